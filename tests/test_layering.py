"""Imports go one way: run_analysis → hooks, reports → analysis, and inside each folder from room to room.

The two siblings never meet, the core stays light, and every room's ``__init__`` says what each of its files does.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"analysis", "hooks", "reports", "run_analysis", "tests"}
ALLOWED = {"analysis": {"analysis"}, "hooks": {"hooks", "analysis"}, "reports": {"reports", "analysis"}}
FOREIGN_TO = {
    "analysis": {"transformer_lens", "transformers", "pandas", "matplotlib", "seaborn", "rich", "typer"},
    "hooks": {"pandas", "matplotlib", "seaborn", "rich", "typer"},
    "reports": {"transformer_lens", "transformers", "typer"},
}
ORDER = {
    "analysis": (
        "errors checks memory noise storage",
        *("units", "weights", "sums", "theory", "measures", "run", "causal", "full_run compare neuron"),
    ),
    "hooks": (
        *("tolerance", "loading", "locating", "corpus", "models", "reading", "collect", "patching", "causal"),
        "measure neuron",
    ),
    "reports": (
        *("markdown columns", "html output_reference", "tables", "run", "causal", "compare neuron theory"),
        *("directory", "findings"),
    ),
}
"""Rooms and single files of each folder, lowest first; a line imports only from lines before it, and from itself."""


def imports(source: str) -> Iterator[str]:
    """Modules that the source imports, anywhere in it; of ``from x import y`` x."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(package: str, source: str) -> set[str]:
    """Packages that the source imports and must not."""
    imported = {name.split(".")[0] for name in imports(source)}
    return (imported & OURS - ALLOWED[package]) | (imported & FOREIGN_TO[package])


def upwards(module: str, source: str) -> set[str]:
    """Rooms of its own folder that a module imports and that stand above it; KeyError if it has no place in ``ORDER``."""
    package, room = module.split(".")[:2]
    rank = {name: place for place, line in enumerate(ORDER[package]) for name in line.split()}
    own = {name.split(".")[1] for name in imports(source) if name.startswith(f"{package}.")}
    height = rank[room]
    return {other for other in own if other in rank and rank[other] > height}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def unlisted(folder: Path, docstring: str) -> set[str]:
    """Files and rooms of a folder without a line of their own in its docstring, and lines without a file."""
    there = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return (there - {"__init__"}) ^ set(re.findall(r"^ *(\w+)  +\S", docstring, re.MULTILINE))


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    assert files(package)
    for path in files(package):
        source = path.read_text(encoding="utf-8")
        assert violations(package, source) == set(), path.name
        if path.parent != ROOT / package or path.stem != "__init__":
            assert upwards(module_of(path), source) == set(), module_of(path)


@pytest.mark.parametrize("package", ALLOWED)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    modules = {module_of(path): path for path in files(package)}
    graph = {name: set(imports(path.read_text(encoding="utf-8"))) & set(modules) - {name} for name, path in modules.items()}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("package", ALLOWED)
def test_every_file_has_its_line_in_its_room(package: str) -> None:
    for path in (path for path in files(package) if path.stem == "__init__"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
        assert unlisted(path.parent, docstring) == set(), path


def test_a_wrong_import_would_be_seen() -> None:
    assert violations("reports", "def f():\n    from hooks.models import load_model") == {"hooks"}
    assert violations("hooks", "import reports.tables") == {"reports"}
    assert violations("analysis", "import numpy, pandas as pd") == {"pandas"}
    assert violations("analysis", "from analysis.run import Run") == set()


def test_an_import_from_a_room_above_would_be_seen() -> None:
    assert upwards("hooks.loading.network", "def f():\n    from hooks.locating.ends import find_ends") == {"locating"}
    assert upwards("analysis.sums.moments", "import analysis.measures.jackknife") == {"measures"}
    assert upwards("analysis.sums.moments", "from analysis import run") == {"run"}
    assert upwards("analysis.measures.jackknife", "from analysis.sums.moments import Moments") == set()
    with pytest.raises(KeyError):
        upwards("analysis.cellar.moments", "import math")


def test_a_file_without_its_line_would_be_seen() -> None:
    named = "\n".join(f"    {name}  what it does" for name in ("loading", "locating", "reading", "patching"))
    assert {"models", "corpus"} < unlisted(ROOT / "hooks", named)
    assert "cellar" in unlisted(ROOT / "hooks", f"{named}\n    cellar  nothing")


def test_a_saved_run_is_drawn_without_the_model_libraries() -> None:
    seen = "print({'transformers', 'transformer_lens'} & set(sys.modules))"
    code = f"import reports.directory, reports.run.terminal, sys; {seen}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
