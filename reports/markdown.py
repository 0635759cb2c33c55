"""Tables in Markdown, and the marked parts of a document that a command rewrites."""

from collections.abc import Sequence

import pandas as pd

from analysis.errors import UserError


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], rule: str = "---:") -> str:
    """A table; ``rule`` aligns its columns (to the right unless changed), and a bar inside a cell is escaped."""
    lines = [header, [rule] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def short(value: float, digits: int = 2) -> str:
    """A number to ``digits`` significant digits, without an exponent."""
    return "–" if pd.isna(value) else f"{float(f'{value:.{digits}g}'):.7f}".rstrip("0").rstrip(".")


def marks(part: str) -> tuple[str, str]:
    """The two comments that enclose a generated part of a document."""
    return f"<!-- {part}: begin -->", f"<!-- {part}: end -->"


def written_into(text: str, part: str, tables: str) -> str:
    """The document with ``tables`` between the marks of ``part``; UserError if it has no such marks."""
    begin, end = marks(part)
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise UserError(f"the file has no marks {begin} and {end}: put them where the tables belong")
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"
