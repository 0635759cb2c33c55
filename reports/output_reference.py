"""The generated tables of ``docs/output.md``: every output file and every column, each from its one list in the code.

python -m reports.output_reference docs/output.md
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from analysis.errors import UserError
from analysis.storage.files import COMPARISON_FILES, RUN_FILES, THEORY_FILES
from reports.columns import COLUMNS, TABLES, Column, columns_of
from reports.markdown import markdown, written_into

RULE = "---"


def parts() -> Iterator[tuple[str, str]]:
    """Every generated part of the document: its name in the marks, and its table."""
    yield "files of a run", _files(RUN_FILES)
    yield "files of a comparison", _files(COMPARISON_FILES)
    yield "files of a theory check", _files(THEORY_FILES)
    yield "families of columns", _families()
    for table in TABLES:
        yield f"columns of {table}", _columns(table)


def with_tables(text: str) -> str:
    """The document with every part replaced; UserError if it lacks the marks of one."""
    for part, table in parts():
        text = written_into(text, part, table)
    return text


def main(path: Path) -> None:
    """Rewrite the generated parts of the file."""
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


def _files(files: Mapping[str, str]) -> str:
    return markdown(["file", "content"], [[f"`{name}`", content] for name, content in files.items()], RULE)


def _columns(table: str) -> str:
    rows = [[f"`{column.name}`", column.meaning, column.unit] for column in columns_of(table) if not column.is_family]
    return markdown(["column", "meaning", "unit"], rows, RULE)


def _families() -> str:
    rows = [
        [f"`{column.name}`", _members(column), _listed(column.tables), column.meaning, column.unit]
        for column in COLUMNS
        if column.is_family
    ]
    return markdown(["column", "placeholder", "in", "meaning", "unit"], rows, RULE)


def _members(column: Column) -> str:
    return _listed(column.of) if column.of else "any edit"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m reports.output_reference docs/output.md")
    try:
        main(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(f"error: {error}")
