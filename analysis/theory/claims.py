"""The table of claims, forms × actions × units: the predictions of theory beside measurements.

The measured values are relative changes of the output, in float64, over many random forms of random shapes and many random
actions. A prediction of invariance holds if the largest of them is at most rounding error (``LIMIT``). A prediction that a
symmetry is broken holds if it is larger and there is also a witness: a form with one neuron and d_model = 2, q = (1, 0),
k = (0, 1), v = (1, 0), whose output at x = (a, b) the action visibly changes. On the gated MLP and for scaling, the witness
is a pair (a, b) with σ(a)·b ≠ σ(αa)·b/α.

Inputs and the grid of witnesses cover the range in which all features of the unit are visible, its ``span``. For a unit
that couples the neurons (top-k) there are enough neurons for some gates to be open, and those beside the witness have
weights 0.

The two theorems of the paper (Breslow 2026) are checked as equivalences, both sides measured:

    exchange   σ(a)b = σ(b)a for all a, b                 exactly when  σ(z)/z is constant
    scaling    σ(αa)·b/α = σ(a)·b for all a, b, α > 0     exactly when  σ(αz) = ασ(z) for all z, α > 0

What it does not show: invariance on every input. That follows from the reasons in ``analysis.theory.properties``, not from
any number of draws.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.theory.actions import (
    Action,
    ChangeOfBasis,
    Exchange,
    Permutation,
    Scaling,
    SignFlip,
    ValueRescaling,
    residual,
)
from analysis.theory.forms import Form
from analysis.theory.gated import FAMILY, GATED
from analysis.theory.properties import RULES, Outcome, predicted
from analysis.units.activations import ACTIVATIONS, Activation
from analysis.units.registry import OTHER_UNITS, GatedUnit, Unit

LIMIT = 1e-12
"""Relative change below which two float64 computations of one function agree."""
VISIBLE = 1e-3
"""Smallest difference at a witness, relative to the larger of the two outputs."""
DRAWS = 24
GRID = (-3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0)

SIGNED: tuple[type[Action], ...] = (Scaling, ValueRescaling)
"""Actions with a parameter that may be negative."""

Values = Float64[Tensor, " token"]
UNITS: dict[str, Unit] = {**{name: GatedUnit(activation) for name, activation in ACTIVATIONS.items()}, **OTHER_UNITS}


@dataclass(frozen=True)
class Witness:
    """x = (a, b) and an action that changes the output of the smallest form of its kind there."""

    a: float
    b: float
    action: str
    before: float
    after: float

    @property
    def gap(self) -> float:
        """|after − before| over the larger of the two; 0 where both are 0."""
        return abs(self.after - self.before) / max(abs(self.before), abs(self.after), math.ulp(0.0))


@dataclass(frozen=True)
class Claim:
    """One cell of the table.

    Attributes:
        form, action, unit: names.
        prediction: what follows from the properties of the unit.
        residual: largest relative change over the draws, with α > 0 or β > 0 for an action with such a parameter.
        residual_negative: the same with a negative parameter; NaN for an action without a parameter.
        witness: where the break is largest; None if no break is predicted.
    """

    form: str
    action: str
    unit: str
    prediction: Outcome
    residual: float
    residual_negative: float
    witness: Witness | None

    @property
    def measured(self) -> Outcome:
        """The outcome according to the residuals alone."""
        if not self.residual <= LIMIT:
            return Outcome.BROKEN
        return Outcome.POSITIVE if self.residual_negative > LIMIT else Outcome.INVARIANT

    @property
    def passed(self) -> bool:
        """Whether measurement and prediction agree, and a predicted break has its witness."""
        return self.measured is self.prediction and (self.witness is None or self.witness.gap >= VISIBLE)


@dataclass(frozen=True)
class Theorem:
    """One theorem on one activation: how far each side of the equivalence is from holding."""

    name: str
    unit: str
    condition: float
    symmetry: float

    @property
    def passed(self) -> bool:
        """Both sides hold, or neither does."""
        return (self.condition <= LIMIT) == (self.symmetry <= LIMIT)


def claims(units: dict[str, Unit] = UNITS, draws: int = DRAWS, seed: int = 0) -> list[Claim]:
    """Every cell of the table for these units."""
    return [
        claim(form, action, unit, draws, seed)
        for unit in units.values()
        for form in FAMILY
        if accepts(form, unit)
        for action in RULES[form]
    ]


def accepts(form: type[Form], unit: Unit) -> bool:
    """Whether the form exists with this unit: forms with σ outside the product need a unit σ(a)·b."""
    return form in GATED or isinstance(unit, GatedUnit)


def claim(form: type[Form], action: type[Action], unit: Unit, draws: int = DRAWS, seed: int = 0) -> Claim:
    """Predict and measure one cell."""
    generator = torch.Generator().manual_seed(seed)
    prediction = predicted(form, action, unit)
    residuals = [_residuals(form, action, unit, generator) for _ in range(draws)]
    positive, negative = torch.tensor(residuals, dtype=torch.float64).amax(dim=0).tolist()
    found = None if prediction is Outcome.INVARIANT else witness(form, action, unit, prediction)
    return Claim(form.__name__, action.__name__, unit.name, prediction, positive, negative, found)


def _residuals(form: type[Form], action: type[Action], unit: Unit, generator: torch.Generator) -> tuple[float, float]:
    """The relative change on one random form of random shape, for a positive and for a negative parameter."""
    d_model, d_mlp, rank = (int(torch.randint(2, 7, (), generator=generator)) for _ in range(3))
    one = form.random(_sigma(form, unit), d_model, d_mlp + unit.enough_neurons - 1, rank, generator=generator)
    x = 3 * unit.span * torch.randn(16, d_model, generator=generator, dtype=torch.float64)
    positive = residual(one, _DRAWN[action](one, generator, 1.0), x)
    return positive, residual(one, _DRAWN[action](one, generator, -1.0), x) if action in SIGNED else math.nan


def witness(form: type[Form], action: type[Action], unit: Unit, prediction: Outcome) -> Witness:
    """The grid point with the largest change by a simple action, with a negative parameter if only those break."""
    label, simple = _simple(action, -1.0 if prediction is Outcome.POSITIVE else 2.0)
    one = smallest(form, unit)
    points = unit.span * torch.tensor(GRID, dtype=torch.float64)
    x = torch.cartesian_prod(points, points)
    outputs = torch.stack([one(x)[:, 0], simple(one)(x)[:, 0]], dim=1)
    place = int((outputs[:, 1] - outputs[:, 0]).abs().argmax())
    (a, b), (before, after) = x[place].tolist(), outputs[place].tolist()
    return Witness(a, b, label, before, after)


def smallest(form: type[Form], unit: Unit) -> Form:
    """One neuron in d_model = 2 with q = (1, 0), k = (0, 1), v = (1, 0); for rank 2 the second direction repeats the first.

    Beside it are neurons with weights 0, if the unit needs more than one.
    """
    build: Callable[..., Form] = form
    shapes = form.shapes(2, unit.enough_neurons, 2)
    weights = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for name, place in (("q", 0), ("k", 1), ("v", 0)):
        if name in weights:
            own = weights[name][:1] if name in form.per_neuron else weights[name]
            own.view(2, -1)[place] = 1
    return build(_sigma(form, unit), **weights)


def theorems(units: dict[str, Unit] = UNITS, seed: int = 0) -> list[Theorem]:
    """Both theorems on every unit of the form σ(a)·b, to which they apply."""
    generator = torch.Generator().manual_seed(seed)
    a, b, log_alpha = torch.randn(3, 4096, generator=generator, dtype=torch.float64)
    found: list[Theorem] = []
    for unit in units.values():
        if isinstance(unit, GatedUnit):
            found += _theorems_of(unit, 3 * unit.span * a, 3 * unit.span * b, log_alpha.exp())
    return found


def _theorems_of(unit: GatedUnit, a: Values, b: Values, alpha: Values) -> Iterator[Theorem]:
    sigma, h = unit.activation, unit(a, b)
    gain = sigma(a) / a
    homogeneity = _relative(sigma(alpha * a) - alpha * sigma(a), sigma(a))
    yield Theorem("exchange", unit.name, _relative(gain - gain.mean(), gain), _relative(unit.exchanged(a, b) - h, h))
    yield Theorem("scaling", unit.name, homogeneity, _relative(unit(alpha * a, b / alpha) - h, h))


def _sigma(form: type[Form], unit: Unit) -> Unit | Activation:
    """The argument of the form: the unit, or its σ alone."""
    return unit.activation if isinstance(unit, GatedUnit) and form not in GATED else unit


def _relative(change: Values, reference: Values) -> float:
    return float(torch.linalg.vector_norm(change) / torch.linalg.vector_norm(reference))


def _simple(action: type[Action], factor: float) -> tuple[str, Action]:
    """An action with small whole numbers, and its label."""
    basis = torch.tensor([[2.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    simple: dict[type[Action], tuple[str, Action]] = {
        Exchange: ("q ↔ k", Exchange()),
        Scaling: (f"α = {factor:g}", Scaling(factor)),
        SignFlip: ("α = -1", SignFlip()),
        ValueRescaling: (f"β = {factor:g}", ValueRescaling(torch.tensor([factor], dtype=torch.float64))),
        ChangeOfBasis: ("A = [[2, -1], [1, 0]]", ChangeOfBasis(basis)),
    }
    return simple[action]


def _factors(size: int, generator: torch.Generator) -> Values:
    return torch.randn(size, generator=generator, dtype=torch.float64).exp()


def _basis(form: Form, generator: torch.Generator, sign: float) -> ChangeOfBasis:
    """A random well-conditioned A: two unit triangular matrices and a diagonal one between them."""
    size = form.weights["q"].shape[-1]
    entries, one = torch.randn(size, size, generator=generator, dtype=torch.float64) / size, torch.eye(size).double()
    return ChangeOfBasis((entries.tril(-1) + one) * _factors(size, generator) @ (entries.triu(1) + one))


_DRAWN: dict[type[Action], Callable[[Form, torch.Generator, float], Action]] = {
    Exchange: lambda form, generator, sign: Exchange(),
    Scaling: lambda form, generator, sign: Scaling(sign * float(_factors(1, generator))),
    SignFlip: lambda form, generator, sign: SignFlip(),
    ValueRescaling: lambda form, generator, sign: ValueRescaling(sign * _factors(len(form.v), generator)),
    Permutation: lambda form, generator, sign: Permutation(torch.randperm(len(form.v), generator=generator)),
    ChangeOfBasis: _basis,
}
"""A random action of each kind for a form, whose parameter has the given sign."""
