"""Gates and ups with biases: a and b include them, so every number and every action has to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from analysis.measures import asymmetry as measures
from analysis.measures.controls import measure_controls
from analysis.sums.layout import Layout
from analysis.theory.actions import Exchange, Permutation, Scaling, ValueRescaling, residual
from analysis.theory.conversions import fitted_coefficients
from analysis.theory.gated import GatedMLP
from analysis.units.registry import unit_named
from analysis.weights.geometry import derangements
from hooks.collect import analyze
from hooks.models import load_model
from tests.helpers import reference
from tests.helpers.random_layers import Case, assert_close, assert_numbers_close, layer_numbers, layer_sums, permuted
from tests.helpers.tiny import save_tiny

D_MODEL, D_MLP = 4, 6


def biased(name: str = "silu", size: float = 1.5) -> GatedMLP:
    """A random layer with large biases."""
    generator = torch.Generator().manual_seed(0)
    bare = GatedMLP.random(unit_named(name), D_MODEL, D_MLP, generator=generator)
    assert isinstance(bare, GatedMLP)
    q_bias, k_bias = size * torch.randn(2, D_MLP, generator=generator, dtype=torch.float64)
    v_bias = torch.randn(D_MODEL, generator=generator, dtype=torch.float64)
    return replace(bare, q_bias=q_bias, k_bias=k_bias, v_bias=v_bias)


def inputs() -> Tensor:
    return torch.randn(40, D_MODEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def case_of(mlp: GatedMLP) -> Case:
    """What is read of the layer: the pre-activations, and weights without biases."""
    a, b = mlp.pre_activations(inputs())
    layout, partners = Layout.of(mlp.unit, draws=2), derangements(D_MLP, 2, 0)
    return Case(mlp.unit, ((a, b),), mlp.q, mlp.k, mlp.v, layout, partners)


@pytest.mark.parametrize("name", ["silu", "gelu", "top_k(silu,0.5)"])
def test_the_gauge_with_its_bias_changes_no_balanced_number(name: str) -> None:
    mlp = biased(name)
    beta = torch.tensor([2.0, -0.5, 3.0, -1.0, 0.2, 1.5], dtype=torch.float64)
    moved = ValueRescaling(beta)(mlp)
    assert_close(moved.k_bias, beta * mlp.k_bias)
    expected, found = (layer_numbers(case.moments, case.weight) for case in (case_of(mlp), case_of(moved)))
    gauge_free = ["exchange_balanced", "placement_balanced", "repaired exchange_balanced", "scaling"]
    gauge_free += ["scaling_null_repaired", "euler_residual", "bilinear_share", "top_token_share"]
    assert_numbers_close(*({name: of[name] for name in gauge_free} for of in (found, expected)))
    without = replace(moved, k_bias=mlp.k_bias)  # the weights alone: another layer
    other = layer_numbers(case_of(without).moments, case_of(without).weight)
    assert abs(other["exchange_balanced"] - expected["exchange_balanced"]) > 1e-3


def test_the_actions_that_hold_hold_with_biases_and_not_without() -> None:
    mlp, x = biased(), inputs()
    beta = torch.tensor([3.0], dtype=torch.float64)
    assert residual(mlp, ValueRescaling(beta), x) < 1e-14
    assert residual(mlp, Permutation(torch.randperm(D_MLP)), x) < 1e-14
    forgotten = replace(ValueRescaling(beta)(mlp), k_bias=mlp.k_bias)
    assert float((forgotten(x) - mlp(x)).norm() / mlp(x).norm()) > 0.1
    relu = biased("relu")
    assert residual(relu, Scaling(2.5), x) < 1e-14
    assert residual(relu, Scaling(-1.0), x) > 0.1


def test_actions_on_the_weights_are_actions_on_the_pre_activations() -> None:
    mlp, x = biased(), inputs()
    a, b = mlp.pre_activations(x)
    assert_close(Exchange()(mlp)(x), mlp.unit.exchanged(a, b) @ mlp.v + mlp.v_bias)
    assert_close(Scaling(0.3)(mlp)(x), mlp.unit.scaled(a, b, 0.3) @ mlp.v + mlp.v_bias)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert_close(Permutation(order)(mlp).memories(x), mlp.memories(x)[:, order])
    case, moved = case_of(mlp), permuted(case_of(mlp), order)
    assert_numbers_close(layer_numbers(moved.moments, moved.weight), layer_numbers(case.moments, case.weight))


def test_controls_hold_with_biases_and_find_one_that_was_forgotten() -> None:
    mlp = biased()
    assert [record.passed for record in measure_controls(mlp, inputs())] == [True] * 4

    class Forgetful(GatedMLP):
        keys = ("k",)

    forgetful = Forgetful(**vars(mlp))
    assert [record.passed for record in measure_controls(forgetful, inputs())] == [False, False, True, True]


def test_fitted_coefficients_are_of_pre_activations_with_biases() -> None:
    mlp, x = biased(), inputs()
    sigma, _, _, _ = reference.ACTIVATIONS["silu"]
    a, b = ((x @ weight.T + bias).tolist() for weight, bias in ((mlp.q, mlp.q_bias), (mlp.k, mlp.k_bias)))
    _, coefficients, _ = reference.bilinear(reference.gate_unit(sigma), a, b, [1.0] * D_MLP)
    assert_close(fitted_coefficients(mlp, x), coefficients)


def test_a_bias_moves_the_numbers_and_not_the_geometry() -> None:
    mlp = biased()
    bare = replace(mlp, q_bias=None, k_bias=None)
    one, other = case_of(mlp), case_of(bare)
    assert torch.equal(one.geometry.cos_qk, other.geometry.cos_qk)
    assert abs(measures.exchange(layer_sums(one.moments)) - measures.exchange(layer_sums(other.moments))) > 1e-3


def test_the_numbers_of_a_model_with_biases_are_those_of_its_own_weights(tmp_path: Path) -> None:
    """Exchange, as stored and balanced, of a tiny Llama with biases, by loops over what its projections give."""
    model = load_model(str(save_tiny("llama-bias", tmp_path / "llama-bias")), device="cpu")
    corpus = model.read(context=16, max_tokens=60)
    run = analyze(model, corpus, quiet=True)
    assert run.passed
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-bias")
    block = plain.model.layers[1]
    assert block.mlp.up_proj.bias.abs().max() > 0.1
    rows: dict[str, list[Tensor]] = {"a": [], "b": []}
    for symbol, projection in (("a", block.mlp.gate_proj), ("b", block.mlp.up_proj)):
        projection.register_forward_hook(lambda _, __, out, symbol=symbol: rows[symbol].append(out[0, 1:]))
    with torch.no_grad():
        for window in corpus.windows:
            plain(window.tokens[None])
    a, b = (torch.cat(rows[symbol]).tolist() for symbol in "ab")
    gain = block.post_attention_layernorm.weight.detach()
    q, k = ((projection.weight.detach() * gain).tolist() for projection in (block.mlp.gate_proj, block.mlp.up_proj))
    weight = block.mlp.down_proj.weight.detach().square().sum(dim=0).tolist()
    unit = reference.gate_unit(reference.ACTIVATIONS["silu"][0])
    sums = layer_sums(run.layers[1].moments)
    expected = reference.exchange(unit, a, b, weight).pooled_asymmetry
    assert float(measures.exchange(sums)) == pytest.approx(expected, rel=1e-5)
    beta = [reference.balance(*pair) for pair in zip(q, k, strict=True)]
    before = reference.apply(unit, a, b)
    after = [
        [unit(beta[j] * y, x) / beta[j] for j, (x, y) in enumerate(zip(*pair, strict=True))]
        for pair in zip(a, b, strict=True)
    ]
    balanced = reference.compare(before, after, weight).pooled_asymmetry
    assert float(measures.exchange_balanced(sums)) == pytest.approx(balanced, rel=1e-5)
