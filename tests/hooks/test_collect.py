"""Streaming gives what caching everything gives, whatever the batch, and keeps nothing."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from analysis.errors import UserError
from analysis.measures import asymmetry as measures
from analysis.run import Run
from analysis.sums.batch import Window
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, Moments
from analysis.sums.tiled import TileReducer
from analysis.weights.geometry import Geometry, derangements
from hooks.collect import analyze, collect
from hooks.locating.sites import LocatedLayers
from hooks.models import LoadedModel, load_model
from tests.helpers.tiny import save_tiny

CONTEXT = 48


def read(model: LoadedModel, **options: int) -> Run:
    corpus = model.read(context=CONTEXT, max_tokens=330)
    return analyze(model, corpus, quiet=True, **options)


def cached(directory: Path, model: LoadedModel, layer: int) -> list[tuple[Window, Tensor, Tensor]]:
    """(window, a, b) of all its tokens, from the Hugging Face model alone, one window at a time, in float64."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    mlp, kept = plain.model.layers[layer].mlp, []
    mlp.register_forward_hook(lambda module, inputs, _: kept.append(inputs[0][0]))
    corpus = model.read(context=CONTEXT, max_tokens=330)
    with torch.no_grad():
        for window in corpus.windows:
            plain(window.tokens[None])
        return [(window, mlp.gate_proj(x), mlp.up_proj(x)) for window, x in zip(corpus.windows, kept, strict=True)]


@pytest.mark.parametrize("layer", [0, 2])
def test_streamed_moments_are_those_of_cached_activations(tiny_llama: Path, llama: LoadedModel, layer: int) -> None:
    run = read(llama)
    site, found = llama.sites[layer], run.layers[layer]
    geometry = Geometry.of(site.q, site.k, site.v, site.gain)
    layout = found.moments.neuron.layout
    total = Moments.empty(48, layout)
    pairing = geometry.permuted_pairs(site.q, site.k, site.gain, derangements(48, layout.draws, layer))
    reduce = TileReducer(site.unit, layout, geometry, pairing, dtype=torch.float64)
    n_windows = run.corpus[0]["n_windows"]
    for window, a, b in cached(tiny_llama, llama, layer):
        total += Moments.of(a, b, reduce, window, jackknife_block=window.index * N_JACKKNIFE_BLOCKS // n_windows)
    torch.testing.assert_close(found.moments.neuron.values, total.neuron.values, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.moments.pooled.values, total.pooled.values, rtol=1e-4, atol=1e-2)
    assert found.moments.n_tokens == total.n_tokens == run.corpus[0]["tokens_counted"]
    assert found.moments.tokens.quantile("exchange", 0.5) == pytest.approx(total.tokens.quantile("exchange", 0.5), abs=1e-3)
    assert torch.equal(found.moments.peaks.places, total.peaks.places)
    assert torch.equal(found.moments.top_tokens.places, total.top_tokens.places)
    torch.testing.assert_close(found.moments.tokens.by_energy.sum(1), total.tokens.by_energy.sum(1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_batch_size_changes_no_number(llama: LoadedModel, batch_size: int) -> None:
    run, other = read(llama, batch_size=2), read(llama, batch_size=batch_size)
    for index, layer in run.layers.items():
        theirs = other.layers[index].moments
        torch.testing.assert_close(layer.moments.neuron.values, theirs.neuron.values, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(
            measures.exchange(layer.moments.neuron), measures.exchange(theirs.neuron), rtol=1e-5, atol=1e-6
        )
        assert layer.moments.n_tokens == theirs.n_tokens


def test_padding_is_never_counted(tmp_path: Path) -> None:
    """A short window in a batch with a long one gives what it gives alone; the gate sees the padding, the sums do not."""
    model = load_model(str(save_tiny("gemma3", tmp_path / "m")), device="cpu")
    corpus = model.read(context=CONTEXT, max_tokens=200)
    short = replace(corpus.windows[1], tokens=corpus.windows[1].tokens[:9])
    mixed = replace(corpus, windows=(corpus.windows[0], short, corpus.windows[2]))
    together, apart = (analyze(model, mixed, batch_size=size, quiet=True) for size in (3, 1))
    for index, layer in together.layers.items():
        theirs = apart.layers[index].moments
        torch.testing.assert_close(layer.moments.neuron.values, theirs.neuron.values, rtol=1e-5, atol=1e-4)
        assert layer.moments.n_tokens == theirs.n_tokens == 2 * (CONTEXT - 1) + 8


def test_some_layers_are_as_in_the_whole(llama: LoadedModel) -> None:
    whole, some = read(llama), read(llama, layers=[1, 0, 1])
    assert list(some.layers) == [0, 1]
    for index, layer in some.layers.items():
        torch.testing.assert_close(layer.moments.neuron.values, whole.layers[index].moments.neuron.values)
    with pytest.raises(UserError, match="layer 3 is out of range: .* has layers 0-2"):
        read(llama, layers=[0, 3])


def test_layers_after_the_last_one_asked_for_are_not_run(llama: LoadedModel) -> None:
    fired = []
    handle = llama.blocks(llama.hf_model)[2].mlp.register_forward_pre_hook(lambda *_: fired.append(2))
    read(llama, layers=[0, 1])
    handle.remove()
    assert fired == []


def test_every_part_of_the_model_is_as_before(llama: LoadedModel) -> None:
    before = {name: weight.clone() for name, weight in llama.bridge.original_model.state_dict().items()}
    read(llama)
    assert all(not point.fwd_hooks for point in llama.bridge.hook_dict.values())
    for name, weight in llama.bridge.original_model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_skipped_layer_is_named_with_its_reason(llama: LoadedModel) -> None:
    partial = replace(llama, located=LocatedLayers({0: llama.sites[0]}, {}, {1: "because", 2: "of that"}))
    assert read(partial).skipped == {1: "because", 2: "of that"}
    assert read(partial, layers=[0, 1]).skipped == {1: "because"}
    with pytest.raises(UserError, match="layer 2: of that"):
        read(partial, layers=[2])


def test_activations_that_are_not_finite_are_refused_by_layer(tiny_llama: Path) -> None:
    model = load_model(str(tiny_llama), device="cpu")
    with torch.no_grad():
        model.bridge.original_model.model.layers[1].mlp.up_proj.original_component.weight[5, 0] = torch.inf
    corpus = model.read(context=CONTEXT, max_tokens=200)
    with pytest.raises(
        UserError, match="activations of layer 1: NaN or infinite in windows 0-4, beyond what float32 holds"
    ):
        collect(model, corpus, model.sites, quiet=True)


@pytest.mark.filterwarnings("ignore")  # looking at every object wakes lazy modules that warn
def test_no_activation_outlives_its_batch(llama: LoadedModel) -> None:
    def living() -> int:
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if type(t) is Tensor and t.dtype == torch.float32)

    read(llama)
    before = living()
    run = read(llama, batch_size=1)
    kept = sum(layer.moments.neuron_groups.numel() for layer in run.layers.values())
    kept += sum(layer.output.sample.outputs.numel() for layer in run.layers.values())
    assert kept > CONTEXT
    assert living() - before - kept < CONTEXT


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.01), ("float64", 1e-4)])
def test_other_dtypes_give_nearly_the_same(tiny_llama: Path, llama: LoadedModel, dtype: str, tolerance: float) -> None:
    run, other = read(llama), read(load_model(str(tiny_llama), device="cpu", dtype=dtype))
    for index, layer in run.layers.items():
        weight = layer.geometry.value_weight
        ours, theirs = (measures.exchange(m.neuron.pool(weight)) for m in (layer.moments, other.layers[index].moments))
        assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    assert other.model["dtype"] == dtype
