"""Which neurons differ from the permutation null, controlling the false discovery rate among thousands of them.

Under the permutation null a neuron's a is combined with the b of another neuron. If a neuron's own pair (a, b) were as
random as these, its value x and its permuted values x_1 … x_R would be exchangeable. So the distance of x from the mean of
the x_r is ranked among the distances of every permuted value in the layer from the mean of the R − 1 others of its neuron,
after both are brought to one scale. These ranks are conformal p-values, for which the Benjamini-Hochberg procedure controls
the false discovery rate (Bates, Candès, Lei, Romano & Sesia 2023, Ann. Statist. 51, 149).
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

    NaN where the value or a permuted value is NaN, or with fewer than two permutations.
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
    """p, q (the smallest false discovery rate at which the neuron is a discovery), and whether q ≤ 5 %; each [d_mlp]."""
    p = repaired_p(value, draws)
    q, known = torch.full_like(p, torch.nan), p.isfinite()
    if bool(known.any()):
        q[known] = torch.from_numpy(stats.false_discovery_control(p[known].numpy(), method="bh"))
    return p, q, q <= FALSE_DISCOVERY_RATE
