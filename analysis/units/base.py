"""The gated unit g(a, b) and the actions of the two symmetries on it.

A neuron of a gated MLP reads its gate pre-activation a = ⟨q, x⟩ and its up pre-activation b = ⟨k, x⟩ and emits
h = g(a, b), most often σ(a)·b. Rank-1 bilinear attention, σ(ab), is unchanged by

    exchange    (a, b) → (b, a)
    scaling     (a, b) → (αa, b/α)

(Breslow 2026, the symmetries of the rank-1 form). Everything here is written for g(a, b) = gate(a)·up(b), so a unit with
clamps or an offset only defines its two factors: see ``analysis.units.variants``, and ``analysis.units.registry`` for all
units by name.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.units.activations import Activation, Slopes

Scalars = Float[Tensor, "*shape"]


class Unit(ABC):
    """A gated unit g(a, b) = gate(a)·up(b), on tensors of one shape whose last axis holds all neurons of a layer.

    All units of gated MLPs that we know are of this form; most have up(b) = b, and then k → βk, v → v/β does not change the
    neuron's output.
    """

    up_is_linear = True
    """Whether up(b) = b."""
    is_pointwise = True
    """Whether a neuron's h depends on its own a and b only, so that the last axis need not hold all neurons of a layer."""
    enough_neurons = 1
    """Number of neurons with which a random layer has an output that is not 0."""

    @property
    def span(self) -> float:
        """Size of pre-activations on which all features of the unit are visible, its clamps included."""
        return 1.0

    @property
    def can_be_compiled(self) -> bool:
        """Whether torch.compile can compile it: only if its derivative is written out, not taken by torch."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which ``unit_named`` returns this unit."""

    @abstractmethod
    def gate(self, a: Scalars) -> Scalars:
        """The factor that depends on a, σ(a)."""

    def up(self, b: Scalars) -> Scalars:
        """The factor that depends on b."""
        return b

    def __call__(self, a: Scalars, b: Scalars) -> Scalars:
        """h = g(a, b)."""
        return self.gate(a) * self.up(b)

    @property
    def limits(self) -> tuple[float, ...]:
        """Which of the limiting scales, 0 and ∞, exist for this unit."""
        return ()

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        """The factor of a in the limit of g(αa, b/α) as α → 0+ or α → ∞, for a scale in ``limits``; else ValueError."""
        raise ValueError(f"{self.name} has no limit at scale {alpha:g}")

    def up_at_limit(self, b: Scalars, alpha: float) -> Scalars:
        """The factor of b in the same limit."""
        return b

    def exchanged(self, a: Scalars, b: Scalars) -> Scalars:
        """g(b, a): query and key are exchanged."""
        return self(b, a)

    def scaled_gate(self, a: Scalars, alpha: float) -> Scalars:
        """The factor of a in g(αa, b/α), or in its limit for α = 0 and ∞; includes the 1/α of a linear up."""
        if alpha == 0 or math.isinf(alpha):
            return self.gate_at_limit(a, alpha)
        return self.gate(alpha * a) / alpha if self.up_is_linear else self.gate(alpha * a)

    def scaled_up(self, b: Scalars, alpha: float) -> Scalars:
        """The factor of b in g(αa, b/α); b itself where up is linear."""
        if self.up_is_linear or alpha == 0 or math.isinf(alpha):
            return self.up_at_limit(b, alpha)
        return self.up(b / alpha)

    def scaled(self, a: Scalars, b: Scalars, alpha: float) -> Scalars:
        """g(αa, b/α); α = −1 flips both signs, α = 0 and ∞ are the limits."""
        return self.scaled_gate(a, alpha) * self.scaled_up(b, alpha)

    def placed_outside(self, a: Scalars, b: Scalars) -> Scalars:
        """g(ab, 1), which is σ(ab) for g = σ(a)·b: the symmetric form with the nonlinearity outside."""
        return self(a * b, torch.ones_like(b))

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        """d/dα g(αa, b/α) at α = 1, that is a ∂g/∂a − b ∂g/∂b; b(aσ′(a) − σ(a)) for g = σ(a)·b.

        Zero everywhere exactly when g is invariant under infinitesimal scaling (Euler's theorem on homogeneous
        functions). Computed by forward-mode differentiation for any g, including one that couples the neurons.
        """
        return torch.func.jvp(self, (a, b), (a, -b))[1]


@dataclass(frozen=True)
class GatedUnit(Unit):
    """g(a, b) = σ(a)·b."""

    activation: Activation

    @property
    def span(self) -> float:
        return self.activation.span

    @property
    def can_be_compiled(self) -> bool:
        return self.activation.euler is not None

    @property
    def name(self) -> str:
        return self.activation.name

    def gate(self, a: Scalars) -> Scalars:
        return self.activation(a)

    @property
    def limits(self) -> tuple[float, ...]:
        slopes = ((0.0, self.activation.slope_at_zero), (math.inf, self.activation.slope_at_infinity))
        return tuple(alpha for alpha, slope in slopes if slope is not None)

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        slopes = self.activation.slope_at_zero if alpha == 0 else self.activation.slope_at_infinity
        return super().gate_at_limit(a, alpha) if slopes is None else _one_sided(a, slopes)

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        euler = self.activation.euler
        return super().euler(a, b) if euler is None else euler(a) * b


def _one_sided(a: Scalars, slopes: Slopes) -> Scalars:
    """The line through zero with one slope for a < 0 and another for a > 0."""
    negative, positive = slopes
    if negative == positive:
        return positive * a
    return positive * torch.nn.functional.leaky_relu(a, negative / positive)
