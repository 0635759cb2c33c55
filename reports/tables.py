"""Tables: a Run as DataFrames, one row a layer, a neuron, a layer and a scale, or an extreme neuron.

Columns are a contract (``docs/output.md``). A number that does not exist is NaN; ``run.json`` says why.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.random_init import layer_excess, neuron_excess
from analysis.run import Run


@dataclass(frozen=True)
class Tables:
    """The tables of a run."""

    layers: pd.DataFrame
    neurons: pd.DataFrame
    curves: pd.DataFrame
    extremes: pd.DataFrame


def tables_of(run: Run, random: Run | None = None) -> Tables:
    """All tables of a run; with the run of the same architecture with random weights, joined to it as a third null."""
    return Tables(layers_table(run, random), neurons_table(run, random), curves_table(run), extremes_table(run))


def layers_table(run: Run, random: Run | None = None) -> pd.DataFrame:
    """One row per layer: each measure with its error, its companions and its nulls, and the geometry in brief."""
    rows = []
    for index, layer in run.layers.items():
        row = {"layer": index, **layer.estimates.layer_numbers()}
        row["interaction_antisymmetry"] = layer.interaction_antisymmetry
        if random is not None and index in random.layers:
            row |= layer_excess(layer, random.layers[index])
        rows.append(row)
    return pd.DataFrame(rows)


def neurons_table(run: Run, random: Run | None = None) -> pd.DataFrame:
    """One row per neuron of every layer."""
    tables = []
    for index, layer in run.layers.items():
        columns = layer.estimates.neuron_numbers()
        if random is not None and index in random.layers:
            columns |= neuron_excess(layer, random.layers[index])
        table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
        table.insert(0, "neuron", np.arange(len(table)))
        table.insert(0, "layer", index)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def curves_table(run: Run) -> pd.DataFrame:
    """One row per layer and scale α; 0 and inf are the limits, where the unit has them."""
    tables = [pd.DataFrame({"layer": index, **layer.estimates.curve_numbers()}) for index, layer in run.layers.items()]
    return pd.concat(tables, ignore_index=True)


def extremes_table(run: Run) -> pd.DataFrame:
    """The neurons with the largest |h|·‖v‖ of every layer, and the token on which each was so large."""
    tables = []
    for index, layer in run.layers.items():
        columns = {name: values.numpy() for name, values in layer.estimates.extreme_neurons().items()}
        tables.append(pd.DataFrame({"layer": index, **columns}))
    table = pd.concat(tables, ignore_index=True)
    table.insert(table.columns.get_loc("token") + 1, "text", table["token"].map(run.token_texts))
    return table
