"""Gate activations σ and their two limiting slopes.

A gated unit multiplies σ(a) by b. The behaviour of σ near 0 and at infinity determines which symmetries the unit has
approximately, so each activation has lim σ(z)/z on both sides of both limits:

    at zero        SiLU → 1/2, ReLU → 0 or 1     (the limit of (σ(αa)·b/α)/(ab) as α → 0)
    at infinity    SiLU → 0 or 1                 (the same as α → ∞)

A slope of ``None`` says that the limit does not exist (sigmoid at zero: σ(0) = 1/2).

Names are the canonical ones of Hugging Face configurations; aliases map to them. An unknown name is an error. Two functions
derive an activation from another one, and are written as a name with a parameter:

    soft_capped(σ,c)    σ(c·tanh(z/c)): as σ near 0, flat beyond c
    multiplied(σ,m)     σ(mz): the gate of Falcon-H1, whose pre-activation is multiplied by a constant
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis.errors import UserError
from analysis.units.names import numbers, parsed, require, written

Slopes = tuple[float, float]


@dataclass(frozen=True)
class Activation:
    """A pointwise function σ with its slopes σ(z)/z at 0∓ and at ∓∞.

    Attributes:
        name: canonical name, as in a Hugging Face configuration.
        function: σ, elementwise on a tensor of any shape.
        slope_at_zero: (lim z→0−, lim z→0+) of σ(z)/z, or None where it diverges.
        slope_at_infinity: (lim z→−∞, lim z→+∞) of σ(z)/z, or None where it diverges.
        euler: zσ′(z) − σ(z), 0 where σ is linear on each side of 0; if None, σ is differentiated automatically, which is
            slower.
        span: size of the arguments on which all features of σ are visible.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    slope_at_zero: Slopes | None
    slope_at_infinity: Slopes | None
    euler: Callable[[Tensor], Tensor] | None = None
    span: float = 1.0

    def __call__(self, z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.function(z)


def _gelu_tanh(z: Tensor) -> Tensor:
    return functional.gelu(z, approximate="tanh")


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _relu_squared(z: Tensor) -> Tensor:
    return functional.relu(z).square()


def _leaky_relu(z: Tensor) -> Tensor:
    return functional.leaky_relu(z, negative_slope=0.01)


def _identity(z: Tensor) -> Tensor:
    return z.clone()


def _none(z: Tensor) -> Tensor:
    return 0 * z  # NaN and infinity must survive, they indicate overflow


def _bell(z: Tensor) -> Tensor:
    """s(1 − s) of the logistic function s, to full precision in both tails."""
    return torch.sigmoid(z) * torch.sigmoid(-z)


def _euler_of_gelu(z: Tensor) -> Tensor:
    square = z.square()
    return square * torch.exp(-0.5 * square) / math.sqrt(2 * math.pi)


def _euler_of_gelu_tanh(z: Tensor) -> Tensor:
    """With (1 + tanh u)/2 = s(2u), where 2u = z·(c + d z²)."""
    linear, square = 2 * math.sqrt(2 / math.pi), z.square()
    cubic = 0.044715 * linear
    return square * (linear + 3 * cubic * square) * _bell(z * (linear + cubic * square))


def _euler_of_quick_gelu(z: Tensor) -> Tensor:
    return 1.702 * z.square() * _bell(1.702 * z)


def _euler_of_silu(z: Tensor) -> Tensor:
    return z.square() * _bell(z)


def _euler_of_sigmoid(z: Tensor) -> Tensor:
    return z * _bell(z) - torch.sigmoid(z)


def _euler_of_tanh(z: Tensor) -> Tensor:
    y = torch.tanh(z)
    return z * (1 - y.square()) - y


def _euler_of_softplus(z: Tensor) -> Tensor:
    """An even function, written without a difference of large numbers."""
    size = z.abs()
    return -size * torch.sigmoid(-size) - functional.softplus(-size)


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("linear", _identity, (1.0, 1.0), (1.0, 1.0), _none),
        Activation("relu", functional.relu, (0.0, 1.0), (0.0, 1.0), _none),
        Activation("leaky_relu", _leaky_relu, (0.01, 1.0), (0.01, 1.0), _none),
        Activation("relu2", _relu_squared, (0.0, 0.0), None, _relu_squared),
        Activation("gelu", functional.gelu, (0.5, 0.5), (0.0, 1.0), _euler_of_gelu),
        Activation("gelu_pytorch_tanh", _gelu_tanh, (0.5, 0.5), (0.0, 1.0), _euler_of_gelu_tanh),
        Activation("quick_gelu", _quick_gelu, (0.5, 0.5), (0.0, 1.0), _euler_of_quick_gelu),
        Activation("silu", functional.silu, (0.5, 0.5), (0.0, 1.0), _euler_of_silu),
        Activation("sigmoid", torch.sigmoid, None, (0.0, 0.0), _euler_of_sigmoid),
        Activation("tanh", torch.tanh, (1.0, 1.0), (0.0, 0.0), _euler_of_tanh),
        Activation("softplus", functional.softplus, None, (0.0, 1.0), _euler_of_softplus),
    )
}

# Exact synonyms only: gelu_fast and gelu_new are the same tanh formula, written differently.
ALIASES = {
    "identity": "linear",
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
}


@cache
def soft_capped(activation: Activation, cap: float) -> Activation:
    """σ(c·tanh(z/c)), c > 0.

    With u = c·tanh(z/c) and r = zu′/u = 2t/sinh 2t, t = z/c: zσ′(u)u′ − σ(u) = r(uσ′(u) − σ(u)) − (1 − r)σ(u).
    """
    sigma, euler, name = activation.function, activation.euler, written("soft_capped", activation.name, cap)
    require(cap > 0, name, "give a cap above 0")

    def function(z: Tensor) -> Tensor:
        return sigma(cap * torch.tanh(z / cap))

    def euler_of_it(z: Tensor) -> Tensor:
        inside, twice = cap * torch.tanh(z / cap), 2 / cap * z
        ratio = torch.where(twice == 0, 1.0, twice / torch.sinh(twice))
        return ratio * euler(inside) - (1 - ratio) * sigma(inside)  # type: ignore[misc]

    slopes, span = (activation.slope_at_zero, (0.0, 0.0)), max(activation.span, cap / 2)
    return Activation(name, function, *slopes, None if euler is None else euler_of_it, span)


@cache
def multiplied(activation: Activation, factor: float) -> Activation:
    """σ(mz), m ≠ 0; its zσ′ − σ is that of σ at mz."""
    sigma, euler, name = activation.function, activation.euler, written("multiplied", activation.name, factor)
    require(factor != 0, name, "a gate multiplied by 0 is constant, give another factor")

    def function(z: Tensor) -> Tensor:
        return sigma(factor * z)

    def euler_of_it(z: Tensor) -> Tensor:
        return euler(factor * z)  # type: ignore[misc]

    def times(slopes: Slopes | None) -> Slopes | None:
        if slopes is None:
            return None
        negative, positive = slopes if factor > 0 else slopes[::-1]
        return factor * negative, factor * positive

    slopes, span = (times(activation.slope_at_zero), times(activation.slope_at_infinity)), activation.span / abs(factor)
    return Activation(name, function, *slopes, None if euler is None else euler_of_it, span)


MADE: dict[str, Callable[[Activation, float], Activation]] = {"soft_capped": soft_capped, "multiplied": multiplied}
"""The functions that derive an activation from another one, by name."""


def activation_named(name: str, units: tuple[str, ...] = ()) -> Activation:
    """The activation of that name or alias, or derived from one, as in soft_capped(gelu,30); UserError for other names.

    ``units`` are other valid forms of a name, for the error message.
    """
    kind, parameters = parsed(name)
    if kind in MADE and parameters:
        return MADE[kind](activation_named(parameters[0], units), *numbers(name, parameters[1:], 1))
    canonical = ALIASES.get(name, name)
    if canonical not in ACTIVATIONS:
        known = ", ".join([*sorted({*ACTIVATIONS, *ALIASES}), *(f"{kind}(NAME,NUMBER)" for kind in MADE), *units])
        raise UserError(f"unknown gate activation {name!r}: choose from {known} or add it to analysis/units/activations.py")
    return ACTIVATIONS[canonical]
