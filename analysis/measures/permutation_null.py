"""The variance of a layer's permutation null over permutations.

In the permutation null each neuron's a is combined with the b of another neuron, its partner. To first order a layer's
number is then Σ_j u(j, π(j)) over the pairs of a random permutation π. Its variance is that of the interaction part of u:
what a pair adds to a part α_j of the neuron and a part γ_p of the partner, which every permutation contains in full
(Hoeffding 1951, Ann. Math. Statist. 22, 558). A few permutations suffice to separate that part, because each contains every
neuron and every partner once. Noise from a small number of tokens counts as interaction too, so the estimate is
conservative.
"""

import math

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.weights.experts import Experts, expert_slices

FEWEST_DRAWS = 3
"""With fewer permutations nothing remains after the parts of neurons and partners are removed."""
_SWEEPS = 100


def permutation_variance(parts: Float64[Tensor, "draw d_mlp"], partners: Int64[Tensor, "draw d_mlp"]) -> float:
    """The variance of Σ_j u(j, π(j)) over random permutations π; NaN with fewer than ``FEWEST_DRAWS`` of them.

    Args:
        parts: u of every neuron in each of the permutations drawn.
        partners: the partner of each neuron.
    """
    n_draws, d_mlp = parts.shape
    if n_draws < FEWEST_DRAWS:
        return float("nan")
    rest = parts.nan_to_num(nan=0.0)
    for _ in range(_SWEEPS):
        rest = rest - rest.mean(dim=0)
        by_partner = torch.zeros(d_mlp, dtype=rest.dtype).index_add_(0, partners.flatten(), rest.flatten()) / n_draws
        rest = rest - by_partner[partners]
    freedom = (n_draws - 2) * d_mlp + 1
    return float(d_mlp * rest.square().sum() / freedom)


def experts_permutation_variance(
    parts: Float64[Tensor, "draw d_mlp"], partners: Int64[Tensor, "draw d_mlp"], experts: Experts | None
) -> float:
    """The same where partners are of the same expert: every expert has permutations of its own."""
    if experts is None:
        return permutation_variance(parts, partners)
    neurons = expert_slices(experts).values()
    return math.fsum(permutation_variance(parts[:, mine], partners[:, mine] - mine.start) for mine in neurons)
