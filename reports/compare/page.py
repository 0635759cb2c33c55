"""compare.html and the rest of a comparison's directory."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from analysis.storage.files import COMPARISON_PAGE, COMPARISON_TABLE
from analysis.storage.staged_writes import staged
from reports.compare.figures import SHOWN_MEASURES, draw_comparison
from reports.compare.tables import VERDICT_MEASURES, Comparison, by_third, difference_numbers, verdict, warnings
from reports.html.render import render
from reports.run.definitions import DEFINITIONS, LIMITS, NOTATION
from reports.run.document import files_of, records, to_json
from reports.run.figures import DPI, save_figures
from reports.run.page import provenance, shown_figures

CAPTIONS = {
    "depth": (
        "By relative depth",
        "Every layer of every run, what it writes first and then the mean of its neurons, with 95 % intervals.",
    ),
    "difference": (
        "Differences from the first run",
        "Layer by layer, with 95 % intervals; an interval that excludes 0 is a difference beyond sampling noise.",
    ),
}


def write_comparison(comparison: Comparison, directory: Path, force: bool = False) -> None:
    """Write compare.csv, compare.html and the figures, all or none."""
    figures = draw_comparison(comparison)
    with staged(directory, force) as folder:
        comparison.table.drop(columns="value_reach").to_csv(folder / COMPARISON_TABLE, index=False)
        save_figures(figures, folder, DPI)
        (folder / COMPARISON_PAGE).write_text(comparison_html(comparison, figures), encoding="utf-8")


def comparison_html(comparison: Comparison, figures: dict[str, Figure]) -> str:
    """The page of a comparison, which needs no network."""
    tables = [(measure, title, _rows(comparison, measure)) for measure, title in SHOWN_MEASURES.items()]
    thirds = by_third(comparison).loc[list(VERDICT_MEASURES)].reset_index()
    return render(
        "compare.html",
        runs=comparison.runs,
        tokens=[sum(part["tokens_counted"] for part in one.run.corpus) for one in comparison.runs],
        verdict=list(verdict(comparison)),
        warnings=list(warnings(comparison)),
        figures=list(shown_figures(figures, CAPTIONS)),
        thirds=thirds.to_dict(orient="records"),
        words=VERDICT_MEASURES,
        tables=tables,
        notation=NOTATION,
        definitions=DEFINITIONS,
        limits=LIMITS,
        provenance=[(one.label, one.run.record.get("command"), provenance(one.run)) for one in comparison.runs],
    )


def comparison_json(comparison: Comparison, directory: Path) -> str:
    """The numbers behind the sentences, the whole table, and the paths of the files."""
    runs = [
        {"label": one.label, "directory": str(one.directory), "model": one.run.model, "passed": one.run.passed}
        | {"layer_by_layer": one.comparable, "paired": one.paired}
        for one in comparison.runs
    ]
    numbers = {
        one.label: {measure: difference_numbers(comparison, one, measure) for measure in VERDICT_MEASURES}
        for one in comparison.others
    }
    document: dict[str, Any] = {
        "passed": comparison.passed,
        "reference": comparison.reference.label,
        "runs": runs,
        "verdict": numbers,
        "sentences": [f"{how}: {sentence}" for how, found in verdict(comparison) for sentence in found],
        "remarks": list(warnings(comparison)),
        "layers": records(comparison.table.drop(columns="value_reach")),
        "directory": str(directory),
        "files": files_of(directory, (COMPARISON_TABLE, COMPARISON_PAGE)),
    }
    return to_json(document)


def print_comparison(comparison: Comparison, directory: Path, console: Console) -> None:
    """Print the sentences, the warnings, and the path of the files."""
    for how, found in verdict(comparison):
        console.print(f"{how}:", highlight=False, markup=False)
        for sentence in found:
            console.print(f"  {sentence}", highlight=False, markup=False)
    for sentence in warnings(comparison):
        console.print(f"! {sentence}", highlight=False, markup=False)
    console.print(f"files are in {directory}/", highlight=False, markup=False, soft_wrap=True)


def _rows(comparison: Comparison, measure: str) -> list[dict[str, Any]]:
    """The rows of one measure, each with whether the interval of its difference excludes 0."""
    table = comparison.table[comparison.table["measure"] == measure]
    differs = (table["difference_low"] > 0) | (table["difference_high"] < 0)
    return table.assign(differs=differs).to_dict(orient="records")
