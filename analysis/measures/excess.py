"""The nulls of a measure and its excess over each of them, with a standard error of that difference.

The error of an excess is that of the difference, not a combination of two errors: measure and null are recomputed together
without each jackknife block. Over the permutation null it also contains the variance over permutations, as if the neurons'
own pairs were one more random permutation:

    SE² = SE²(tokens) + (1 + 1/R) Var(one permutation)          R permutations drawn; 1 for scaling, which averages over all

The columns of the permutation null are called ``…_repaired``: each neuron's a is combined with another neuron's b.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures.asymmetry import LAYER_MEASURES, REPAIRED_NULLS, excess_over_repaired
from analysis.measures.jackknife import group_pooled_replicates, jackknife, neuron_error, pooled_error
from analysis.measures.layer_sums import GAUSSIAN_NULLS, LayerSums, Neurons
from analysis.measures.permutation_null import experts_permutation_variance
from analysis.sums.layout import MAIN_SCALES

Draws = Float64[Tensor, "draw d_mlp"]


def layer_nulls(layer: LayerSums, name: str) -> dict[str, float]:
    """The Gaussian and the permutation null of a pooled measure, and the excess over each with its error."""
    key, weight = GAUSSIAN_NULLS[name], layer.geometry.value_weight
    value, repaired = (float(part[name](layer.pooled)) for part in (LAYER_MEASURES, REPAIRED_NULLS))
    gaussian = layer.gaussian[key].pooled(weight) if key in layer.gaussian else math.nan
    return {
        f"{name}_null_gaussian": gaussian,
        f"{name}_excess_gaussian": value - gaussian,
        f"{name}_excess_gaussian_se": _gaussian_error(layer, name),
        f"{name}_null_repaired": repaired,
        f"{name}_excess_repaired": value - repaired,
        f"{name}_excess_repaired_se": _permutation_error(layer, name),
    }


def neuron_nulls(
    layer: LayerSums, name: str, value: Neurons, replicates: Float64[Tensor, "d_mlp group"]
) -> dict[str, Neurons]:
    """The same for every neuron, given the measure and its jackknife replicates."""
    key, missing = GAUSSIAN_NULLS[name], torch.full_like(value, torch.nan)
    repaired = REPAIRED_NULLS[name](layer.moments.neuron)
    gaussian, error = missing, missing
    if key in layer.gaussian:
        gaussian = layer.gaussian[key].by_neuron
        gap, scale = layer.gaussian_replicates[key]
        error = jackknife(replicates - gap / scale)
    return {
        f"{name}_null_gaussian": gaussian,
        f"{name}_excess_gaussian": value - gaussian,
        f"{name}_excess_gaussian_se": error,
        f"{name}_null_repaired": repaired,
        f"{name}_excess_repaired": value - repaired,
        f"{name}_excess_repaired_se": _neuron_permutation_error(layer, name),
    }


def _gaussian_error(layer: LayerSums, name: str) -> float:
    """NaN for a scale that the run did not include."""
    parts = layer.gaussian_replicates.get(GAUSSIAN_NULLS[name])
    if parts is None:
        return math.nan
    weight = layer.geometry.value_weight
    gap, scale = (weight @ part for part in parts)
    own = group_pooled_replicates(LAYER_MEASURES[name], weight, layer.moments)
    return float(jackknife(own - gap / scale))


def _permutation_error(layer: LayerSums, name: str) -> float:
    """The ratio is linearized in its two sums, so that the variance over permutations is that of a sum over neurons."""
    gap, scale = (part * layer.geometry.value_weight for part in _draws(layer, name))
    total = scale.sum() / len(scale)
    linear = (gap - gap.sum() / scale.sum() * scale) / total
    variance = experts_permutation_variance(linear, layer.partners, layer.experts) * _permutations_compared(layer, name)
    return math.sqrt(float(pooled_error(excess_over_repaired(name), layer.moments)) ** 2 + variance)


def _neuron_permutation_error(layer: LayerSums, name: str) -> Neurons:
    gap, scale = _draws(layer, name)
    variance = (gap / scale).var(dim=0) if len(gap) > 1 else torch.full_like(gap[0], torch.nan)
    tokens = neuron_error(excess_over_repaired(name), layer.moments)
    return (tokens.square() + variance * _permutations_compared(layer, name)).sqrt()


def _permutations_compared(layer: LayerSums, name: str) -> float:
    """How many variances of one permutation an excess has: the own one, and 1/R of the mean over R drawn (0 for all)."""
    return 1.0 if name in MAIN_SCALES else 1 + 1 / layer.moments.layout.draws


def _draws(layer: LayerSums, name: str) -> tuple[Draws, Draws]:
    """Gap and scale of each neuron in each random permutation; NaN for a scale that the run did not include."""
    sums = layer.moments.neuron
    if name not in MAIN_SCALES:
        kind = "" if name == "exchange" else "balanced_"
        parts = (f"repaired_{kind}exchange_gap", f"repaired_{kind}hh", f"repaired_{kind}exchange")
        gap, before, after = (sums[part] for part in parts)
        return gap, 2 * (before + after)
    before, alphas = sums["repaired_hh"], layer.moments.layout.main_alphas
    if MAIN_SCALES[name] not in alphas:
        return torch.full_like(before, torch.nan), torch.full_like(before, torch.nan)
    which = slice(alphas.index(MAIN_SCALES[name]), None, len(alphas))
    after, product = sums["repaired_scaling"][which], sums["repaired_product"][which]
    length = layer.geometry.norm_k if layer.unit.up_is_linear else torch.ones_like(layer.geometry.norm_k)
    as_own = (length / length[layer.partners]).square().nan_to_num(nan=0.0, posinf=0.0)  # 0 for a partner without a key
    return as_own * (before + after - 2 * product).clamp(min=0), as_own * 2 * (before + after)
