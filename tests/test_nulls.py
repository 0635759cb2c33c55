"""The Gaussian null of exchange: right against sampling, against closed forms, and on data that are Gaussian."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from analysis import measures
from analysis.jackknife import standard_error
from analysis.moments import N_BLOCKS, Moments
from analysis.nulls import gaussian_exchange
from analysis.sums import Layout, Sums
from analysis.units import Unit, unit_named
from tests.analysis_helpers import ClampedUnit, SymmetricUnit, assert_close, layer_sums, random_case

LAWS = torch.tensor(
    [
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 0.99],
        [0, 0, 1, 1, -0.99],
        [0.5, -1, 1, 2, 0.3],
        [-2, 1, 0.5, 0.3, -0.5],
        [3, 0, 2, 1, 0.99],
        [-1, 2, 1, 1, 0],
    ],
    dtype=torch.float64,
)
"""mean_a, mean_b, std_a, std_b, corr_ab: one neuron a row."""

WEIGHT = torch.linspace(0.5, 2, len(LAWS), dtype=torch.float64)
LAYOUT = Layout(())


def moments_with(laws: Tensor) -> Moments:
    """Moments whose first two moments are exactly these."""
    mean_a, mean_b, std_a, std_b, correlation = laws.T
    n_tokens = 1000
    rows = {
        "a": mean_a,
        "b": mean_b,
        "aa": std_a.square() + mean_a.square(),
        "bb": std_b.square() + mean_b.square(),
        "ab": correlation * std_a * std_b + mean_a * mean_b,
    }
    values = torch.zeros(LAYOUT.size, len(laws), dtype=torch.float64)
    for name, row in rows.items():
        values[LAYOUT.rows[name]] = n_tokens * row
    return replace(Moments.empty(len(laws), LAYOUT), neuron=Sums(LAYOUT, values), n_tokens=n_tokens)


def monte_carlo(unit: Unit, laws: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Σ(h − h′)² and 2 Σ(h² + h′²) of normal (a, b), one row a draw."""
    mean_a, mean_b, std_a, std_b, correlation = laws.T
    z, own = torch.randn(2, draws, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = mean_a + std_a * z
    b = mean_b + std_b * (correlation * z + (1 - correlation.square()).sqrt() * own)
    h, swapped = unit(a, b), unit(b, a)
    return (h - swapped).square(), 2 * (h.square() + swapped.square())


def ratio_and_error(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio of means over draws, and its standard error."""
    ratio = numerator.mean(dim=0) / denominator.mean(dim=0)
    error = (numerator - ratio * denominator).std(dim=0) / denominator.mean(dim=0) / math.sqrt(len(numerator))
    return ratio, error


@pytest.mark.parametrize(
    ("unit", "quadrature"),
    [(unit_named("silu"), 1e-7), (unit_named("gelu"), 1e-7), (unit_named("relu"), 1e-4), (ClampedUnit(), 1e-5)],
    ids=lambda value: value.name if isinstance(value, Unit) else "",
)
def test_gaussian_null_equals_monte_carlo(unit: Unit, quadrature: float) -> None:
    neurons, layer = gaussian_exchange(moments_with(LAWS), unit, WEIGHT)
    numerator, denominator = monte_carlo(unit, LAWS, 1_000_000)
    ratio, error = ratio_and_error(numerator, denominator)
    assert ((neurons - ratio).abs() <= 4.5 * error + quadrature).all()
    ratio, error = ratio_and_error(numerator @ WEIGHT, denominator @ WEIGHT)
    assert abs(layer - ratio) <= 4.5 * error + quadrature


def test_gaussian_null_of_relu_in_closed_form() -> None:
    """Independent standard normals: h and h′ share the quadrant a, b > 0 and differ elsewhere, so A = 1/4."""
    assert gaussian_exchange(moments_with(LAWS[:1]), unit_named("relu"), WEIGHT[:1])[1] == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("unit", [unit_named("linear"), SymmetricUnit()], ids=lambda unit: unit.name)
def test_gaussian_null_is_zero_for_a_symmetric_unit(unit: Unit) -> None:
    neurons, layer = gaussian_exchange(moments_with(LAWS), unit, WEIGHT)
    assert_close(neurons, torch.zeros(len(LAWS)))
    assert_close(layer, 0.0)


def test_gaussian_null_is_zero_when_query_equals_key() -> None:
    laws = torch.tensor([[0.3, 0.3, 1.2, 1.2, 1.0]], dtype=torch.float64)
    assert_close(gaussian_exchange(moments_with(laws), unit_named("silu"), WEIGHT[:1])[1], 0.0)


def test_gaussian_null_does_not_know_which_is_the_query() -> None:
    swapped = LAWS[:, [1, 0, 3, 2, 4]]
    numbers = [gaussian_exchange(moments_with(laws), unit_named("silu"), WEIGHT)[0] for laws in (LAWS, swapped)]
    torch.testing.assert_close(*numbers, rtol=1e-6, atol=1e-9)


def test_gaussian_null_of_constants_is_their_own_exchange() -> None:
    laws = torch.tensor([[1.5, -0.5, 0, 0, 0]], dtype=torch.float64)
    unit, a, b = unit_named("silu"), laws[0, :1], laws[0, 1:2]
    h, swapped = unit(a, b), unit(b, a)
    expected = (h - swapped).square() / (2 * (h.square() + swapped.square()))
    null, _ = gaussian_exchange(moments_with(laws), unit, WEIGHT[:1])
    torch.testing.assert_close(null, expected, rtol=1e-6, atol=1e-9)


def test_gaussian_null_equals_the_exchange_of_gaussian_data() -> None:
    case = replace(random_case("silu", (640,) * N_BLOCKS, 4, dtype=torch.float32), layout=LAYOUT)
    moments = case.moments
    neurons, layer = gaussian_exchange(moments, case.unit, case.weight)
    measured, error = measures.exchange(layer_sums(moments)), standard_error(measures.exchange, moments.pooled)
    assert abs(layer - measured.item()) <= 4 * error
    torch.testing.assert_close(neurons, measures.exchange(moments.neuron), rtol=0.05, atol=2e-3)


def test_gaussian_null_differs_from_the_exchange_of_other_data() -> None:
    """Signs have the first two moments of normal numbers but not their shape: the null must be able to be missed."""
    case = random_case("silu", (64,) * N_BLOCKS, 4)
    moments = case.with_data(lambda a, b: (a.sign(), b.sign())).moments
    _, layer = gaussian_exchange(moments, case.unit, case.weight)
    error = standard_error(measures.exchange, moments.pooled)
    assert abs(layer - measures.exchange(layer_sums(moments)).item()) > 4 * error
