"""The edits whose effect on a layer's output is measured: one changed h′ for all neurons of a layer at once.

exchange            h′ = g(b, a)
exchange_balanced   h′ = g(βb, a)/β, with k first rescaled to the length and sign of q (``Geometry.balance``)
scaling_half        h′ = g(αa, b/α) at α = ½; likewise scaling_double at 2 and scaling_flip at −1
scaling_zero        the limit α → 0, where it exists: the bilinear unit, ab/2 for SiLU and GELU
scaling_infinity    the limit α → ∞, where it exists: relu(a)·b for SiLU and GELU
"""

import math
from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from analysis.sums.layout import MAIN_SCALES
from analysis.units.base import Unit

MODEL = "model"
"""The version that is not edited."""
RESCALED = "rescaled"
"""g(a, βb)/β, what exchange_balanced is compared with; the same as the model's where up is linear."""
BALANCED = "exchange_balanced"
LIMITS = {"scaling_zero": 0.0, "scaling_infinity": math.inf}
OUTPUT_EDITS = ("exchange", BALANCED, *MAIN_SCALES, *LIMITS)
"""Every edit; a unit without limits has all but the last two."""

Rows = Float[Tensor, "token d_mlp"]


def edits_of(unit: Unit) -> tuple[str, ...]:
    """The edits that exist for a unit."""
    return tuple(name for name in OUTPUT_EDITS if name not in LIMITS or LIMITS[name] in unit.limits)


def versions_of(unit: Unit) -> tuple[str, ...]:
    """Every version of h: the model's, the rescaled one if that is another, and one per edit."""
    return (MODEL, *(() if unit.up_is_linear else (RESCALED,)), *edits_of(unit))


def reference_of(unit: Unit, edit: str) -> str:
    """The version that an edit is compared with."""
    return RESCALED if edit == BALANCED and not unit.up_is_linear else MODEL


def versions(unit: Unit, a: Rows, b: Rows, balance: Float[Tensor, " d_mlp"]) -> Iterator[tuple[str, Rows]]:
    """Every version of h by name, in the order of ``versions_of``; one at a time, so that only one needs memory."""
    yield MODEL, unit(a, b)
    if not unit.up_is_linear:
        yield RESCALED, unit(a, balance * b) / balance
    yield "exchange", unit.exchanged(a, b)
    yield BALANCED, unit(balance * b, a) / balance
    for name, alpha in (MAIN_SCALES | LIMITS).items():
        if name in MAIN_SCALES or alpha in unit.limits:
            yield name, unit.scaled(a, b, alpha)
