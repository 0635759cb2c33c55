"""Every known unit by name, and which units a model's layer may have.

A name is an activation's, and means σ(a)·b, or one of

    gpt_oss, gpt_oss(slope,limit)                clamped(σ,limit)       inkling2, inkling2(gate cap,up cap)
    top_k(σ,sparsity)                            clamped_after(σ,limit)

with σ the name of an activation, soft_capped(σ,cap) or multiplied(σ,factor). ``Unit.name`` is such a name. The unit of a
layer is found by trying ``candidate_units``, the likeliest first, and taking the ``nearest_unit``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from jaxtyping import Float
from torch import Tensor

from analysis.errors import UserError
from analysis.units.activations import ACTIVATIONS, ALIASES, Activation, activation_named, multiplied, soft_capped
from analysis.units.base import GatedUnit, Unit
from analysis.units.names import numbers, parsed
from analysis.units.variants import ClampedUnit, GptOssUnit, SoftCappedUnit, TopKUnit

OTHER_UNITS: dict[str, Unit] = {
    unit.name: unit
    for unit in (
        GptOssUnit(),
        ClampedUnit(ACTIVATIONS["silu"], 10.0),
        ClampedUnit(ACTIVATIONS["silu"], 16.0, after=True),
        SoftCappedUnit(),
        GatedUnit(soft_capped(ACTIVATIONS["gelu_pytorch_tanh"], 30.0)),
        GatedUnit(multiplied(ACTIVATIONS["silu"], 0.5)),
        TopKUnit(ACTIVATIONS["gelu_pytorch_tanh"], 0.95),
    )
}
"""One unit of every kind that is not an activation times b, with parameters of real models."""
_OF_AN_ACTIVATION: dict[str, Callable[[Activation, float], Unit]] = {
    "clamped": ClampedUnit,
    "clamped_after": lambda activation, limit: ClampedUnit(activation, limit, after=True),
    "top_k": TopKUnit,
}
_OF_TWO_NUMBERS: dict[str, Callable[..., Unit]] = {"gpt_oss": GptOssUnit, "inkling2": SoftCappedUnit}
_FORMS = (*(f"{kind}(NUMBER,NUMBER)" for kind in _OF_TWO_NUMBERS), *(f"{kind}(NAME,NUMBER)" for kind in _OF_AN_ACTIVATION))

_LIMITS_AFTER, _LIMITS, _SLOPES = (
    ("swiglu_limits", "swiglu_limits_shared"),
    ("swiglu_limit", "limit"),
    ("swiglu_alpha", "alpha"),
)
_CAPS = ("mlp_gate_softcap", "mlp_up_softcap")
PARAMETERS = (*_LIMITS_AFTER, *_LIMITS, *_SLOPES, *_CAPS, "activation_sparsity", "gate_multiplier")
"""The parameters that ``candidate_units`` uses, by their names in configurations and modules."""


def unit_named(name: str) -> Unit:
    """The unit of that name, the inverse of ``Unit.name``; UserError for an unknown name."""
    kind, parameters = parsed(name)
    if kind in _OF_TWO_NUMBERS:
        return _OF_TWO_NUMBERS[kind](*numbers(name, parameters, 2)) if parameters else _OF_TWO_NUMBERS[kind]()
    if kind in _OF_AN_ACTIVATION and parameters:
        return _OF_AN_ACTIVATION[kind](activation_named(parameters[0], _FORMS), *numbers(name, parameters[1:], 1))
    return GatedUnit(activation_named(name, _FORMS))


def candidate_units(names: Iterable[str], parameters: Mapping[str, float | None]) -> list[Unit]:
    """The units to try on a layer, each once, the likeliest first: of equally near ones the first should be taken.

    For every activation named, then for every other known one, the units that the parameters suggest, and σ(a)·b last.
    Units without an activation come before those of activations that are not named. An unknown name is ignored, because all
    known activations are tried anyway.

    Args:
        names: activations that the configuration names, the likeliest first; aliases are allowed.
        parameters: of this layer, preferably its module's own: a configuration may describe the experts only, and a clamp
            that is not reached on a probe is not verified by it. Used are, unless None, 0 or infinite,
            ``swiglu_limit``, ``limit``: L of clamped(σ,L), then of clamped_after(σ,L), and of gpt_oss;
            ``swiglu_limits``, ``swiglu_limits_shared``: the same, clamped_after first (Step-3.7; its lists have one entry
            per layer, give that of this layer);
            ``swiglu_alpha``, ``alpha``: the slope of gpt_oss, which then comes first;
            ``activation_sparsity``: p of top_k(σ,p);
            ``mlp_gate_softcap``: c of soft_capped(σ,c), with ``mlp_up_softcap`` the caps of inkling2, which comes first;
            ``gate_multiplier``: m of multiplied(σ,m).
            Other keys are ignored: ``PARAMETERS`` lists these.
    """
    known = [ALIASES.get(name, name) for name in names]
    given = {key: float(value) for key in PARAMETERS if (value := parameters.get(key)) and math.isfinite(value)}
    named = [ACTIVATIONS[name] for name in dict.fromkeys(known) if name in ACTIVATIONS]
    others = [activation for activation in ACTIVATIONS.values() if activation not in named]
    found = [*_other_kinds(given, first=True)]
    for activation in named:
        found += _forms_of(activation, given)
    found += _other_kinds(given, first=False)
    for activation in others:
        found += _forms_of(activation, given)
    return list({unit.name: unit for unit in found}.values())


def nearest_unit(
    units: Sequence[Unit],
    a: Float[Tensor, "*batch d_mlp"],
    b: Float[Tensor, "*batch d_mlp"],
    h: Float[Tensor, "*batch d_mlp"],
) -> tuple[Unit, float]:
    """The unit with the smallest ‖g(a, b) − h‖ / ‖h‖, and this number; the first of equal ones.

    All neurons of the layer are needed, in any order, the same in a, b and h. Units that differ only where a clamp is
    reached are distinguished only if it is reached here. An error of NaN counts as larger than any number.
    """
    reference = h.double()
    errors = [float((unit(a, b).double() - reference).norm() / reference.norm()) for unit in units]
    best = min(range(len(units)), key=lambda place: math.inf if math.isnan(errors[place]) else errors[place])
    return units[best], errors[best]


def _other_kinds(given: Mapping[str, float], first: bool) -> Iterator[Unit]:
    """The units without an activation: those that come before all others, or those after the named activations."""
    caps, slopes = ([given[key] for key in keys if key in given] for keys in (_CAPS, _SLOPES))
    if first and len(caps) == 2:
        yield SoftCappedUnit(*caps)
    for key in (*_LIMITS, *_LIMITS_AFTER):
        if key in given and first == bool(slopes):
            yield GptOssUnit(slopes[0] if slopes else 1.702, given[key])


def _forms_of(activation: Activation, given: Mapping[str, float]) -> Iterator[Unit]:
    """The units of σ that the parameters suggest, then σ(a)·b."""
    kinds = [(key, kind) for key in _LIMITS_AFTER for kind in ("clamped_after", "clamped")]
    kinds += [(key, kind) for key in _LIMITS for kind in ("clamped", "clamped_after")]
    for key, kind in (*kinds, ("activation_sparsity", "top_k")):
        if key in given:
            with suppress(UserError):  # a bounded gate cannot be clamped
                yield _OF_AN_ACTIVATION[kind](activation, given[key])
    if "mlp_gate_softcap" in given:
        yield GatedUnit(soft_capped(activation, given["mlp_gate_softcap"]))
    if "gate_multiplier" in given:
        yield GatedUnit(multiplied(activation, given["gate_multiplier"]))
    yield GatedUnit(activation)
