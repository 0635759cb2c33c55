"""--causal on the command line: what it writes, says and refuses, and how an interrupted sweep goes on."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.causal.costs import CONTROL_LIMIT
from analysis.storage.files import PROGRESS
from hooks.models import LoadedModel, load_model
from hooks.patching.sweep import _Steps
from tests.helpers.command_line import QUICK, call, refused

EDITS = ["--edits", "exchange,scale:2"]
ENDINGS = ("", "_se", "_placebo")


@pytest.fixture(autouse=True)
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own figures are drawn elsewhere."""
    monkeypatch.setattr("reports.directory.draw_all", lambda _: {})


@pytest.fixture
def same_model(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """The tiny model, loaded once for several calls."""
    model = load_model(str(tiny_llama), device="cpu")
    monkeypatch.setattr("hooks.measure.load_model", lambda *_, **__: model)
    return model


def test_everything_at_once(
    tiny_llama: Path, same_model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, out, _ = call("analyze", tiny_llama, "--out", tmp_path / "run", "--causal", "both", *EDITS, *QUICK)
    assert code == 0
    assert [line.split(":")[0] for line in caplog.messages] == ["layer 0", "layer 1", "layer 2", "single neurons"]
    words = " ".join(out.split())
    assert "exchange: KL lowest in layer" in words
    assert "passes through the blocks" in words
    layers = pd.read_csv(tmp_path / "run" / "layers.csv")
    for edit in ("exchange", "scale_2", "mean", "zero"):
        for column in (f"{quantity}_{edit}{ending}" for quantity in ("kl", "dce") for ending in ENDINGS):
            assert layers[column].notna().all(), column
        assert layers[f"attribution_{edit}"].notna().all()
    neurons = pd.read_parquet(tmp_path / "run" / "neurons.parquet")
    assert {f"attribution_exchange{ending}" for ending in (*ENDINGS, "_per_asymmetry")} <= set(neurons)
    costs = pd.read_csv(tmp_path / "run" / "causal.csv")
    assert len(costs) == 3 * 4 * 2
    assert set(costs["edit"]) == {"exchange", "scale:2", "mean", "zero"}
    single = pd.read_csv(tmp_path / "run" / "causal_neurons.csv")
    assert single["largest"].sum() == len(single) == 3 * 48
    agreement = pd.read_csv(tmp_path / "run" / "causal_agreement.csv").set_index("over")
    assert agreement.loc["neurons of the largest attribution", "rank_correlation"] > 0.5
    figures = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert figures == {f"causal_{name}.png" for name in ("alpha", "attribution", "cost", "cumulative")}
    assert not (tmp_path / "run" / PROGRESS).exists()


def test_attribution_is_what_comes_by_itself(tiny_llama: Path, same_model: LoadedModel, tmp_path: Path) -> None:
    code, out, err = call("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK)
    assert (code, err) == (0, "")
    assert "To first order, on" in out
    layers = pd.read_csv(tmp_path / "run" / "layers.csv")
    assert "attribution_relu_limit" in layers
    assert "To first order, on" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "run" / "causal.safetensors").rename(tmp_path / "elsewhere")
    code, _, err = call("report", tmp_path / "run")
    assert (code, err.count("\n")) == (2, 1)
    assert "has causal.csv but not causal.safetensors" in err
    assert (tmp_path / "run" / "causal.csv").exists()
    assert "kl_exchange" not in layers
    assert call("analyze", tiny_llama, "--out", tmp_path / "run", "--causal", "none", *QUICK)[0] == 0
    assert not list((tmp_path / "run").glob("causal*"))


def test_ctrl_c_keeps_finished_layers_and_resume_goes_on(
    tiny_llama: Path,
    same_model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("reports.directory.draw_causal", lambda *_: {})
    step, steps = _Steps.step, []

    def interrupted(self: _Steps, layer: int) -> object:
        steps.append(layer)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step(self, layer)

    monkeypatch.setattr(_Steps, "step", interrupted)
    options = ["--causal", "exact", *EDITS, *QUICK]
    code, out, err = call("analyze", tiny_llama, "--out", tmp_path / "run", *options)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted: 2 layers are kept, continue with the same command and --resume"
    assert [path.name for path in (tmp_path / "run").iterdir()] == [PROGRESS]
    other = ["--causal", "exact", "--edits", "flip", *QUICK]
    line = refused("analyze", tiny_llama, "--out", tmp_path / "run", "--quiet", "--resume", *other)
    assert "is unfinished work with edits ['exchange', 'scale:2', 'mean', 'zero'], not ['flip', 'mean', 'zero']" in line
    caplog.clear()
    assert call("analyze", tiny_llama, "--out", tmp_path / "run", "--resume", *options)[0] == 0
    assert steps == [0, 1, 2, 2]
    assert ["already finished" in line for line in caplog.messages] == [True, True, False]
    assert call("analyze", tiny_llama, "--out", tmp_path / "at-once", *options)[0] == 0
    resumed, at_once = (pd.read_csv(tmp_path / name / "causal.csv") for name in ("run", "at-once"))
    numbers = resumed.select_dtypes("number").columns
    np.testing.assert_allclose(resumed[numbers], at_once[numbers], rtol=1e-3, atol=1e-5)


def test_ctrl_c_before_the_first_layer_writes_nothing(
    tiny_llama: Path, same_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_Steps, "step", interrupt)
    code, _, err = call("analyze", tiny_llama, "--out", tmp_path / "run", "--causal", "exact", *QUICK)
    assert code == 130
    assert "interrupted: nothing was written" in err
    assert not (tmp_path / "run").exists()


def test_a_failed_control_exits_with_1(
    tiny_llama: Path, same_model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reports.directory.draw_causal", lambda *_: {})
    monkeypatch.setitem(CONTROL_LIMIT, "float32", -1.0)
    code, out, _ = call("analyze", tiny_llama, "--out", tmp_path / "run", "--causal", "exact", *EDITS, *QUICK)
    assert code == 1
    assert "check failed: KL of an edit that changes nothing" in out
    assert (tmp_path / "run" / "causal.csv").exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--causal", "none", "--edits", "flip"], "--edits and --causal-tokens say what --causal measures, which is none"),
        (["--causal", "some"], "unknown --causal 'some': choose one of none, attribution, exact, both"),
        (["--edits", "swap"], "unknown edit 'swap'"),
        (["--resume"], "--resume continues an exact sweep, not --causal attribution"),
    ],
)
def test_options_that_do_not_fit(tiny_llama: Path, tmp_path: Path, options: list[str], complaint: str) -> None:
    assert complaint in refused("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK, *options)
    assert not (tmp_path / "run").exists()
