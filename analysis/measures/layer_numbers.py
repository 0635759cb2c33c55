"""The numbers of a whole layer: a row of the table of layers, and its scaling curve.

Each measure is pooled over the neurons with the value weights, a ratio of sums, and stands beside its standard error, its
quartiles over tokens, its trimmed value, its nulls and the excess over each of them.
"""

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.excess import layer_nulls
from analysis.measures.jackknife import (
    bilinear_share_replicates,
    filled_jackknife_blocks,
    gate_positive_error,
    jackknife,
    neuron_replicates,
    pooled_error,
)
from analysis.measures.layer_sums import GAUSSIAN_NULLS, LayerSums, Neurons
from analysis.measures.output_numbers import output_numbers
from analysis.measures.token_numbers import TOKEN_MEASURES, TRIMMED, depends_on_few_tokens, over_tokens
from analysis.sums.layout import scaling_name


def layer_numbers(layer: LayerSums) -> dict[str, int | float]:
    """One row of the table of layers."""
    numbers: dict[str, int | float] = {
        "n_neurons": len(layer.geometry.value_weight),
        "n_tokens": layer.moments.n_tokens,
        "n_blocks": filled_jackknife_blocks(layer.moments),
    }
    numbers |= output_numbers(layer)
    for name in (*GAUSSIAN_NULLS, *(name for name in TOKEN_MEASURES if name not in GAUSSIAN_NULLS)):
        numbers |= _pooled(layer, name) | over_tokens(layer, name)
        if name in GAUSSIAN_NULLS:
            numbers |= layer_nulls(layer, name)
    for name, measure in (("exchange", measures.exchange), ("exchange_balanced", measures.exchange_balanced)):
        numbers |= _neuron_median(layer, name, measure)
    numbers |= _pooled(layer, "exchange_relative_change")
    numbers |= _bilinear(layer)
    numbers["gate_positive"] = measures.layer_gate_positive(layer.moments.neuron)
    numbers["gate_positive_se"] = gate_positive_error(layer.moments)
    numbers |= _concentration(layer)
    for name, found in layer.discoveries.items():
        numbers[f"n_{name}_differs"] = int(found[2].sum())
    score = layer.geometry.score
    numbers["cos_qk_abs_mean"] = float(layer.geometry.cos_qk.abs().mean())
    numbers["score_max_ratio"] = float(score.max() / score.median())
    return numbers


def curve_numbers(layer: LayerSums) -> dict[str, list[float]]:
    """The columns of the scaling curve, one value per α."""
    alphas, weight = layer.moments.layout.alphas, layer.geometry.value_weight
    columns = {
        "asymmetry": measures.scaling(layer.pooled)[:, 0],
        "asymmetry_se": pooled_error(measures.scaling, layer.moments),
        "null_repaired": measures.scaling_null_repaired(layer.pooled)[:, 0],
        "relative_change": measures.scaling_relative_change(layer.pooled)[:, 0],
    }
    return {
        "alpha": list(alphas),
        **{name: values.tolist() for name, values in columns.items()},
        "null_gaussian": [layer.gaussian[scaling_name(alpha)].pooled(weight) for alpha in alphas],
        "token_median": [layer.moments.tokens.quantile(scaling_name(alpha), 0.5) for alpha in alphas],
    }


def _concentration(layer: LayerSums) -> dict[str, float]:
    """How few tokens and neurons hold the energy; of the neurons, in the balanced gauge, h and exchanged h together."""
    moments = layer.moments
    energy = moments.tokens.energy
    by_neuron = layer.geometry.value_weight * (moments.neuron["balanced_hh"] + moments.neuron["balanced_exchange"])
    return {
        "top_token_share": moments.top_energy / energy if energy else math.nan,
        "top_tokens_share": moments.tokens.top_share(TRIMMED),
        "effective_tokens": moments.tokens.effective,
        "few_tokens": depends_on_few_tokens(layer),
        "effective_neurons": float(by_neuron.sum() ** 2 / by_neuron.square().sum()),
    }


def _pooled(layer: LayerSums, name: str) -> dict[str, float]:
    measure = LAYER_MEASURES[name]
    return {name: float(measure(layer.pooled)), f"{name}_se": float(pooled_error(measure, layer.moments))}


def _neuron_median(layer: LayerSums, name: str, measure: measures.Measure) -> dict[str, float]:
    replicates = neuron_replicates(lambda sums: _median(measure(sums)), layer.moments)
    return {
        f"{name}_neuron_median": float(_median(measure(layer.moments.neuron))),
        f"{name}_neuron_median_se": float(jackknife(replicates)),
    }


def _bilinear(layer: LayerSums) -> dict[str, float]:
    weight = layer.geometry.value_weight
    return {
        "bilinear_share": measures.layer_bilinear_share(layer.moments.neuron, weight),
        "bilinear_share_se": float(jackknife(bilinear_share_replicates(weight, layer.moments))),
    } | _neuron_median(layer, "bilinear_share", measures.bilinear_share)


def _median(values: Neurons) -> Float64[Tensor, ""]:
    """The median without NaN values; the mean of the two middle ones if their count is even."""
    return torch.nanquantile(values, 0.5)
