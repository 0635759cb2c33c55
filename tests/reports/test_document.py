"""What scripts read: --json, the report of a saved run, terminals without colour and machines without a display."""

import json
import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from analysis.run import Run
from hooks.collect import analyze
from hooks.models import LoadedModel
from reports.run.document import records, summary_json
from reports.run.terminal import print_summary
from reports.tables import tables_of
from tests.helpers.command_line import ROOT, call, refused
from tests.helpers.hostile import renamed

QUICK = ["--context", "32", "--tokens", "320", "--device", "cpu"]


@pytest.fixture(scope="module")
def written(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run's directory, and what ``analyze --json`` wrote to stdout and stderr."""
    out = tmp_path_factory.mktemp("written") / "run"
    code, text, errors = call("analyze", tiny_llama, "--out", out, "--json", *QUICK)
    assert code == 0
    return out, text, errors


@pytest.fixture(scope="module")
def poor(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=32, max_tokens=32), layers=[1], alphas=[3.0], quiet=True)


def test_json_holds_the_verdicts_numbers(written: tuple[Path, str, str]) -> None:
    out, text, errors = written
    assert errors == ""
    document = json.loads(text)
    layers = pd.read_csv(out / "layers.csv").set_index("layer")
    for name in ("exchange", "exchange_balanced", "scaling_double", "scaling_flip", "bilinear_share"):
        numbers = document["verdict"][name]
        assert numbers["median"] == pytest.approx(layers[name].median())
        assert (numbers["min"], numbers["max"]) == pytest.approx((layers[name].min(), layers[name].max()))
        assert numbers["layer_of_max"] == layers[name].idxmax()
    chance = document["verdict"]["exchange_balanced_against_chance"]
    assert set(chance) == {"gaussian", "repaired"}
    counted = f"above the permutation null in {chance['repaired']['layers_above']} layers"
    assert any(counted in sentence for sentence in document["verdict"]["sentences"])
    assert len(document["layers"]) == 3
    assert set(document["layers"][0]) == {"layer", *layers.columns}
    assert document["passed"] is True
    assert document["acceptance"] == json.loads((out / "run.json").read_text())["acceptance"]
    assert all(Path(path).is_file() for path in document["files"].values())
    assert (document["model"]["name"], document["tokens_counted"]) == ("llama", 310)


def test_a_number_that_is_not_there_is_null(poor: Run) -> None:
    document = json.loads(summary_json(poor, tables_of(poor), Path("out")))
    assert document["verdict"]["scaling_double"] is None
    assert document["layers"][0]["scaling_double"] is None
    assert document["layers"][0]["exchange_se"] is None
    assert records(pd.DataFrame({"x": [float("inf"), 1.0], "n": [1, 2]})) == [{"x": None, "n": 1}, {"x": 1.0, "n": 2}]


@pytest.mark.usefixtures("without_figures")
def test_the_command_is_recorded(written: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, _, _ = written
    monkeypatch.setattr(sys, "argv", ["/some/where/run_analysis.py", "merge", "a b", "--out", "\udcff"])
    assert call("report", out, "--out", tmp_path / "again", "--quiet")[0] == 0
    assert Run.load(tmp_path / "again").record["command"] == Run.load(out).record["command"]
    import run_analysis

    command = run_analysis._with_command(Run.load(out)).record["command"]
    assert command == "python run_analysis.py merge 'a b' --out '\\udcff'"


def test_a_saved_run_is_reported_without_model_or_display(written: tuple[Path, str, str], tmp_path: Path) -> None:
    out, _, _ = written
    code = (
        "import sys, run_analysis\n"
        "sys.modules['transformer_lens'] = sys.modules['transformers'] = None\n"
        "run_analysis.app(sys.argv[1:])\n"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY")}
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(out), "--out", str(tmp_path / "again"), "--json"],
        cwd=ROOT, capture_output=True, text=True, env=environment | {"MPLBACKEND": "TkAgg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["directory"] == str(tmp_path / "again")
    for name in ("layers.csv", "curves.csv", "extremes.csv", "causal.csv", "moments.safetensors", "causal.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert (tmp_path / "again" / "report.html").read_text().count("<svg") == 6


@pytest.mark.usefixtures("without_figures")
def test_a_report_is_made_in_place_and_says_what_failed(written: tuple[Path, str, str], tmp_path: Path) -> None:
    out, _, _ = written
    renamed(Run.load(out)).save(tmp_path / "run")
    code, text, errors = call("report", tmp_path / "run", "--json")
    assert (code, errors) == (1, "")
    assert json.loads(text)["failed_controls"][0]["layer"] == 0
    names = {path.name for path in out.iterdir() if not path.name.startswith("causal")}  # costs were not saved with it
    assert {path.name for path in (tmp_path / "run").iterdir()} - {"figures"} == names - {"figures"}
    assert "is not a run" in refused("report", tmp_path / "nowhere")


def test_no_color_is_respected(poor: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = renamed(poor)

    def printed() -> str:
        console = Console(file=StringIO(), width=80, force_terminal=True, color_system="standard")
        print_summary(failed, tables_of(failed), Path("out"), console)
        return console.file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[\d;]*3[0-7]")
    assert colour.search(printed())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(printed())
