"""Every notebook runs from top to bottom, and its stored outputs are small and say nothing of the machine they ran on."""

import os

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # or jupyter_core warns that it will do so in future

import re
from pathlib import Path

import nbformat
import pytest

from notebooks.refresh import FOLDER, LARGEST, executed, small

NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
NEEDS_NO_MODEL = {"theory"}


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS == ["neurons", "quickstart", "theory"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NEEDS_NO_MODEL else pytest.mark.real) for name in NOTEBOOKS]
)
def test_it_runs(name: str, tmp_path: Path) -> None:
    notebook = executed(FOLDER / f"{name}.ipynb")
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in shown if output.output_type == "error"]
    assert any("text/html" in output.get("data", {}) for output in shown)
    nbformat.validate(small(notebook))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_stored_is_small_and_complete(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < LARGEST
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    for cell in nbformat.reads(text, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs, cell.source
            assert all(output.get("name") != "stderr" and output.output_type != "error" for output in cell.outputs)
