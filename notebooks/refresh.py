"""Run every notebook and keep its outputs small: ``python notebooks/refresh.py``.

A page of a neuron is large; in the stored notebook only its text stays, and running the cell shows the page.
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
LARGEST = 100_000
"""Characters of one stored output."""
TIMEOUT_S = 600


def executed(path: Path) -> NotebookNode:
    """The notebook with fresh outputs; raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(FOLDER.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    return notebook


def small(notebook: NotebookNode) -> NotebookNode:
    """The same without outputs that are too large, without the times of its cells, and without remarks on the machine."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            for kind in [kind for kind, content in data.items() if len(str(content)) > LARGEST]:
                del data[kind]
    notebook.metadata.get("language_info", {}).pop("version", None)
    return notebook


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(small(executed(path)), path)
        print(path.name)
