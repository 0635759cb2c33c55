"""The summary of a run as one JSON document for scripts: the numbers behind the verdict.

A number that does not exist is null. The table of neurons is not in it; the document gives the paths of all files.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.run import Run
from analysis.storage.files import CURVES, EXPERTS, EXTREMES, LAYERS, NEURONS, REPORT, RUN_FILE
from reports.run.verdict import against_chance, remarks, verdict
from reports.tables import Tables

FILES = (RUN_FILE, LAYERS, NEURONS, CURVES, EXTREMES, REPORT)
VERDICT_MEASURES = (
    *("output_exchange_balanced", "output_scaling_double", "output_scaling_flip", "output_exchange"),
    *("exchange_balanced", "output_exchange_balanced_coherence"),
    *("exchange", "scaling_double", "scaling_flip", "bilinear_share"),
)


def summary_json(run: Run, tables: Tables, directory: Path) -> str:
    """Model, verdict, checks, remarks, the tables of layers and experts, and the paths of the files."""
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
    """One record per row; NaN and ∞, which JSON does not have, become None."""
    finite = table.notna() & ~table.isin([math.inf, -math.inf])
    return table.astype(object).where(finite, None).to_dict(orient="records")


def files_of(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """The path of each file in a directory, by name."""
    return {name: str(directory / name) for name in names}


def to_json(document: dict[str, Any]) -> str:
    """Indented JSON; raises ValueError for a NaN."""
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
    """Median and range over layers, and the layer of the maximum; None if any layer has no value."""
    values = layers.set_index("layer")[name]
    if values.isna().any():
        return None
    summary = {"median": float(values.median()), "min": float(values.min()), "max": float(values.max())}
    return summary | {"layer_of_max": int(values.idxmax())}
