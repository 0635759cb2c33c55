"""The Gaussian nulls: right against sampling, against closed forms, and on data that are Gaussian."""

import math

import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from analysis.measures import asymmetry as measures
from analysis.measures.gaussian_null import GaussianFit, Parts, gaussian_nulls
from analysis.measures.jackknife import pooled_error
from analysis.sums.layout import DEFAULT_ALPHAS, Layout, scaling_name
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS
from analysis.units.registry import Unit, unit_named
from tests.helpers.families import grid
from tests.helpers.random_layers import Case, ClampedUnit, SymmetricUnit, assert_close, layer_sums, random_case

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
BALANCE = torch.tensor([1.0, -1.0, 2.0, -0.5, 0.7, 3.0, -2.0], dtype=torch.float64)
ALPHAS = (-1.0, 0.125, 2.0, 8.0)


def law_of(laws: Tensor) -> GaussianFit:
    return GaussianFit(*laws.T)


def nulls(unit: Unit, laws: Tensor = LAWS, alphas: tuple[float, ...] = ALPHAS) -> dict[str, Parts]:
    """Every Gaussian null of the laws, at these scales and the limits of the unit."""
    return gaussian_nulls(law_of(laws), unit, BALANCE[: len(laws)], (*alphas, *unit.limits))


def sampled(unit: Unit, laws: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Normal (a, b) of these laws, one row a draw."""
    mean_a, mean_b, std_a, std_b, correlation = laws.T
    z, own = torch.randn(2, draws, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return mean_a + std_a * z, mean_b + std_b * (correlation * z + (1 - correlation.square()).sqrt() * own)


def versions(unit: Unit, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """h and h′ of the null of that name, from the definitions."""
    if name == "exchange":
        return unit(a, b), unit(b, a)
    if name == "exchange_balanced":
        return unit(a, BALANCE * b) / BALANCE, unit(BALANCE * b, a) / BALANCE
    alpha = float(name.removeprefix("scaling "))
    if alpha == 0:
        return unit(a, b), (unit(1e-7 * a, 1e7 * b))
    return unit(a, b), unit(1e7 * a, b / 1e7) if math.isinf(alpha) else unit(alpha * a, b / alpha)


def ratio_and_error(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio of means over draws, and its standard error."""
    ratio = numerator.mean(dim=0) / denominator.mean(dim=0)
    error = (numerator - ratio * denominator).std(dim=0) / denominator.mean(dim=0) / math.sqrt(len(numerator))
    return ratio, error


UNITS = {"silu": 1e-6, "gelu": 5e-6, "relu": 3e-4, "clamped": 1e-4, "gpt_oss(1.702,2)": 1e-4, "inkling2(2,3)": 1e-4}
UNITS |= {"clamped_after(silu,2)": 4e-4, "soft_capped(gelu,2)": 1e-4}
"""Units, and how near the quadrature comes: a kink is seen worst."""


def quadrature_of(name: str, null: str) -> float:
    """The same, for nulls at far scales, where every gate is nearly a kink."""
    far = null in ("scaling 0.125", "scaling 8", "scaling inf") and name != "relu"
    return 4e-4 if far else UNITS[name]


@pytest.mark.parametrize("name", grid(UNITS, ["silu", "relu", "gpt_oss(1.702,2)"]))
def test_gaussian_nulls_equal_monte_carlo(name: str) -> None:
    unit = ClampedUnit() if name == "clamped" else unit_named(name)
    found, (a, b) = nulls(unit), sampled(unit, LAWS, 400_000)
    assert set(found) == {"exchange", "exchange_balanced", *map(scaling_name, (*ALPHAS, *unit.limits))}
    for null, parts in found.items():
        h, changed = versions(unit, null, a, b)
        numerator, denominator = (h - changed).square(), 2 * (h.square() + changed.square())
        slack = quadrature_of(name, null)
        ratio, error = ratio_and_error(numerator, denominator)
        assert ((parts.by_neuron - ratio).abs() <= 4.5 * error + slack).all(), null
        ratio, error = ratio_and_error(numerator @ WEIGHT, denominator @ WEIGHT)
        assert abs(parts.pooled(WEIGHT) - ratio) <= 4.5 * error + slack, null


def test_gaussian_null_of_relu_in_closed_form() -> None:
    """Independent standard normals: h and h′ share the quadrant a, b > 0 and differ elsewhere, so A = 1/4.

    Flipping both signs leaves nothing of h, so A = 1/2.
    """
    found = nulls(unit_named("relu"), LAWS[:1])
    assert found["exchange"].pooled(WEIGHT[:1]) == pytest.approx(0.25, abs=1e-4)
    assert found["scaling -1"].pooled(WEIGHT[:1]) == pytest.approx(0.5, abs=1e-9)


def test_gaussian_null_of_the_flip_in_closed_form() -> None:
    """SiLU(a)b and SiLU(−a)(−b) have half their sum ab/2 and half their difference ab tanh(a/2)/2; b is independent."""
    z, weight = (torch.from_numpy(x) for x in hermegauss(100))
    even, odd = (z / 2).square(), (z * (z / 2).tanh() / 2).square()
    expected = (weight @ odd) / (weight @ (even + odd))
    assert_close(nulls(unit_named("silu"), LAWS[:1])["scaling -1"].by_neuron, expected[None], torch.float32)


ZEROS = [
    ("linear", LAWS, None),
    ("relu", LAWS, ("scaling 0.125", "scaling 2", "scaling 8", "scaling 0", "scaling inf")),
    ("silu", torch.tensor([[0.3, 0.3, 1.2, 1.2, 1.0]], dtype=torch.float64), ("exchange",)),
    ("silu", LAWS[:1] * 0 + torch.tensor([0.4, -0.2, 1.0, -0.5, 1.0], dtype=torch.float64), ("exchange_balanced",)),
]
"""Units and laws, with the nulls that are 0 there: all, scaling by α > 0, and exchange where q is k or a multiple of it."""


@pytest.mark.parametrize(("name", "laws", "free"), ZEROS, ids=["linear", "relu", "q = k", "q = -2k"])
def test_gaussian_null_is_zero_where_the_symmetry_holds(name: str, laws: Tensor, free: tuple[str, ...] | None) -> None:
    unit = unit_named(name)
    balance = torch.full((1,), -2.0, dtype=torch.float64) if len(laws) == 1 else BALANCE
    found = gaussian_nulls(law_of(laws), unit, balance, (*ALPHAS, *unit.limits))
    for null in free or found:
        assert_close(found[null].by_neuron, torch.zeros(len(laws)), what=null)
    if free is not None:
        assert found["scaling -1"].by_neuron.min() > 1e-3


def test_gaussian_null_of_exchange_is_zero_for_a_symmetric_unit() -> None:
    """Up is not linear here, so the balanced exchange is another thing."""
    assert_close(nulls(SymmetricUnit())["exchange"].by_neuron, torch.zeros(len(LAWS)))


def test_gaussian_null_does_not_know_which_is_the_query() -> None:
    swapped = LAWS[:, [1, 0, 3, 2, 4]]
    numbers = [nulls(unit_named("silu"), laws)["exchange"].by_neuron for laws in (LAWS, swapped)]
    torch.testing.assert_close(*numbers, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("null", ["exchange", "exchange_balanced", "scaling -1", "scaling 0.125", "scaling inf"])
def test_gaussian_null_of_constants_is_their_own_asymmetry(null: str) -> None:
    constants = torch.cat([LAWS[:, :2] + 0.25, 0 * LAWS[:, 2:]], dim=1)
    unit = unit_named("silu")
    h, changed = versions(unit, null, constants[:, 0], constants[:, 1])
    expected = (h - changed).square() / (2 * (h.square() + changed.square()))
    torch.testing.assert_close(nulls(unit, constants)[null].by_neuron, expected, rtol=1e-6, atol=1e-9)


def gaussian_case() -> Case:
    """A layer of Gaussian data, a few thousand tokens in every jackknife block."""
    return random_case("silu", (640,) * N_JACKKNIFE_BLOCKS, 4, dtype=torch.float32, seed=1)


def test_gaussian_nulls_equal_the_numbers_of_gaussian_data() -> None:
    case = gaussian_case()
    numbers, neurons = case.estimates.layer_numbers(), case.estimates.neuron_numbers()
    for name in ("exchange", "exchange_balanced", "scaling_half", "scaling_double", "scaling_flip"):
        excess, error = (numbers[f"{name}_excess_gaussian{end}"] for end in ("", "_se"))
        assert 0 < error < 0.02, name
        assert abs(excess) <= 4 * error, name
        assert excess == pytest.approx(numbers[name] - numbers[f"{name}_null_gaussian"], rel=1e-12)
        off = neurons[f"{name}_excess_gaussian"].abs() / neurons[f"{name}_excess_gaussian_se"]
        assert (off <= 5.5).all(), name  # Student's with 7 degrees of freedom: 1 in 1000 beyond
    whole = case.estimates.gaussian
    for alpha, curve in zip(case.layout.alphas, measures.scaling(layer_sums(case.moments))[:, 0], strict=True):
        error = pooled_error(measures.scaling, case.moments)[case.layout.alphas.index(alpha)]
        assert abs(whole[scaling_name(alpha)].pooled(case.weight) - curve) <= 4 * error, alpha


def test_gaussian_nulls_differ_from_the_numbers_of_other_data() -> None:
    """Signs have the first two moments of normal numbers but not their shape: the null must be able to be missed."""
    case = random_case("silu", (64,) * N_JACKKNIFE_BLOCKS, 4).with_data(lambda a, b: (a.sign(), b.sign()))
    numbers = case.estimates.layer_numbers()
    for name in ("exchange", "scaling_flip"):
        assert abs(numbers[f"{name}_excess_gaussian"]) > 4 * numbers[f"{name}_excess_gaussian_se"], name
        assert numbers[f"{name}_excess_gaussian_se"] > 0


def test_gaussian_nulls_follow_the_neurons_own_moments() -> None:
    """The numbers of a run are those of the law of its sums, at the balance of its weights."""
    case = random_case("gelu", (80,), 4)
    law = GaussianFit.of(case.moments.neuron)
    expected = gaussian_nulls(law, case.unit, case.balance, (2.0,))
    columns = case.estimates.neuron_numbers()
    for name, null in (("exchange",) * 2, ("exchange_balanced",) * 2, ("scaling_double", "scaling 2")):
        assert_close(columns[f"{name}_null_gaussian"], expected[null].by_neuron)


def test_default_scales_and_the_main_ones_all_have_a_null() -> None:
    unit = unit_named("silu")
    layout = Layout.of(unit)
    assert set(DEFAULT_ALPHAS) < set(layout.alphas)
    assert all(parts.by_neuron.isfinite().all() for parts in nulls(unit, alphas=DEFAULT_ALPHAS).values())


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("width", [1.0, 4.3, 10.0])
def test_a_scaling_null_is_right_where_a_is_wide_against_the_gate(name: str, width: float) -> None:
    """Against an integral over 200,001 points, with E[b² | a] written out; a few Hermite nodes are off by half there."""
    unit, mean_a, mean_b, std_b, rho = unit_named(name), -0.7, 0.4, 1.3, 0.6
    law = GaussianFit(*(torch.tensor([value], dtype=torch.float64) for value in (mean_a, mean_b, width, std_b, rho)))
    x = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    a, squared = mean_a + width * x, (mean_b + rho * std_b * x) ** 2 + (1 - rho**2) * std_b**2
    for alpha in (-1.0, 2.0, 8.0, math.inf):
        before, after = unit.gate(a), unit.scaled_gate(a, alpha)
        weight = torch.exp(-(x**2) / 2) * squared
        expected = (weight * (before - after) ** 2).sum() / (2 * (weight * (before**2 + after**2)).sum())
        null = gaussian_nulls(law, unit, torch.ones(1, dtype=torch.float64), (alpha,))[scaling_name(alpha)]
        assert float(null.by_neuron) == pytest.approx(float(expected), rel=2e-3 if width < 5 else 1e-2)
