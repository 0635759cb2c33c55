"""What a neuron's vectors say in the vocabulary, and which neurons are like it. Weights only, no data.

Through the unembedding U and the final norm's gain γ, one unit of h v adds to the logits, up to the norm's length,

    v_t = ⟨v, γ ⊙ u_t⟩ − mean over t                        (a constant over all tokens changes no probability)

so v promotes the tokens of largest and suppresses those of smallest v_t. Through the embedding E, a residual stream that is
token t's embedding e_t alone gives, after an RMS norm of gain γ′ and without biases, the pre-activation

    q_t = √d_model · ⟨q, γ′ ⊙ e_t⟩ / ‖e_t‖                   and the same for k.

Two neurons are alike in what they write by cos(v, v′); in what they read by the cosine of q⊗k and q′⊗k′, which is
cos(q, q′)·cos(k, k′) and does not change under scaling q → αq, k → k/α, or of q⊗k and k′⊗q′, its exchanged form,
cos(q, k′)·cos(k, q′), whichever is larger in size. Rescaling k → βk, v → v/β with β < 0 turns the signs of both: neurons
are ranked by size, and the sign is shown.

What they do not show: what the blocks between do. Both read-outs follow the direct path alone.
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
        highest, lowest: texts and values, the most extreme first.
        spread: standard deviation of the values over the vocabulary.
        tokens: how many tokens were projected.
    """

    highest: tuple[tuple[str, float], ...]
    lowest: tuple[tuple[str, float], ...]
    spread: float
    tokens: int


@dataclass(frozen=True)
class Similar:
    """A neuron that is like another one.

    Attributes:
        layer, neuron: which.
        cosine: of the values, or of the products of query and key.
        exchanged: whether its query resembles the other's key, and its key the other's query.
        expert: which expert of the layer it belongs to, None in a dense layer.
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
    """What one unit of h adds to each logit, relative to the mean over the vocabulary."""
    values = _projections(v.double() * gain.double(), unembedding)
    return (values - values.mean()).cpu()


def excitation(q: Vector, embedding: Table, gain: Vector) -> Float64[Tensor, " token"]:
    """The pre-activation that each token's embedding alone would give; 0 for an embedding that is 0."""
    length = torch.linalg.vector_norm(embedding, dim=1, dtype=torch.float64)
    values = _projections(q.double() * gain.double(), embedding)
    return math.sqrt(embedding.shape[1]) * torch.where(length > 0, values / length, 0.0).cpu()


def ends(values: Float64[Tensor, " token"], count: int) -> tuple[Int64[Tensor, " chosen"], Int64[Tensor, " chosen"]]:
    """The tokens of the largest and of the smallest values, the most extreme first, of equal ones the smaller number."""
    descending = values.argsort(descending=True, stable=True)
    return descending[:count], values.argsort(stable=True)[:count]


def cosines(vector: Vector, rows: Float[Tensor, "d_mlp d_model"]) -> Neurons:
    """The cosine with every row; NaN with a row that is 0."""
    vector, rows = vector.double(), rows.double()
    return (rows @ vector / (torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(vector))).cpu()


def pair_cosines(
    q: Vector, k: Vector, queries: Float[Tensor, "d_mlp d_model"], keys: Float[Tensor, "d_mlp d_model"]
) -> tuple[Neurons, Bool[Tensor, " d_mlp"]]:
    """The cosine of q⊗k with every row's pair, direct or exchanged, whichever is larger in size; and whether exchanged."""
    direct = cosines(q, queries) * cosines(k, keys)
    exchanged = cosines(q, keys) * cosines(k, queries)
    takes = exchanged.abs() > direct.abs()
    return torch.where(takes, exchanged, direct), takes


def nearest(
    layer: int, cosine: Neurons, exchanged: Bool[Tensor, " d_mlp"] | None, count: int, expert: int | None = None
) -> tuple[Similar, ...]:
    """The neurons of a layer, or of an expert of it, with the largest |cosine|; one without a cosine is not among them."""
    order = cosine.abs().nan_to_num(nan=-1.0).argsort(descending=True, stable=True)[:count].tolist()
    return tuple(
        Similar(layer, neuron, float(cosine[neuron]), exchanged is not None and bool(exchanged[neuron]), expert)
        for neuron in order
        if bool(cosine[neuron].isfinite())
    )


def _projections(direction: Float64[Tensor, " d_model"], table: Table) -> Float64[Tensor, " token"]:
    wide = torch.promote_types(table.dtype, torch.float32)
    return (table.to(wide) @ direction.to(wide)).double()
