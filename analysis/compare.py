"""Two runs of one architecture, layer by layer: the difference of every measure, with its error.

Where both runs counted the same windows in the same jackknife blocks, a block is left out of both at once, so that the
influence of the text on both cancels:

    SE² = (K − 1)/K · Σ_k (D_(k) − D̄)²,   D_(k) the difference without block k

Otherwise the runs are independent, SE² = SE₁² + SE₂², and the degrees of freedom are those of the run with fewer blocks,
which is conservative (Welch's lie between the smaller number and the sum). The error does not include the variation between
training runs.

The third null, the same architecture with fresh random weights on the same tokens, is such a comparison: a run of its own.
Its neurons have no counterparts among the trained ones, so each trained neuron is compared with the pooled number of the
random layer.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.jackknife import (
    bilinear_share_replicates,
    gate_positive_replicates,
    group_pooled_replicates,
    jackknife,
    measure_replicates,
    pooled_replicates,
    t95,
)
from analysis.measures.layer_sums import GAUSSIAN_NULLS
from analysis.measures.output_numbers import OUTPUT_MEASURES, output_replicates, output_value
from analysis.run import Layer, Run
from analysis.weights.experts import same_experts

COMPARED = (*OUTPUT_MEASURES, *LAYER_MEASURES, "bilinear_share", "gate_positive")
"""The measures of a layer that have replicates."""


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error, and the number of jackknife blocks that the error is based on."""

    value: float
    error: float
    n_blocks: int

    @property
    def reach(self) -> float:
        """Half the width of the 95 % interval; NaN with fewer than two blocks."""
        return t95(self.n_blocks) * self.error


def estimate(name: str, layer: Layer) -> Estimate:
    """One of ``COMPARED`` of a layer."""
    replicates = _replicates(name, layer)
    return Estimate(value_of(name, layer), float(jackknife(replicates)), len(replicates))


def difference(name: str, first: Layer, second: Layer, paired: bool) -> Estimate:
    """One of ``COMPARED``, second minus first.

    Args:
        name: the measure.
        first: a layer of the reference.
        second: the same layer of another run.
        paired: whether both counted the same tokens in the same jackknife blocks: see ``same_windows``.
    """
    before, after = _replicates(name, first), _replicates(name, second)
    error = jackknife(after - before) if paired else torch.hypot(jackknife(before), jackknife(after))
    return Estimate(value_of(name, second) - value_of(name, first), float(error), min(len(before), len(after)))


def same_windows(first: Run, second: Run) -> bool:
    """Whether both runs counted the same tokens of the same windows in the same jackknife blocks."""
    common = [index for index in first.layers if index in second.layers]
    return torch.equal(first.windows.sort().values, second.windows.sort().values) and all(
        torch.equal(first.layers[index].moments.blocks, second.layers[index].moments.blocks) for index in common
    )


def same_shape(first: Run, second: Run) -> bool:
    """Whether layers correspond: equal depth and d_model, and in each common layer the same unit, width and experts."""
    if any(first.model[key] != second.model[key] for key in ("n_layers", "d_model")):
        return False
    common = [(first.layers[index], second.layers[index]) for index in first.layers if index in second.layers]
    return bool(common) and all(
        one.unit.name == other.unit.name
        and one.geometry.norm_v.shape == other.geometry.norm_v.shape
        and same_experts(one.experts, other.experts)
        for one, other in common
    )


def layer_excess(trained: Layer, random: Layer) -> dict[str, float]:
    """``…_null_random``, ``…_excess_random`` and its standard error, for the output and each measure that has nulls."""
    row = {}
    for name in (*OUTPUT_MEASURES, *GAUSSIAN_NULLS):
        excess = difference(name, random, trained, paired=True)
        row[f"{name}_null_random"] = value_of(name, random)
        row[f"{name}_excess_random"] = excess.value
        row[f"{name}_excess_random_se"] = excess.error
    return row


def neuron_excess(trained: Layer, random: Layer) -> dict[str, Tensor]:
    """The same for every neuron, [d_mlp] each, against the pooled number of the random layer."""
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


def value_of(name: str, layer: Layer) -> float:
    """One of ``COMPARED`` of a layer, without its error."""
    if name in OUTPUT_MEASURES:
        return output_value(name, layer.estimates)
    sums, weight = layer.moments.neuron, layer.geometry.value_weight
    if name == "bilinear_share":
        return measures.layer_bilinear_share(sums, weight)
    if name == "gate_positive":
        return measures.layer_gate_positive(sums)
    return float(LAYER_MEASURES[name](sums.pool(weight)))


def _replicates(name: str, layer: Layer) -> Float64[Tensor, " block"]:
    """The number without each jackknife block, or without each group of blocks where it needs every neuron's sums."""
    if name in OUTPUT_MEASURES:
        return output_replicates(name, layer.estimates)
    if name == "bilinear_share":
        return bilinear_share_replicates(layer.geometry.value_weight, layer.moments)
    if name == "gate_positive":
        return gate_positive_replicates(layer.moments)
    return pooled_replicates(LAYER_MEASURES[name], layer.moments)
