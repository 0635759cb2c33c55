"""Imports go one way: run_analysis → hooks, reports → analysis; the siblings never meet, the core stays light."""

import ast
import subprocess
import sys
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


def violations(package: str, source: str) -> set[str]:
    """Packages that the source imports, anywhere in it, and must not."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            imported.add((node.module or "").split(".")[0])
    return (imported & OURS - ALLOWED[package]) | (imported & FOREIGN_TO[package])


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert violations(package, path.read_text(encoding="utf-8")) == set(), path.name


def test_a_wrong_import_would_be_seen() -> None:
    assert violations("reports", "def f():\n    from hooks.models import load_model") == {"hooks"}
    assert violations("hooks", "import reports.tables") == {"reports"}
    assert violations("analysis", "import numpy, pandas as pd") == {"pandas"}
    assert violations("analysis", "from analysis.run import Run") == set()


def test_a_saved_run_is_drawn_without_the_model_libraries() -> None:
    code = (
        "import reports.directory, reports.run.summary, sys; print({'transformers', 'transformer_lens'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
