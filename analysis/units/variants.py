"""Units that are not σ(a)·b, as in these model families:

    GptOssUnit         (clamp(b, ±L) + 1) · z·logistic(αz), z = min(a, L)      gpt-oss, MiniMax-M3-VL, OpenAI privacy filter
    ClampedUnit        σ(min(a, L)) · clamp(b, ±L)                             DeepSeek-V4, GLM-5 Next, Hunyuan V4
                       min(σ(a), L) · clamp(b, ±L)                             Step-3.7, which clamps after σ
    SoftCappedUnit     c·tanh(a/c)·logistic(a) · d·tanh(b/d)                   Inkling 2
    TopKUnit           σ(relu(a − cutoff)) · b, cutoff = mean + std·Φ⁻¹(p)     Gemma 3n

(as in transformers 5.24.0). Gates are clamped from above only, ups from both sides. For a unit with a bounded up both
limits exist but are degenerate: as α → 0 or ∞ one factor of g(αa, b/α) vanishes and the other is bounded.

The cutoff of a top-k gate depends on all neurons of the layer, through mean and std of their a on the token: that unit is a
function of the layer, not of single pairs (a, b).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from analysis.units.activations import Activation
from analysis.units.base import Scalars, Unit
from analysis.units.names import require, written


@dataclass(frozen=True)
class GptOssUnit(Unit):
    """(clamp(b, −L, L) + 1) · z·logistic(αz) with z = min(a, L).

    Not linear in b, because of the clamp and the offset 1, so that k → βk, v → v/β changes it. Its limit as scaling goes to
    ∞ is L·logistic(αL) wherever a > 0, independent of b: the clamp of the gate times the offset.
    """

    slope: float = 1.702
    limit: float = 7.0

    up_is_linear = False
    can_be_compiled = True
    limits = (0.0, math.inf)

    def __post_init__(self) -> None:
        require(self.slope > 0 and self.limit > 0, self.name, "give a slope and a limit above 0")

    @property
    def name(self) -> str:
        return _with("gpt_oss", (self.slope, self.limit), (1.702, 7.0))

    def gate(self, a: Scalars) -> Scalars:
        clamped = a.clamp(max=self.limit)
        return clamped * torch.sigmoid(self.slope * clamped)

    def up(self, b: Scalars) -> Scalars:
        return b.clamp(-self.limit, self.limit) + 1

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        return 0 * a if alpha == 0 else (a > 0) * self.gate(torch.full_like(a, self.limit)) + 0 * a

    def up_at_limit(self, b: Scalars, alpha: float) -> Scalars:
        return _signs(b) * self.limit + 1 if alpha == 0 else 0 * b + 1

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        inside = a.clamp(max=self.limit)
        logistic = torch.sigmoid(self.slope * inside)
        derivative = logistic * (1 + self.slope * inside * torch.sigmoid(-self.slope * inside)) * (a <= self.limit)
        return a * derivative * self.up(b) - inside * logistic * (b * (b.abs() <= self.limit))


@dataclass(frozen=True)
class ClampedUnit(Unit):
    """σ(min(a, L)) · clamp(b, −L, L), or min(σ(a), L) · clamp(b, −L, L) where the gate is clamped after σ.

    σ must grow without bound, or clamping its argument would not be a clamp.
    """

    activation: Activation
    limit: float
    after: bool = False

    up_is_linear = False

    def __post_init__(self) -> None:
        slopes = self.activation.slope_at_infinity
        grows = slopes is None or (slopes[0] >= 0 and slopes[1] > 0)
        require(self.limit > 0, self.name, "give a limit above 0")
        require(grows, self.name, f"{self.activation.name} does not grow, use it without a clamp")

    @property
    def name(self) -> str:
        return written("clamped_after" if self.after else "clamped", self.activation.name, self.limit)

    @property
    def span(self) -> float:
        return max(self.activation.span, self.limit / 2)

    @property
    def can_be_compiled(self) -> bool:
        return self.activation.euler is not None

    def gate(self, a: Scalars) -> Scalars:
        return self.activation(a).clamp(max=self.limit) if self.after else self.activation(a.clamp(max=self.limit))

    def up(self, b: Scalars) -> Scalars:
        return b.clamp(-self.limit, self.limit)

    @property
    def limits(self) -> tuple[float, ...]:
        return (0.0,) if self.activation.slope_at_infinity is None else (0.0, math.inf)

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        """As α → 0 the gate is σ(0); as α → ∞ the clamped gate over α vanishes for a > 0, and b is not clamped."""
        slopes = self.activation.slope_at_infinity
        if alpha == 0:
            return self.gate(0 * a)
        return super().gate_at_limit(a, alpha) if slopes is None else slopes[0] * a.clamp(max=0)

    def up_at_limit(self, b: Scalars, alpha: float) -> Scalars:
        return _signs(b) * self.limit if alpha == 0 else b

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        """With e = zσ′ − σ: e(a)·b where nothing is clamped, computed without a difference of equal numbers."""
        if self.activation.euler is None:
            return super().euler(a, b)
        gate, up = self.gate(a), self.up(b)
        free = (self.activation(a) if self.after else a) <= self.limit
        return self.activation.euler(a) * free * up + gate * (free * up - (b.abs() <= self.limit) * b)


@dataclass(frozen=True)
class SoftCappedUnit(Unit):
    """c·tanh(a/c)·logistic(a) · d·tanh(b/d): SiLU whose linear factor is capped, and a capped up."""

    gate_cap: float = 4.0
    up_cap: float = 25.0

    up_is_linear = False
    can_be_compiled = True
    limits = (0.0, math.inf)

    def __post_init__(self) -> None:
        require(self.gate_cap > 0 and self.up_cap > 0, self.name, "give two caps above 0")

    @property
    def name(self) -> str:
        return _with("inkling2", (self.gate_cap, self.up_cap), (4.0, 25.0))

    @property
    def span(self) -> float:
        return max(1.0, self.gate_cap / 2, self.up_cap / 2)

    def gate(self, a: Scalars) -> Scalars:
        return self.gate_cap * torch.tanh(a / self.gate_cap) * torch.sigmoid(a)

    def up(self, b: Scalars) -> Scalars:
        return self.up_cap * torch.tanh(b / self.up_cap)

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        return 0 * a

    def up_at_limit(self, b: Scalars, alpha: float) -> Scalars:
        return _signs(b) * self.up_cap if alpha == 0 else b

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        capped, logistic = torch.tanh(a / self.gate_cap), torch.sigmoid(a)
        derivative = (1 - capped.square()) * logistic + self.gate_cap * capped * logistic * torch.sigmoid(-a)
        flattened = 1 - torch.tanh(b / self.up_cap).square()
        return a * derivative * self.up(b) - self.gate(a) * (b * flattened)


@dataclass(frozen=True)
class TopKUnit(Unit):
    """σ(r)·b with r_j = relu(a_j − m − s·Φ⁻¹(p)), m and s the mean and the std of a over the neurons of the layer.

    About the share p of Gaussian pre-activations is cut off. r is homogeneous, r(αa) = αr(a) for α > 0, so that scaling
    depends on σ at z ≥ 0 only: limits and zσ′ − σ are those of σ there, at r. The cutoff of −a is different, and the
    exchanged gate has the cutoff of b. Φ⁻¹(p) is computed in float32, as in the model.

    In the balanced gauge b is β_j·b, one β per neuron, and the exchanged gate has the cutoff of all β_j·b_j: the balanced
    numbers are of the layer whose keys have all been rescaled to the length and sign of their queries.
    """

    activation: Activation
    sparsity: float
    deviations: float = field(init=False, repr=False, compare=False)

    is_pointwise = False

    def __post_init__(self) -> None:
        require(0 < self.sparsity < 1, self.name, "give the share that is cut off, between 0 and 1")
        share = torch.tensor(self.sparsity, dtype=torch.float32)
        deviations = float(torch.distributions.Normal(0.0, 1.0).icdf(share))
        require(math.isfinite(deviations), self.name, "give a share that float32 distinguishes from 0 and 1")
        object.__setattr__(self, "deviations", deviations)

    @property
    def name(self) -> str:
        return written("top_k", self.activation.name, self.sparsity)

    @property
    def enough_neurons(self) -> int:  # type: ignore[override]
        """So many that the largest possible deviation, √(n − 1), is twice the cutoff, and every second token passes it."""
        return max(2 + math.ceil(4 * self.deviations**2), math.ceil(0.5 / (1 - self.sparsity)))

    @property
    def span(self) -> float:
        return self.activation.span

    @property
    def can_be_compiled(self) -> bool:
        return self.activation.euler is not None

    def above_cutoff(self, a: Scalars) -> Scalars:
        """r."""
        deviations = a.new_full((), self.deviations)  # rounded to the precision of a, as the model does
        cutoff = a.mean(dim=-1, keepdim=True) + a.std(dim=-1, keepdim=True, correction=0) * deviations
        return torch.relu(a - cutoff)

    def gate(self, a: Scalars) -> Scalars:
        return self.activation(self.above_cutoff(a))

    @property
    def limits(self) -> tuple[float, ...]:
        slopes = ((0.0, self.activation.slope_at_zero), (math.inf, self.activation.slope_at_infinity))
        return tuple(alpha for alpha, slope in slopes if slope is not None)

    def gate_at_limit(self, a: Scalars, alpha: float) -> Scalars:
        slopes = self.activation.slope_at_zero if alpha == 0 else self.activation.slope_at_infinity
        return super().gate_at_limit(a, alpha) if slopes is None else slopes[1] * self.above_cutoff(a)

    def euler(self, a: Scalars, b: Scalars) -> Scalars:
        euler = self.activation.euler
        return super().euler(a, b) if euler is None else euler(self.above_cutoff(a)) * b


def _with(kind: str, parameters: tuple[float, ...], usual: tuple[float, ...]) -> str:
    """The kind alone if its parameters are the usual ones."""
    return kind if parameters == usual else written(kind, *parameters)


def _signs(b: Tensor) -> Tensor:
    """−1, 0 or 1, or NaN."""
    return torch.sign(b) + 0 * b
