"""Weights in the precision that was asked for, and fetched from wherever a spread model keeps them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from analysis.errors import UserError
from analysis.theory.actions import Exchange
from hooks.causal import measure_causal
from hooks.collect import analyze
from hooks.loading import devices as weights
from hooks.loading.checkpoint import SINGLE
from hooks.loading.devices import SPREAD, device_of, in_precision, is_spread, spread_options, weights_of
from hooks.loading.prepare import resolve_device
from hooks.loading.sources import load_files, locate
from hooks.models import load_model
from hooks.neuron import inspect_neuron
from hooks.patching.interventions import acting
from reports.tables import layers_table
from tests.helpers.families import grid
from tests.helpers.quantizing import E4M3, rewrite
from tests.helpers.tiny import save_tiny

TOKENS = torch.arange(3, 43)[None]
PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}


def offloaded(directory: Path, folder: Path, precision: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, device_map=PLACES, offload_folder=folder, dtype=precision).eval()


@pytest.mark.parametrize("precision", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_on_disk_are_fetched(precision: torch.dtype, tiny_llama: Path, tmp_path: Path) -> None:
    model, stored = offloaded(tiny_llama, tmp_path, precision), load_file(tiny_llama / SINGLE)
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert is_spread(model)
    found = weights_of(model)
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(found[name], value.to(precision)), name
    mlp = weights_of(model.model.layers[2].mlp)
    assert set(mlp) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert torch.equal(mlp["up_proj.weight"], stored["model.layers.2.mlp.up_proj.weight"].to(precision))
    assert weights_of(model.model.layers[2].mlp, inside=False) == {}
    assert device_of(model.model.layers[1]) == torch.device("cpu")


def test_a_pass_through_a_spread_model_is_that_of_the_model(tiny_llama: Path, tmp_path: Path) -> None:
    model, whole = offloaded(tiny_llama, tmp_path), AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(weights_of(model)["lm_head.weight"], whole.lm_head.weight)


def test_weights_in_memory_are_the_models_own(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert not is_spread(model)
    found = weights_of(model)
    assert all(found[name].data_ptr() == weight.data_ptr() for name, weight in model.named_parameters())
    assert not any(weight.requires_grad for weight in found.values())


def test_weights_that_are_nowhere(tiny_llama: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        lost = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match="its values are not known"):
        weights_of(lost)
    with pytest.raises(ValueError, match="has no device of its own"):
        device_of(torch.nn.SiLU())


def test_several_hooks_in_a_row(tiny_llama: Path, tmp_path: Path) -> None:
    model = offloaded(tiny_llama, tmp_path)
    projection = model.model.layers[1].mlp.up_proj
    add_hook_to_module(projection, ModelHook(), append=True)
    stored = load_file(tiny_llama / SINGLE)["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(weights_of(projection)["weight"], stored)


def test_in_lower_precision_positions_keep_theirs(tiny_llama: Path) -> None:
    """As transformers itself loads a checkpoint in that precision."""
    for name, precision in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float64", torch.float64)):
        loaded = load_model(str(tiny_llama), device="cpu", dtype=name).hf_model
        direct = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=precision)
        assert {weight.dtype for weight in loaded.parameters()} == {precision}
        assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(loaded.model.rotary_emb.inv_freq, direct.model.rotary_emb.inv_freq)
        loaded.set_attn_implementation("eager")
        direct.set_attn_implementation("eager")
        with torch.no_grad():
            assert torch.equal(loaded(TOKENS).logits, direct(TOKENS).logits)


def test_saved_buffers_are_weights(tiny_llama: Path) -> None:
    model: Any = torch.nn.Module()
    model.register_buffer("saved", torch.ones(2))
    model.register_buffer("computed", torch.ones(2), persistent=False)
    model.register_buffer("counter", torch.ones(2, dtype=torch.int64))
    model.weight = torch.nn.Parameter(torch.ones(2))
    in_precision(model, torch.float16)
    kinds = [tensor.dtype for tensor in (model.weight, model.saved, model.computed, model.counter)]
    assert kinds == [torch.float16, torch.float16, torch.float32, torch.int64]


def test_spread_over_one_device_is_that_device(tiny_llama: Path) -> None:
    spread, plain = (load_model(str(tiny_llama), device=device) for device in (SPREAD, "auto"))
    assert spread.device == plain.device
    assert all(torch.equal(spread.sites[i].q, plain.sites[i].q) for i in range(3))
    assert all(check.passed for check in spread.acceptance)


def test_spread_is_refused_where_it_cannot_be(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="random weights are drawn on one device"):
        load_model(str(tiny_llama), device=SPREAD, random_seed=0)
    with pytest.raises(UserError, match="choose auto, cpu, cuda, cuda:N or spread"):
        resolve_device("spreads")
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs accelerate, which is not installed: pip install 'accelerate>=1.1'"):
        spread_options()


@pytest.mark.parametrize("family", grid(["llama", "phi3", "qwen2_moe"], ["llama", "qwen2_moe"]))
def test_a_model_that_is_spread_is_read_like_one_in_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of its layers, of a neuron, and of what edits cost; weights that are away are fetched and let go."""
    directory = save_tiny(family, tmp_path / "model")
    whole = load_model(str(directory), device="cpu")
    places = {"device_map": PLACES, "offload_folder": str(tmp_path / "folder")}
    monkeypatch.setattr("hooks.loading.sources.spread_options", lambda: places)
    spread = load_model(str(directory), device=SPREAD)
    assert spread.bridge is None
    assert all(check.passed for check in spread.acceptance)
    found = []
    for model in (whole, spread):
        text = model.read(context=48, max_tokens=400)
        run = analyze(model, text, quiet=True)
        costs = measure_causal(model, text, run, mode="both", edits=["exchange", "flip"], n_tokens=96)
        place = "1:2:5" if model.mixtures else "1:5"
        found.append((layers_table(run), costs, inspect_neuron(model, text, place, quiet=True)))
    (tables, costs, neuron), (theirs, their_costs, their_neuron) = found
    for column in tables.select_dtypes("number"):
        np.testing.assert_allclose(theirs[column], tables[column], rtol=1e-4, atol=1e-7, err_msg=column)
    for index in tables["layer"]:
        torch.testing.assert_close(their_costs.sweep.layers[index].single, costs.sweep.layers[index].single)
        torch.testing.assert_close(their_costs.attribution.neurons(index), costs.attribution.neurons(index))
    assert their_neuron.readouts["v"].highest[0][0] == neuron.readouts["v"].highest[0][0]
    assert neuron.similar["qk"][0].neuron == their_neuron.similar["qk"][0].neuron
    away = [name for name, weight in spread.hf_model.named_parameters() if weight.is_meta]
    assert any("layers.1.mlp" in name for name in away)
    if family == "llama":
        with pytest.raises(UserError, match="weights of layer 1 are offloaded"), acting(spread, {1: Exchange()}):
            pass


def test_a_dequantized_model_is_spread_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny("llama", tmp_path / "model")
    rewrite(
        directory,
        {"quant_method": "fp8", "weight_block_size": None},
        lambda name, weight: {name: weight.to(E4M3), f"{name}_scale": torch.tensor(0.5)},
    )
    source = locate(str(directory), None, trust_remote_code=False)
    whole, _ = load_files(source, torch.float32, trust_remote_code=False)
    places = {"device_map": PLACES, "offload_folder": str(tmp_path / "folder")}
    monkeypatch.setattr("hooks.loading.sources.spread_options", lambda: places)
    model, _ = load_files(source, torch.float32, trust_remote_code=False, spread=True)
    assert is_spread(model)
    for name, weight in weights_of(model).items():
        assert torch.equal(weight, whole.state_dict()[name]), name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
