"""The third null: the same architecture with fresh random weights, on the same tokens.

It is a run of its own. Its neurons have no counterpart among the trained ones, so a neuron is compared with the pooled
number of its layer. Both runs counted the same tokens in the same blocks: the error of a difference leaves a block out of
both.
"""

import torch
from torch import Tensor

from analysis.compare import difference, value_of
from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.estimates import GAUSSIAN_NULLS
from analysis.measures.jackknife import group_pooled_replicates, jackknife, measure_replicates
from analysis.run import Layer


def layer_excess(trained: Layer, random: Layer) -> dict[str, float]:
    """``…_null_random``, ``…_excess_random`` and its standard error for each measure that has nulls."""
    row = {}
    for name in GAUSSIAN_NULLS:
        excess = difference(name, random, trained, paired=True)
        row[f"{name}_null_random"] = value_of(name, random)
        row[f"{name}_excess_random"] = excess.value
        row[f"{name}_excess_random_se"] = excess.error
    return row


def neuron_excess(trained: Layer, random: Layer) -> dict[str, Tensor]:
    """The same for every neuron, against the pooled number of the random layer."""
    columns = {}
    for name in GAUSSIAN_NULLS:
        measure, null = LAYER_MEASURES[name], value_of(name, random)
        own = measure(trained.moments.neuron)
        replicates = measure_replicates(measure, trained.moments)
        of_null = group_pooled_replicates(measure, random.geometry.value_weight, random.moments)
        columns[f"{name}_null_random"] = torch.full_like(own, null)
        columns[f"{name}_excess_random"] = own - null
        columns[f"{name}_excess_random_se"] = jackknife(replicates - of_null)
    return columns
