"""Geometry of a neuron's query, key and value: weights only, no data.

The gain of the norm before the MLP belongs to the map from the residual stream to (a, b), so it is folded into q and k
before they are compared: q → γ ⊙ q, k → γ ⊙ k. What is applied to the output before it reaches the residual stream, the
gain of a norm after the MLP or a multiplier, belongs to v likewise: v → γ′ ⊙ v. Then all three live in the residual stream.

The score ‖q‖‖k‖‖v‖ is unchanged by every rescaling that leaves the neuron as it is (k → βk with v → v/β), as are the
cosines up to sign. Aligned q and k (cosine near 1) make exchange nearly free: the neuron sees a ≈ c·b.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

_ELEMENTS = 2**17


@dataclass(frozen=True)
class Geometry:
    """Cosines, norms and score of every neuron of a layer, with the gains before and after it folded into q, k and v.

    All are [d_mlp] in float64.
    """

    cos_qk: Float64[Tensor, " d_mlp"]
    cos_qv: Float64[Tensor, " d_mlp"]
    cos_kv: Float64[Tensor, " d_mlp"]
    norm_q: Float64[Tensor, " d_mlp"]
    norm_k: Float64[Tensor, " d_mlp"]
    norm_v: Float64[Tensor, " d_mlp"]

    @classmethod
    def of(
        cls,
        q: Float[Tensor, "d_mlp d_model"],
        k: Float[Tensor, "d_mlp d_model"],
        v: Float[Tensor, "d_mlp d_model"],
        gain: Float[Tensor, " d_model"],
        value_gain: Float[Tensor, " d_model"] | None = None,
    ) -> "Geometry":
        """From the weights as the model holds them.

        Args:
            q, k, v: one row a neuron.
            gain: of the norm before them, ones where there is none.
            value_gain: what is applied to the layer's output before it reaches the residual stream; None for nothing.
        """
        gain, after = gain.double(), torch.ones_like(gain).double() if value_gain is None else value_gain.double()
        some = [
            _products(q[rows].double() * gain, k[rows].double() * gain, v[rows].double() * after)
            for rows in _rows_at_once(*q.shape)
        ]
        norm_q, norm_k, norm_v, qk, qv, kv = torch.cat(some, dim=1).cpu()
        return cls(qk / (norm_q * norm_k), qv / (norm_q * norm_v), kv / (norm_k * norm_v), norm_q, norm_k, norm_v)

    @classmethod
    def cat(cls, experts: Iterable["Geometry"]) -> "Geometry":
        """The neurons of several experts as those of one layer."""
        tables = [expert.tensors() for expert in experts]
        return cls(*(torch.cat([table[field.name] for table in tables]) for field in fields(cls)))

    @property
    def score(self) -> Float64[Tensor, " d_mlp"]:
        """‖q‖‖k‖‖v‖: the gauge-invariant size of the neuron."""
        return self.norm_q * self.norm_k * self.norm_v

    @property
    def value_weight(self) -> Float64[Tensor, " d_mlp"]:
        """w_j = ‖v_j‖²: what one unit of h_j² is worth in the layer's output energy."""
        return self.norm_v.square()

    @property
    def balance(self) -> Float64[Tensor, " d_mlp"]:
        """β_j = ±‖q_j‖/‖k_j‖, with the sign of cos(q_j, k_j): the rescaling that brings k to the length and side of q.

        1 where q or k is zero and has neither.
        """
        ratio = self.norm_q / self.norm_k
        return torch.where((ratio > 0) & ratio.isfinite(), ratio.copysign(self.cos_qk), 1.0)

    def pairing(
        self,
        q: Float[Tensor, "d_mlp d_model"],
        k: Float[Tensor, "d_mlp d_model"],
        gain: Float[Tensor, " d_model"],
        partners: Int64[Tensor, "draw d_mlp"],
    ) -> "PermutedPairs":
        """Re-pairings of these neurons, each with the β that balances q_j and the partner's key; 1 where one is zero."""
        gain, there = gain.double().square(), partners.to(k.device)
        some = [
            torch.stack([(q[rows].double() * gain * k[partner[rows]]).sum(dim=1) for partner in there])
            for rows in _rows_at_once(*q.shape)
        ]
        sides = torch.cat(some, dim=1).cpu()
        ratio = self.norm_q / self.norm_k[partners]
        return PermutedPairs(partners, torch.where((ratio > 0) & ratio.isfinite(), ratio.copysign(sides), 1.0))

    def tensors(self) -> dict[str, Float64[Tensor, " d_mlp"]]:
        """The fields by name, for writing and for tables."""
        return asdict(self)


@dataclass(frozen=True)
class PermutedPairs:
    """Random re-pairings of the neurons of a layer, for the null.

    Attributes:
        partners: for each draw, the neuron whose b is paired with each neuron's a.
        balance: the β that brings the partner's key to the length and the side of the neuron's query.
    """

    partners: Int64[Tensor, "draw d_mlp"]
    balance: Float64[Tensor, "draw d_mlp"]


def _products(q: Tensor, k: Tensor, v: Tensor) -> Float64[Tensor, "product row"]:
    """Norms of q, k and v, then q·k, q·v and k·v."""
    norms = [torch.linalg.vector_norm(x, dim=1) for x in (q, k, v)]
    return torch.stack([*norms, (q * k).sum(dim=1), (q * v).sum(dim=1), (k * v).sum(dim=1)])


def _rows_at_once(d_mlp: int, d_model: int) -> Iterator[slice]:
    """Few rows at a time: in float64 the weights of a large layer are gigabytes."""
    size = max(1, _ELEMENTS // d_model)
    return (slice(start, start + size) for start in range(0, d_mlp, size))


def derangements(d_mlp: int, draws: int, seed: int) -> Int64[Tensor, "draw d_mlp"]:
    """Random re-pairings of neurons in which no neuron keeps its own b: each is one cycle through a random order."""
    generator = torch.Generator().manual_seed(seed)
    partners = torch.empty(draws, d_mlp, dtype=torch.int64)
    for draw in range(draws):
        order = torch.randperm(d_mlp, generator=generator)
        partners[draw, order] = order.roll(1)
    return partners
