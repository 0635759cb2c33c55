"""How far the numbers change when the model runs in bfloat16 or float16 instead of float32.

    python -m benchmarks.precision [MODEL] [--tokens N] [--out FILE]

The same windows are read in each precision; statistics are in float32 products and float64 sums every time. For each column
the table gives the largest and the median difference to float32 over the layers, and the median standard error beside it: a
difference below the error is smaller than the variation between texts.
"""

import json
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from analysis.errors import UserError
from hooks.collect import analyze
from hooks.loading.builtin import DEFAULT_MODEL
from hooks.models import load_model
from reports.tables import layers_table

COLUMNS = (
    *("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip", "euler_residual"),
    *("placement_balanced", "bilinear_share", "gate_positive"),
)


def main(
    model: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=1)] = 4000,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers as JSON.")] = None,
) -> None:
    """Print the table of differences."""
    tables: dict[str, pd.DataFrame] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        try:
            subject = load_model(model, dtype=dtype)
            tables[dtype] = layers_table(analyze(subject, subject.read(max_tokens=tokens)))
        except UserError as error:
            print(f"{dtype}: refused: {error}")
    exact = tables.pop("float32")
    found = {
        dtype: {
            column: {
                "largest": float((table[column] - exact[column]).abs().max()),
                "median": float((table[column] - exact[column]).abs().median()),
                "median_se": float(exact[f"{column}_se"].median()),
            }
            for column in COLUMNS
        }
        for dtype, table in tables.items()
    }
    print(f"| column | median se | {' | '.join(f'{dtype}: median | largest' for dtype in tables)} |")
    print(f"|---|---|{'---|---|' * len(tables)}")
    for column in COLUMNS:
        cells = [f"{found[dtype][column][part]:.1e}" for dtype in tables for part in ("median", "largest")]
        error = exact[f"{column}_se"].median()
        print(f"| `{column}` | {error:.1e} | {' | '.join(cells)} |")
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
