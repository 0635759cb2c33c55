"""The numbers of what a layer writes: how much the vector that it adds to the residual stream changes if its units do.

For y the vector added and y′ the same with every unit of the layer edited,

    A = E‖y − y′‖² / 2(E‖y‖² + E‖y′‖²),        relative change = sqrt(E‖y′ − y‖² / E‖y‖²)

in three readings: as written; ``raw``, before a norm behind the MLP, where there is one; and ``centred``, each version
without its own mean over tokens. The **coherence** is A over the pooled asymmetry of the neurons, which treats them as if
they wrote in orthogonal directions: below 1 their changes cancel in what is written, above 1 they add up; behind a norm it
also contains the norm's rescaling of tokens. A is of the sampled tokens, the neurons' asymmetry of all. Unlike a single
SiLU, GELU or ReLU neuron, a layer's output may exceed ½.

With y_s = (y + y′)/2 and y_a = (y − y′)/2, E‖y_s‖² + E‖y_a‖² = (E‖y‖² + E‖y′‖²)/2, and A is the share of y_a in it.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.asymmetry import LAYER_MEASURES, asymmetry
from analysis.measures.jackknife import filled_jackknife_blocks, jackknife, pooled_replicates, quantile_error
from analysis.measures.layer_sums import LayerSums
from analysis.measures.output_ranks import output_ranks
from analysis.measures.token_numbers import CHANGED, CONCENTRATED, TRIMMED
from analysis.sums.layout import Sums
from analysis.sums.output_edits import BALANCED, LIMITS, MODEL, OUTPUT_EDITS, reference_of, versions_of
from analysis.sums.output_moments import READINGS, OutputMoments

OUTPUT_MEASURES = tuple(f"output_{edit}" for edit in OUTPUT_EDITS)
"""The asymmetries of the output, by column name."""
_PARTS = (
    *("", "_se", "_relative_change", "_raw", "_raw_se", "_centred", "_centred_se", "_coherence", "_coherence_se"),
    *("_token_q1", "_token_median", "_token_median_se", "_token_q3", "_trimmed"),
)
"""The endings of the columns of one edit."""
_OF_THE_LAYER = ("energy", "mean_share", "mean_share_se", "symmetric_energy", "antisymmetric_energy", "effective_tokens")
Replicates = Float64[Tensor, " block"]
Sliced = Callable[[Float64[Tensor, "*row block"]], Float64[Tensor, "*row replicate"]]


def output_numbers(layer: LayerSums) -> dict[str, int | float]:
    """The columns of a layer about its output; all NaN if what stands behind its MLP is not known, or without tokens."""
    output = _measured(layer)
    numbers: dict[str, int | float] = {"output_tokens": 0 if output is None else output.n_tokens}
    for edit in OUTPUT_EDITS:
        numbers |= _of_edit(layer, edit)
    if output is None:
        numbers |= {f"output_{name}": math.nan for name in _OF_THE_LAYER} | {"output_few_tokens": False}
    else:
        reference = reference_of(layer.unit, BALANCED)
        energies = [float(_energy(output, version, "written").sum()) for version in (reference, BALANCED)]
        gap, n = float(_gap(output, BALANCED, "written").sum()), output.n_tokens
        numbers |= {
            "output_energy": float(_energy(output, MODEL, "written").sum()) / n,
            **_with_error("output_mean_share", lambda slices: _mean_share(output, slices), layer),
            "output_symmetric_energy": (sum(energies) / 2 - gap / 4) / n,
            "output_antisymmetric_energy": gap / 4 / n,
            "output_effective_tokens": output.tokens.effective,
            "output_few_tokens": output_depends_on_few_tokens(output),
        }
    return numbers | output_ranks(None if output is None else output.sample)


def output_value(name: str, layer: LayerSums) -> float:
    """One of ``OUTPUT_MEASURES``; NaN if it was not measured."""
    output, edit = _measured(layer), name.removeprefix("output_")
    if output is None or edit not in output.edits:
        return math.nan
    return float(_asymmetry(output, edit, "written", _whole)[0])


def output_replicates(name: str, layer: LayerSums) -> Replicates:
    """One of ``OUTPUT_MEASURES`` without each of the filled jackknife blocks; NaN if it was not measured."""
    output, edit = _measured(layer), name.removeprefix("output_")
    if output is None or edit not in output.edits:
        return torch.full((filled_jackknife_blocks(layer.moments),), torch.nan, dtype=torch.float64)
    return _asymmetry(output, edit, "written", _without_each(layer))


def output_depends_on_few_tokens(output: OutputMoments) -> bool:
    """Whether some number of the output depends on a handful of tokens, as ``depends_on_few_tokens`` of the neurons."""
    if output.tokens.effective < CONCENTRATED * output.n_tokens:
        return True
    values = {edit: float(_asymmetry(output, edit, "written", _whole)[0]) for edit in output.edits}
    return any(abs(value - output.tokens.without_top(edit, TRIMMED)) > CHANGED * value for edit, value in values.items())


def _of_edit(layer: LayerSums, edit: str) -> dict[str, float]:
    """Every column of one edit; NaN if it does not exist for the unit."""
    output, name = _measured(layer), f"output_{edit}"
    if output is None or edit not in output.edits:
        return {f"{name}{part}": math.nan for part in _PARTS}
    found = _with_error(name, lambda slices: _asymmetry(output, edit, "written", slices), layer)
    before = _energy(output, reference_of(layer.unit, edit), "written").sum()
    found[f"{name}_relative_change"] = math.sqrt(float(_gap(output, edit, "written").sum() / before))
    found |= {f"{name}_raw": math.nan, f"{name}_raw_se": math.nan}
    if output.has_norm:
        found |= _with_error(f"{name}_raw", lambda slices: _asymmetry(output, edit, "raw", slices), layer)
    found |= _with_error(f"{name}_centred", lambda slices: _centred(output, edit, slices), layer)
    found |= _coherence(layer, output, edit)
    return found | {
        f"{name}_token_q1": output.tokens.quantile(edit, 0.25),
        f"{name}_token_median": output.tokens.quantile(edit, 0.5),
        f"{name}_token_median_se": quantile_error(edit, 0.5, output.tokens, layer.moments.blocks),
        f"{name}_token_q3": output.tokens.quantile(edit, 0.75),
        f"{name}_trimmed": output.tokens.without_top(edit, TRIMMED),
    }


def _coherence(layer: LayerSums, output: OutputMoments, edit: str) -> dict[str, float]:
    """Output over neurons, with the error of that ratio; NaN where the neurons' number is 0 or was not measured."""
    measure, name = _neuron_measure(layer, edit), f"output_{edit}_coherence"
    of_neurons = math.nan if measure is None else float(measure(layer.pooled))
    if measure is None or of_neurons == 0:
        return {name: math.nan, f"{name}_se": math.nan}
    value = float(_asymmetry(output, edit, "written", _whole)[0])
    replicates = _asymmetry(output, edit, "written", _without_each(layer))
    error = jackknife(replicates / pooled_replicates(measure, layer.moments))
    return {name: value / of_neurons, f"{name}_se": float(error)}


def _neuron_measure(layer: LayerSums, edit: str) -> measures.Measure | None:
    """The same measure of the neurons, pooled; None for a scale that the run did not include."""
    if edit in LAYER_MEASURES:
        return LAYER_MEASURES[edit] if not edit.startswith("scaling") or _is_included(layer, edit) else None
    alphas = layer.moments.layout.alphas
    return _scaling_at(alphas.index(LIMITS[edit])) if LIMITS[edit] in alphas else None


def _is_included(layer: LayerSums, edit: str) -> bool:
    return bool(LAYER_MEASURES[edit](layer.pooled).isfinite().all())


def _scaling_at(row: int) -> measures.Measure:
    def measure(sums: Sums) -> Float64[Tensor, " column"]:
        return measures.scaling(sums)[row]

    return measure


def _with_error(name: str, value: Callable[[Sliced], Float64[Tensor, " replicate"]], layer: LayerSums) -> dict[str, float]:
    """A number and its standard error by jackknife."""
    return {name: float(value(_whole)[0]), f"{name}_se": float(jackknife(value(_without_each(layer))))}


def _measured(layer: LayerSums) -> OutputMoments | None:
    """The sums of the output, if there are any."""
    return layer.output if layer.output is not None and layer.output.n_tokens else None


def _whole(sums: Float64[Tensor, "*row block"]) -> Float64[Tensor, "*row 1"]:
    """The sum over all blocks, as one replicate."""
    return sums.sum(dim=-1, keepdim=True)


def _without_each(layer: LayerSums) -> Sliced:
    """What sums over all blocks but one, for each block in which the layer has tokens, sampled or not."""
    filled = layer.moments.blocks > 0

    def slices(sums: Float64[Tensor, "*row block"]) -> Float64[Tensor, "*row replicate"]:
        return sums[..., filled].sum(dim=-1, keepdim=True) - sums[..., filled]

    return slices


def _asymmetry(output: OutputMoments, edit: str, reading: str, slices: Sliced) -> Float64[Tensor, " replicate"]:
    versions = (reference_of(output.unit, edit), edit)
    return asymmetry(slices(_gap(output, edit, reading)), *(slices(_energy(output, name, reading)) for name in versions))


def _centred(output: OutputMoments, edit: str, slices: Sliced) -> Float64[Tensor, " replicate"]:
    """The same with y and y′ each without its mean over tokens."""
    versions = (reference_of(output.unit, edit), edit)
    totals = [slices(_total(output, name)) for name in versions]
    count = slices(output.blocks.double())
    gap = slices(_gap(output, edit, "written")) - (totals[0] - totals[1]).square().sum(dim=0) / count
    energies = [
        slices(_energy(output, name, "written")) - total.square().sum(dim=0) / count
        for name, total in zip(versions, totals, strict=True)
    ]
    return asymmetry(gap.clamp(min=0), *energies)


def _mean_share(output: OutputMoments, slices: Sliced) -> Float64[Tensor, " replicate"]:
    """‖E y‖² / E‖y‖²: the share of the output's energy that is its mean over tokens."""
    count, energy = slices(output.blocks.double()), slices(_energy(output, MODEL, "written"))
    return slices(_total(output, MODEL)).square().sum(dim=0) / count / energy


def _energy(output: OutputMoments, version: str, reading: str) -> Float64[Tensor, " block"]:
    return output.energy[READINGS.index(reading), versions_of(output.unit).index(version)]


def _gap(output: OutputMoments, edit: str, reading: str) -> Float64[Tensor, " block"]:
    return output.gap[READINGS.index(reading), output.edits.index(edit)]


def _total(output: OutputMoments, version: str) -> Float64[Tensor, "d_model block"]:
    return output.total[versions_of(output.unit).index(version)].T
