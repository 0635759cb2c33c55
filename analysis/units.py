"""The gated unit g(a, b) and the actions of the two symmetries on it.

A neuron of a gated MLP reads its gate pre-activation a = ⟨q, x⟩ and its up pre-activation b = ⟨k, x⟩ and emits
h = g(a, b), most often σ(a)·b. Rank-1 bilinear attention, σ(ab), is unchanged by

    exchange    (a, b) → (b, a)
    scaling     (a, b) → (αa, b/α)

(Breslow 2026, the symmetries of the rank-1 form). Everything here is written for a general g, so a unit with clamps or
an offset needs only its own ``__call__``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.activations import Activation, Slopes, activation_named

Scalars = Float[Tensor, "*shape"]


class Unit(ABC):
    """A gated unit g(a, b), elementwise on tensors of one shape."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name from which ``unit_named`` makes the unit again."""

    @abstractmethod
    def __call__(self, a: Scalars, b: Scalars) -> Scalars:
        """h = g(a, b)."""

    @property
    def limits(self) -> tuple[float, ...]:
        """Which of the limiting scales, 0 and ∞, exist for this unit."""
        return ()

    def at_limit(self, a: Scalars, b: Scalars, alpha: float) -> Scalars:
        """g(αa, b/α) as α → 0+ or α → ∞, for a scale listed in ``limits``."""
        raise ValueError(f"{self.name} has no limit at scale {alpha:g}")

    def exchanged(self, a: Scalars, b: Scalars) -> Scalars:
        """g(b, a): query and key change places."""
        return self(b, a)

    def scaled(self, a: Scalars, b: Scalars, alpha: float) -> Scalars:
        """g(αa, b/α); α = −1 flips both signs, α = 0 and ∞ are the limits."""
        if alpha == 0 or math.isinf(alpha):
            return self.at_limit(a, b, alpha)
        return self(alpha * a, b / alpha)

    def placed_outside(self, a: Scalars, b: Scalars) -> Scalars:
        """g(ab, 1), which is σ(ab) for g = σ(a)·b: the symmetric form with the nonlinearity outside."""
        return self(a * b, torch.ones_like(b))

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        """d/dα g(αa, b/α) at α = 1, that is a ∂g/∂a − b ∂g/∂b; b(aσ′(a) − σ(a)) for g = σ(a)·b.

        Zero everywhere exactly when g is invariant under infinitesimal scaling (Euler's theorem on homogeneous
        functions). Forward-mode differentiation keeps it right for every g.
        """
        return torch.func.jvp(self, (a, b), (a, -b))[1]


@dataclass(frozen=True)
class GatedUnit(Unit):
    """g(a, b) = σ(a)·b."""

    activation: Activation

    @property
    def name(self) -> str:
        return self.activation.name

    def __call__(self, a: Scalars, b: Scalars) -> Scalars:
        return self.activation(a) * b

    @property
    def limits(self) -> tuple[float, ...]:
        slopes = ((0.0, self.activation.slope_at_zero), (math.inf, self.activation.slope_at_infinity))
        return tuple(alpha for alpha, slope in slopes if slope is not None)

    def at_limit(self, a: Scalars, b: Scalars, alpha: float) -> Scalars:
        slopes = self.activation.slope_at_zero if alpha == 0 else self.activation.slope_at_infinity
        if slopes is None:
            return super().at_limit(a, b, alpha)
        return _one_sided(a, slopes) * b


def _one_sided(a: Scalars, slopes: Slopes) -> Scalars:
    """The line through zero with one slope for a < 0 and another for a > 0."""
    negative, positive = slopes
    if negative == positive:
        return positive * a
    return positive * torch.nn.functional.leaky_relu(a, negative / positive)


@dataclass(frozen=True)
class GptOssUnit(Unit):
    """(clamp(b, −7, 7) + 1) · z·logistic(1.702 z) with z = min(a, 7): the unit of gpt-oss.

    Not linear in b, because of the clamps and of the 1, so it is the one unit here that k → βk, v → v/β changes.
    """

    @property
    def name(self) -> str:
        return "gpt_oss"

    def __call__(self, a: Scalars, b: Scalars) -> Scalars:
        gate = a.clamp(max=7.0)
        return (b.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


OTHER_UNITS: dict[str, Unit] = {unit.name: unit for unit in (GptOssUnit(),)}
"""Units that are not σ(a)·b."""


def unit_named(name: str) -> Unit:
    """The unit that ``Unit.name`` named; raises UserError for an unknown activation."""
    return OTHER_UNITS.get(name) or GatedUnit(activation_named(name))
