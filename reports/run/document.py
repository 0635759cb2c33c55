"""The summary of a run as one JSON document: the numbers behind the verdict, for scripts.

A number that does not exist is null. Tables by neuron are in the run's directory, whose files the document names.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.run import Run
from reports.directory import EXPERTS, REPORT
from reports.run.summary import against_chance, remarks, verdict
from reports.tables import Tables

FILES = ("run.json", "layers.csv", "neurons.parquet", "curves.csv", "extremes.csv", REPORT)
VERDICT_MEASURES = ("exchange", "exchange_balanced", "scaling_double", "scaling_flip", "bilinear_share")


def summary_json(run: Run, tables: Tables, directory: Path) -> str:
    """What a reader of the verdict learns: model, numbers, checks, remarks, the table of layers, where the files are."""
    document = {
        "passed": run.passed,
        "model": run.model,
        "settings": run.settings,
        "tokens_counted": sum(part["tokens_counted"] for part in run.corpus),
        "verdict": _verdict(tables) | {"sentences": list(verdict(run, tables))},
        "remarks": list(remarks(run, tables.layers, tables.experts)),
        "acceptance": [check.as_record() for check in run.acceptance],
        "failed_controls": [control.as_control() for control in run.controls if not control.passed],
        "skipped_layers": {str(layer): reason for layer, reason in run.skipped.items()},
        "missing": run.missing(),
        "layers": records(tables.layers),
        **({} if tables.experts is None else {"experts": records(tables.experts)}),
        "directory": str(directory),
        "files": files_of(directory, FILES if tables.experts is None else (*FILES, EXPERTS)),
    }
    return to_json(document)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One record a row; NaN and ∞, which JSON does not have, are None."""
    finite = table.notna() & ~table.isin([math.inf, -math.inf])
    return table.astype(object).where(finite, None).to_dict(orient="records")


def files_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The paths of files in a directory, by name."""
    return {name: str(directory / name) for name in names}


def to_json(document: dict[str, Any]) -> str:
    """Indented, as UTF-8 text that holds no NaN."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def _verdict(tables: Tables) -> dict[str, Any]:
    layers, neurons = tables.layers, tables.neurons
    return {
        **{name: _over_layers(layers, name) for name in VERDICT_MEASURES},
        "exchange_balanced_against_chance": {
            null: {"layers_above": above, "layers_below": below} for null, (above, below) in against_chance(layers).items()
        },
        "neurons_that_differ_from_repaired": int(neurons["exchange_balanced_repaired_differs"].sum()),
        "neurons": len(neurons),
    }


def _over_layers(layers: pd.DataFrame, name: str) -> dict[str, float | int] | None:
    """Median and range over layers, and the layer of the largest; None where a layer has no number."""
    values = layers.set_index("layer")[name]
    if values.isna().any():
        return None
    extent = {"median": float(values.median()), "min": float(values.min()), "max": float(values.max())}
    return extent | {"layer_of_max": int(values.idxmax())}
