"""Gate activations σ and their two limiting slopes.

A gated unit multiplies σ(a) by b. How σ behaves near zero and far from it decides which symmetries the unit nearly
has, so each activation carries lim σ(z)/z on both sides of both ends:

    near zero     SiLU → 1/2, ReLU → 0 or 1     (what σ(αa)·b/α tends to, over ab, as α → 0)
    far from it   SiLU → 0 or 1                 (the same as α → ∞)

A slope of ``None`` says that the limit does not exist (sigmoid at zero: σ(0) = 1/2).

Names are the canonical ones of Hugging Face configurations; aliases map to them. An unknown name is an error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from analysis.errors import UserError

Slopes = tuple[float, float]


@dataclass(frozen=True)
class Activation:
    """A pointwise function σ with its slopes σ(z)/z at 0∓ and at ∓∞.

    Attributes:
        name: canonical name, as in a Hugging Face configuration.
        function: σ, elementwise on a tensor of any shape.
        slope_at_zero: (lim z→0−, lim z→0+) of σ(z)/z, or None where it diverges.
        slope_at_infinity: (lim z→−∞, lim z→+∞) of σ(z)/z, or None where it diverges.
        euler: zσ′(z) − σ(z), 0 where σ is linear on each side of 0; None has σ differentiated instead, which is as right
            and slower.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    slope_at_zero: Slopes | None
    slope_at_infinity: Slopes | None
    euler: Callable[[Tensor], Tensor] | None = None

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
    return 0 * z  # NaN and infinity must survive, they tell of overflow


def _bell(z: Tensor) -> Tensor:
    """s(1 − s) of the logistic s, to full precision in both tails."""
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
    """An even function, here without a difference of large numbers."""
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

# Only exact synonyms: gelu_fast and gelu_new are the same tanh formula, written differently.
ALIASES = {
    "identity": "linear",
    "swish": "silu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_python": "gelu",
    "relu_squared": "relu2",
}


def activation_named(name: str) -> Activation:
    """The activation of that name or alias; raises UserError for any other name."""
    canonical = ALIASES.get(name, name)
    if canonical not in ACTIVATIONS:
        known = ", ".join(sorted({*ACTIVATIONS, *ALIASES}))
        raise UserError(f"unknown gate activation {name!r}: known are {known}; add it to analysis/activations.py")
    return ACTIVATIONS[canonical]
