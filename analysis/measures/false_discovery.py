"""Which neurons differ from chance, when thousands are looked at.

The null of a neuron is itself with the b of another neuron. If its own pairing were as random as the others, its number x
and those of its re-pairings x_1 … x_R would be exchangeable. The distance of x from the mean of its re-pairings is
therefore ranked among the distances of every re-pairing in the layer from the mean of the R − 1 others of its neuron,
brought to one scale. These ranks are conformal p-values; the Benjamini-Hochberg procedure controls the false discovery rate
of such (Bates, Candès, Lei, Romano & Sesia 2023, Ann. Statist. 51, 149).
"""

import math

import torch
from jaxtyping import Bool, Float64
from scipy import stats
from torch import Tensor

FALSE_DISCOVERY_RATE = 0.05
_EPS = 1e-9

Neurons = Float64[Tensor, " d_mlp"]


def repaired_p(value: Neurons, draws: Float64[Tensor, "draw d_mlp"]) -> Neurons:
    """Two-sided p-value of each neuron.

    NaN where the neuron or a re-pairing of it has no number, or with fewer than two draws.
    """
    n_draws = len(draws)
    value, draws = value.logit(eps=_EPS), draws.logit(eps=_EPS)
    if n_draws < 2:
        return torch.full_like(value, torch.nan)
    others = (draws.sum(dim=0) - draws) / (n_draws - 1)
    chance = (draws - others).abs() / math.sqrt(1 + 1 / (n_draws - 1))
    distance = (value - draws.mean(dim=0)).abs() / math.sqrt(1 + 1 / n_draws)
    known = chance[chance.isfinite()].sort().values
    at_least = len(known) - torch.searchsorted(known, distance)
    return torch.where(distance.isfinite(), (1 + at_least).double() / (1 + len(known)), torch.nan)


def false_discovery(
    value: Neurons, draws: Float64[Tensor, "draw d_mlp"]
) -> tuple[Neurons, Neurons, Bool[Tensor, " d_mlp"]]:
    """p, q (the smallest false discovery rate at which the neuron is listed), and whether it is at the rate of 5 %."""
    p = repaired_p(value, draws)
    q, known = torch.full_like(p, torch.nan), p.isfinite()
    if bool(known.any()):
        q[known] = torch.from_numpy(stats.false_discovery_control(p[known].numpy(), method="bh"))
    return p, q, q <= FALSE_DISCOVERY_RATE
