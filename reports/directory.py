"""The directory that a run leaves: record, tables and figures, written together or not at all."""

from pathlib import Path

from analysis.directory import staged
from analysis.run import Run
from reports.figures import Tables, draw_all
from reports.tables import curves_table, layers_table, neurons_table

DPI = 200


def tables_of(run: Run) -> Tables:
    """All tables of a run."""
    return Tables(layers_table(run), neurons_table(run), curves_table(run))


def write_directory(run: Run, directory: Path, force: bool = False) -> Tables:
    """Write run.json, moments.safetensors, the tables and the figures; returns the tables.

    Raises UserError, and changes nothing, if the directory holds something else and ``force`` is not set, or if writing
    fails.
    """
    tables = tables_of(run)
    with staged(directory, force) as folder:
        run.write(folder)
        tables.layers.to_csv(folder / "layers.csv", index=False)
        tables.curves.to_csv(folder / "curves.csv", index=False)
        tables.neurons.to_parquet(folder / "neurons.parquet", index=False)
        (folder / "figures").mkdir()
        for name, figure in draw_all(tables).items():
            figure.savefig(folder / "figures" / f"{name}.png", dpi=DPI)
    return tables
