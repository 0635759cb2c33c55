"""How much a layer's number owes to which neuron was paired with which.

A number of a layer with its neurons paired at random is, to first order, Σ_j u(j, π(j)) over the pairs of a random
permutation π. Its variance is that of the interaction part of u: what a pairing does beyond the neuron's own part α_j and
its partner's γ_p, which every permutation holds in full (Hoeffding 1951, Ann. Math. Statist. 22, 558). A few pairings of
all neurons tell that part from the others, because each neuron and each partner is seen once in every one of them. The
noise of few tokens counts as interaction too, so the estimate errs to the safe side.
"""

import math

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.weights.experts import Experts, expert_slices

FEWEST_DRAWS = 3
"""With fewer pairings nothing is left once the parts of neurons and partners are taken out."""
_SWEEPS = 100


def permutation_variance(parts: Float64[Tensor, "draw d_mlp"], partners: Int64[Tensor, "draw d_mlp"]) -> float:
    """The variance of Σ_j u(j, π(j)) over random pairings π; NaN with fewer than ``FEWEST_DRAWS`` pairings.

    Args:
        parts: u of every neuron in some random pairings.
        partners: the neuron that each was paired with.
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
    """The same where partners are of the own expert only: every expert has a permutation of its own."""
    if experts is None:
        return permutation_variance(parts, partners)
    neurons = expert_slices(experts).values()
    return math.fsum(permutation_variance(parts[:, mine], partners[:, mine] - mine.start) for mine in neurons)
