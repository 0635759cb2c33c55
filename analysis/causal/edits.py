"""Edits: a gated unit is replaced, h′ = edit(a, b, g), to measure what breaking or enforcing a symmetry costs the model.

    exchange             g(b, a)
    exchange-balanced    g(βb, a)/β: k first brought to the length and side of q, so the edit is the same in every gauge
    scale:α              g(αa, b/α)
    flip                 the scaling at α = −1
    bilinear-limit       the scaling as α → 0+: ab/2 for SiLU and GELU
    relu-limit           the scaling as α → ∞: relu(a)·b for SiLU and GELU
    symmetric            (g(a, b) + g(b, a))/2
    antisymmetric        (g(a, b) − g(b, a))/2
    bilinear             c_j·ab, each neuron with its own least-squares c_j
    placement            c_j·g(ab, 1), the nonlinearity outside, each neuron with its own least-squares c_j
    mean, zero           E[h_j], 0: ablations, as a reference for the other costs

Plain exchange depends on the gauge: k → βk, v → v/β changes its result but not the layer (see
``asymmetry.exchange_balanced``).

A ``Change`` restricts an edit to neurons and positions, or is its placebo: a random change of h with the same norm ‖h′ − h‖
on every token. A placebo does not show the effect of a change of the same size in the directions in which h usually varies.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from analysis.errors import UserError
from analysis.sums.layout import check_alphas
from analysis.units.registry import Unit

Scalars = Float[Tensor, "*batch d_mlp"]
PerNeuron = Float[Tensor, " d_mlp"]


class Edit(ABC):
    """h′ from a and b, token by token; constants of the layer that it needs are fields, one number per neuron."""

    @abstractmethod
    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        """h′, in the precision of a."""


@dataclass(frozen=True)
class PlainExchange(Edit):
    """g(b, a)."""

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return unit.exchanged(a, b)


@dataclass(frozen=True)
class BalancedExchange(Edit):
    """g(βb, a)/β."""

    balance: PerNeuron

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        beta = self.balance.to(a)
        return unit.exchanged(a, beta * b) / beta


@dataclass(frozen=True)
class Scale(Edit):
    """g(αa, b/α); α = 0 and ∞ are the limits. ValueError on a unit without that limit."""

    alpha: float

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return unit.scaled(a, b, self.alpha)


@dataclass(frozen=True)
class SymmetricPart(Edit):
    """(g(a, b) + g(b, a))/2."""

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return (unit(a, b) + unit.exchanged(a, b)) / 2


@dataclass(frozen=True)
class AntisymmetricPart(Edit):
    """(g(a, b) − g(b, a))/2."""

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return (unit(a, b) - unit.exchanged(a, b)) / 2


@dataclass(frozen=True)
class Bilinear(Edit):
    """c_j·ab."""

    coefficient: PerNeuron

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return self.coefficient.to(a) * a * b


@dataclass(frozen=True)
class Placement(Edit):
    """c_j·g(ab, 1), which is c_j·σ(ab) for g = σ(a)·b."""

    coefficient: PerNeuron

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return self.coefficient.to(a) * unit.placed_outside(a, b)


@dataclass(frozen=True)
class Mean(Edit):
    """E[h_j] on every token."""

    mean: PerNeuron

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return self.mean.to(a).expand_as(a)


@dataclass(frozen=True)
class Zero(Edit):
    """0."""

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return torch.zeros_like(a)


@dataclass(frozen=True)
class Partial(Edit):
    """h + ε(h′ − h): an edit applied to the fraction ε."""

    edit: Edit
    epsilon: float

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        h = unit(a, b)
        return h + self.epsilon * (self.edit(a, b, unit) - h)


@dataclass(frozen=True)
class Rescaled(Edit):
    """g(a, βb)/β: a control, which does not change a unit that is linear in b."""

    beta: float

    def __call__(self, a: Scalars, b: Scalars, unit: Unit) -> Scalars:
        return unit(a, self.beta * b) / self.beta


@dataclass(frozen=True)
class EditCoefficients:
    """The constants of a layer that edits need, one number per neuron.

    Attributes:
        bilinear: c_j of the least-squares approximation c_j·ab of h.
        placement: c_j of the least-squares approximation c_j·g(ab, 1) of h.
        mean: E[h_j].
        balance: β_j = ±‖q_j‖/‖k_j‖.
    """

    bilinear: Float64[Tensor, " d_mlp"]
    placement: Float64[Tensor, " d_mlp"]
    mean: Float64[Tensor, " d_mlp"]
    balance: Float64[Tensor, " d_mlp"]


LIMITS = {"bilinear-limit": 0.0, "relu-limit": math.inf}
_SCALE = "scale:"
_MAKERS: dict[str, Callable[[EditCoefficients], Edit]] = {
    "exchange": lambda _: PlainExchange(),
    "exchange-balanced": lambda coefficients: BalancedExchange(coefficients.balance),
    "flip": lambda _: Scale(-1.0),
    "bilinear": lambda coefficients: Bilinear(coefficients.bilinear),
    "bilinear-limit": lambda _: Scale(0.0),
    "relu-limit": lambda _: Scale(math.inf),
    "symmetric": lambda _: SymmetricPart(),
    "antisymmetric": lambda _: AntisymmetricPart(),
    "placement": lambda coefficients: Placement(coefficients.placement),
    "mean": lambda coefficients: Mean(coefficients.mean),
    "zero": lambda _: Zero(),
}
ABLATIONS = ("mean", "zero")
"""Always measured too, as a reference: exchanging a layer's gate and up may cost more than removing the layer."""
DEFAULT_EDITS = (
    *("exchange", "exchange-balanced", "flip", "scale:0.5", "scale:2", "bilinear", "bilinear-limit", "relu-limit"),
    *ABLATIONS,
)


def make_edit(name: str, coefficients: EditCoefficients) -> Edit:
    """The edit of that name, for the layer that the coefficients were fitted on."""
    return Scale(float(name.removeprefix(_SCALE))) if name.startswith(_SCALE) else _MAKERS[name](coefficients)


def scale_of(name: str) -> float | None:
    """The α of an edit that is a scaling, limits included; None for any other edit."""
    if name.startswith(_SCALE):
        return float(name.removeprefix(_SCALE))
    return {"flip": -1.0, **LIMITS}.get(name)


def parse_edits(text: str) -> tuple[str, ...]:
    """'exchange,scale:2' as names, each once, in order, with the ablations added; UserError for an unknown name."""
    return tuple(dict.fromkeys([*(_canonical(part.strip()) for part in text.split(",")), *ABLATIONS]))


def existing_edits(names: tuple[str, ...], units: list[Unit]) -> tuple[str, ...]:
    """Those of the names that exist for every one of the units: not all units have a limit at 0 or ∞.

    Where up is bounded, the limits are not offered as edits: they are not a bilinear or a relufied unit, but vanish or do
    not depend on b.
    """
    linear = [unit.limits if unit.up_is_linear else () for unit in units]
    return tuple(name for name in names if all(name not in LIMITS or LIMITS[name] in limits for limits in linear))


def _canonical(name: str) -> str:
    if name in _MAKERS:
        return name
    if not name.startswith(_SCALE):
        raise UserError(f"unknown edit {name!r}: choose from {', '.join(_MAKERS)}, scale:α (like scale:2)")
    try:
        alpha = float(name.removeprefix(_SCALE))
    except ValueError as error:
        raise UserError(f"{name!r} is not a scaling: write it like scale:0.5") from error
    check_alphas([alpha], f"the limits are called {' and '.join(LIMITS)}")
    if alpha == 1:
        raise UserError(f"{name!r} changes nothing: omit it")
    return "flip" if alpha == -1 else f"{_SCALE}{alpha:g}"


@dataclass(frozen=True)
class Change:
    """An edit on some neurons and positions of a layer, or its placebo there; everything else is unchanged bit for bit.

    So is a neuron on a token that was not routed to its expert, where a and b are both 0.

    Attributes:
        edit: the edit.
        unit: g of the layer.
        neurons: indices of the neurons to edit; None for all.
        positions: which positions to edit; None for all.
        noise: if given, h is moved along these directions instead, on every token by the distance of the edit.
    """

    edit: Edit
    unit: Unit
    neurons: Int64[Tensor, " chosen"] | None = None
    positions: Bool[Tensor, "*batch pos"] | None = None
    noise: Float[Tensor, "*batch pos d_mlp"] | None = None

    def __call__(
        self,
        a: Float[Tensor, "*batch pos d_mlp"],
        b: Float[Tensor, "*batch pos d_mlp"],
        h: Float[Tensor, "*batch pos d_mlp"],
    ) -> Float[Tensor, "*batch pos d_mlp"]:
        """h after the change."""
        chosen = (a != 0) | (b != 0)
        if self.neurons is not None:
            chosen = chosen & torch.zeros_like(chosen).index_fill(-1, self.neurons.to(h.device), True)
        if self.positions is not None:
            chosen = chosen & self.positions[..., None].to(h.device)
        changed = torch.where(chosen, self.edit(a, b, self.unit).to(h.dtype), h)
        return changed if self.noise is None else _moved_equally(h, changed, torch.where(chosen, self.noise.to(h), 0))


def _moved_equally(h: Scalars, changed: Scalars, direction: Scalars) -> Scalars:
    """h moved along the direction by ‖changed − h‖ on every token; unchanged where the direction is 0."""
    distance = torch.linalg.vector_norm(changed - h, dim=-1, keepdim=True)
    length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    return torch.where(length > 0, h + direction * (distance / length), h)
