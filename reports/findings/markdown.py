"""Tables in Markdown, as documents hold them."""

from collections.abc import Sequence

import pandas as pd


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its numbers to the right; a bar within a cell is no border."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def short(value: float, digits: int = 2) -> str:
    """A number with so many significant digits, without an exponent."""
    return "–" if pd.isna(value) else f"{float(f'{value:.{digits}g}'):.7f}".rstrip("0").rstrip(".")
