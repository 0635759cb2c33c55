"""Activations, their limiting slopes, and the two symmetries acting on a gated unit."""

import math

import pytest
import torch
from torch import Tensor

from analysis.errors import UserError
from analysis.units.activations import ACTIVATIONS, ALIASES, activation_named
from analysis.units.registry import GatedUnit, Unit, unit_named
from tests.helpers import reference
from tests.helpers.random_layers import TWINS, ClampedUnit, SymmetricUnit, assert_close, clamped_twin

GRID = torch.cat([torch.linspace(-9, 9, 181, dtype=torch.float64), torch.tensor([-30.0, 30.0], dtype=torch.float64)])

FORMULAS = {
    "identity": lambda z: z,
    "swish": lambda z: z * reference.sigmoid(z),
    "gelu_new": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_fast": lambda z: 0.5 * z * (1 + math.tanh(z * 0.7978845608028654 * (1 + 0.044715 * z * z))),
    "gelu_python": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
    "relu_squared": lambda z: max(z, 0.0) ** 2,
}
"""The formula that each alias stands for."""


def pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pre-activations of a few hundred tokens, none of them 0."""
    a, b = torch.randn(2, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 2 * a, 2 * b


def test_every_activation_has_a_twin() -> None:
    assert ACTIVATIONS.keys() == TWINS.keys()
    assert ALIASES.keys() == FORMULAS.keys()


@pytest.mark.parametrize("name", TWINS)
def test_activation_equals_its_formula(name: str) -> None:
    sigma = reference.ACTIVATIONS[TWINS[name]][0]
    assert_close(activation_named(name)(GRID), [sigma(z) for z in GRID.tolist()])
    assert_close(activation_named(name)(GRID.float()), [sigma(z) for z in GRID.tolist()], torch.float32)


@pytest.mark.parametrize("alias", FORMULAS)
def test_alias_is_the_same_function_under_its_canonical_name(alias: str) -> None:
    activation = activation_named(alias)
    assert activation is ACTIVATIONS[ALIASES[alias]]
    assert unit_named(alias).name == activation.name
    assert_close(activation(GRID), [FORMULAS[alias](z) for z in GRID.tolist()])


@pytest.mark.parametrize("name", ["mish", "SiLU", "", "gelu_pytorch"])
def test_unknown_activation_is_an_error_that_names_it_and_the_known_ones(name: str) -> None:
    with pytest.raises(UserError) as caught:
        unit_named(name)
    message = str(caught.value)
    assert repr(name) in message
    assert "\n" not in message
    assert all(known in message for known in (*ACTIVATIONS, *ALIASES))


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize(("end", "field"), [(1e-7, "slope_at_zero"), (1e7, "slope_at_infinity")])
def test_slopes_are_the_limits_of_the_gain(name: str, end: float, field: str) -> None:
    activation = activation_named(name)
    z = torch.tensor([-end, end], dtype=torch.float64)
    gain, slopes = activation(z) / z, getattr(activation, field)
    if slopes is None:
        assert gain.abs().max() > 1e6
    else:
        torch.testing.assert_close(gain, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", TWINS)
def test_unit_is_found_by_its_name(name: str) -> None:
    unit = unit_named(name)
    assert unit_named(unit.name) == unit
    a, b = pairs()
    assert torch.equal(unit(a, b), activation_named(name)(a) * b)


@pytest.mark.parametrize("name", TWINS)
def test_limits_are_what_scaling_tends_to(name: str) -> None:
    unit, (a, b) = unit_named(name), pairs()
    _, _, at_zero, at_infinity = reference.ACTIVATIONS[TWINS[name]]
    expected = {alpha for alpha, slopes in ((0.0, at_zero), (math.inf, at_infinity)) if slopes is not None}
    assert set(unit.limits) == expected
    for alpha, near in ((0.0, 1e-9), (math.inf, 1e9)):
        if alpha in unit.limits:
            torch.testing.assert_close(unit.scaled(a, b, alpha), unit.scaled(a, b, near), rtol=1e-6, atol=1e-6)
        else:
            with pytest.raises(ValueError, match="no limit"):
                unit.scaled(a, b, alpha)


def test_clamped_unit_equals_its_twin_and_has_no_limit() -> None:
    unit, (a, b) = ClampedUnit(), pairs()
    a, b = 6 * a, 6 * b
    assert_close(unit(a, b), [clamped_twin(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    assert unit.limits == ()
    for alpha in (0.0, math.inf):
        with pytest.raises(ValueError, match="clamped has no limit"):
            unit.scaled(a, b, alpha)


@pytest.mark.parametrize("unit", [*map(unit_named, TWINS), ClampedUnit()], ids=lambda unit: unit.name)
def test_actions_of_the_symmetries(unit: GatedUnit | ClampedUnit) -> None:
    a, b = pairs()
    assert torch.equal(unit.exchanged(a, b), unit(b, a))
    assert torch.equal(unit.scaled(a, b, 1.0), unit(a, b))
    assert torch.equal(unit.scaled(a, b, -1.0), unit(-a, -b))
    assert torch.equal(unit.scaled(a, b, 4.0), unit(4 * a, b / 4))
    assert torch.equal(unit.placed_outside(a, b), unit.placed_outside(b, a))


@pytest.mark.parametrize("name", TWINS)
def test_placed_outside_is_sigma_of_the_product(name: str) -> None:
    a, b = pairs()
    assert torch.equal(unit_named(name).placed_outside(a, b), activation_named(name)(a * b))


@pytest.mark.parametrize("name", TWINS)
def test_euler_is_the_closed_form(name: str) -> None:
    a, b = pairs()
    sigma, derivative, _, _ = reference.ACTIVATIONS[TWINS[name]]
    closed = reference.apply(lambda x, y: y * (x * derivative(x) - sigma(x)), [a.tolist()], [b.tolist()])
    assert_close(unit_named(name).euler(a, b), closed[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*TWINS, "gpt_oss"])
def test_euler_written_out_is_what_differentiation_gives(name: str, dtype: torch.dtype) -> None:
    unit, (a, b) = unit_named(name), pairs()
    a, b = 5 * a, 5 * b
    assert ((a.abs() > 7) & (b.abs() < 7)).any()
    expected = Unit.euler(unit, a, b)
    found = unit.euler(a.to(dtype), b.to(dtype))
    assert found.dtype == dtype
    assert_close(found, expected, torch.float32)  # far out torch's own derivative rounds, and its softplus is cut off
    far = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=dtype)
    assert unit.euler(far, torch.ones_like(far)).isfinite().all()
    assert unit.euler(torch.tensor([torch.nan, 1.0]), torch.tensor([1.0, torch.nan])).isnan().all()  # tells of overflow


@pytest.mark.parametrize("unit", [unit_named("silu"), ClampedUnit(), SymmetricUnit()], ids=lambda unit: unit.name)
def test_euler_is_the_derivative_of_scaling(unit: GatedUnit | ClampedUnit | SymmetricUnit) -> None:
    a, b = pairs()
    step = 1e-5
    slope = (unit.scaled(a, b, 1 + step) - unit.scaled(a, b, 1 - step)) / (2 * step)
    torch.testing.assert_close(unit.euler(a, b), slope, rtol=1e-6, atol=1e-8)
