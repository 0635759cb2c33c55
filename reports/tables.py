"""Tables: a Run as DataFrames, one row a layer, a neuron, a layer and a scale, an extreme neuron, or an expert.

Columns are a contract (``docs/output.md``). A number that does not exist is NaN; ``run.json`` says why.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.compare import layer_excess, neuron_excess
from analysis.measures import asymmetry as measures
from analysis.run import Run
from analysis.weights.experts import index_within


@dataclass(frozen=True)
class Tables:
    """The tables of a run; ``experts`` is None where no layer is a mixture of them."""

    layers: pd.DataFrame
    neurons: pd.DataFrame
    curves: pd.DataFrame
    extremes: pd.DataFrame
    experts: pd.DataFrame | None = None


def tables_of(run: Run, random: Run | None = None) -> Tables:
    """All tables of a run; with the run of the same architecture with random weights, joined to it as a third null."""
    layers, neurons = layers_table(run, random), neurons_table(run, random)
    return Tables(layers, neurons, curves_table(run), extremes_table(run), experts_table(run))


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
    """One row per neuron of every layer.

    If a layer is a mixture of experts, all have an ``expert``, NaN in a dense layer, and ``neuron`` counts within it.
    """
    tables = []
    for index, layer in run.layers.items():
        columns = layer.estimates.neuron_numbers()
        if random is not None and index in random.layers:
            columns |= neuron_excess(layer, random.layers[index])
        table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
        table.insert(0, "neuron", np.arange(len(table)) if layer.experts is None else index_within(layer.experts).numpy())
        if has_experts(run):
            table.insert(0, "expert", np.nan if layer.experts is None else layer.experts.numpy())
            table["n_tokens"] = measures.tokens_seen(layer.moments.neuron).long().numpy()
        table.insert(0, "layer", index)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def experts_table(run: Run) -> pd.DataFrame | None:
    """One row per expert of every layer that is a mixture of them; None if none is."""
    rows = [{"layer": index} | row for index, layer in run.layers.items() for row in layer.estimates.expert_numbers()]
    return pd.DataFrame(rows) if rows else None


def has_experts(run: Run) -> bool:
    """Whether some layer is a mixture of experts."""
    return any(layer.experts is not None for layer in run.layers.values())


def curves_table(run: Run) -> pd.DataFrame:
    """One row per layer and scale α; 0 and inf are the limits, where the unit has them."""
    tables = [pd.DataFrame({"layer": index, **layer.estimates.curve_numbers()}) for index, layer in run.layers.items()]
    return pd.concat(tables, ignore_index=True)


def extremes_table(run: Run) -> pd.DataFrame:
    """The neurons with the largest |h|·‖v‖ of every layer, and the token on which each was so large."""
    tables = []
    for index, layer in run.layers.items():
        columns = {name: values.numpy() for name, values in layer.estimates.extreme_neurons().items()}
        expert = {"expert": np.nan} if has_experts(run) else {}
        tables.append(pd.DataFrame({"layer": index, **expert, **columns}))
    table = pd.concat(tables, ignore_index=True)
    table.insert(table.columns.get_loc("token") + 1, "text", table["token"].map(run.token_texts))
    return table
