"""The seven forms equal their plain loops, convert into each other, and refuse what does not fit."""

import math

import jaxtyping
import pytest
import torch
from torch import Tensor

from analysis import memory
from analysis.errors import UserError
from analysis.theory.conversions import (
    absorbed_biases,
    bilinear_sibling,
    exchanged_twin,
    extended,
    fitted_coefficients,
    full_rank,
    low_rank,
    low_rank_gated,
    one_rank,
    static_query,
    symmetric_sibling,
    truncated,
)
from analysis.theory.forms import BilinearAttention, Form, GlobalQueryMemory, KeyValueMemory, LowRankBilinearAttention
from analysis.theory.forms import Rank1BilinearAttention as Rank1
from analysis.theory.gated import FAMILY, GATED, GatedMLP, LowRankGated
from analysis.units.activations import ACTIVATIONS, activation_named
from analysis.units.registry import GptOssUnit, unit_named

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-5}
SEEDS = range(6)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tests' own checks of shapes, as a user runs it: the form itself must refuse."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def made(kind: type[Form], seed: int = 0, sigma: str = "silu", dtype: torch.dtype = torch.float64) -> tuple[Form, Tensor]:
    """A random form of random shape, and inputs for it."""
    generator = torch.Generator().manual_seed(seed)
    d_model, d_mlp, rank, batch = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(4))
    named = unit_named(sigma) if kind in GATED else activation_named(sigma)
    form = kind.random(named, d_model, d_mlp, rank, generator=generator, dtype=dtype)
    return form, 2 * torch.randn(batch, d_model, generator=generator, dtype=dtype)


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def columns(matrix: Tensor) -> list[list[float]]:
    return matrix.T.tolist()


def looped_memory(form: Form, j: int, x: list[float]) -> float:
    """h_j(x) as the table of forms has it, with plain loops."""

    def sigma(z: float) -> float:
        activation = form.unit.activation if isinstance(form, (GatedMLP, LowRankGated)) else form.activation
        return float(activation(torch.tensor(z, dtype=torch.float64)))

    q, k = form.weights.get("q"), form.weights["k"]
    if isinstance(form, KeyValueMemory):
        return sigma(dot(x, k[j].tolist()))
    if isinstance(form, GlobalQueryMemory):
        return sigma(dot([dot(x, column) for column in columns(q)], k[j].tolist()))
    if isinstance(form, Rank1):
        return sigma(dot(x, q[j].tolist()) * dot(x, k[j].tolist()))
    if isinstance(form, GatedMLP):
        return sigma(dot(x, q[j].tolist())) * dot(x, k[j].tolist())
    pairs = [(dot(x, one), dot(x, two)) for one, two in zip(columns(q[j]), columns(k[j]), strict=True)]
    if isinstance(form, LowRankGated):
        return math.fsum(sigma(a) * b for a, b in pairs)
    return sigma(math.fsum(a * b for a, b in pairs))


def looped(form: Form, x: Tensor) -> Tensor:
    rows = []
    for row in x.double().tolist():
        h = [looped_memory(form, j, row) for j in range(len(form.v))]
        rows.append([dot(h, column) for column in columns(form.v.double())])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILY)
def test_a_form_equals_its_loop(kind: type[Form], dtype: torch.dtype) -> None:
    for seed in SEEDS:
        form, x = made(kind, seed, dtype=dtype)
        y = form(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), looped(form, x), rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("kind", FAMILY)
def test_gradients_reach_every_weight_and_the_input(kind: type[Form]) -> None:
    form, x = made(kind, 1)
    names, sigma = list(form.weights), form.unit if kind in GATED else form.activation
    inputs = [weight.clone().requires_grad_() for weight in form.weights.values()]
    x.requires_grad_()

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        return kind(sigma, **dict(zip(names, weights, strict=True)))(x)

    assert torch.autograd.gradcheck(output, (x, *inputs))
    output(x, *inputs).square().sum().backward()
    assert all(tensor.grad is not None and bool((tensor.grad != 0).any()) for tensor in (x, *inputs))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", FAMILY)
def test_wrong_shapes_are_refused(kind: type[Form]) -> None:
    generator = torch.Generator().manual_seed(0)
    sigma = unit_named("silu") if kind in GATED else activation_named("silu")
    form = kind.random(sigma, 4, 3, 2, generator=generator)
    for name in form.weights:
        if name != "v":
            with pytest.raises(ValueError, match=rf"{kind.__name__}.{name} is \[.*give it as \["):
                kind(sigma, **{**form.weights, name: form.weights[name][:-1]})
    with pytest.raises(ValueError, match=r"v is \[3\]: give it as \[d_mlp, d_model\]"):
        kind(sigma, **{**form.weights, "v": form.v[:, 0]})
    with pytest.raises(ValueError, match="d_mlp 0, .*each must be at least 1"):
        kind.random(sigma, 4, 0, 2)


@pytest.mark.parametrize("kind", [LowRankBilinearAttention, LowRankGated])
def test_rank_zero_is_refused(kind: type[Form]) -> None:
    with pytest.raises(ValueError, match="rank 0: each must be at least 1"):
        kind.random(unit_named("silu") if kind in GATED else activation_named("silu"), 4, 3, 0)


@pytest.mark.usefixtures("unchecked")
def test_a_bias_of_the_wrong_size_is_refused() -> None:
    form, _ = made(GatedMLP)
    with pytest.raises(ValueError, match="GatedMLP.k_bias is .*give it as"):
        GatedMLP(form.unit, form.q, form.k, form.v, k_bias=torch.zeros(len(form.v) + 1))


@pytest.mark.parametrize("kind", FAMILY)
def test_parameters_are_counted_without_making_the_form(kind: type[Form]) -> None:
    for seed in SEEDS:
        form, _ = made(kind, seed)
        d_mlp, d_model = form.v.shape
        assert form.n_parameters == sum(w.numel() for w in form.weights.values()) == kind.count(d_model, d_mlp, form.rank)
        assert form.flops == kind.count_flops(d_model, d_mlp, form.rank)


def test_counts_of_known_shapes() -> None:
    assert GatedMLP.count(576, 1536) == 3 * 576 * 1536
    assert KeyValueMemory.count(576, 1536) == 2 * 576 * 1536
    assert BilinearAttention.count(4096, 11008) == 2 * 11008 * 4096**2 + 11008 * 4096
    assert GatedMLP.count_flops(2, 5) == 5 * (2 * (2 + 2) + 2 + 2 * 2)  # two dot products, σ, a product, and h·v
    assert LowRankBilinearAttention.count_flops(2, 5, 3) == 5 * (3 * 2 * (2 + 2) + 3 + 2 + 1 + 2 * 2)
    assert LowRankGated.count_flops(2, 5, 3) == 5 * (3 * 2 * (2 + 2) + 3 + 3 + 2 + 2 * 2)


def test_a_form_too_big_for_the_machine_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    small, _ = made(LowRankBilinearAttention, 3)
    monkeypatch.setattr(memory, "machine_memory", lambda: 64 * 10**9)
    with pytest.raises(UserError, match=r"BilinearAttention of d_model 4096, d_mlp 11008 needs 738.8 GB .* bfloat16"):
        BilinearAttention.random(activation_named("silu"), 4096, 11008, dtype=torch.bfloat16)
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * 3 * 4 * 5 - 1)
    with pytest.raises(UserError, match="this machine has"):
        GatedMLP.random(unit_named("silu"), 4, 5)
    monkeypatch.setattr(memory, "machine_memory", lambda: 8 * 3 * 4 * 5)
    GatedMLP.random(unit_named("silu"), 4, 5)
    monkeypatch.setattr(memory, "machine_memory", lambda: 8)
    with pytest.raises(UserError, match="full rank of d_model"):
        full_rank(small)


def close(first: Tensor, second: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversions_keep_the_output(seed: int, dtype: torch.dtype) -> None:
    tolerance = 100 * DTYPES[dtype]
    asked, x = made(GlobalQueryMemory, seed, dtype=dtype)
    close(asked.absorb()(x), asked(x), tolerance)
    many, x = made(LowRankBilinearAttention, seed, dtype=dtype)
    close(full_rank(many)(x), many(x), tolerance)
    full, x = made(BilinearAttention, seed, dtype=dtype)
    again, error = truncated(full, full.v.shape[1])
    close(again(x), full(x), tolerance)
    assert error < tolerance
    one, x = made(Rank1, seed, dtype=dtype)
    close(low_rank(one)(x), one(x), tolerance)
    assert torch.equal(one_rank(low_rank(one))(x), one(x))
    gated, x = made(GatedMLP, seed, dtype=dtype)
    close(low_rank_gated(gated)(x), gated(x), tolerance)
    static, x = made(KeyValueMemory, seed, dtype=dtype)
    close(static_query(static)(extended(x)), extended(static(x), 0.0), tolerance)


def test_truncation_finds_the_rank_that_is_there_and_reports_what_it_loses() -> None:
    generator = torch.Generator().manual_seed(0)
    form = LowRankBilinearAttention.random(activation_named("silu"), 6, 4, 2, generator=generator)
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    whole = full_rank(form)
    back, error = truncated(whole, 2)
    close(back(x), form(x))
    assert error < 1e-12
    shorter, error = truncated(whole, 1)
    m, m1 = (f.q @ f.k.mT for f in (whole, shorter))
    assert error == pytest.approx(float((m - m1).norm() / m.norm()), rel=1e-10)
    assert error > 0.1
    for rank in (0, 7):
        with pytest.raises(ValueError, match=f"rank {rank} is out of range"):
            truncated(whole, rank)
    with pytest.raises(ValueError, match="has rank 2"):
        one_rank(form)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_linear_activation_gated_rank_one_and_bilinear_are_one_function(seed: int) -> None:
    gated, x = made(GatedMLP, seed, "linear")
    close(symmetric_sibling(gated)(x), gated(x))
    close(bilinear_sibling(gated, torch.ones(len(gated.v), dtype=torch.float64))(x), gated(x))
    close(bilinear_sibling(gated, fitted_coefficients(gated, x))(x), gated(x))
    close(full_rank(low_rank(symmetric_sibling(gated)))(x), gated(x))


def test_siblings_are_other_functions_and_the_fit_is_the_best() -> None:
    gated, x = made(GatedMLP, 2)
    a, b = gated.pre_activations(x)
    close(symmetric_sibling(gated)(x), torch.nn.functional.silu(a * b) @ gated.v)
    close(exchanged_twin(gated)(x), (torch.nn.functional.silu(b) * a) @ gated.v)
    best = fitted_coefficients(gated, x)
    h = gated.memories(x)
    error = (h - best * a * b).square().sum(dim=0)
    for step in (-0.01, 0.01):
        assert ((h - (best + step) * a * b).square().sum(dim=0) > error).all()


@pytest.mark.parametrize("unit", [*map(unit_named, ACTIVATIONS), GptOssUnit()], ids=lambda unit: unit.name)
def test_biases_are_a_constant_coordinate(unit: object) -> None:
    generator = torch.Generator().manual_seed(4)
    bare = GatedMLP.random(unit, 4, 5, generator=generator)
    biases = {
        name: torch.randn(size, generator=generator, dtype=torch.float64)
        for name, size in (("q_bias", 5), ("k_bias", 5), ("v_bias", 4))
    }
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    for kept in (biases, {"k_bias": biases["k_bias"]}, {}):
        form = GatedMLP(bare.unit, bare.q, bare.k, bare.v, **kept)
        close(absorbed_biases(form)(extended(x)), extended(form(x), 0.0))
        assert form.flops == bare.flops + sum(map(len, kept.values()))
    biased = GatedMLP(bare.unit, bare.q, bare.k, bare.v, **biases)
    a, b = x @ bare.q.T + biases["q_bias"], x @ bare.k.T + biases["k_bias"]
    close(biased(x), unit(a, b) @ bare.v + biases["v_bias"])
    with pytest.raises(ValueError, match="has biases: use absorbed_biases"):
        symmetric_sibling(biased)


def test_a_unit_without_an_activation_has_no_symmetric_sibling() -> None:
    with pytest.raises(ValueError, match=r"unit gpt_oss is not σ\(a\)·b"):
        symmetric_sibling(GatedMLP.random(GptOssUnit(), 3, 2))
