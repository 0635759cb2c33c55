"""The tables of a run as DataFrames: layers, neurons, scaling curves, extreme neurons and experts.

``reports.columns`` explains every column. A number that does not exist is NaN; ``run.json`` gives the reason.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.compare import layer_excess, neuron_excess
from analysis.measures import asymmetry as measures
from analysis.run import Run
from analysis.storage.files import CURVES, EXPERTS, EXTREMES, LAYERS, NEURONS
from analysis.weights.experts import index_within


@dataclass(frozen=True)
class Tables:
    """The tables of a run; ``experts`` is None if no layer is a mixture of experts."""

    layers: pd.DataFrame
    neurons: pd.DataFrame
    curves: pd.DataFrame
    extremes: pd.DataFrame
    experts: pd.DataFrame | None = None

    def write(self, folder: Path) -> None:
        """Write every table into an existing folder."""
        self.layers.to_csv(folder / LAYERS, index=False)
        self.curves.to_csv(folder / CURVES, index=False)
        self.extremes.to_csv(folder / EXTREMES, index=False)
        if self.experts is not None:
            self.experts.to_csv(folder / EXPERTS, index=False)
        self.neurons.to_parquet(folder / NEURONS, index=False)


def tables_of(run: Run, random: Run | None = None) -> Tables:
    """All tables of a run; ``random``, the same architecture with random weights, adds the columns of a third null."""
    layers, neurons = layers_table(run, random), neurons_table(run, random)
    return Tables(layers, neurons, curves_table(run), extremes_table(run), experts_table(run))


def layers_table(run: Run, random: Run | None = None) -> pd.DataFrame:
    """One row per layer: every measure with its error, token statistics and nulls, and a summary of the weights."""
    rows = []
    for index, layer in run.layers.items():
        row = {"layer": index, **layer.estimates.layer_numbers()}
        row["interaction_antisymmetry"] = layer.interaction_antisymmetry
        if random is not None and index in random.layers:
            row |= layer_excess(layer, random.layers[index])
        rows.append(row)
    return pd.DataFrame(rows)


def neurons_table(run: Run, random: Run | None = None) -> pd.DataFrame:
    """One row per neuron.

    If any layer is a mixture of experts, every row has an ``expert`` (NaN in a dense layer), and ``neuron`` is the index
    within the expert.
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
    """One row per expert of every layer that is a mixture of experts; None if there is none."""
    rows = [{"layer": index} | row for index, layer in run.layers.items() for row in layer.estimates.expert_numbers()]
    return pd.DataFrame(rows) if rows else None


def has_experts(run: Run) -> bool:
    """Whether some layer is a mixture of experts."""
    return any(layer.experts is not None for layer in run.layers.values())


def curves_table(run: Run) -> pd.DataFrame:
    """One row per layer and scale α; 0 and inf are the limits, if the unit has them."""
    tables = [pd.DataFrame({"layer": index, **layer.estimates.curve_numbers()}) for index, layer in run.layers.items()]
    return pd.concat(tables, ignore_index=True)


def extremes_table(run: Run) -> pd.DataFrame:
    """The neurons of every layer with the largest |h|·‖v‖ on any token, and that token."""
    tables = []
    for index, layer in run.layers.items():
        columns = {name: values.numpy() for name, values in layer.estimates.extreme_neurons().items()}
        expert = {"expert": np.nan} if has_experts(run) else {}
        tables.append(pd.DataFrame({"layer": index, **expert, **columns}))
    table = pd.concat(tables, ignore_index=True)
    table.insert(table.columns.get_loc("token") + 1, "text", table["token"].map(run.token_texts))
    return table
