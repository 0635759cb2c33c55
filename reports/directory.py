"""The directory that a run leaves: record, tables and figures, written together or not at all."""

from pathlib import Path

from analysis.causal import Causal
from analysis.directory import staged
from analysis.run import Run
from reports.causal import CausalTables
from reports.causal_figures import draw_causal
from reports.figures import Tables, draw_all
from reports.tables import curves_table, layers_table, neurons_table

DPI = 200


def tables_of(run: Run) -> Tables:
    """All tables of a run."""
    return Tables(layers_table(run), neurons_table(run), curves_table(run))


def write_directory(run: Run, directory: Path, force: bool = False, causal: Causal | None = None) -> Tables:
    """Write run.json, moments.safetensors, costs of edits if measured, the tables and the figures; returns the tables.

    Raises UserError, and changes nothing, if the directory holds something else and ``force`` is not set, or if writing
    fails.
    """
    tables = tables_of(run)
    costs = None
    if causal is not None:
        costs = CausalTables.of(causal, tables)
        tables = costs.joined_to(tables)
    with staged(directory, force) as folder:
        run.write(folder)
        tables.layers.to_csv(folder / "layers.csv", index=False)
        tables.curves.to_csv(folder / "curves.csv", index=False)
        tables.neurons.to_parquet(folder / "neurons.parquet", index=False)
        (folder / "figures").mkdir()
        figures = draw_all(tables)
        if causal is not None and costs is not None:
            causal.write(folder)
            costs.write(folder)
            figures |= draw_causal(costs.costs, costs.singly)
        for name, figure in figures.items():
            figure.savefig(folder / "figures" / f"{name}.png", dpi=DPI)
        written = {path.relative_to(folder) for path in folder.rglob("*")}
    for stale in (*directory.glob("causal*"), *directory.glob("figures/causal*")):  # of the run that was there before
        if stale.relative_to(directory) not in written:
            stale.unlink()
    return tables
