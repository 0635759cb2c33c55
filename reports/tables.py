"""Tables: a Run as DataFrames, one row a layer, a neuron, or a layer and a scale.

Columns are a contract (``docs/output.md``). A number that does not exist is NaN; ``run.json`` says why.
"""

import numpy as np
import pandas as pd
import torch

from analysis import measures
from analysis.jackknife import standard_error
from analysis.moments import Moments
from analysis.nulls import first_moments
from analysis.run import Layer, Run
from analysis.sums import QUADRANTS, scaling_name

WITH_ERROR = ("exchange", "exchange_balanced", "scaling_double")
"""Measures whose standard error has a column of its own."""


def layers_table(run: Run) -> pd.DataFrame:
    """One row per layer: pooled measures, their companions, and the geometry in brief."""
    return pd.DataFrame([_layer_row(index, layer) for index, layer in run.layers.items()])


def neurons_table(run: Run) -> pd.DataFrame:
    """One row per neuron of every layer."""
    tables = [_neuron_rows(index, layer) for index, layer in run.layers.items()]
    return pd.concat(tables, ignore_index=True)


def curves_table(run: Run) -> pd.DataFrame:
    """One row per layer and scale α; 0 and inf are the limits, where the unit has them."""
    tables = []
    for index, layer in run.layers.items():
        pooled = layer.moments.neuron.pool(layer.geometry.value_weight)
        curve = {
            "layer": index,
            "alpha": pooled.layout.alphas,
            "asymmetry": measures.scaling(pooled)[:, 0].numpy(),
            "token_median": [layer.moments.token_median(scaling_name(alpha)) for alpha in pooled.layout.alphas],
            "relative_change": measures.scaling_relative_change(pooled)[:, 0].numpy(),
        }
        tables.append(pd.DataFrame(curve))
    return pd.concat(tables, ignore_index=True)


def _layer_row(index: int, layer: Layer) -> dict[str, int | float]:
    moments, geometry = layer.moments, layer.geometry
    weight = geometry.value_weight
    pooled = moments.neuron.pool(weight)
    value = {name: measure(pooled).item() for name, measure in measures.LAYER_MEASURES.items()}
    error = {name: standard_error(measures.LAYER_MEASURES[name], moments.pooled).item() for name in WITH_ERROR}
    token_median = _token_medians(moments)
    score = geometry.score
    return {
        "layer": index,
        "n_neurons": len(score),
        "n_tokens": moments.n_tokens,
        "exchange": value["exchange"],
        "exchange_se": error["exchange"],
        "exchange_token_median": token_median["exchange"],
        "exchange_neuron_median": _median(measures.exchange(moments.neuron)),
        "exchange_balanced": value["exchange_balanced"],
        "exchange_balanced_se": error["exchange_balanced"],
        "exchange_balanced_token_median": token_median["exchange_balanced"],
        "exchange_relative_change": value["exchange_relative_change"],
        "exchange_null_gaussian": layer.gaussian_null[1],
        "exchange_null_repaired": value["exchange_null_repaired"],
        "scaling_half": value["scaling_half"],
        "scaling_half_token_median": token_median["scaling_half"],
        "scaling_double": value["scaling_double"],
        "scaling_double_se": error["scaling_double"],
        "scaling_double_token_median": token_median["scaling_double"],
        "scaling_flip": value["scaling_flip"],
        "scaling_flip_token_median": token_median["scaling_flip"],
        "euler_residual": value["euler_residual"],
        "euler_residual_token_median": token_median["euler_residual"],
        "bilinear_share": measures.layer_bilinear_share(moments.neuron, weight),
        "bilinear_share_neuron_median": _median(measures.bilinear_share(moments.neuron)),
        "placement": value["placement"],
        "placement_token_median": token_median["placement"],
        "placement_balanced": value["placement_balanced"],
        "placement_balanced_token_median": token_median["placement_balanced"],
        "gate_positive": measures.gate_positive(moments.neuron).mean().item(),
        "top_token_share": moments.top_energy / pooled["hh"].item() if pooled["hh"].item() else np.nan,
        "cos_qk_abs_mean": geometry.cos_qk.abs().mean().item(),
        "score_max_ratio": (score.max() / score.median()).item(),
        "interaction_antisymmetry": layer.interaction_antisymmetry,
    }


def _neuron_rows(index: int, layer: Layer) -> pd.DataFrame:
    moments, geometry = layer.moments, layer.geometry
    sums, weight = moments.neuron, geometry.value_weight
    columns = {name: measure(sums) for name, measure in measures.LAYER_MEASURES.items()}
    columns["exchange_null_gaussian"] = layer.gaussian_null[0]
    columns["gate_positive"] = measures.gate_positive(sums)
    columns["bilinear_share"] = measures.bilinear_share(sums)
    columns["bilinear_coef"] = measures.bilinear_coefficient(sums)
    columns["energy_share"] = weight * sums["hh"] / (weight @ sums["hh"])
    columns |= first_moments(moments)
    for quadrant, tokens in zip(QUADRANTS, measures.quadrant_tokens(sums), strict=True):
        columns[f"quadrant_{quadrant}"] = tokens
    for quadrant, energy in zip(QUADRANTS, measures.quadrant_energy(sums), strict=True):
        columns[f"quadrant_energy_{quadrant}"] = energy
    columns |= {**geometry.tensors(), "score": geometry.score}
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    table.insert(0, "neuron", np.arange(len(table)))
    table.insert(0, "layer", index)
    return table


def _token_medians(moments: Moments) -> dict[str, float]:
    """The median over tokens of every measure that is also taken token by token, by its column's name."""
    names = {
        "exchange": "exchange",
        "exchange_balanced": "balanced_exchange",
        "placement": "placement",
        "placement_balanced": "balanced_placement",
        "scaling_half": scaling_name(0.5),
        "scaling_double": scaling_name(2.0),
        "scaling_flip": scaling_name(-1.0),
    }
    known = moments.neuron.layout.token_measures
    medians = {column: moments.token_median(name) if name in known else np.nan for column, name in names.items()}
    share = moments.token_median("euler")
    return medians | {"euler_residual": float(np.sqrt(share / (1 - share)))}


def _median(values: torch.Tensor) -> float:
    return float(np.nanmedian(values.numpy())) if bool(values.isfinite().any()) else np.nan
