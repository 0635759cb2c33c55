"""The directory that a run leaves: record, tables, figures and report, written together or not at all."""

from pathlib import Path

import torch

from analysis.causal.costs import CAUSAL_FILE, Causal
from analysis.errors import UserError
from analysis.run import Run
from analysis.storage.directory import RUN_FILE, staged
from reports.causal.figures import draw_causal
from reports.causal.summary import sentences
from reports.causal.tables import CausalTables
from reports.run.figures import draw_all
from reports.run.page import report_html
from reports.tables import Tables, tables_of

DPI = 200
REPORT = "report.html"
EXPERTS = "experts.csv"
RANDOM_INIT = "random-init"
"""Folder, inside a run's directory, of the run with random weights that was made with it."""


def write_directory(
    run: Run, directory: Path, force: bool = False, random: Run | None = None, causal: Causal | None = None
) -> Tables:
    """Write run.json, moments.safetensors, costs of edits if measured, the tables, the figures and report.html.

    Returns the tables.
    The run with random weights, if there is one, is written as a run of its own into ``random-init``.

    Raises UserError, and changes nothing, if the directory holds something else and ``force`` is not set, or if writing
    fails.
    """
    tables = tables_of(run, random)
    costs = None
    if causal is not None:
        costs = CausalTables.of(causal, tables)
        tables = costs.joined_to(tables)
    with staged(directory, force) as folder:
        run.write(folder)
        if random is not None:
            (folder / RANDOM_INIT).mkdir()
            random.write(folder / RANDOM_INIT)
        tables.layers.to_csv(folder / "layers.csv", index=False)
        tables.curves.to_csv(folder / "curves.csv", index=False)
        tables.extremes.to_csv(folder / "extremes.csv", index=False)
        if tables.experts is not None:
            tables.experts.to_csv(folder / EXPERTS, index=False)
        tables.neurons.to_parquet(folder / "neurons.parquet", index=False)
        (folder / "figures").mkdir()
        figures = draw_all(tables)
        if causal is not None and costs is not None:
            causal.write(folder)
            costs.write(folder)
            figures |= draw_causal(costs.costs, costs.singly)
        for name, figure in figures.items():
            figure.savefig(folder / "figures" / f"{name}.png", dpi=DPI)
        said = [] if causal is None else sentences(causal, tables.layers)
        (folder / REPORT).write_text(report_html(run, tables, figures, said), encoding="utf-8")
        written = {path.relative_to(folder) for path in folder.rglob("*")}
    for pattern in ("causal*", "figures/causal*", EXPERTS, "figures/experts.png"):  # of the run that was there before
        for stale in directory.glob(pattern):
            if stale.relative_to(directory) not in written:
                stale.unlink()
    return tables


def load_random(directory: Path, run: Run) -> Run | None:
    """The run with random weights beside a run, if one was made with it: one left by an earlier run is not."""
    if not (directory / RANDOM_INIT / RUN_FILE).is_file():
        return None
    random = Run.load(directory / RANDOM_INIT)
    fits = random.settings == run.settings and torch.equal(random.windows, run.windows)
    return random if fits and random.model["name"] == run.model["name"] else None


def load_causal(directory: Path) -> Causal | None:
    """The costs of edits beside a run, if any were measured; UserError if only their tables are left."""
    if (directory / "causal.csv").exists() and not (directory / CAUSAL_FILE).exists():
        raise UserError(
            f"{directory} has costs of edits but no {CAUSAL_FILE} to make them from: analyze again, or move causal*.csv"
        )
    return Causal.load(directory)
