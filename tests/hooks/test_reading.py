"""Batches fit the memory; where one does not, it is read in halves and every number stays what it was."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from analysis.causal.edits import Change, PlainExchange
from analysis.errors import UserError
from analysis.run import Run
from analysis.sums.batch import Batch
from hooks.collect import analyze
from hooks.models import LoadedModel, load_model
from hooks.patching.interventions import rewriting
from hooks.reading import batches as reading
from hooks.reading.accumulators import SiteAccumulator
from hooks.reading.batches import TOKENS_AT_ONCE, batch_size_for, is_out_of_memory

CONTEXT = 48


def read(model: LoadedModel, **options: Any) -> Run:
    return analyze(model, model.read(context=CONTEXT, max_tokens=600), quiet=True, **options)


def assert_same(run: Run, other: Run) -> None:
    for index, layer in run.layers.items():
        mine, theirs = layer.moments, other.layers[index].moments
        scale = theirs.neuron.values.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        torch.testing.assert_close(mine.neuron.values / scale, theirs.neuron.values / scale, rtol=0, atol=1e-5)
        assert torch.equal(mine.signs.sum(), theirs.signs.sum())
        assert (mine.n_tokens, mine.n_sequences) == (theirs.n_tokens, theirs.n_sequences)
        assert torch.equal(mine.peaks.places, theirs.peaks.places)


def bounded(monkeypatch: pytest.MonkeyPatch, room: int, after: int, error: Callable[[], Exception]) -> list[int]:
    """Passes of more windows than there is room for fail when that many layers have been captured; returns their sizes."""
    capture_pass, sizes = reading.capture_pass, []

    def scarce(model: LoadedModel, windows: Any, capture_hooks: Any, last_layer: int) -> Any:
        sizes.append(len(windows))
        if len(windows) > room:
            if captured := capture_hooks[: 2 * after]:  # of gate and up
                capture_pass(model, windows, captured, after - 1)
            raise error()
        return capture_pass(model, windows, capture_hooks, last_layer)

    monkeypatch.setattr(reading, "capture_pass", scarce)
    return sizes


ERRORS: dict[str, Callable[[], Exception]] = {
    "of a GPU": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "of a CPU": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "of python": MemoryError,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_batch_that_does_not_fit_is_halved_and_counted_once(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], after: int
) -> None:
    """Layers that had taken the whole batch when the memory ran out do not take its halves too."""
    expected = read(llama, batch_size=8)
    sizes = bounded(monkeypatch, 2, after, error)
    assert_same(read(llama, batch_size=8), expected)
    assert sizes[:5] == [8, 4, 2, 2, 4]
    assert set(sizes[7:]) <= {1, 2}  # once halved, no batch is larger than what there was room for


def test_no_room_for_one_window_is_said(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded(monkeypatch, 0, 0, ERRORS["of a GPU"])
    with pytest.raises(
        UserError, match="out of memory on cpu with 1 windows of 48 tokens at once: use a smaller --batch-size"
    ):
        read(llama)


def test_a_layer_that_took_in_half_a_batch_is_not_trusted(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("analysis.sums.fused_reducer.FusedReducer.add", torn)
    with pytest.raises(UserError, match="out of memory"):
        read(llama)


def test_other_errors_are_not_taken_for_it(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    bounded(monkeypatch, 0, 0, lambda: RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        read(llama)


@pytest.mark.parametrize(("context", "expected"), [(16, 128), (64, 32)])
def test_batches_have_so_many_tokens(llama: LoadedModel, context: int, expected: int) -> None:
    assert batch_size_for(llama, llama.read(context=context)) == expected == TOKENS_AT_ONCE["cpu"] // context


def test_the_batch_that_was_taken_is_in_the_record(llama: LoadedModel) -> None:
    assert read(llama).record["batch_size"] == TOKENS_AT_ONCE["cpu"] // CONTEXT
    assert read(llama, batch_size=3).record["batch_size"] == 3


def test_an_attention_that_is_wrong_is_not_read_with(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves out what the model needs shows in the logits; then the eager one is taken."""
    scaled = functional.scaled_dot_product_attention

    def wrong(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        return 3 * scaled(*inputs, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", wrong)
    model = load_model(str(tiny_llama), device="cpu")
    assert model.hf_model.config._attn_implementation == "eager"
    assert all(check.passed for check in model.acceptance)
    monkeypatch.undo()
    assert load_model(str(tiny_llama), device="cpu").hf_model.config._attn_implementation == "sdpa"


def test_two_threads_with_one_model_hear_their_own_pass(llama: LoadedModel) -> None:
    expected = read(llama, batch_size=1)
    with ThreadPoolExecutor(3) as pool:
        for run in pool.map(lambda _: read(llama, batch_size=1), range(3)):
            assert_same(run, expected)


def test_an_edited_model_is_read_as_edited(llama: LoadedModel) -> None:
    """By ``rewriting``, and by hooks that somebody puts on the wrapped model, of which the model itself knows nothing."""
    plain = read(llama)
    assert llama.network is llama.hf_model
    with rewriting(llama, {0: Change(PlainExchange(), llama.sites[0].unit)}):
        edited = read(llama)
    assert llama.bridge is not None
    with llama.bridge.hooks(fwd_hooks=[(llama.sites[0].hook_h, lambda h, hook: -2 * h)]):
        assert llama.network is llama.bridge.original_model
        hooked = read(llama)
    assert llama.network is llama.hf_model
    for run in (edited, hooked):
        for layer, changes in ((0, False), (2, True)):
            mine, theirs = (one.layers[layer].moments.neuron["hh"] for one in (plain, run))
            assert torch.allclose(mine, theirs, rtol=1e-4) is not changes


def test_overflow_before_the_memory_ran_out_is_refused(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that had the whole batch is in neither of its halves, and is looked at all the same."""
    take = SiteAccumulator.take

    def overflowing(stream: SiteAccumulator, captured: dict[str, torch.Tensor], batch: Batch) -> None:
        if stream.layer == 0 and batch.windows[0].index == 8:
            captured["a"] = captured["a"].clone()
            captured["a"][0, 5, 3] = torch.inf
        take(stream, captured, batch)

    monkeypatch.setattr(SiteAccumulator, "take", overflowing)
    bounded(monkeypatch, 4, 1, ERRORS["of a GPU"])
    with pytest.raises(UserError, match="activations of layer 0: NaN or infinite"):
        analyze(llama, llama.read(context=CONTEXT, max_tokens=16 * CONTEXT), batch_size=8, quiet=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 0}, "0 permutations"),
        ({"alphas": (float("nan"),)}, "α = nan is out of range"),
        ({"alphas": (0.0, 2.0)}, "α = 0 is out of range"),
    ],
)
def test_arguments_out_of_range_are_said(llama: LoadedModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(llama, **options)
