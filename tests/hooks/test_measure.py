"""A whole analysis in one call is its steps in turn; contradictory options are refused before a model loads."""

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.causal.edits import parse_edits
from analysis.checks import Check
from analysis.errors import UserError
from analysis.full_run import FullRun
from analysis.run import Run
from hooks.causal import measure_causal
from hooks.collect import analyze
from hooks.measure import measure
from hooks.models import load_model
from reports.causal.tables import CausalTables
from reports.tables import tables_of

READ = {"context": 32, "skip_positions": 1}


@pytest.fixture(scope="module")
def full(tiny_llama: Path) -> FullRun:
    return measure(
        str(tiny_llama), tokens=200, causal="attribution", edits="exchange,zero", causal_tokens=64, random_weights=True,
        seed=3, quiet=True, device="cpu", **READ,
    )  # fmt: skip


def test_it_is_its_steps_one_after_the_other(full: FullRun, tiny_llama: Path) -> None:
    model = load_model(str(tiny_llama), device="cpu")
    text = model.read(max_tokens=200, **READ)
    run = analyze(model, text, seed=3, quiet=True)
    costs = measure_causal(model, text, run, mode="attribution", edits=parse_edits("exchange,zero"), n_tokens=64, seed=3)
    random = analyze(load_model(str(tiny_llama), device="cpu", random_seed=3), text, seed=3, quiet=True)
    assert full.random is not None
    assert full.causal is not None
    mine, theirs = tables_of(full.run, full.random), tables_of(run, random)
    assert mine.layers.equals(theirs.layers)
    assert CausalTables.of(full.causal, mine).costs.equals(CausalTables.of(costs, theirs).costs)


def test_it_passes_only_if_all_of_it_does(full: FullRun) -> None:
    assert full.passed
    assert full.random is not None
    failed = Check("planted", 2.0, 1.0)

    def with_failure(run: Run) -> Run:
        return replace(run, acceptance=(*run.acceptance, failed))

    assert not replace(full, run=with_failure(full.run)).passed
    assert not replace(full, random=with_failure(full.random)).passed
    assert not replace(full, run=replace(full.run, controls=(*full.run.controls, replace(failed, layer=0)))).passed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"causal": "some"}, "unknown --causal 'some'"),
        ({"causal": "none", "edits": "exchange"}, "leave them out"),
        ({"resume": True}, "--resume continues an exact sweep"),
        ({"edits": "nonsense"}, "nonsense"),
        ({"context": 2, "skip_positions": 1}, "raise --context"),
    ],
)
def test_what_contradicts_itself_is_refused_before_the_model_loads(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure("/no/such/model", **options)
