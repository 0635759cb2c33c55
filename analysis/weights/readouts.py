"""A neuron's vectors projected onto the vocabulary, and the neurons most similar to it. Weights only, no data.

Through the unembedding U and the gain γ of the final norm, the output h v adds to the logits, per unit of h and up to the
factor 1/RMS of the norm,

    v_t = ⟨v, γ ⊙ u_t⟩ − mean over t                        (a constant over all tokens changes no probability)

so v promotes the tokens with the largest v_t and suppresses those with the smallest. Through the embedding E, a residual
stream that consists of token t's embedding e_t alone gives, after an RMS norm with gain γ′ and without biases, the
pre-activation

    q_t = √d_model · ⟨q, γ′ ⊙ e_t⟩ / ‖e_t‖                   and the same for k.

The similarity of what two neurons write is cos(v, v′). The similarity of what they read is the cosine of q⊗k and q′⊗k′,
which is cos(q, q′)·cos(k, k′) and invariant under scaling q → αq, k → k/α; or of q⊗k and k′⊗q′, the exchanged form, which
is cos(q, k′)·cos(k, q′), whichever has the larger absolute value. Rescaling k → βk, v → v/β with β < 0 flips the sign of
both: neurons are ranked by absolute value, and the sign is reported.

What they do not show: the effect of the blocks in between. Both projections follow the direct path alone.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from analysis.weights.experts import neuron_name

Vector = Float[Tensor, " d_model"]
Table = Float[Tensor, "token d_model"]
Neurons = Float64[Tensor, " d_mlp"]


@dataclass(frozen=True)
class Readout:
    """The tokens at both ends of a projection of the vocabulary.

    Attributes:
        highest, lowest: token texts and values, the most extreme first.
        standard_deviation: of the values over the vocabulary.
        tokens: number of tokens projected onto.
    """

    highest: tuple[tuple[str, float], ...]
    lowest: tuple[tuple[str, float], ...]
    standard_deviation: float
    tokens: int


@dataclass(frozen=True)
class Similar:
    """A neuron that is similar to another one.

    Attributes:
        layer, neuron: its layer, and its index there or within its expert.
        cosine: of the values, or of the products of query and key.
        exchanged: whether its query resembles the other's key, and its key the other's query.
        expert: the expert of the layer that it belongs to, None in a dense layer.
    """

    layer: int
    neuron: int
    cosine: float
    exchanged: bool = False
    expert: int | None = None

    @property
    def name(self) -> str:
        """LAYER:INDEX or LAYER:EXPERT:INDEX, as on the command line."""
        return f"{self.layer}:{neuron_name({'neuron': self.neuron, 'expert': self.expert})}"


def promoted(v: Vector, unembedding: Table, gain: Vector) -> Float64[Tensor, " token"]:
    """The addition to each logit per unit of h, relative to the mean over the vocabulary."""
    values = _projections(v.double() * gain.double(), unembedding)
    return (values - values.mean()).cpu()


def excitation(q: Vector, embedding: Table, gain: Vector) -> Float64[Tensor, " token"]:
    """The pre-activation for each token's embedding alone; 0 for an embedding that is 0."""
    length = torch.linalg.vector_norm(embedding, dim=1, dtype=torch.float64)
    values = _projections(q.double() * gain.double(), embedding)
    return math.sqrt(embedding.shape[1]) * torch.where(length > 0, values / length, 0.0).cpu()


def ends(values: Float64[Tensor, " token"], count: int) -> tuple[Int64[Tensor, " chosen"], Int64[Tensor, " chosen"]]:
    """The tokens of the largest and of the smallest values, the most extreme first, of equal ones the smaller id first."""
    descending = values.argsort(descending=True, stable=True)
    return descending[:count], values.argsort(stable=True)[:count]


def cosines(vector: Vector, rows: Float[Tensor, "d_mlp d_model"]) -> Neurons:
    """The cosine with every row; NaN for a row that is 0."""
    vector, rows = vector.double(), rows.double()
    return (rows @ vector / (torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(vector))).cpu()


def pair_cosines(
    q: Vector, k: Vector, queries: Float[Tensor, "d_mlp d_model"], keys: Float[Tensor, "d_mlp d_model"]
) -> tuple[Neurons, Bool[Tensor, " d_mlp"]]:
    """The cosine of q⊗k with each row's q′⊗k′ or k′⊗q′, whichever is larger in size; and whether the exchanged."""
    direct = cosines(q, queries) * cosines(k, keys)
    exchanged = cosines(q, keys) * cosines(k, queries)
    takes = exchanged.abs() > direct.abs()
    return torch.where(takes, exchanged, direct), takes


def nearest(
    layer: int, cosine: Neurons, exchanged: Bool[Tensor, " d_mlp"] | None, count: int, expert: int | None = None
) -> tuple[Similar, ...]:
    """The neurons of a layer, or of one of its experts, with the largest |cosine|; neurons whose cosine is NaN excluded."""
    order = cosine.abs().nan_to_num(nan=-1.0).argsort(descending=True, stable=True)[:count].tolist()
    return tuple(
        Similar(layer, neuron, float(cosine[neuron]), exchanged is not None and bool(exchanged[neuron]), expert)
        for neuron in order
        if bool(cosine[neuron].isfinite())
    )


def _projections(direction: Float64[Tensor, " d_model"], table: Table) -> Float64[Tensor, " token"]:
    wide = torch.promote_types(table.dtype, torch.float32)
    return (table.to(wide) @ direction.to(wide)).double()
