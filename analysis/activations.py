"""Gate activations σ and their two limiting slopes.

A gated unit multiplies σ(a) by b. How σ behaves near zero and far from it decides which symmetries the unit nearly
has, so each activation carries lim σ(z)/z on both sides of both ends:

    near zero     SiLU → 1/2, ReLU → 0 or 1     (what σ(αa)·b/α tends to, over ab, as α → 0)
    far from it   SiLU → 0 or 1                 (the same as α → ∞)

A slope of ``None`` says that the limit does not exist (sigmoid at zero: σ(0) = 1/2).

Names are the canonical ones of Hugging Face configurations; aliases map to them. An unknown name is an error.
"""

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
    """

    name: str
    function: Callable[[Tensor], Tensor]
    slope_at_zero: Slopes | None
    slope_at_infinity: Slopes | None

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


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("linear", _identity, (1.0, 1.0), (1.0, 1.0)),
        Activation("relu", functional.relu, (0.0, 1.0), (0.0, 1.0)),
        Activation("leaky_relu", _leaky_relu, (0.01, 1.0), (0.01, 1.0)),
        Activation("relu2", _relu_squared, (0.0, 0.0), None),
        Activation("gelu", functional.gelu, (0.5, 0.5), (0.0, 1.0)),
        Activation("gelu_pytorch_tanh", _gelu_tanh, (0.5, 0.5), (0.0, 1.0)),
        Activation("quick_gelu", _quick_gelu, (0.5, 0.5), (0.0, 1.0)),
        Activation("silu", functional.silu, (0.5, 0.5), (0.0, 1.0)),
        Activation("sigmoid", torch.sigmoid, None, (0.0, 0.0)),
        Activation("tanh", torch.tanh, (1.0, 1.0), (0.0, 0.0)),
        Activation("softplus", functional.softplus, None, (0.0, 1.0)),
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
