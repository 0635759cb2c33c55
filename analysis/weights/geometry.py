"""Geometry of a neuron's query, key and value: weights only, no data.

The gain of the norm before the MLP belongs to the map from the residual stream to (a, b), so it is folded into q and k
before they are compared: q → γ ⊙ q, k → γ ⊙ k. Whatever is applied to the output before it is added to the residual stream,
the gain of a norm after the MLP or a multiplier, is likewise folded into v: v → γ′ ⊙ v. Then all three are vectors of the
residual stream.

The score ‖q‖‖k‖‖v‖ is invariant under every rescaling that does not change the neuron (k → βk with v → v/β), as are the
cosines up to sign. If q and k are aligned (cosine near 1), exchange changes little, because a ≈ c·b.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

_ELEMENTS = 2**17
"""Elements of a weight matrix that are converted to float64 at once."""


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
        """From the weights as stored in the model.

        Args:
            q, k, v: one row per neuron.
            gain: gain of the norm before the MLP; ones if there is none.
            value_gain: factor applied to the layer's output before it is added to the residual stream; None for none.
        """
        gain, after = gain.double(), torch.ones_like(gain).double() if value_gain is None else value_gain.double()
        products = [
            _products(q[rows].double() * gain, k[rows].double() * gain, v[rows].double() * after)
            for rows in _rows_at_once(*q.shape)
        ]
        norm_q, norm_k, norm_v, qk, qv, kv = torch.cat(products, dim=1).cpu()
        return cls(qk / (norm_q * norm_k), qv / (norm_q * norm_v), kv / (norm_k * norm_v), norm_q, norm_k, norm_v)

    @classmethod
    def cat(cls, experts: Iterable["Geometry"]) -> "Geometry":
        """The neurons of several experts as those of one layer."""
        tables = [expert.tensors() for expert in experts]
        return cls(*(torch.cat([table[field.name] for table in tables]) for field in fields(cls)))

    @property
    def score(self) -> Float64[Tensor, " d_mlp"]:
        """‖q‖‖k‖‖v‖: the gauge-invariant size of every neuron."""
        return self.norm_q * self.norm_k * self.norm_v

    @property
    def value_weight(self) -> Float64[Tensor, " d_mlp"]:
        """w_j = ‖v_j‖²: the output energy per unit of h_j²."""
        return self.norm_v.square()

    @property
    def balance(self) -> Float64[Tensor, " d_mlp"]:
        """β_j = ±‖q_j‖/‖k_j‖, with the sign of cos(q_j, k_j); it gives k the length of q and makes cos(q, k) ≥ 0.

        1 where q or k is 0.
        """
        ratio = self.norm_q / self.norm_k
        return torch.where((ratio > 0) & ratio.isfinite(), ratio.copysign(self.cos_qk), 1.0)

    def permuted_pairs(
        self,
        q: Float[Tensor, "d_mlp d_model"],
        k: Float[Tensor, "d_mlp d_model"],
        gain: Float[Tensor, " d_model"],
        partners: Int64[Tensor, "draw d_mlp"],
    ) -> "PermutedPairs":
        """The pairs of the permutation null, with the β that balances q_j and the partner's key; β = 1 where one is 0."""
        squared_gain, on_device = gain.double().square(), partners.to(k.device)
        products = [
            torch.stack([(q[rows].double() * squared_gain * k[partner[rows]]).sum(dim=1) for partner in on_device])
            for rows in _rows_at_once(*q.shape)
        ]
        inner = torch.cat(products, dim=1).cpu()
        ratio = self.norm_q / self.norm_k[partners]
        return PermutedPairs(partners, torch.where((ratio > 0) & ratio.isfinite(), ratio.copysign(inner), 1.0))

    def tensors(self) -> dict[str, Float64[Tensor, " d_mlp"]]:
        """The fields by name, for files and tables."""
        return asdict(self)


@dataclass(frozen=True)
class PermutedPairs:
    """Random permutations of the neurons of a layer, for the permutation null.

    Attributes:
        partners: for each permutation, the neuron whose b is combined with each neuron's a.
        balance: the β that gives the partner's key the length of the neuron's query, and makes their cosine ≥ 0.
    """

    partners: Int64[Tensor, "draw d_mlp"]
    balance: Float64[Tensor, "draw d_mlp"]


def _products(q: Tensor, k: Tensor, v: Tensor) -> Float64[Tensor, "product row"]:
    """Norms of q, k and v, then q·k, q·v and k·v, of every row."""
    norms = [torch.linalg.vector_norm(x, dim=1) for x in (q, k, v)]
    return torch.stack([*norms, (q * k).sum(dim=1), (q * v).sum(dim=1), (k * v).sum(dim=1)])


def _rows_at_once(d_mlp: int, d_model: int) -> Iterator[slice]:
    """Slices of a few rows: the weights of a large layer would be gigabytes in float64."""
    size = max(1, _ELEMENTS // d_model)
    return (slice(start, start + size) for start in range(0, d_mlp, size))


def derangements(d_mlp: int, draws: int, seed: int) -> Int64[Tensor, "draw d_mlp"]:
    """Random permutations in which no neuron keeps its own b: each is one cycle through a random order of all neurons."""
    generator = torch.Generator().manual_seed(seed)
    partners = torch.empty(draws, d_mlp, dtype=torch.int64)
    for draw in range(draws):
        order = torch.randperm(d_mlp, generator=generator)
        partners[draw, order] = order.roll(1)
    return partners
