"""The costs of edits as tables, and as columns of the tables of layers and neurons.

Costs are nats per scored token. The tables of layers and neurons get the costs of editing counted positions; ``causal.csv``
also has those of editing all positions.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from analysis.causal.costs import (
    POSITIONS,
    Attribution,
    Causal,
    SingleNeurons,
    Sweep,
    error_per_token,
    per_token,
    rank_correlation,
)
from analysis.causal.edits import scale_of
from analysis.storage.files import AGREEMENT, COSTS, COSTS_BY_NEURON, REPLACEABLE
from reports.tables import Tables

REPLACEMENTS = ("bilinear", "relu-limit")
"""Edits that make a layer bilinear or ReLU-gated: c·ab and relu(a)·b."""
THRESHOLDS = (0.001, 0.01, 0.1)
"""Thresholds ε in nats per token for replacing a layer."""
ASYMMETRIES = {
    "exchange": "exchange",
    "exchange-balanced": "exchange_balanced",
    "flip": "scaling_flip",
    "scale:0.5": "scaling_half",
    "scale:2": "scaling_double",
    "placement": "placement",
}
"""For edits that are symmetries of the bilinear unit: the column with the asymmetry of the activations."""


@dataclass(frozen=True)
class CausalTables:
    """The tables of the costs of one run.

    Attributes:
        costs: one row per layer, edit and choice of positions.
        neurons: attributions by neuron; None if not measured.
        replaceable: what can be replaced at a cost below ε.
        single_neurons: the neurons that were patched one at a time; None if not measured.
        agreement: agreement of attribution and exact cost; empty unless both were measured.
    """

    costs: pd.DataFrame
    neurons: pd.DataFrame | None
    replaceable: pd.DataFrame
    single_neurons: pd.DataFrame | None
    agreement: pd.DataFrame

    @classmethod
    def of(cls, causal: Causal, tables: Tables) -> "CausalTables":
        costs = causal_table(causal, tables.layers, tables.curves)
        neurons = None if causal.attribution is None else neuron_columns(causal.attribution)
        single = causal.single_neurons
        single_neurons = None if single is None else _with_experts(single_neuron_table(single), tables.neurons)
        return cls(
            costs, neurons, replaceable_table(costs, neurons), single_neurons, agreement_table(costs, single_neurons)
        )

    def joined_to(self, tables: Tables) -> Tables:
        """The run's tables with the columns of costs added."""
        layers = tables.layers.merge(layer_columns(self.costs), on="layer", how="left")
        neurons = tables.neurons
        if self.neurons is not None:
            costs = self.neurons.rename(columns={"neuron": "place"})
            joined = _placed(neurons).merge(costs, on=["layer", "place"], how="left")
            neurons = with_cost_per_asymmetry(joined.drop(columns="place"))
        return replace(tables, layers=layers, neurons=neurons)

    def write(self, folder: Path) -> None:
        """Write every table of costs that has rows into an existing folder."""
        tables = {
            COSTS: self.costs,
            REPLACEABLE: self.replaceable,
            COSTS_BY_NEURON: self.single_neurons,
            AGREEMENT: self.agreement,
        }
        for name, table in tables.items():
            if table is not None and len(table):
                table.to_csv(folder / name, index=False)


def _placed(neurons: pd.DataFrame) -> pd.DataFrame:
    """With each neuron's index in its layer as ``place``; in a mixture ``neuron`` is the index within the expert."""
    return neurons.assign(place=neurons.groupby("layer").cumcount())


def _with_experts(table: pd.DataFrame, neurons: pd.DataFrame) -> pd.DataFrame:
    """A table of neurons by their index in the layer, renamed to expert and index if there are experts."""
    if "expert" not in neurons:
        return table
    names = _placed(neurons)[["layer", "place", "expert", "neuron"]]
    named = table.rename(columns={"neuron": "place"}).merge(names, on=["layer", "place"], how="left")
    first = ["layer", "expert", "neuron"]
    return named[[*first, *(name for name in named if name not in (*first, "place"))]]


def column_name(edit: str) -> str:
    """An edit's name as used in column names: exchange_balanced, scale_2."""
    return edit.replace("-", "_").replace(":", "_")


def causal_table(causal: Causal, layers: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """One row per layer, edit and choice of positions.

    Args:
        causal: the costs.
        layers: the table of layers and
        curves: the table of scaling curves, which give the asymmetry for each cost.
    """
    tables = []
    if causal.sweep is not None:
        tables.append(_sweep_rows(causal.sweep))
    if causal.attribution is not None:
        tables.append(_attribution_rows(causal.attribution))
    table = tables[0] if len(tables) == 1 else tables[0].merge(tables[1], on=["layer", "edit", "positions"], how="left")
    edits = list(dict.fromkeys(table["edit"]))
    known = {edit: _asymmetry_by_layer(edit, layers, curves) for edit in edits}
    table["asymmetry"] = [known[edit].get(layer, np.nan) for layer, edit in zip(table["layer"], table["edit"], strict=True)]
    for column in ("kl", "kl_placebo"):
        if column in table:
            table[f"{column}_per_asymmetry"] = table[column] / table["asymmetry"].where(table["asymmetry"] > 0)
    return table


def layer_columns(table: pd.DataFrame) -> pd.DataFrame:
    """The columns of costs for ``layers.csv``: kl_, dce_ and attribution_ of every edit, one row per layer."""
    counted = table[table["positions"] == "counted"]
    columns = {}
    for edit, rows in counted.groupby("edit", sort=False):
        by_layer = rows.set_index("layer")
        for quantity in ("kl", "dce", "attribution"):
            for ending in ("", "_se", "_placebo"):
                if quantity + ending in by_layer:
                    columns[f"{quantity}_{column_name(str(edit))}{ending}"] = by_layer[quantity + ending]
    return pd.DataFrame(columns).rename_axis("layer").reset_index()


def neuron_columns(attribution: Attribution) -> pd.DataFrame:
    """Attribution, standard error and placebo of every neuron and edit; rows as in ``neurons.parquet``."""
    tables = []
    for layer in attribution.layers:
        values = (attribution.neurons(layer), attribution.neuron_errors(layer), attribution.neuron_placebos(layer))
        columns = {
            f"attribution_{column_name(edit)}{ending}": value[place].numpy()
            for place, edit in enumerate(attribution.edits)
            for ending, value in zip(("", "_se", "_placebo"), values, strict=True)
        }
        table = pd.DataFrame(columns)
        table.insert(0, "neuron", np.arange(len(table)))
        table.insert(0, "layer", layer)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def with_cost_per_asymmetry(neurons: pd.DataFrame) -> pd.DataFrame:
    """The table of neurons with attribution and placebo divided by the neuron's own asymmetry, if that is positive."""
    columns = {}
    for edit, asymmetry in ASYMMETRIES.items():
        name = f"attribution_{column_name(edit)}"
        if name in neurons:
            per = neurons[asymmetry].where(neurons[asymmetry] > 0)
            columns[f"{name}_per_asymmetry"] = neurons[name] / per
            columns[f"{name}_placebo_per_asymmetry"] = neurons[f"{name}_placebo"] / per
    return pd.concat([neurons, pd.DataFrame(columns)], axis=1)


def replaceable_table(table: pd.DataFrame, neurons: pd.DataFrame | None) -> pd.DataFrame:
    """What can be replaced by c·ab or relu(a)·b for less than ε nats per token; one row per layer, replacement and ε.

    ``whole_layer`` is exact, for all neurons of the layer together: KL plus two standard errors below ε. ``neurons`` is the
    number whose absolute attributions, smallest first, add up to less than ε: to first order a bound on |ΔCE| of replacing
    them together.
    """
    counted = table[table["positions"] == "counted"]
    rows = []
    for row in counted[counted["edit"].isin(REPLACEMENTS)].to_dict("records"):
        for epsilon in THRESHOLDS:
            found = {"layer": row["layer"], "edit": row["edit"], "epsilon": epsilon}
            if "kl" in row:
                found |= {"whole_layer": row["kl"] + 2 * row["kl_se"] < epsilon, "kl": row["kl"], "kl_se": row["kl_se"]}
            name = f"attribution_{column_name(row['edit'])}"
            if neurons is not None and name in neurons:
                size = neurons.loc[neurons["layer"] == row["layer"], name].abs().sort_values().cumsum()
                found |= {"neurons": int((size < epsilon).sum()), "of": len(size)}
            rows.append(found)
    return pd.DataFrame(rows)


def single_neuron_table(found: SingleNeurons) -> pd.DataFrame:
    """The neurons that were patched one at a time: predicted and exact ΔCE, those of largest attribution first."""
    names = ("layer", "neuron", "largest", "predicted", "exact")
    return pd.DataFrame({name: getattr(found, name).numpy() for name in names})


def agreement_table(table: pd.DataFrame, single_neurons: pd.DataFrame | None) -> pd.DataFrame:
    """Rank correlation of attribution and exact ΔCE: over layers for each edit, then over single neurons."""
    rows = []
    if {"dce", "attribution"} <= set(table):
        for edit, group in table[table["positions"] == "counted"].groupby("edit", sort=False):
            rows.append(_agreement(f"layers, {edit}", group["attribution"], group["dce"]))
    if single_neurons is not None:
        for largest, name in ((True, "neurons of the largest attribution"), (False, "neurons at random")):
            group = single_neurons[single_neurons["largest"] == largest]
            rows.append(_agreement(name, group["predicted"], group["exact"]))
        for layer, group in single_neurons.groupby("layer"):
            if len(group) >= 5:
                rows.append(_agreement(f"neurons of layer {layer}", group["predicted"], group["exact"]))
    return pd.DataFrame(rows)


def _agreement(what: str, predicted: pd.Series, exact: pd.Series) -> dict[str, object]:
    known = predicted.notna() & exact.notna()
    predicted, exact = predicted[known], exact[known]
    ratio = float((predicted * exact).sum() / predicted.pow(2).sum()) if predicted.any() else np.nan
    return {
        "over": what,
        "n": len(exact),
        "rank_correlation": rank_correlation(predicted.tolist(), exact.tolist()),
        "exact_per_predicted": ratio,
    }


def _sweep_rows(sweep: Sweep) -> pd.DataFrame:
    rows = []
    for layer, costs in sweep.layers.items():
        single = _mean_and_error(costs.single, sweep)
        together = {"bottom": _mean_and_error(costs.bottom, sweep), "top": _mean_and_error(costs.top, sweep)}
        for e, edit in enumerate(sweep.edits):
            for p, positions in enumerate(POSITIONS):
                row = {"layer": layer, "edit": edit, "positions": positions, "tokens": int(sweep.n_tokens.sum())}
                for q, quantity in enumerate(("kl", "dce")):
                    for v, version in enumerate(("", "_placebo")):
                        for ending, values in zip(("", "_se"), single, strict=True):
                            row[f"{quantity}{version}{ending}"] = values[q, e, v, p].item()
                    for name, pair in together.items():
                        for ending, values in zip(("", "_se"), pair, strict=True):
                            value = values[q, e].item() if positions == "counted" else np.nan
                            row[f"{quantity}_{name}{ending}"] = value
                rows.append(row)
    return pd.DataFrame(rows)


def _mean_and_error(sums: Tensor, sweep: Sweep) -> tuple[Float64[Tensor, "*case"], Float64[Tensor, "*case"]]:
    return per_token(sums, sweep.n_tokens), error_per_token(sums, sweep.n_tokens)


def _attribution_rows(attribution: Attribution) -> pd.DataFrame:
    rows = []
    for layer, sums in attribution.layers.items():
        mean, error = (f(sums.total, attribution.n_tokens) for f in (per_token, error_per_token))
        for e, edit in enumerate(attribution.edits):
            row = {"layer": layer, "edit": edit, "positions": "counted"}
            rows.append(row | {"attribution": mean[e].item(), "attribution_se": error[e].item()})
    return pd.DataFrame(rows)


def _asymmetry_by_layer(edit: str, layers: pd.DataFrame, curves: pd.DataFrame) -> dict[int, float]:
    """The asymmetry of each layer's activations under an exchange, a scaling or the placement; empty for other edits."""
    alpha = scale_of(edit)
    if alpha is not None:
        rows = curves[curves["alpha"] == alpha]
        return dict(zip(rows["layer"], rows["asymmetry"], strict=True))
    if edit not in ASYMMETRIES:
        return {}
    return dict(zip(layers["layer"], layers[ASYMMETRIES[edit]], strict=True))
