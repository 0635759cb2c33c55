"""Controls: what must hold holds, what must fail fails, and a layer that is not what it claims is found out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from analysis.measures.controls import measure_controls
from analysis.run import Run
from analysis.theory.gated import GatedMLP
from analysis.units.registry import GptOssUnit, Unit, unit_named
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from tests.helpers.command_line import FILES, QUICK, call
from tests.helpers.random_layers import ClampedUnit
from tests.helpers.tiny import save_tiny

RESCALINGS = ["k → 3k, v → v/3", "k → -1k, v → v/-1"]
ORDER, EXCHANGE = "a random order of the neurons", "exchange of SiLU(a)·b, re-paired"


class Liar(ClampedUnit):
    """A unit that says that its up is linear, and is not."""

    up_is_linear = True


def layer(unit: Unit, dtype: torch.dtype = torch.float64) -> tuple[GatedMLP, Tensor]:
    """A random layer and inputs of it."""
    mlp = GatedMLP.random(unit, 6, 9, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    return mlp, torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "relu", "linear", "relu2"])
def test_what_must_hold_holds_and_what_must_fail_fails(name: str, dtype: torch.dtype) -> None:
    found = {record.what: record for record in measure_controls(*layer(unit_named(name), dtype))}
    assert list(found) == [*RESCALINGS, ORDER, EXCHANGE]
    assert all(record.passed for record in found.values())
    assert [record.sense for record in found.values()] == ["at most", "at most", "at most", "more than"]
    assert 0 < found[ORDER].value < found[ORDER].limit
    assert found[EXCHANGE].value > 0.01 > found[EXCHANGE].limit


def test_a_unit_whose_up_is_not_linear_has_no_rescaling_to_hold() -> None:
    found = measure_controls(*layer(GptOssUnit()))
    assert [record.what for record in found] == [ORDER, EXCHANGE]
    assert all(record.passed for record in found)


def test_a_unit_that_only_claims_a_linear_up_is_found_out() -> None:
    found = {record.what: record for record in measure_controls(*layer(Liar()))}
    assert [found[name].passed for name in (*RESCALINGS, ORDER, EXCHANGE)] == [False, False, True, True]
    assert found[RESCALINGS[0]].value > 0.1


def test_a_layer_that_exchange_does_not_change_fails_the_control_that_must_fail() -> None:
    """All neurons alike and q = k: there is no break to find, and a control that passed would show nothing."""
    mlp, x = layer(unit_named("silu"))
    alike = replace(mlp, q=mlp.q[:1].repeat(9, 1), k=mlp.q[:1].repeat(9, 1))
    last = measure_controls(alike, x)[-1]
    assert (last.what, last.passed) == (EXCHANGE, False)
    assert last.value < 1e-30


def test_a_layer_without_output_has_no_controls() -> None:
    mlp, x = layer(unit_named("silu"))
    assert measure_controls(replace(mlp, v=torch.zeros_like(mlp.v)), x) == []


@pytest.fixture(scope="module")
def run(llama: LoadedModel) -> Run:
    return analyze(llama, llama.read(context=32, max_tokens=160), quiet=True)


def test_every_layer_of_a_run_has_its_controls(run: Run) -> None:
    expected = [(index, control) for index in (0, 1, 2) for control in (*RESCALINGS, ORDER, EXCHANGE)]
    assert [(record.layer, record.what) for record in run.controls] == expected
    assert run.passed


LINES = (
    "h = g(a, b)",
    "MLP output from q, k, v",
    "logits with and without TransformerLens",
    "logits of the pass that reads, with its own attention",
    *(f"{control} must change" for control in (*RESCALINGS, ORDER, EXCHANGE)),
    "h = g(a, b) on the text's first window",
    "activation, g(a, b)",
    "precision",
    "beginning of a window",
    "counted positions",
    "norm gain folded",
    "layers analysed",
    "versions",
)


def test_every_line_of_the_acceptance_block_has_a_value_a_limit_and_a_verdict(run: Run) -> None:
    assert len(run.acceptance) == len(LINES)
    for line, check in zip(LINES, run.acceptance, strict=True):
        assert check.what.startswith(line)
        assert check.value != ""
        assert check.limit != ""
        assert check.passed is True
    worst = {record.what: record.value for record in run.controls if record.layer == 0}
    for record in run.controls:
        pick = max if record.sense == "at most" else min
        worst[record.what] = pick(worst[record.what], record.value)
    assert [check.value for check in run.acceptance[4:8]] == list(worst.values())


def changed(run: Run, check: int, **fields: object) -> Run:
    """The run on other windows, with one line of its acceptance block changed."""
    lines = [replace(line, **fields) if index == check else line for index, line in enumerate(run.acceptance)]
    return replace(run, windows=run.windows + 1, acceptance=tuple(lines))


def test_of_two_runs_the_worse_outcome_is_kept(run: Run) -> None:
    error, control, fails, words = 0, 4, 7, 10
    for check, worse, better in ((error, 1e-6, 0.0), (control, 1e-6, 0.0), (fails, 0.002, 0.9)):
        runs = [changed(run, check, value=value) for value in (worse, better)]
        for first, second in (runs, runs[::-1]):
            assert Run.merge([first, replace(second, windows=run.windows)]).acceptance[check].value == worse
    failed = changed(run, error, value=1e-9, limit=1e-10)
    for pair in ([run, failed], [failed, run]):
        merged = Run.merge(pair)
        assert (merged.acceptance[error].value, merged.passed) == (1e-9, False)
    said = Run.merge([run, changed(run, words, value="other words", holds=False)]).acceptance[words]
    assert said.value == f"{run.acceptance[words].value}; other words"
    assert said.passed is False
    tampered = [
        replace(record, value=0.7, limit={"at most": 0.1, "more than": 0.9}[record.sense]) for record in run.controls
    ]
    merged = Run.merge([run, replace(run, windows=run.windows + 1, controls=tuple(tampered))])
    assert {record.value for record in merged.controls} == {0.7}


@pytest.mark.usefixtures("without_figures")
def test_a_control_out_of_tolerance_exits_with_1_and_is_written(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hooks import collect

    controls_of = collect.controls_of

    def of_a_liar(model: LoadedModel, corpus: object, sites: dict, seed: int) -> object:
        return controls_of(model, corpus, {i: replace(s, unit=Liar()) if i == 1 else s for i, s in sites.items()}, seed)

    monkeypatch.setattr(collect, "controls_of", of_a_liar)
    code, out, _ = call("analyze", tiny_llama, "--out", tmp_path / "run", *QUICK)
    assert code == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == FILES - {"figures"}
    words = " ".join(out.split())
    assert "control failed in layer 1: k → 3k, v → v/3" in words
    assert "control failed in layer 0" not in words
    assert "FAIL" in words
    loaded = Run.load(tmp_path / "run")
    assert [(r.layer, r.what) for r in loaded.controls if not r.passed] == [(1, name) for name in RESCALINGS]
    assert not loaded.passed


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_clamp_that_acts_on_the_text_alone_fails_a_check(family: str, tmp_path: Path) -> None:
    """What a layer proved on random tokens is proved again on the text: here h is cut there, and not on the probe."""
    model = load_model(str(save_tiny(family, tmp_path / "model")), device="cpu")
    text = model.read(context=32, max_tokens=160)
    module = model.hf_model.model.layers[1].mlp
    if family == "llama":
        act = module.act_fn.forward
        module.act_fn.forward = lambda z: act(z).clamp(max=0.1)
    else:
        act = module.experts.act_fn.forward
        module.experts.act_fn.forward = lambda z: act(z).clamp(max=0.1)
    run = analyze(model, text, quiet=True)
    failed = [check.what for check in run.acceptance if not check.passed]
    what = "h = g(a, b)" if family == "llama" else "experts' output"
    assert failed == [f"{what} on the text's first window, largest over layers"]
    assert not run.passed
