"""Edits of whole models: what they do is what another forward of the MLP does, and afterwards nothing has happened."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from analysis.causal.divergence import kl_divergence, log_probabilities
from analysis.causal.edits import Change, EditCoefficients, PlainExchange, make_edit
from analysis.errors import UserError
from analysis.theory.actions import Action, Exchange, Permutation, Scaling, ValueRescaling
from hooks.models import LoadedModel, load_model
from hooks.patching.interventions import acting, rewriting
from hooks.patching.partial_pass import clean_pass, full_pass, pass_from_layer
from tests.helpers.by_hand import BY_HAND, KNOWN, KNOWN_MIXTURES, by_hand, edit_by_hand, experts_by_hand, plain_model
from tests.helpers.tiny import VOCABULARY, save_tiny

TOKENS = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(5))
NO_FIT = EditCoefficients(*(torch.zeros(48, dtype=torch.float64) for _ in range(4)))


def logits(model: LoadedModel) -> Tensor:
    with torch.no_grad():
        return full_pass(model, TOKENS)


def change(model: LoadedModel, layer: int, name: str) -> Change:
    return Change(make_edit(name, NO_FIT), model.layers[layer].unit)


@pytest.fixture(scope="module", params=[*KNOWN, *KNOWN_MIXTURES])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoadedModel]:
    directory = save_tiny(request.param, tmp_path_factory.mktemp("edited") / request.param)
    return directory, load_model(str(directory), device="cpu")


def test_an_edited_model_is_the_model_with_another_mlp(family: tuple[Path, LoadedModel]) -> None:
    directory, model = family
    plain = plain_model(directory)
    clean = logits(model)
    for name in ("exchange", "flip"):
        for layers in ((1,), (0, 2)):
            with rewriting(model, {layer: change(model, layer, name) for layer in layers}):
                found = logits(model)
            with torch.no_grad(), ExitStack() as stack:
                for layer in layers:
                    if layer in model.mixtures:
                        stack.enter_context(experts_by_hand(plain, layer, name))
                    else:
                        stack.enter_context(by_hand(plain, {layer: edit_by_hand(name)}))
                expected = plain(TOKENS).logits
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
            assert not torch.allclose(found, clean, rtol=1e-3, atol=1e-3)
    assert torch.equal(logits(model), clean)


@pytest.mark.parametrize("name", BY_HAND)
def test_every_edit_is_what_it_says(tiny_llama: Path, llama: LoadedModel, name: str) -> None:
    plain = plain_model(tiny_llama)
    with rewriting(llama, {1: change(llama, 1, name)}):
        found = logits(llama)
    with torch.no_grad(), by_hand(plain, {1: edit_by_hand(name)}):
        torch.testing.assert_close(found, plain(TOKENS).logits, rtol=1e-3, atol=1e-4)


def test_a_suffix_is_the_end_of_a_whole_pass(family: tuple[Path, LoadedModel]) -> None:
    """From every layer on, edited there and later; and an input that is not the clean one is not ignored."""
    _, model = family
    window = model.read(context=24, max_tokens=60).windows[1]
    clean, inputs = clean_pass(model, window, {})
    assert torch.equal(clean, full_pass(model, window.tokens[None]))
    for layer in range(len(inputs)):
        changes = {later: change(model, later, "flip") for later in range(layer, len(inputs))}
        found, kept = pass_from_layer(model, layer, inputs[layer].repeat(3, 1, 1), window, changes, keep=len(inputs) - 1)
        with torch.no_grad(), rewriting(model, changes):
            whole = full_pass(model, window.tokens[None])
        size = 1e-5 * float(whole.abs().max())
        torch.testing.assert_close(found, whole.repeat(3, 1, 1), rtol=1e-4, atol=size)
        assert kept is not None
        moved, _ = pass_from_layer(model, layer, 1.3 * inputs[layer][None], window, {})
        assert not torch.allclose(moved, clean, rtol=1e-3, atol=1e-3)
    assert torch.equal(full_pass(model, window.tokens[None]), clean)


def test_fitted_edits_use_each_neurons_own_number(tiny_llama: Path, llama: LoadedModel) -> None:
    numbers = torch.randn(4, 48, dtype=torch.float64)
    fit = EditCoefficients(*numbers)
    plain, act = plain_model(tiny_llama), torch.nn.functional.silu
    c, p, m, beta = numbers.float()
    for name, unit in {
        "bilinear": lambda seen: c * seen.gate * seen.up,
        "placement": lambda seen: p * act(seen.gate * seen.up),
        "mean": lambda seen: m + 0 * seen.gate,
        "exchange-balanced": lambda seen: act(beta * seen.up) * seen.gate / beta,
    }.items():
        with rewriting(llama, {1: Change(make_edit(name, fit), llama.sites[1].unit)}):
            found = logits(llama)
        with torch.no_grad(), by_hand(plain, {1: unit}):
            torch.testing.assert_close(found, plain(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_an_edit_can_be_limited_to_neurons_and_positions(tiny_llama: Path, llama: LoadedModel) -> None:
    positions, neurons = torch.zeros(2, 20, dtype=torch.bool), torch.tensor([3, 40])
    positions[0, 5:9], positions[1, 7] = True, True
    limited = Change(PlainExchange(), llama.sites[1].unit, neurons, positions)
    with rewriting(llama, {1: limited}):
        found = logits(llama)
    chosen = positions[..., None] & torch.isin(torch.arange(48), neurons)
    plain = plain_model(tiny_llama)
    unit = edit_by_hand("exchange")
    with torch.no_grad(), by_hand(plain, {1: lambda seen: torch.where(chosen, unit(seen), seen.h)}):
        torch.testing.assert_close(found, plain(TOKENS).logits, rtol=1e-4, atol=1e-4)
    clean = logits(llama)
    assert torch.equal(found[0, :5], clean[0, :5])  # nothing before the first edited position has changed
    assert torch.equal(found[1, :7], clean[1, :7])
    assert not torch.equal(found[1, 7], clean[1, 7])


def test_blocks_nest_and_the_inner_one_has_the_last_word(llama: LoadedModel) -> None:
    clean = logits(llama)
    with rewriting(llama, {1: change(llama, 1, "exchange")}):
        outer = logits(llama)
        with rewriting(llama, {1: change(llama, 1, "zero"), 2: change(llama, 2, "flip")}):
            inner = logits(llama)
        assert torch.equal(logits(llama), outer)
    with rewriting(llama, {1: change(llama, 1, "zero"), 2: change(llama, 2, "flip")}):
        assert torch.equal(logits(llama), inner)
    assert torch.equal(logits(llama), clean)


ACTIONS: dict[str, Action] = {
    "rescaling": ValueRescaling(torch.tensor([3.0])),
    "turning": ValueRescaling(torch.tensor([-1.0])),
    "permutation": Permutation(torch.randperm(48, generator=torch.Generator().manual_seed(2))),
    "exchange": Exchange(),
    "scaling": Scaling(2.0),
}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_restored_bit_for_bit(llama: LoadedModel, name: str, fails: bool) -> None:
    before = {key: weight.clone() for key, weight in llama.bridge.original_model.state_dict().items()}
    clean, hooks = logits(llama), count_of_hooks(llama)
    try:
        with acting(llama, {0: ACTIONS[name], 2: ACTIONS[name]}), rewriting(llama, {1: change(llama, 1, "flip")}):
            changed = logits(llama)
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert not torch.equal(changed, clean)
    after = llama.bridge.original_model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(logits(llama), clean)
    assert count_of_hooks(llama) == hooks


def count_of_hooks(model: LoadedModel) -> int:
    modules = list(model.bridge.modules())
    assert not any("forward" in vars(module) for module in model.bridge.blocks)
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def test_a_pass_that_fails_leaves_no_trace(llama: LoadedModel) -> None:
    def failing(*_: Tensor) -> Tensor:
        raise RuntimeError

    window = llama.read(context=24, max_tokens=60).windows[0]
    clean, inputs = clean_pass(llama, window, {})
    hooks = count_of_hooks(llama)
    for attempt in (
        lambda: clean_pass(llama, window, {1: failing}),
        lambda: pass_from_layer(llama, 2, inputs[2][None], window, {2: failing}, keep=2),
    ):
        with pytest.raises(RuntimeError):
            attempt()
        assert count_of_hooks(llama) == hooks
    assert torch.equal(full_pass(llama, window.tokens[None]), clean)


@pytest.mark.parametrize("name", ["rescaling", "turning", "permutation"])
def test_the_exact_symmetries_of_the_weights_cost_nothing(llama: LoadedModel, name: str) -> None:
    clean = log_probabilities(logits(llama)).flatten(0, 1)
    with acting(llama, dict.fromkeys(range(3), ACTIONS[name])):
        same = log_probabilities(logits(llama)).flatten(0, 1)
    assert float(kl_divergence(clean, same).mean()) < 1e-6


def test_exchanging_weights_is_exchanging_pre_activations(llama: LoadedModel) -> None:
    for name, action in (("exchange", Exchange()), ("scale:2", Scaling(2.0))):
        with acting(llama, {1: action}):
            weights = logits(llama)
        with rewriting(llama, {1: change(llama, 1, name)}):
            torch.testing.assert_close(logits(llama), weights, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_not_there(llama: LoadedModel) -> None:
    with (
        pytest.raises(UserError, match=r"layer 7 cannot be edited \(the model has layers 0-2\)"),
        rewriting(llama, {7: lambda a, b, h: h}),
    ):
        pass


def test_the_view_of_transformerlens_is_edited_too(tmp_path: Path) -> None:
    """Also where it has projections of its own, cut from one that holds both."""
    for family in ("llama", "phi3"):
        model = load_model(str(save_tiny(family, tmp_path / family)), device="cpu")
        assert model.bridge is not None
        for layers in ((0,), (0, 2)):
            with torch.no_grad(), rewriting(model, {layer: change(model, layer, "exchange") for layer in layers}):
                torch.testing.assert_close(model.bridge(TOKENS, return_type="logits"), logits(model), rtol=1e-4, atol=1e-4)
        with acting(model, {1: Exchange()}), torch.no_grad():
            torch.testing.assert_close(model.bridge(TOKENS, return_type="logits"), logits(model), rtol=1e-4, atol=1e-4)


def test_neurons_of_experts_are_edited_one_by_one(tmp_path: Path) -> None:
    """Of the shared expert and of a routed one; those of an expert that a token is not sent to change nothing there."""
    model = load_model(str(save_tiny("qwen2_moe", tmp_path / "model")), device="cpu")
    clean, plain = logits(model), plain_model(tmp_path / "model")
    mlp, seen = plain.model.layers[2].mlp, {}
    mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0], index=inputs[1], weights=inputs[2]))
    with torch.no_grad():
        plain(TOKENS)
        for column, expert in ((5, 0), (24 + 7, 1), (96 + 3, -1)):
            limited = Change(make_edit("zero", NO_FIT), model.layers[2].unit, torch.tensor([column]))
            with rewriting(model, {2: limited}):
                found = logits(model)
            if expert < 0:
                shared, neuron = mlp.shared_expert, column - 96
                gate, up = (part(seen["x"])[:, neuron] for part in (shared.gate_proj, shared.up_proj))
                weight, value = mlp.shared_expert_gate(seen["x"])[:, 0].sigmoid(), shared.down_proj.weight[:, neuron]
                reached = torch.ones(40, dtype=torch.bool)
            else:
                neuron, experts = column - 24 * expert, mlp.experts
                gate, up = (experts.gate_up_proj[expert, row] @ seen["x"].T for row in (neuron, 24 + neuron))
                value, chosen = experts.down_proj[expert, :, neuron], seen["index"] == expert
                weight, reached = (seen["weights"] * chosen).sum(dim=1), chosen.any(dim=1)
            removed = (weight * nn.functional.silu(gate) * up)[:, None] * value
            residual = removed.view(2, 20, -1)
            handle = plain.model.layers[2].register_forward_hook(lambda _, x, y, residual=residual: y - residual)
            expected = plain(TOKENS).logits
            handle.remove()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            assert torch.equal((found - clean).abs().amax(dim=-1).flatten() > 1e-6, reached)


@pytest.mark.parametrize("family", ["dbrx", "minimax_m3"])
def test_an_expert_whose_neurons_are_silent_is_one_without_values(tmp_path: Path, family: str) -> None:
    """Where experts stand one under the other, and where routed ones are multiplied and the shared one is not."""
    model = load_model(str(save_tiny(family, tmp_path / "model")), device="cpu")
    for expert, neurons in ((1, range(24, 48)), *(((-1, range(96, 136)),) if family == "minimax_m3" else ())):
        plain = plain_model(tmp_path / "model")
        with torch.no_grad():
            if family == "dbrx":
                plain.transformer.blocks[2].ffn.experts.mlp.w2[24:48] = 0
            elif expert < 0:
                plain.model.layers[2].mlp.shared_experts.down_proj.weight.zero_()
            else:
                plain.model.layers[2].mlp.experts.down_proj[1] = 0
            expected = plain(TOKENS).logits
        silent = Change(make_edit("zero", NO_FIT), model.layers[2].unit, torch.tensor(neurons))
        with rewriting(model, {2: silent}):
            found = logits(model)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(found, logits(model), rtol=1e-2, atol=1e-2)


def test_weights_of_experts_have_no_actions(tmp_path: Path) -> None:
    model = load_model(str(save_tiny("mixtral", tmp_path / "model")), device="cpu")
    with pytest.raises(UserError, match="layer 1 is a mixture of experts"), acting(model, {1: Exchange()}):
        pass
