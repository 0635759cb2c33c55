"""The properties of each unit, by derivation, and the symmetries that follow from them: the predictions of theory.

Two properties of σ determine all symmetries of σ(a)·b.

    homogeneous   σ(αz) = ασ(z) for every α > 0, that is σ(z) = c₊z for z > 0 and c₋z for z < 0
    odd           σ(−z) = −σ(z)

Exchange. σ(a)b = σ(b)a for all a, b: with b = 1, σ(a) = σ(1)·a, so σ(z)/z is constant; conversely, exchange then holds
(Breslow 2026). A σ that is both homogeneous and odd has c₊ = c₋ and is linear, and no other is.

Scaling. σ(αa)·b/α = σ(a)·b for all a, b exactly when σ(αa) = ασ(a): for every α > 0, when σ is homogeneous (Breslow 2026).
At α = −1, the sign flip, exactly when σ is odd; with both, for every α ≠ 0. The result on the flip is
introduced here.

Value rescaling. k → βk, v → v/β turns h(k) into h(βk)/β. For σ(a)·b this is exact for every β ≠ 0. If σ is applied to the
whole product, it requires σ(βz)/β = σ(z), the condition of scaling again. Introduced here.

Change of basis. Σ_r ⟨x,q_r⟩⟨x,k_r⟩ = x QKᵀxᵀ, and QKᵀ does not change under any invertible A, for every σ. With σ on one
factor under the sum over r, A = αI is the scaling and A = −I the flip, so σ has to be linear. Introduced here, as is the
form.

Other units, introduced here. None is invariant under exchange: the factors are bounded on different sides, or by different
functions, or, over the neurons of a layer, by different cutoffs. With a clamp or a cap no unit is homogeneous; with a clamp
from above only, none is odd; with a cap on both sides, a unit is odd if σ is. A top-k gate σ(r(a)) has r(αa) = αr(a) for
α > 0, since mean and deviation over neurons are homogeneous too: scaling requires only that σ is linear on z ≥ 0. Its flip
is broken for every σ, because r(−a) is open where a is lowest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from analysis.theory.actions import Action, ChangeOfBasis, Exchange, Permutation, Scaling, SignFlip, ValueRescaling
from analysis.theory.forms import (
    BilinearAttention,
    Form,
    GlobalQueryMemory,
    KeyValueMemory,
    LowRankBilinearAttention,
    Rank1BilinearAttention,
)
from analysis.theory.gated import GatedMLP, LowRankGated
from analysis.units.activations import Activation, activation_named
from analysis.units.base import GatedUnit, Unit
from analysis.units.names import parsed
from analysis.units.variants import ClampedUnit, GptOssUnit, SoftCappedUnit, TopKUnit


class Outcome(str, Enum):
    """The effect of an action on the output of a form."""

    INVARIANT = "invariant"
    POSITIVE = "invariant for α>0 only"
    BROKEN = "broken"


@dataclass(frozen=True)
class Properties:
    """The properties of a unit g(a, b) = σ(a)·b, or of another g.

    Attributes:
        homogeneous: g(αa, b/α) = g(a, b) for every α > 0.
        odd: g(−a, −b) = g(a, b).
        why: the reason, briefly.
        linear_in_b: g(a, βb) = βg(a, b) for every β.
    """

    homogeneous: bool
    odd: bool
    why: str
    linear_in_b: bool = True


PROPERTIES: dict[str, Properties] = {
    "linear": Properties(True, True, "σ(z) = z"),
    "relu": Properties(True, False, "slopes 0 and 1; σ(−z) = 0 for z > 0"),
    "leaky_relu": Properties(True, False, "slopes 0.01 and 1, which differ"),
    "relu2": Properties(False, False, "homogeneous of degree 2: σ(αz) = α²σ(z); σ(−z) = 0 for z > 0"),
    "gelu": Properties(False, False, "σ = zΦ(z), Φ not constant on z > 0; σ(−z) = −σ(z) + z(2Φ(z) − 1)"),
    "gelu_pytorch_tanh": Properties(False, False, "as GELU, with a tanh in place of 2Φ − 1"),
    "quick_gelu": Properties(False, False, "as SiLU, with 1.702 z in the logistic"),
    "silu": Properties(False, False, "σ = z·logistic(z), not constant on z > 0; σ(z) + σ(−z) = z·tanh(z/2)"),
    "sigmoid": Properties(False, False, "σ(0) = 1/2, a homogeneous or odd σ has σ(0) = 0; σ(z) + σ(−z) = 1"),
    "tanh": Properties(False, True, "bounded, so not homogeneous; odd"),
    "softplus": Properties(False, False, "σ(0) = log 2, a homogeneous or odd σ has σ(0) = 0"),
}
"""Every known activation, as σ(a)·b. Derived, never measured: measurements are compared with it."""


def properties_of(unit: Unit) -> Properties:
    """The properties of a unit, from those of its σ; ValueError for an unknown kind of unit."""
    if isinstance(unit, GatedUnit):
        return _of_activation(unit.activation)
    if isinstance(unit, GptOssUnit):
        return Properties(False, False, "g(a, 0) ≠ 0 and clamps: every action on b shows", linear_in_b=False)
    if isinstance(unit, ClampedUnit):
        return Properties(False, False, "the gate is clamped from above alone, the up from both sides", linear_in_b=False)
    if isinstance(unit, SoftCappedUnit):
        return Properties(False, False, "both factors bounded; the logistic is not even", linear_in_b=False)
    if isinstance(unit, TopKUnit):
        homogeneous = _of_activation(unit.activation).homogeneous
        why = "r(αa) = αr(a) for α > 0, and σ is linear on z ≥ 0" if homogeneous else "r(αa) = αr(a), but σ bends on z > 0"
        return Properties(homogeneous, False, f"{why}; the cutoffs of a, of −a and of b differ")
    raise ValueError(f"no properties of the unit {unit.name} are known: derive them in analysis/theory/properties.py")


def _of_activation(activation: Activation) -> Properties:
    kind, parameters = parsed(activation.name)
    if not parameters:
        return PROPERTIES[activation.name]
    inner = _of_activation(activation_named(parameters[0]))
    if kind == "soft_capped":
        return Properties(False, inner.odd, f"bounded, so not homogeneous; the cap is odd, and of σ: {inner.why}")
    if kind == "multiplied":
        return Properties(inner.homogeneous, inner.odd, f"σ(mz) has what σ has: {inner.why}")
    raise ValueError(
        f"no properties of the activation {activation.name} are known: derive them in analysis/theory/properties.py"
    )


def _always(_: Properties) -> Outcome:
    return Outcome.INVARIANT


def _linear(unit: Properties) -> Outcome:
    return Outcome.INVARIANT if unit.homogeneous and unit.odd else Outcome.BROKEN


def _homogeneous(unit: Properties) -> Outcome:
    if not unit.homogeneous:
        return Outcome.BROKEN
    return Outcome.INVARIANT if unit.odd else Outcome.POSITIVE


def _odd(unit: Properties) -> Outcome:
    return Outcome.INVARIANT if unit.odd else Outcome.BROKEN


def _linear_in_b(unit: Properties) -> Outcome:
    return Outcome.INVARIANT if unit.linear_in_b else Outcome.BROKEN


Rule = Callable[[Properties], Outcome]
Rules = dict[type[Action], Rule]

_SYMMETRIC: Rules = {Exchange: _always, Scaling: _always, SignFlip: _always}
_MEMORY: Rules = {ValueRescaling: _homogeneous, Permutation: _always}
_GATED: Rules = {
    Exchange: _linear,
    Scaling: _homogeneous,
    SignFlip: _odd,
    ValueRescaling: _linear_in_b,
    Permutation: _always,
}
RULES: dict[type[Form], Rules] = {
    KeyValueMemory: _MEMORY,
    GlobalQueryMemory: {Scaling: _always, SignFlip: _always, ChangeOfBasis: _always, **_MEMORY},
    BilinearAttention: {**_SYMMETRIC, ChangeOfBasis: _always, **_MEMORY},
    LowRankBilinearAttention: {**_SYMMETRIC, ChangeOfBasis: _always, **_MEMORY},
    Rank1BilinearAttention: {**_SYMMETRIC, **_MEMORY},
    GatedMLP: _GATED,
    LowRankGated: {**_GATED, ChangeOfBasis: _linear},
}
"""Form → action → the rule for its outcome; an action that is not listed is not defined on that form."""


def predicted(form: type[Form], action: type[Action], unit: Unit) -> Outcome:
    """The prediction of theory for one cell of the table."""
    return RULES[form][action](properties_of(unit))
