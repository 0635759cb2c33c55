"""The directory of a run: record, tables, figures and report, all written together or not at all."""

from pathlib import Path

import torch

from analysis.causal.costs import Causal
from analysis.errors import UserError
from analysis.run import Run
from analysis.storage.files import CAUSAL_FILE, COSTS, EXPERTS, FIGURES, RANDOM_INIT, REPORT, RUN_FILE
from analysis.storage.staged_writes import staged
from reports.causal.figures import draw_causal
from reports.causal.summary import sentences
from reports.causal.tables import CausalTables
from reports.run.figures import DPI, draw_all, save_figures
from reports.run.page import report_html
from reports.tables import Tables, tables_of

OPTIONAL_FILES = ("causal*", f"{FIGURES}/causal*", EXPERTS, f"{FIGURES}/experts.png")
"""Patterns of the files that only some runs have: those of an earlier run in the same directory are deleted."""


def write_directory(
    run: Run, directory: Path, force: bool = False, random: Run | None = None, causal: Causal | None = None
) -> Tables:
    """Write run.json, moments.safetensors, costs of edits if measured, the tables, the figures and report.html.

    Returns the tables.
    The run with random weights, if there is one, is written as a run of its own into ``random-init``.

    Raises UserError, and changes nothing, if the directory holds something other than a run and ``force`` is not set, or if
    writing fails.
    """
    tables = tables_of(run, random)
    costs = None if causal is None else CausalTables.of(causal, tables)
    if costs is not None:
        tables = costs.joined_to(tables)
    with staged(directory, force) as folder:
        _write_runs(folder, run, random, causal)
        tables.write(folder)
        figures = draw_all(tables)
        if costs is not None:
            costs.write(folder)
            figures |= draw_causal(costs.costs, costs.single_neurons)
        save_figures(figures, folder, DPI)
        in_words = [] if causal is None else sentences(causal, tables.layers)
        (folder / REPORT).write_text(report_html(run, tables, figures, in_words), encoding="utf-8")
        written = {path.relative_to(folder) for path in folder.rglob("*")}
    _delete_stale(directory, written)
    return tables


def load_random(directory: Path, run: Run) -> Run | None:
    """The run with random weights in a run's directory, if it belongs to that run and not to an earlier one."""
    if not (directory / RANDOM_INIT / RUN_FILE).is_file():
        return None
    random = Run.load(directory / RANDOM_INIT)
    same_text = random.settings == run.settings and torch.equal(random.windows, run.windows)
    return random if same_text and random.model["name"] == run.model["name"] else None


def load_causal(directory: Path) -> Causal | None:
    """The costs of edits in a run's directory, if any were measured; UserError if only their tables are left."""
    if (directory / COSTS).exists() and not (directory / CAUSAL_FILE).exists():
        raise UserError(
            f"{directory} has {COSTS} but not {CAUSAL_FILE}, from which it is computed: analyze again, or move causal*.csv"
        )
    return Causal.load(directory)


def _write_runs(folder: Path, run: Run, random: Run | None, causal: Causal | None) -> None:
    """The measurements: the run, the run with random weights, the costs of edits."""
    run.write(folder)
    if random is not None:
        (folder / RANDOM_INIT).mkdir()
        random.write(folder / RANDOM_INIT)
    if causal is not None:
        causal.write(folder)


def _delete_stale(directory: Path, written: set[Path]) -> None:
    """Delete optional files of the run that was there before."""
    for pattern in OPTIONAL_FILES:
        for path in directory.glob(pattern):
            if path.relative_to(directory) not in written:
                path.unlink()
