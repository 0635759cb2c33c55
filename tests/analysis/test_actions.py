"""Actions form groups, compose as their parameters do, undo themselves, and refuse where they are not defined."""

import jaxtyping
import pytest
import torch
from torch import Tensor

from analysis.theory.actions import (
    Action,
    ChangeOfBasis,
    Exchange,
    Permutation,
    Scaling,
    SignFlip,
    ValueRescaling,
    residual,
)
from analysis.theory.forms import (
    BilinearAttention,
    Form,
    GlobalQueryMemory,
    KeyValueMemory,
    LowRankBilinearAttention,
    Rank1BilinearAttention,
)
from analysis.theory.gated import FAMILY, GATED, GatedMLP, LowRankGated
from analysis.units.activations import activation_named
from analysis.units.registry import unit_named

D_MODEL, D_MLP, RANK = 4, 5, 3
BETA = torch.tensor([2.0, -1.0, 0.5, -3.0, 1.0], dtype=torch.float64)
BASIS = torch.tensor([[2.0, -1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)


def made(kind: type[Form], seed: int = 0) -> Form:
    generator = torch.Generator().manual_seed(seed)
    sigma = unit_named("silu") if kind in GATED else activation_named("silu")
    return kind.random(sigma, D_MODEL, D_MLP, RANK, generator=generator)


def biased() -> GatedMLP:
    bare = made(GatedMLP)
    q_bias, k_bias = torch.randn(2, D_MLP, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return GatedMLP(bare.unit, bare.q, bare.k, bare.v, q_bias, k_bias, bare.v[0])


def inputs() -> Tensor:
    return torch.randn(7, D_MODEL, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def assert_same(first: Form, second: Form) -> None:
    assert type(first) is type(second)
    assert first.weights.keys() == second.weights.keys()
    for name, weight in first.weights.items():
        torch.testing.assert_close(weight, second.weights[name], rtol=1e-12, atol=1e-12, msg=name)


ORDER = torch.tensor([3, 1, 4, 0, 2])
INVERSES: list[tuple[Action, Action]] = [
    (Exchange(), Exchange()),
    (SignFlip(), SignFlip()),
    (Scaling(-3.0), Scaling(-1 / 3)),
    (ValueRescaling(BETA), ValueRescaling(1 / BETA)),
    (Permutation(ORDER), Permutation(ORDER.argsort())),
]


@pytest.mark.parametrize(("action", "inverse"), INVERSES, ids=lambda action: type(action).__name__)
def test_every_action_is_undone_by_its_inverse(action: Action, inverse: Action) -> None:
    for form in (*map(made, (Rank1BilinearAttention, LowRankBilinearAttention, LowRankGated)), biased()):
        assert_same(inverse(action(form)), form)
        changed = action(form)
        assert any(not torch.equal(changed.weights[name], weight) for name, weight in form.weights.items())


def test_changes_of_basis_compose_and_hold_the_scaling() -> None:
    for kind in (LowRankBilinearAttention, LowRankGated):
        form, other = made(kind), BASIS.T @ BASIS
        assert_same(ChangeOfBasis(other)(ChangeOfBasis(BASIS)(form)), ChangeOfBasis(BASIS @ other)(form))
        assert_same(ChangeOfBasis(-2 * torch.eye(RANK).double())(form), Scaling(-2.0)(form))
        matrix = form.weights["q"] @ form.weights["k"].mT
        changed = ChangeOfBasis(BASIS)(form).weights
        torch.testing.assert_close(changed["q"] @ changed["k"].mT, matrix, rtol=1e-12, atol=1e-12)


def test_biases_move_with_their_weights() -> None:
    form, x = biased(), inputs()
    a, b = form.pre_activations(x)
    for action, expected in (
        (Exchange(), (b, a)),
        (Scaling(4.0), (4 * a, b / 4)),
        (SignFlip(), (-a, -b)),
        (ValueRescaling(BETA), (a, BETA * b)),
        (Permutation(ORDER), (a[:, ORDER], b[:, ORDER])),
    ):
        for found, wanted in zip(action(form).pre_activations(x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert residual(form, ValueRescaling(BETA), x) < 1e-14
    assert residual(form, Permutation(ORDER), x) < 1e-14
    only_k = GatedMLP(form.unit, form.q, form.k, form.v, k_bias=form.k_bias)
    assert Exchange()(only_k).k_bias is None
    assert torch.equal(Exchange()(only_k).q_bias, form.k_bias)


def test_residual_is_the_relative_change_of_the_output() -> None:
    form, x = made(GatedMLP), inputs()
    before, after = form(x), torch.nn.functional.silu(x @ form.k.T) * (x @ form.q.T) @ form.v
    assert residual(form, Exchange(), x) == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-12)
    assert torch.tensor(residual(form, Exchange(), 0 * x)).isnan()


def test_an_action_leaves_the_form_it_acts_on_alone() -> None:
    form = biased()
    before = {name: weight.clone() for name, weight in form.weights.items()}
    for action, _ in INVERSES:
        action(form)
    assert all(torch.equal(before[name], weight) for name, weight in form.weights.items())


@pytest.mark.parametrize(
    ("kind", "action", "complaint"),
    [
        (KeyValueMemory, Exchange(), "has keys only: Exchange needs queries"),
        (KeyValueMemory, Scaling(2.0), "has keys only: Scaling needs queries"),
        (KeyValueMemory, SignFlip(), "has keys only"),
        (KeyValueMemory, ChangeOfBasis(BASIS), "has keys only"),
        (GlobalQueryMemory, Exchange(), "has one query for all of its keys"),
        (Rank1BilinearAttention, ChangeOfBasis(BASIS), "use Scaling instead"),
        (GatedMLP, ChangeOfBasis(BASIS), "use Scaling instead"),
        (LowRankGated, ChangeOfBasis(BASIS[:2, :2]), r"A is \[2, 2\]: LowRankGated here needs \[3, 3\]"),
        (BilinearAttention, ChangeOfBasis(BASIS), r"needs \[4, 4\]"),
        (GatedMLP, Permutation(torch.tensor([0, 1, 2, 3, 3])), "not a permutation of 5 neurons"),
        (GatedMLP, Permutation(torch.tensor([0, 1])), "not a permutation of 5 neurons"),
    ],
)
def test_an_action_that_is_not_defined_on_a_form_is_refused(kind: type[Form], action: Action, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        action(made(kind))


def test_parameters_without_an_inverse_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="α = 0 has no inverse"):
        Scaling(0.0)
    with pytest.raises(ValueError, match="β = 0 has no inverse"):
        ValueRescaling(0 * BETA)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RuntimeError, match="singular"):
        ChangeOfBasis(torch.ones(RANK, RANK, dtype=torch.float64))(made(LowRankGated))


def test_the_family_is_complete() -> None:
    assert [form.__name__ for form in FAMILY] == [
        "KeyValueMemory",
        "GlobalQueryMemory",
        "BilinearAttention",
        "LowRankBilinearAttention",
        "Rank1BilinearAttention",
        "GatedMLP",
        "LowRankGated",
    ]
