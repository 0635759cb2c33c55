"""Every site is what it says: read against the model's own modules, and refused when it is not."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from analysis.conversions import absorbed_biases, extended
from analysis.errors import UserError
from hooks.models import load_model
from hooks.sites import find_sites
from tests.tiny import CONFIGS, GATED, save_tiny

TOKENS = torch.arange(3, 43).reshape(2, 20)
GATES = {"gemma2": lambda z: functional.gelu(z, approximate="tanh"), "relu": functional.relu}
GATES["gemma3"] = GATES["gemma2"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: save_tiny(family, root / family) for family in CONFIGS}


def read_directly(directory: Path, layer: int) -> dict[str, Tensor]:
    """x, a, b, h and y of one MLP from the Hugging Face model alone, by hooks on its own modules."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    mlp, seen = model.model.layers[layer].mlp, {}

    def watch(module: nn.Module, name: str) -> None:
        module.register_forward_hook(lambda _, inputs, output: seen.update({f"{name}_in": inputs[0], name: output}))

    watch(mlp, "mlp")
    watch(mlp.down_proj, "down")
    for name in ("gate_proj", "up_proj", "gate_up_proj"):
        if hasattr(mlp, name):
            watch(getattr(mlp, name), name)
    with torch.no_grad():
        model(TOKENS)
    fused = seen.get("gate_up_proj")
    a, b = (seen["gate_proj"], seen["up_proj"]) if fused is None else fused.chunk(2, dim=-1)
    return {"x": seen["mlp_in"], "a": a, "b": b, "h": seen["down_in"], "y": seen["mlp"]}


@pytest.mark.parametrize("family", GATED)
def test_hooks_read_what_the_models_own_modules_compute(directories: dict[str, Path], family: str) -> None:
    model = load_model(str(directories[family]), device="cpu")
    assert list(model.sites) == list(range(CONFIGS[family].num_hidden_layers))
    assert model.skipped == {}
    assert all(check["passed"] for check in model.acceptance)
    for layer, site in model.sites.items():
        expected = read_directly(directories[family], layer)
        names = (site.hook_a, site.hook_b, site.hook_h)
        with torch.no_grad():
            _, seen = model.bridge.run_with_cache(TOKENS, names_filter=list(names), return_type=None)
        for name, symbol in zip(names, "abh", strict=True):
            torch.testing.assert_close(seen[name], expected[symbol], rtol=1e-4, atol=1e-4)
        gate = GATES.get(family, functional.silu)
        torch.testing.assert_close(site.unit(expected["a"], expected["b"]), gate(expected["a"]) * expected["b"])
        form, rows = site.gated_mlp(), expected["x"].flatten(0, 1)
        torch.testing.assert_close(form(rows), expected["y"].flatten(0, 1), rtol=1e-4, atol=1e-4)
        assert form.has_biases == (family == "llama-bias")
        absorbed = absorbed_biases(form)(extended(rows))
        torch.testing.assert_close(absorbed[:, :-1], expected["y"].flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "source"),
    [
        ("llama", "ln2, γ = weight"),
        ("gemma3", "ln2, γ = 1 + weight"),
        ("cohere", "ln1, γ = weight"),
        ("olmo2", "none: the MLP does not read a norm's output"),
    ],
)
def test_the_gain_is_that_of_the_norm_before_the_mlp(directories: dict[str, Path], family: str, source: str) -> None:
    site = load_model(str(directories[family]), device="cpu").sites[1]
    assert site.gain_source == source
    layer = AutoModelForCausalLM.from_pretrained(directories[family]).model.layers[1]
    expected = {
        "llama": lambda: layer.post_attention_layernorm.weight,
        "gemma3": lambda: 1 + layer.pre_feedforward_layernorm.weight,
        "cohere": lambda: layer.input_layernorm.weight,
        "olmo2": lambda: torch.ones(32),
    }[family]()
    torch.testing.assert_close(site.gain, expected.detach())


def test_a_swap_of_the_fused_halves_is_caught(directories: dict[str, Path]) -> None:
    model = load_model(str(directories["phi3"]), device="cpu")
    mlp = model.bridge.blocks[1].mlp
    gate, up = mlp.gate.original_component, getattr(mlp, "in").original_component
    mlp.gate.set_original_component(up)
    getattr(mlp, "in").set_original_component(gate)
    sites, skipped = find_sites(model.bridge, TOKENS)
    assert list(sites) == [0, 2]
    assert "MLP output from q, k, v is off by" in skipped[1]


class Wavy(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return functional.silu(z) + 0.01 * z.sin()


def test_a_unit_that_is_not_known_is_no_site(directories: dict[str, Path]) -> None:
    model = load_model(str(directories["llama"]), device="cpu")
    model.bridge.blocks[0].mlp.original_component.act_fn = Wavy()
    sites, skipped = find_sites(model.bridge, TOKENS)
    assert list(sites) == [1, 2]
    assert "not σ(a)·b for any known σ" in skipped[0]
    assert "the model says silu" in skipped[0]


def test_the_activation_is_what_the_model_does_not_what_it_says(directories: dict[str, Path]) -> None:
    model = load_model(str(directories["llama"]), device="cpu")
    for block in model.bridge.blocks:
        block.mlp.original_component.act_fn = nn.GELU()
    sites, _ = find_sites(model.bridge, TOKENS)
    assert {site.unit.name for site in sites.values()} == {"gelu"}


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt2", "static key-value memories.*no key to exchange"), ("mixtral", "mixtures of experts, whose gate is a router")],
)
def test_models_without_a_gated_layer_are_refused(directories: dict[str, Path], family: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_model(str(directories[family]), device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_proves_its_sites(directories: dict[str, Path], dtype: str) -> None:
    model = load_model(str(directories["qwen3"]), device="cpu", dtype=dtype)
    assert len(model.sites) == 3
    assert all(check["passed"] for check in model.acceptance)
