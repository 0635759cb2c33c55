"""The numbers of every neuron of a layer: columns of the table of neurons, and the neurons of largest output."""

from jaxtyping import Float64
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES
from analysis.measures.excess import neuron_nulls
from analysis.measures.gaussian_null import GaussianFit
from analysis.measures.jackknife import jackknife, measure_replicates, neuron_error
from analysis.measures.layer_sums import GAUSSIAN_NULLS, LayerSums
from analysis.sums.layout import QUADRANTS

EXTREMES = 10
"""Neurons of each layer in the table of extreme neurons."""


def neuron_numbers(layer: LayerSums) -> dict[str, Tensor]:
    """The columns of the table of neurons, [d_mlp] each."""
    sums, weight = layer.moments.neuron, layer.geometry.value_weight
    columns: dict[str, Tensor] = {}
    for name in GAUSSIAN_NULLS:
        replicates = measure_replicates(LAYER_MEASURES[name], layer.moments)
        columns[name] = LAYER_MEASURES[name](sums)
        columns[f"{name}_se"] = jackknife(replicates)
        columns |= neuron_nulls(layer, name, columns[name], replicates)
        if name in layer.discoveries:
            found = dict(zip(("p", "q", "differs"), layer.discoveries[name], strict=True))
            columns |= {f"{name}_repaired_{part}": values for part, values in found.items()}
    columns |= {name: measure(sums) for name, measure in LAYER_MEASURES.items() if name not in columns}
    columns["gate_positive"] = measures.gate_positive(sums)
    columns["bilinear_share"] = measures.bilinear_share(sums)
    columns["bilinear_share_se"] = neuron_error(measures.bilinear_share, layer.moments)
    columns["bilinear_coef"] = measures.bilinear_coefficient(sums)
    columns["energy_share"] = weight * sums["hh"] / (weight @ sums["hh"])
    columns |= vars(GaussianFit.of(sums))
    if layer.experts is not None:
        columns["n_tokens"] = measures.tokens_seen(sums).long()
    columns |= _by_quadrant("quadrant", measures.quadrant_tokens(sums))
    columns |= _by_quadrant("quadrant_energy", measures.quadrant_energy(sums))
    return columns | {**layer.geometry.tensors(), "score": layer.geometry.score}


def extreme_neurons(layer: LayerSums, count: int = EXTREMES) -> dict[str, Tensor]:
    """The neurons with the largest |h|·‖v‖ on any token fed to the model, uncounted first ones included, largest first.

    In a mixture of experts h is what the expert writes, routing weight included.
    """
    peaks, geometry = layer.moments.peaks, layer.geometry
    size = peaks.values[0].abs() * geometry.norm_v
    chosen = size.nan_to_num(nan=-1.0).argsort(descending=True)[:count]
    h, a, b = peaks.values[:, chosen]
    window, position, token, counted = peaks.places[:, chosen]
    return {
        **layer.neuron_columns(chosen),
        "size": size[chosen],
        "window": window,
        "position": position,
        "counted": counted.bool(),
        "token": token,
        "a": a,
        "b": b,
        "h": h,
        "cos_qk": geometry.cos_qk[chosen],
        "score": geometry.score[chosen],
        "score_ratio": geometry.score[chosen] / geometry.score.median(),
    }


def _by_quadrant(name: str, values: Float64[Tensor, "quadrant d_mlp"]) -> dict[str, Tensor]:
    return {f"{name}_{quadrant}": row for quadrant, row in zip(QUADRANTS, values, strict=True)}
