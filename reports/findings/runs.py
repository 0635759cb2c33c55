"""The saved runs of each model for ``docs/findings.md``: activations, the first position, costs of edits."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.errors import UserError
from analysis.run import Run
from analysis.storage.files import COSTS, COSTS_BY_NEURON, CURVES, LAYERS, NEURONS, RUN_FILE
from reports.causal.tables import ASYMMETRIES

QUADRANTS = {"pp": "a > 0, b > 0", "pn": "a > 0, b ≤ 0", "np": "a ≤ 0, b > 0", "nn": "a ≤ 0, b ≤ 0"}
UNEXPLAINED = "bilinear"
"""The edit whose cost is divided by the energy that it leaves unexplained, 1 − bilinear share."""


@dataclass(frozen=True)
class ModelResults:
    """The results of one model.

    Attributes:
        document: ``run.json``.
        layers, curves, neurons: the run's tables.
        heaviest: the neuron of largest weight in each layer's balanced exchange.
        first: the table of layers if the first position is counted too; None if not measured.
        costs: costs of edits on counted positions; None if not measured.
        single_neurons: neurons that were exchanged one at a time; None if not measured.
    """

    document: dict[str, Any]
    layers: pd.DataFrame
    curves: pd.DataFrame
    neurons: pd.DataFrame
    heaviest: pd.DataFrame
    first: pd.DataFrame | None = None
    costs: pd.DataFrame | None = None
    single_neurons: pd.DataFrame | None = None

    @property
    def name(self) -> str:
        return str(self.document["model"]["name"])

    @property
    def depth(self) -> pd.Series:
        """The relative depth of each layer, (i + ½)/n."""
        return (self.layers["layer"] + 0.5) / self.document["model"]["n_layers"]


def found_in(runs: Sequence[Path], first: Sequence[Path] = (), costs: Sequence[Path] = ()) -> list[ModelResults]:
    """Read runs, and the other runs of each model; UserError for a run of the wrong kind or of another model."""
    documents = {directory: _document(directory) for directory in (*runs, *first, *costs)}
    names = [documents[directory]["model"]["name"] for directory in runs]
    for directory in (*first, *costs):
        if documents[directory]["model"]["name"] not in names:
            raise UserError(f"{directory} is a run of {documents[directory]['model']['name']}, not of {', '.join(names)}")
    for directory in first:
        if skipped := documents[directory]["settings"]["skip_positions"]:
            raise UserError(f"{directory} skips {skipped} positions: analyze with --skip-positions 0")

    def of(directories: Sequence[Path], name: str) -> Path | None:
        return next((directory for directory in directories if documents[directory]["model"]["name"] == name), None)

    return [
        _found(directory, documents[directory], of(first, name), of(costs, name))
        for directory, name in zip(runs, names, strict=True)
    ]


def energy_by_quadrant(neurons: pd.DataFrame) -> pd.DataFrame:
    """The share of each layer's energy in each sign pair, summed over its neurons with energy."""
    live = neurons[neurons["energy_share"] > 0]
    parts = {pair: live[f"quadrant_energy_{pair}"] * live["energy_share"] for pair in QUADRANTS}
    return pd.DataFrame(parts).groupby(live["layer"]).sum()


def cost_per_asymmetry(one: ModelResults, edit: str) -> pd.DataFrame:
    """By layer: the KL of an edit, that of its placebo, and the asymmetry of the activations under it."""
    assert one.costs is not None
    costs = one.costs[one.costs["edit"] == edit].set_index("layer")[["kl", "kl_placebo"]]
    layers = one.layers.set_index("layer")
    asymmetry = 1 - layers["bilinear_share"] if edit == UNEXPLAINED else layers[ASYMMETRIES[edit]]
    return costs.join(asymmetry.rename("asymmetry"), how="inner")


def heaviest_neurons(run: Run, neurons: pd.DataFrame) -> pd.DataFrame:
    """By layer, the neuron with the most energy before plus after balanced exchange, w (E[h²] + E[h′²]).

    ``share`` is its share of that energy; the other columns are those of the table of neurons.
    """
    rows = []
    for index, layer in run.layers.items():
        sums, weight = layer.moments.neuron, layer.geometry.value_weight
        energy = weight * (sums["balanced_hh"] + sums["balanced_exchange"])
        rows.append({"layer": index, "place": int(energy.argmax()), "share": float(energy.max() / energy.sum())})
    median = neurons.groupby("layer")["score"].transform("quantile", 0.5, "lower")  # as in score_max_ratio
    placed = neurons.assign(place=neurons.groupby("layer").cumcount(), score_ratio=neurons["score"] / median)
    return pd.DataFrame(rows).merge(placed, on=["layer", "place"])


def _found(directory: Path, document: dict[str, Any], first: Path | None, costs: Path | None) -> ModelResults:
    layers = pd.read_csv(directory / LAYERS)
    if "exchange_balanced_null_random" not in layers:
        raise UserError(f"{directory} has no random-weight null: analyze with --null random-init")
    neurons = pd.read_parquet(directory / NEURONS)
    return ModelResults(
        document,
        layers,
        pd.read_csv(directory / CURVES),
        neurons,
        heaviest_neurons(Run.load(directory), neurons),
        None if first is None else pd.read_csv(first / LAYERS),
        None if costs is None else _costs(costs),
        None if costs is None else _single_neurons(costs),
    )


def _costs(directory: Path) -> pd.DataFrame:
    """Costs on counted positions; UserError if no sweep measured any."""
    file = directory / COSTS
    table = pd.read_csv(file) if file.is_file() else pd.DataFrame()
    if "kl" not in table:
        raise UserError(f"{directory} has no exact sweep: analyze with --causal exact or both")
    return table[table["positions"] == "counted"]


def _single_neurons(directory: Path) -> pd.DataFrame | None:
    """Costs of exchanging single neurons, if exchange is the first edit: only the first is patched neuron by neuron."""
    file = directory / COSTS_BY_NEURON
    first = pd.read_csv(directory / COSTS, nrows=1)["edit"].item()
    return pd.read_csv(file) if file.is_file() and first == "exchange" else None


def _document(directory: Path) -> dict[str, Any]:
    """``run.json``; UserError if there is none."""
    if not (directory / RUN_FILE).is_file():
        raise UserError(f"{directory} is not a run (no {RUN_FILE}): give a directory that analyze wrote")
    return dict(json.loads((directory / RUN_FILE).read_text(encoding="utf-8")))
