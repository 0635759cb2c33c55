"""What the terminal shows of a run: the acceptance block, the verdict, and the table of layers."""

from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.run import Run
from reports.run.verdict import outliers, remarks, verdict
from reports.tables import Tables

COLUMNS = {
    "output_exchange_balanced": "bal-\nanced",
    "output_exchange_balanced_se": "\nSE",
    "output_scaling_double": "scale\nα = 2",
    "output_scaling_flip": "flip\nα = −1",
    "output_exchange": "as\nstored",
    "exchange_balanced": "neurons'\nmean",
    "output_exchange_balanced_coherence": "coher-\nence",
    "exchange_balanced_null_gaussian": "Gauss\nnull",
    "exchange_balanced_null_repaired": "perm\nnull",
    "bilinear_share": "ab\nshare",
}
"""The columns of the table on a terminal, which has to fit into 80 characters."""
LEGEND = (
    "Asymmetry of what each layer writes: under balanced exchange, with its standard error; under scaling; as stored. Then "
    "its neurons under balanced exchange: their mean, written over mean, nulls; and the share of energy that c·ab explains."
)


def print_summary(run: Run, tables: Tables, directory: Path, console: Console) -> None:
    """Print the acceptance block, the verdict, the table of layers, and where the files are."""
    console.print()
    console.print(acceptance_table(run))
    console.print()
    for sentence in verdict(run, tables):
        console.print(sentence, highlight=False, markup=False)
    console.print()
    console.print(layer_table(tables.layers))
    console.print(LEGEND, highlight=False, markup=False)
    for sentence in remarks(run, tables.layers, tables.experts):
        console.print(f"! {sentence}", highlight=False, markup=False)
    console.print(f"files are in {directory}/", highlight=False, markup=False, soft_wrap=True)


def acceptance_table(run: Run) -> Table:
    """Each check with its value, limit and verdict."""
    table = Table(title="Acceptance", title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
    for column in ("check", "value", "limit"):
        table.add_column(column)
    table.add_column("", no_wrap=True)
    for check in run.acceptance:
        verdict_word = "pass" if check.passed else "[bold red]FAIL[/]"
        table.add_row(Text(check.what), Text(check.value_in_words), Text(check.limit_in_words), verdict_word)
    return table


def layer_table(layers: pd.DataFrame) -> Table:
    """The main columns, one line per layer; outliers are bold."""
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("layer", justify="right", no_wrap=True)
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    bold = {layer for layer, _ in outliers(layers, "output_exchange_balanced")}
    for _, row in layers.iterrows():
        cells = ["–" if pd.isna(row[column]) else f"{row[column]:.3f}" for column in COLUMNS]
        mark = "*" if row["few_tokens"] or row["output_few_tokens"] else ""
        table.add_row(f"{int(row['layer'])}{mark}", *cells, style="bold" if row["layer"] in bold else "")
    return table
