"""One massive token: what it does to a pooled number, what is not moved by it, and where a run says that it was there."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from analysis.run import Run
from analysis.sums.batch import Batch, Window
from hooks.collect import analyze
from hooks.models import LoadedModel
from hooks.reading.accumulators import SiteAccumulator
from reports.run.verdict import remarks
from reports.tables import extremes_table, layers_table
from tests.helpers.random_layers import Case, random_case

LAYER, WINDOW, POSITION, NEURON = 1, 3, 7, 11


def layer(massive: bool) -> Case:
    """1,600 tokens; if asked for, neuron 2 is massive on token 30 of sequence 4, with the gate as open as the up: a = b."""
    case = random_case("silu", (100,) * 16, 6, seed=1)
    if massive:
        for x in case.sequences[4]:
            x[30, 2] = 400.0
    return case


def test_a_planted_token_owns_the_pooled_number_and_nothing_else() -> None:
    with_it, without = (layer(massive).estimates for massive in (True, False))
    planted, plain = with_it.layer_numbers(), without.layer_numbers()
    assert planted["exchange"] < 0.1 * plain["exchange"]  # a = b: exchange changes nothing on this token
    assert planted["exchange_trimmed"] == pytest.approx(plain["exchange"], rel=0.05)
    for quartile in ("q1", "median", "q3"):
        assert planted[f"exchange_token_{quartile}"] == pytest.approx(plain[f"exchange_token_{quartile}"], abs=0.01)
    assert planted["top_token_share"] > 0.9
    assert planted["effective_tokens"] == pytest.approx(1, abs=0.2)
    assert (planted["few_tokens"], plain["few_tokens"]) == (True, False)
    assert plain["effective_tokens"] > 100
    first = with_it.top_tokens()[0]
    assert (first["window"], first["position"], first["token"], first["neuron"]) == (4, 30, 30, 2)
    assert first["energy_share"] == planted["top_token_share"]
    assert first["neuron_share"] > 0.99
    extreme = with_it.extreme_neurons(1)
    assert [int(extreme[name]) for name in ("neuron", "window", "position", "counted")] == [2, 4, 30, 1]


def test_energy_in_a_few_equal_tokens_is_flagged_though_leaving_some_out_moves_nothing() -> None:
    """Ten equal massive tokens of 1,600: without two of them every ratio is still theirs."""
    case = layer(False)
    a, b = case.sequences[4]
    a[30:40], b[30:40] = a[30].clone(), 300 * b[30]
    numbers = case.estimates.layer_numbers()
    assert numbers["exchange_trimmed"] == pytest.approx(numbers["exchange"], rel=0.01)
    assert numbers["effective_tokens"] == pytest.approx(10, rel=0.1)
    assert numbers["few_tokens"] is True


def test_an_uncounted_token_is_extreme_but_changes_no_number() -> None:
    case = layer(False)
    a, b = (x.clone() for x in case.sequences[0])
    window = Window(0, torch.arange(100), 1)
    plain = case.moments_of(a, b, 0, window)
    a[0, 2] = b[0, 2] = 400.0
    planted = case.moments_of(a, b, 0, window)
    assert torch.equal(planted.neuron.values, plain.neuron.values)
    assert planted.peaks.places[:, 2].tolist() == [0, 0, 0, 0]
    assert planted.peaks.values[1, 2] == 400
    assert torch.equal(planted.top_tokens.places, plain.top_tokens.places)


@pytest.fixture
def planted_run(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run in which one neuron of layer 1 is massive on one token."""
    take = SiteAccumulator.take

    def planted(stream: SiteAccumulator, captured: dict[str, Tensor], batch: Batch) -> None:
        for row, window in enumerate(batch.windows):
            if window.index == WINDOW and stream.layer == LAYER:
                a, b = captured["a"].clone(), captured["b"].clone()
                a[row, POSITION, NEURON], b[row, POSITION, NEURON] = 300.0, -800.0
                captured |= {"a": a, "b": b}
        take(stream, captured, batch)

    monkeypatch.setattr(SiteAccumulator, "take", planted)
    return analyze(llama, llama.read(context=64, max_tokens=1280), quiet=True)


def test_a_run_names_the_token_that_carries_a_layer(planted_run: Run, llama: LoadedModel, tmp_path: Path) -> None:
    window = llama.read(context=64, max_tokens=1280).windows[WINDOW]
    token = int(window.tokens[POSITION])
    place = {"window": WINDOW, "position": POSITION, "token": token, "neuron": NEURON}
    massive_activation_tokens = planted_run.massive_activation_tokens()
    assert list(massive_activation_tokens) == [LAYER]
    assert place.items() <= massive_activation_tokens[LAYER][0].items()
    assert massive_activation_tokens[LAYER][0]["text"] == llama.tokenizer.decode([token])
    assert len(massive_activation_tokens[LAYER]) == 2  # 0.1 % of 1,260 tokens, rounded up
    planted_run.save(tmp_path)
    written = json.loads((tmp_path / "run.json").read_text())["carried_by_few_tokens"]
    assert written == {str(LAYER): massive_activation_tokens[LAYER]}
    assert Run.load(tmp_path).massive_activation_tokens() == massive_activation_tokens


def test_tables_and_summary_say_so_too(planted_run: Run) -> None:
    layers = layers_table(planted_run)
    assert layers["few_tokens"].tolist() == [False, True, False]
    extreme = extremes_table(planted_run).groupby("layer").first().loc[LAYER]
    assert (extreme["neuron"], extreme["window"], extreme["position"]) == (NEURON, WINDOW, POSITION)
    assert (extreme["a"], extreme["b"], extreme["h"]) == (300.0, -800.0, -240000.0)
    assert extreme["text"] == planted_run.token_texts[int(extreme["token"])]
    text = " ".join(remarks(planted_run, layers))
    assert f"layer {LAYER}: effectively 1 of" in text
    assert f"window {WINDOW}, position {POSITION}, with 100% of the energy, most of it in neuron {NEURON}" in text


def test_without_a_massive_token_nothing_is_flagged(llama: LoadedModel, tmp_path: Path) -> None:
    run = analyze(llama, llama.read(context=64, max_tokens=1280), quiet=True)
    assert run.massive_activation_tokens() == {}
    assert not layers_table(run)["few_tokens"].any()
    assert "hold its energy" not in " ".join(remarks(run, layers_table(run)))
    run.save(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["carried_by_few_tokens"] == {}
