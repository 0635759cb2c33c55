"""What docs/stability.md promises is still there: documented imports, and the commands with their options and defaults.

Two literals say what is promised. Something that was renamed on purpose is renamed here and in CHANGELOG.md; something new
in the documents is added to ``IMPORTS``; a new option may be added to ``COMMANDS``.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import nbformat
import pytest
import typer

from run_analysis import app

IMPORTS = {
    "analysis.causal.edits": "Change PlainExchange Zero",
    "analysis.compare": "difference",
    "analysis.errors": "UserError",
    "analysis.run": "Run",
    "analysis.theory.actions": "Exchange Scaling SignFlip ValueRescaling residual",
    "analysis.theory.conversions": "symmetric_sibling",
    "analysis.theory.gated": "GatedMLP",
    "analysis.units.registry": "unit_named",
    "analysis.weights.geometry": "Geometry",
    "analysis.weights.interactions": "antisymmetric_share spectrum value_groups",
    "hooks.collect": "analyze",
    "hooks.measure": "measure",
    "hooks.models": "load_model",
    "hooks.neuron": "inspect_neuron",
    "hooks.patching.interventions": "rewriting",
    "reports.causal.tables": "CausalTables",
    "reports.compare.figures": "draw_comparison",
    "reports.compare.page": "write_comparison",
    "reports.compare.tables": "compare compare_runs",
    "reports.directory": "write_directory",
    "reports.neuron.page": "NeuronPage",
    "reports.run.figures": "draw_all exchange_by_layer measure_by_layer neuron_exchange scaling_heatmap",
    "reports.run.page": "report_html",
    "reports.run.verdict": "remarks verdict",
    "reports.tables": "layers_table tables_of",
    "reports.theory.figures": "units_figure",
    "reports.theory.tables": "theory_of",
}
"""Every documented import: module, and the names that README.md, docs/ and notebooks/ take from it."""

REQUIRED = "(required)"
COMMANDS: dict[str, dict[str, Any]] = {
    "analyze": {
        "model": "smollm2-135m",
        "--corpus": "sample",
        "--tokens": 20_000,
        "--layers": None,
        "--context": 256,
        "--skip-positions": 1,
        "--alphas": "-1,0.125,0.25,0.5,2,4,8",
        "--batch-size": None,
        "--shard": "0/1",
        "--draws": 4,
        "--null": None,
        "--seed": 0,
        "--causal": None,
        "--edits": None,
        "--causal-tokens": None,
        "--resume": False,
        "--device": "auto",
        "--dtype": "float32",
        "--revision": None,
        "--trust-remote-code": False,
        "--out": None,
        "--force": False,
        "--quiet -q": False,
        "--json": False,
    },
    "merge": {"runs": REQUIRED, "--out": REQUIRED, "--force": False, "--quiet -q": False},
    "report": {"run": REQUIRED, "--out": None, "--force": False, "--quiet -q": False, "--json": False},
    "compare": {"runs": REQUIRED, "--out": REQUIRED, "--force": False, "--quiet -q": False, "--json": False},
    "neuron": {
        "model": REQUIRED,
        "place": REQUIRED,
        "--corpus": "sample",
        "--tokens": 20_000,
        "--context": 256,
        "--skip-positions": 1,
        "--top": 8,
        "--run": None,
        "--seed": 0,
        "--device": "auto",
        "--dtype": "float32",
        "--revision": None,
        "--trust-remote-code": False,
        "--out": None,
        "--force": False,
        "--quiet -q": False,
    },
    "theory": {"--activation": None, "--json": False, "--out": None, "--force": False},
    "models": {},
}
"""Every command with its arguments in their order and its options, each with its default; False means a switch."""

ROOT = Path(__file__).parent.parent.parent
OURS = ("analysis", "hooks", "reports")
NAMED_IN_PROSE = {"README.md", "python.md"}
"""Documents that also promise what they only name, like `analysis.run.Run`; the others name internals as well."""
Import = tuple[str, str]

LISTED = sorted((module, name) for module, names in IMPORTS.items() for name in names.split())


def imports(source: str) -> Iterator[Import]:
    """Module and name of everything of ours that the source imports; the name is empty for ``import module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] in OURS)


def named(prose: str) -> Iterator[Import]:
    """Module and name of everything of ours in inline code, like ``analysis.run.Run``; modules alone are left out."""
    for dotted in re.findall(rf"`((?:{'|'.join(OURS)})(?:\.\w+)+)", prose):
        module, name = dotted, ""
        while not exists(module):
            module, _, name = module.rpartition(".")
        if name:
            yield module, name


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def code_of(markdown: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"^```python\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)


def documented() -> dict[Import, str]:
    """Everything that the documents import, with the last document that does."""
    found: dict[Import, str] = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        found |= {each: path.name for block in code_of(text) for each in imports(block)}
        if path.name in NAMED_IN_PROSE:
            found |= dict.fromkeys(named(text), path.name)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        code = [re.sub("^[%!].*$", "", cell.source, flags=re.MULTILINE) for cell in cells if cell.cell_type == "code"]
        found |= {each: path.name for source in code for each in imports(source)}
    return found


def docstring(thing: object) -> str:
    """Its own docstring; empty if it has none but the signature that a dataclass is given."""
    own = vars(thing).get("__doc__") if isinstance(thing, type) else thing.__doc__
    return "" if own is None or own.startswith(f"{getattr(thing, '__name__', '')}(") else own


def broken_imports(module: str, name: str) -> list[str]:
    """What is wrong with a promised import; nothing if it is there and says what it is."""
    if not exists(module):
        return [f"there is no module {module}"]
    home: ModuleType = importlib.import_module(module)
    if not hasattr(home, name):
        return [f"{module} has no {name}"]
    return [
        f"{part} has no docstring"
        for part, thing in {module: home, name: getattr(home, name)}.items()
        if not docstring(thing)
    ]


def broken_options(promised: dict[str, Any], command: Any) -> list[str]:
    """Promised arguments and options that the command no longer takes in the same way, and new ones that it insists on."""
    options = {spelling: each for each in command.params if each.param_type_name == "option" for spelling in each.opts}
    arguments = {each.name: each for each in command.params if each.param_type_name == "argument"}
    places = [name for name in promised if not name.startswith("-")]
    broken = [] if list(arguments)[: len(places)] == places else [f"arguments are {list(arguments)}, no longer {places}"]
    known = arguments | options
    for names, default in promised.items():
        for name in names.split():
            now = known.pop(name, None)
            if now is None:
                broken.append(f"{name} is gone")
            elif (REQUIRED if now.required else now.default) != default:
                broken.append(f"{name} is {now.default!r} by default, no longer {default!r}")
            elif name in options and now.is_flag != (default is False):
                broken.append(f"{name} was a switch, or has become one")
    return broken + [f"{name} is new and required" for name, each in known.items() if each.required]


def test_what_the_documents_import_is_listed() -> None:
    unlisted = {each: where for each, where in documented().items() if each not in LISTED}
    assert not unlisted, f"add to IMPORTS, or take out of the documents: {unlisted}"


def test_what_is_listed_stands_in_the_documents() -> None:
    undocumented = sorted(set(LISTED) - set(documented()))
    assert not undocumented, f"in IMPORTS, but no document imports it: {undocumented}"


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_a_documented_import_exists_and_says_what_it_is(module: str, name: str) -> None:
    assert broken_imports(module, name) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_what_it_took(name: str) -> None:
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    assert name in commands
    assert broken_options(COMMANDS[name], commands[name]) == []


def test_a_broken_import_would_be_seen() -> None:
    assert broken_imports("analysis.cellar", "Run") == ["there is no module analysis.cellar"]
    assert broken_imports("analysis.run", "Walk") == ["analysis.run has no Walk"]
    assert broken_imports("typing", "Any") == []
    assert list(imports("def f():\n    from hooks.models import load_model as load\nimport torch, reports.tables")) == [
        ("reports.tables", ""),
        ("hooks.models", "load_model"),
    ]
    assert list(named("`analysis.run.Run.load(x)` is in `analysis.run`, not in `run.json`")) == [("analysis.run", "Run")]
    assert len(code_of("```python\nx = 1\n```\n\n```\ny\n```\n\n```python\nz\n```\n")) == 2


def test_a_broken_option_would_be_seen() -> None:
    model, tokens = click.Argument(["model"]), click.Option(["--tokens"], default=10)
    command = click.Command("analyze", params=[model, tokens, click.Option(["--quiet", "-q"], is_flag=True, default=False)])
    kept = {"model": REQUIRED, "--tokens": 10, "--quiet -q": False}
    assert broken_options(kept, command) == []
    assert broken_options({"model": REQUIRED}, command) == []  # what was added breaks nothing
    assert broken_options(kept | {"--seed": 0}, command) == ["--seed is gone"]
    assert broken_options({"model": REQUIRED, "--quiet -s": False}, command) == ["-s is gone"]
    assert broken_options(kept | {"--tokens": 20}, command) == ["--tokens is 10 by default, no longer 20"]
    assert broken_options({"--tokens": 10}, command) == ["model is new and required"]
    switched = click.Command("analyze", params=[model, tokens, click.Option(["--quiet", "-q"], default=False, type=bool)])
    assert broken_options(kept, switched) == [f"{name} was a switch, or has become one" for name in ("--quiet", "-q")]
    turned = click.Command("neuron", params=[click.Argument(["place"]), model])
    assert broken_options({"model": REQUIRED, "place": REQUIRED}, turned) == [
        "arguments are ['place', 'model'], no longer ['model', 'place']"
    ]
