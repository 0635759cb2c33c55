"""The numbers of every expert of a layer that is a mixture of experts."""

import math
from dataclasses import replace

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES, REPAIRED_NULLS
from analysis.measures.jackknife import bilinear_share_replicates, group_pooled_replicates, jackknife
from analysis.measures.layer_sums import GAUSSIAN_NULLS, LayerSums
from analysis.measures.token_numbers import TOKEN_MEASURES
from analysis.sums.layout import Sums
from analysis.weights.experts import expert_slices

FEW_EXPERT_TOKENS = 256
"""An expert with fewer counted tokens is marked. If tokens were independent, this many would give pooled balanced exchange
a standard error of 2 % of its value in the median layer of SmolLM2, and of more than 11 % in a tenth of its layers."""


def expert_numbers(layer: LayerSums) -> list[dict[str, int | float]]:
    """One row per expert, each pooled over its neurons as a layer is; no rows for a dense layer.

    NaN for an expert without counted tokens. Errors leave out groups of jackknife blocks, for which only some of the sums
    are kept: measures of the other sums have no error.
    """
    if layer.experts is None:
        return []
    of_layer = float((layer.geometry.value_weight * layer.moments.neuron["hh"]).sum())
    return [_expert(layer, expert, neurons, of_layer) for expert, neurons in expert_slices(layer.experts).items()]


def idle_experts(layer: LayerSums) -> list[int]:
    """The experts to which no counted token was routed."""
    if layer.experts is None:
        return []
    seen = measures.tokens_seen(layer.moments.neuron)
    return [expert for expert, neurons in expert_slices(layer.experts).items() if not bool(seen[neurons.start] > 0)]


def _expert(layer: LayerSums, expert: int, neurons: slice, energy_of_layer: float) -> dict[str, int | float]:
    weight, sums = layer.geometry.value_weight[neurons], layer.moments.neuron.values[:, neurons]
    groups = layer.moments.neuron_groups[..., neurons]
    moments = replace(layer.moments, neuron=Sums(layer.moments.layout, sums), neuron_groups=groups)
    pooled, n_tokens = moments.neuron.pool(weight), int(measures.tokens_seen(moments.neuron)[0])
    numbers: dict[str, int | float] = {
        "expert": expert,
        "n_neurons": len(weight),
        "n_tokens": n_tokens,
        "token_share": n_tokens / moments.n_tokens if moments.n_tokens else math.nan,
        "energy_share": float(pooled["hh"]) / energy_of_layer if energy_of_layer else math.nan,
        "few_tokens": n_tokens < FEW_EXPERT_TOKENS,
    }
    for name in TOKEN_MEASURES:
        measure = LAYER_MEASURES[name]
        numbers[name] = float(measure(pooled))
        if name in GAUSSIAN_NULLS:  # those whose sums are kept by group of jackknife blocks
            numbers[f"{name}_se"] = float(jackknife(group_pooled_replicates(measure, weight, moments)))
            numbers[f"{name}_null_repaired"] = float(REPAIRED_NULLS[name](pooled))
    numbers["bilinear_share"] = measures.layer_bilinear_share(moments.neuron, weight)
    numbers["bilinear_share_se"] = float(jackknife(bilinear_share_replicates(weight, moments)))
    numbers["gate_positive"] = measures.layer_gate_positive(moments.neuron)
    numbers["cos_qk_abs_mean"] = float(layer.geometry.cos_qk[neurons].abs().mean())
    return numbers
