"""The third null: the same architecture with fresh random weights, on the same tokens.

It is a run of its own. Its neurons have no counterpart among the trained ones, so a neuron is compared with the pooled
number of its layer. Both runs counted the same tokens in the same blocks: the error of a difference leaves a block out of
both.
"""

from functools import partial

import torch
from torch import Tensor

from analysis.estimates import GAUSSIAN_NULLS, Estimates
from analysis.jackknife import jackknife, neuron_replicates, pooled_replicates
from analysis.measures import LAYER_MEASURES, Measure
from analysis.sums import Sums


def layer_excess(trained: Estimates, random: Estimates) -> dict[str, float]:
    """``…_null_random``, ``…_excess_random`` and its standard error for each measure that has nulls."""
    row = {}
    for name in GAUSSIAN_NULLS:
        measure, null = LAYER_MEASURES[name], _pooled(name, random)
        difference = pooled_replicates(measure, trained.moments) - pooled_replicates(measure, random.moments)
        row[f"{name}_null_random"] = null
        row[f"{name}_excess_random"] = _pooled(name, trained) - null
        row[f"{name}_excess_random_se"] = float(jackknife(difference))
    return row


def neuron_excess(trained: Estimates, random: Estimates) -> dict[str, Tensor]:
    """The same for every neuron, against the pooled number of the random layer."""
    columns = {}
    weight = random.geometry.value_weight
    for name in GAUSSIAN_NULLS:
        measure, null = LAYER_MEASURES[name], _pooled(name, random)
        own = measure(trained.moments.neuron)
        replicates = neuron_replicates(partial(_number, measure), trained.moments)
        of_null = neuron_replicates(partial(_pooled_number, measure, weight), random.moments)
        columns[f"{name}_null_random"] = torch.full_like(own, null)
        columns[f"{name}_excess_random"] = own - null
        columns[f"{name}_excess_random_se"] = jackknife(replicates - of_null)
    return columns


def _number(measure: Measure, sums: Sums, _: float) -> Tensor:
    return measure(sums)


def _pooled_number(measure: Measure, weight: Tensor, sums: Sums, _: float) -> Tensor:
    return measure(sums.pool(weight))


def _pooled(name: str, estimates: Estimates) -> float:
    return float(LAYER_MEASURES[name](estimates.moments.neuron.pool(estimates.geometry.value_weight)))
