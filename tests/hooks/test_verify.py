"""A layer is read only where it proves itself; what is not a gated MLP is refused with what it is instead."""

import copy
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from analysis.errors import UserError
from analysis.theory.conversions import absorbed_biases, extended
from hooks.collect import analyze
from hooks.loading.network import blocks_of, run_network
from hooks.locating.expected import Expected, VerificationError
from hooks.locating.expert_weights import fused_experts_of
from hooks.locating.norm_gains import NOT_VERIFIED, NOTHING_AFTER, NOTHING_BEFORE
from hooks.locating.projections import Candidate, Projection, candidates_of
from hooks.locating.recording import Recording, record
from hooks.locating.verify import find_sites
from hooks.locating.verify_dense import verify_candidate
from hooks.locating.verify_experts import ExpertsVerifier
from hooks.models import load_model
from tests.helpers.families import Families, grid
from tests.helpers.mlps_by_hand import layers_of, load_plain
from tests.helpers.tiny import DENSE, MIXTURES, UNGATED, save_tiny, tiny_model

TOKENS = torch.arange(3, 43).reshape(2, 20)
WITH_BRIDGE = ("llama", "llama-bias", "gemma2", "gemma3", "qwen3", "phi3", "glm4", "olmo2", "cohere", "granite", "stablelm")


@pytest.mark.parametrize("family", grid(WITH_BRIDGE))
def test_the_hooks_of_transformerlens_see_the_same(families: Families, family: str) -> None:
    """By the names that a site gives, against the modules of a model that TransformerLens has never recording."""
    model, plain = families.loaded(family), load_plain(families.directory(family), family)
    assert model.bridge is not None
    for index, site in model.sites.items():
        mlp, recording = layers_of(plain, family)[index].mlp, {}
        handle = mlp.down_proj.register_forward_hook(lambda _, h, y, recording=recording: recording.update(h=h[0], y=y))
        with torch.no_grad():
            plain(TOKENS)
            _, cache = model.bridge.run_with_cache(TOKENS, names_filter=list(site.hook_names.values()), return_type=None)
        handle.remove()
        for symbol in "hy":
            torch.testing.assert_close(cache[site.hook_names[symbol]], recording[symbol], rtol=1e-4, atol=1e-4)
        a, b, x = (cache[site.hook_names[symbol]] for symbol in "abx")
        torch.testing.assert_close(site.unit(a, b), recording["h"], rtol=1e-4, atol=1e-4)
        form, rows = site.gated_mlp(), x.flatten(0, 1)
        torch.testing.assert_close(form(rows), recording["y"].flatten(0, 1), rtol=1e-4, atol=1e-4)
        assert form.has_biases == (family == "llama-bias")
        absorbed = absorbed_biases(form)(extended(rows))
        torch.testing.assert_close(absorbed[:, :-1], recording["y"].flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "t5", "gemma3n", "falcon_h1"])
def test_layers_without_a_view_in_transformerlens_have_no_names(families: Families, family: str) -> None:
    """The hook that is called gate in a mixture of experts is its router."""
    model = families.loaded(family)
    assert len(model.sites) + len(model.mixtures) == model.description["n_layers"]
    assert not any(site.hook_names for site in model.sites.values())
    assert not any(site.hook_names for mixture in model.mixtures.values() for site in mixture.sites)
    said = next((check.value for check in model.acceptance if "TransformerLens" in check.what), "")
    assert (model.bridge is None) == (str(said).startswith("none: TransformerLens") or family == "t5")


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", ("post_attention_layernorm", 0), NOTHING_AFTER),
        ("gemma3", ("pre_feedforward_layernorm", 1), ("post_feedforward_layernorm", 1)),
        ("gemma2", ("pre_feedforward_layernorm", 1), ("post_feedforward_layernorm", 1)),
        ("cohere", ("input_layernorm", 0), NOTHING_AFTER),
        ("olmo2", None, ("post_feedforward_layernorm", 0)),
        ("exaone4", None, ("post_feedforward_layernorm", 0)),
        ("glm4", ("post_attention_layernorm", 0), ("post_mlp_layernorm", 0)),
        ("granite", ("post_attention_layernorm", 0), 0.5),
        ("falcon_h1", ("pre_ff_layernorm", 0), 0.9),
        ("granitemoe", ("post_attention_layernorm", 0), 0.5),
        ("granitemoehybrid", ("post_attention_layernorm", 0), 0.5),
        ("llama4", ("post_attention_layernorm", 0), NOTHING_AFTER),
        ("dbrx", ("norm_attn_norm.norm_2", 0), NOTHING_AFTER),
        ("t5", ("layer.1.layer_norm", 0), NOTHING_AFTER),
        ("modernbert", ("mlp_norm", 0), NOTHING_AFTER),
        ("gemma3n", ("pre_feedforward_layernorm", 0), NOT_VERIFIED),
    ],
)
@pytest.mark.parametrize("dtype", grid(["float64", "float32", "bfloat16"], ["float32"]))
def test_what_stands_before_and_after_the_mlp_is_folded(
    families: Families, family: str, before: Any, after: Any, dtype: str
) -> None:
    """Gains of norms in the form that the model has them, multipliers of the configuration, attention before or beside."""
    model = families.loaded(family, dtype)
    block = layers_of(load_plain(families.directory(family), family).to(getattr(torch, dtype)), family)[1]
    sites = [model.sites[1]] if 1 in model.sites else model.mixtures[1].sites
    for site in sites:
        expected = torch.ones(32, dtype=site.gain.dtype)
        if before is None:
            assert site.gain_source == NOTHING_BEFORE
        else:
            name, offset = before
            expected = block.get_submodule(name).weight + offset
            assert site.gain_source == f"{name}, γ = {'1 + ' * offset}weight"
        torch.testing.assert_close(site.gain, expected.detach())
        expected = torch.ones(32, dtype=site.gain.dtype)
        if isinstance(after, str):
            assert site.value_gain_source == after
        elif isinstance(after, float):
            expected = after * expected
            assert site.value_gain_source.startswith(f"× {after:g} (")
        else:
            expected = block.get_submodule(after[0]).weight + after[1]
            assert site.value_gain_source == f"{after[0]}, γ = {'1 + ' * after[1]}weight"
        torch.testing.assert_close(site.value_gain, expected.detach())


def test_what_is_added_to_the_residual_stream_is_the_gained_output(families: Families) -> None:
    """Of a granite, whose multiplier no module holds: the block's output with the MLP and without it."""
    model = families.loaded("granite")
    plain, given, gave = load_plain(families.directory("granite"), "granite"), {}, []
    block = plain.model.layers[1]
    block.mlp.register_forward_hook(lambda _, x, y: given.update(x=x[0]))
    handle = block.register_forward_hook(lambda *recording: gave.append(recording[-1]))
    with torch.no_grad():
        plain(TOKENS)
        block.mlp.down_proj.weight.zero_()
        plain(TOKENS)
    handle.remove()
    form = model.sites[1].gated_mlp()
    added = form(given["x"].flatten(0, 1)) * model.sites[1].value_gain
    torch.testing.assert_close((gave[0] - gave[1]).flatten(0, 1), added, rtol=1e-3, atol=1e-4)


def seen_in(model: nn.Module, layer: int) -> Recording:
    """What passes the modules of a block on the probe."""
    found: list[Recording] = []

    def keep(recording: Recording) -> None:
        found.append(replace(recording, calls=dict(recording.calls), fired=recording.fired.copy()))

    with ExitStack() as stack, torch.no_grad():
        record(blocks_of(model, model.config.num_hidden_layers)[layer], keep, stack)
        run_network(model, TOKENS)
    return found[0]


@pytest.mark.parametrize("family", ["phi3", "glm4", "modernbert"])
def test_a_swap_of_the_fused_halves_is_caught(family: str) -> None:
    """Of the four ways in which one projection may hold two, one proves itself, and it is the family's own."""
    model = tiny_model(family)
    recording = seen_in(model, 1)
    expected, proved = Expected(model.config, {}), []
    for candidate in candidates_of(recording.block):
        with torch.no_grad(), suppress(VerificationError):
            proved.append(verify_candidate(expected, 1, candidate, recording)[0].projections)
    assert len(list(candidates_of(recording.block))) >= 4
    assert [(candidate.gate.rows, candidate.up.rows) for candidate in proved] == [(slice(0, 48), slice(48, 96))]


def test_experts_one_under_the_other_are_parted_and_told_apart() -> None:
    """Of all orders of three tables, and numbers of experts by which they can be parted, the family's own proves itself."""
    model = tiny_model("dbrx")
    recording = seen_in(model, 1)
    mixtures, proved = ExpertsVerifier(Expected(model.config, {})), []
    candidates = list(fused_experts_of(recording.block, 32))
    for expert_weights in candidates:
        with torch.no_grad(), suppress(VerificationError):
            mixtures.verified_unit(1, expert_weights, recording)
            proved.append(
                (
                    expert_weights.path,
                    expert_weights.gate.name,
                    expert_weights.up.name,
                    expert_weights.down.name,
                    expert_weights.n_experts,
                )
            )
    assert {candidate.n_experts for candidate in candidates} == {4, 24, 32}
    assert proved == [("ffn.experts", "w1", "v1", "w2", 4)]


def test_tables_that_are_told_no_experts_are_none() -> None:
    """Three of one shape beside an MLP, in a module that holds a number by which they can be parted."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = 4
            for name in "abc":
                self.register_parameter(name, nn.Parameter(torch.randn(96, 32)))

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.silu(x @ self.a.T) @ self.b

    model = tiny_model("llama")
    model.model.layers[1].self_attn.register_module("more", Tables())
    model.model.layers[1].self_attn.register_forward_hook(lambda module, _, output: (module.more(output[0]), *output[1:]))
    assert any(expert_weights.is_flat for expert_weights in fused_experts_of(model.model.layers[1], 32))
    assert list(find_sites(model, TOKENS).sites) == [0, 1, 2]


def test_what_is_applied_to_the_routed_experts_alone_is_theirs(families: Families) -> None:
    """Their sum is multiplied before the shared expert is added; anything else that is added is still no part of them."""
    model = families.loaded("minimax_m3")
    for mixture in model.mixtures.values():
        assert {site.value_gain_source for site in mixture.routed} == {"× 2.5 (routed_scaling_factor)"}
        assert all(torch.equal(site.value_gain, torch.full((32,), 2.5)) for site in mixture.routed)
        assert mixture.shared is not None
        assert mixture.shared.value_gain_source == NOTHING_AFTER
    plain = tiny_model("minimax_m3")
    plain.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output + 0.1 * inputs[0])
    found = find_sites(plain, TOKENS)
    assert list(found.mixtures) == [2]
    assert "its experts do not add up to the layer's output, off by" in found.skipped[1]


def test_a_router_taken_for_a_gate_is_caught() -> None:
    """As wide as a gate and in its place, but what it gives weighs nothing: the identity says so."""

    class Routed(nn.Module):
        def __init__(self, like: nn.Module) -> None:
            super().__init__()
            self.gate, self.up_proj, self.down_proj = nn.Linear(32, 48), like.up_proj, like.down_proj

        def forward(self, x: Tensor) -> Tensor:
            self.loss = self.gate(x).softmax(dim=-1).square().sum()
            return self.down_proj(functional.silu(self.up_proj(x)))

    model = tiny_model("llama")
    model.model.layers[1].mlp = Routed(model.model.layers[1].mlp)
    found = find_sites(model, TOKENS)
    assert list(found.sites) == [0, 2]
    assert "h is not g(a, b) for any known g (nearest" in found.skipped[1]
    assert found.skipped[1].endswith("; projections of mlp)")


class Wavy(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return functional.silu(z) + 0.01 * z.sin()


def test_a_unit_that_is_not_known_is_no_site() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = Wavy()
    found = find_sites(model, TOKENS)
    assert list(found.sites) == [1, 2]
    assert "h is not g(a, b) for any known g (nearest silu" in found.skipped[0]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_activation_is_what_the_model_does_not_what_it_says(family: str) -> None:
    model = tiny_model(family)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()
    found = find_sites(model, TOKENS)
    assert {layer.unit.name for layer in (*found.sites.values(), *found.mixtures.values())} == {"gelu"}


def of_mixtral(change: Callable[[nn.Module], None]) -> str:
    """Why layer 1 of a mixtral is refused after a change of its mixture."""
    model = tiny_model("mixtral")
    change(model.model.layers[1].mlp)
    found = find_sites(model, TOKENS)
    assert list(found.mixtures) == [0, 2]
    return found.skipped[1]


def test_a_mixture_that_does_anything_else_is_refused() -> None:
    def other_unit(mlp: nn.Module) -> None:
        mlp.experts.act_fn = Wavy()

    def more(mlp: nn.Module) -> None:
        mlp.register_forward_hook(lambda module, inputs, output: output + 0.1 * inputs[0])

    def other_weights(mlp: nn.Module) -> None:
        mlp.experts.register_forward_hook(lambda module, inputs, output: output * inputs[2].square().sum(-1, keepdim=True))

    assert "the output of its experts is not Σ r·g(a, b) v for any known g (nearest silu" in of_mixtral(other_unit)
    assert "its experts do not add up to the layer's output, off by" in of_mixtral(more)
    assert "the output of its experts is not Σ r·g(a, b) v" in of_mixtral(other_weights)


def test_a_shared_experts_weight_must_be_found() -> None:
    model = tiny_model("qwen2_moe")
    mlp = model.model.layers[1].mlp
    mlp.shared_expert_gate.register_forward_hook(lambda module, inputs, output: output + 1)  # still σ of what it gives
    assert list(find_sites(model, TOKENS).mixtures) == [0, 1, 2]
    mlp.shared_expert.register_forward_hook(lambda module, inputs, output: output * inputs[0].abs().mean(-1, keepdim=True))
    found = find_sites(model, TOKENS)
    assert list(found.mixtures) == [0, 2]
    assert "its shared expert has a weight for every token, which no module of the block computes" in found.skipped[1]


@pytest.mark.parametrize("family", UNGATED)
def test_models_without_a_gated_layer_are_refused(families: Families, family: str) -> None:
    reason = {
        "bitnet": "h is not g(a, b) for any known g",
        "nemotron_h": "no gated MLP that can be analysed",
    }.get(family, "static key-value memory σ(xKᵀ)V, in which there is no key to exchange with the query")
    with pytest.raises(UserError) as refusal:
        families.loaded(family)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("family", grid(["qwen3", "phi3", "mixtral", "qwen2_moe", "gpt_oss", "dbrx"], ["phi3", "gpt_oss"]))
def test_every_dtype_proves_its_layers(families: Families, dtype: str, family: str) -> None:
    model = families.loaded(family, dtype)
    assert len(model.sites) + len(model.mixtures) == 3
    assert all(check.passed for check in model.acceptance), model.acceptance
    units = {layer.unit.name for layer in (*model.sites.values(), *model.mixtures.values())}
    assert units == {"gpt_oss" if family == "gpt_oss" else "silu"}


def test_taps_of_one_projection_are_views(families: Families) -> None:
    """Weights that are changed through a site are the model's own."""
    model = families.loaded("phi3")
    site, fused = model.sites[0], model.hf_model.model.layers[0].mlp.gate_up_proj.weight
    assert site.q.data_ptr() == fused.data_ptr()
    assert torch.equal(site.k, fused[48:])
    candidate = Candidate(
        "", Projection(nn.Linear(4, 6), slice(0, None, 2)), Projection(nn.Linear(4, 6), slice(1, None, 2)), nn.Linear(3, 4)
    )
    assert torch.equal(candidate.gate.weight, candidate.gate.module.weight[::2])
    assert torch.equal(candidate.up.of(torch.arange(6.0)[None]), torch.tensor([[1.0, 3.0, 5.0]]))


@pytest.mark.parametrize("family", grid([name for name in (*DENSE, *MIXTURES) if name not in ("t5", "modernbert")]))
def test_a_model_that_is_loaded_computes_what_its_authors_wrote(families: Families, family: str) -> None:
    model = families.loaded(family)
    with torch.no_grad():
        mine, theirs = (
            model.hf_model(TOKENS).logits,
            AutoModelForCausalLM.from_pretrained(families.directory(family))(TOKENS).logits,
        )
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_what_the_model_changes_in_place_is_heard_as_it_was_given(tmp_path: Path) -> None:
    """An activation that overwrites the gate: the same numbers as where it does not."""
    directory = save_tiny("llama", tmp_path / "model")
    model, changed = load_model(str(directory), device="cpu"), load_model(str(directory), device="cpu")

    def forward(mlp: nn.Module, x: Tensor) -> Tensor:
        gate = mlp.gate_proj(x)
        functional.silu(gate, inplace=True)
        return mlp.down_proj(gate * mlp.up_proj(x))

    for layer in changed.hf_model.model.layers:
        layer.mlp.forward = partial(forward, layer.mlp)
    changed = replace(changed, located=find_sites(changed.hf_model, TOKENS), bridge=None)
    assert all(site.in_place for site in changed.sites.values())
    assert not any(site.in_place for site in model.sites.values())
    text = model.read(context=32, max_tokens=160)
    mine, theirs = (analyze(one, text, quiet=True).layers[1].moments.neuron.values for one in (model, changed))
    torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-9)


def test_modules_of_several_layers_are_refused() -> None:
    """What is captured at them in one pass is of all these layers."""
    for family, shared in (("llama", "mlp"), ("mixtral", "mlp")):
        model = tiny_model(family)
        setattr(model.model.layers[2], shared, getattr(model.model.layers[0], shared))
        found = find_sites(model, TOKENS)
        assert [*found.sites, *found.mixtures] == [1]
        assert {found.skipped[layer] for layer in (0, 2)} == {"its projections also belong to another layer"}
    model = tiny_model("llama")
    model.model.layers[2] = model.model.layers[0]
    found = find_sites(model, TOKENS)
    assert list(found.sites) == [1]
    assert "its block is also that of another layer" in found.skipped[2]
    model = tiny_model("mixtral")
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = Twice(mlp)
    assert "its experts ran 2 times on the probe, expected once" in find_sites(model, TOKENS).skipped[1]


class Twice(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x.roll(1, dims=1))


def test_experts_that_the_probe_does_not_reach_are_proved_too() -> None:
    model = tiny_model("mixtral")
    experts, called = model.model.layers[1].mlp.experts, []
    forward = experts.forward

    def swapped(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As it is, but gate and up change places in expert 3, which no token of the probe is sent to."""
        called.append(index)
        kept = experts.gate_up_proj.data.clone()
        experts.gate_up_proj.data[3] = kept[3].roll(48, dims=0)
        found = forward(x, index, weights)
        experts.gate_up_proj.data.copy_(kept)
        return found

    experts.forward = swapped
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda _, x, out: (out[0], out[1], out[2].clamp(max=2)))
    found = find_sites(model, TOKENS)
    assert all(int(index.max()) < 3 for index in called[:1])
    assert "an expert that the probe did not reach is off by" in found.skipped[1]


def test_a_layers_own_limit_is_tried_before_the_unit_of_the_last_layer() -> None:
    """Limits that nothing reaches on the probe, one a layer, as some families have them."""
    model = tiny_model("mixtral")
    for layer, limit in zip(model.model.layers, (float("inf"), float("inf"), 1e3), strict=True):
        layer.mlp.experts.limit = limit
    units = {index: mixture.unit.name for index, mixture in find_sites(model, TOKENS).mixtures.items()}
    assert units == {0: "silu", 1: "silu", 2: "clamped(silu,1000)"}


def test_two_modules_of_experts_in_one_block_are_refused() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp.more = copy.deepcopy(model.model.layers[1].mlp.experts)
    assert "it has 2 modules of experts in parallel" in find_sites(model, TOKENS).skipped[1]


def test_a_factor_that_a_norm_has_in_its_code_belongs_to_its_gain() -> None:
    model = tiny_model("llama")
    norm = model.model.layers[1].post_attention_layernorm
    norm.register_forward_hook(lambda module, inputs, output: 2 * output)
    site = find_sites(model, TOKENS).sites[1]
    torch.testing.assert_close(site.gain, 2 * norm.weight.detach(), rtol=1e-4, atol=1e-6)
    assert site.gain_source == "post_attention_layernorm, γ = weight, × 2 (as measured)"


def test_equal_weights_of_a_norm_are_told_by_their_size() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.post_attention_layernorm.weight.data.fill_(0.3)
    sites = find_sites(model, TOKENS).sites.values()
    assert {site.gain_source for site in sites} == {"post_attention_layernorm, γ = weight"}
    assert all(torch.allclose(site.gain, torch.tensor(0.3)) for site in sites)


def test_a_model_that_does_not_run_is_refused_in_one_line(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4, "num_attention_heads": 2}))
    with pytest.raises(UserError) as refusal:
        load_model(str(directory), device="cpu")
    assert "\n" not in str(refusal.value)
