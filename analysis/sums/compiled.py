"""``tile_sums`` compiled, and whether what it gives may be trusted.

One compilation serves all layers of a model and tiles of every length: the number of chunks is a symbol of it.
"""

import warnings
from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from analysis.sums.eager import PRE_ACTIVATIONS, Plan, TileSums, ValueWeights, tile_sums
from analysis.sums.layout import QUADRANTS, Layout
from analysis.units.registry import Unit

EXACTNESS = 1e-5
"""How far compiled sums may be from eager ones, of what they are held against in ``agree``."""
_EXACT = (*PRE_ACTIVATIONS, *(f"count_{quadrant}" for quadrant in QUADRANTS))
"""Sums that are exact in float64, so that no rounding is allowed for."""
_refused: set[tuple[Unit, Plan, torch.dtype, str]] = set()
"""What did not compile."""


class NotCompiledError(Exception):
    """There is no compiled function; the eager one gives the same."""


@cache
def _function() -> Callable[..., TileSums]:
    """Made when it is first called, because the compiler is slow to import."""
    return torch.compile(tile_sums, fullgraph=True)


def compiled_sums(
    unit: Unit,
    plan: Plan,
    weights: ValueWeights,
    a: Float[Tensor, "chunk token d_mlp"],
    b: Float[Tensor, "chunk token d_mlp"],
    live: Bool[Tensor, "chunk token"],
    routing_weight: Float[Tensor, "chunk token"],
) -> TileSums:
    """As ``tile_sums``, of two chunks or more.

    Raises:
        NotCompiledError: the compiler is missing, or does not take this function here; it is not asked again.
    """
    kind = unit, plan, a.dtype, a.device.type
    if kind in _refused:
        raise NotCompiledError
    try:
        function = _function()
        for x in (a, b, live, routing_weight):
            torch._dynamo.mark_dynamic(x, 0)
        # Scales are constants: as symbols, which they would become where a second unit has others, they do not compile.
        with torch._dynamo.config.patch(specialize_float=True), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # a compiler's advice is nothing to who reads a model
            return function(unit, plan, weights, a, b, live, routing_weight)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a compiler of some version may raise on some device
        _refused.add(kind)
        raise NotCompiledError from error


def agree(found: TileSums, expected: TileSums, layout: Layout, live: Bool[Tensor, " token"]) -> Bool[Tensor, ""]:
    """Whether two ways of computing the sums of a tile agree within ``EXACTNESS``.

    A neuron's sum is held against itself, plus what its sums of that kind are made of: a gap that is 0 by identity is
    rounding. A hundredth of the layer's mean is added to that, because the far tails of some activations are rounding too.
    """
    neuron = (found.neuron - expected.neuron).abs() <= EXACTNESS * _size(expected.neuron, layout)
    scale, energy = (x.double().where(live, 0.0) for x in (expected.token_scale, expected.token_energy))
    token = [
        (x.double() - y.double()).abs().where(live, 0.0) <= EXACTNESS * size
        for x, y, size in (
            (found.token_gap, expected.token_gap, scale),
            (found.token_scale, expected.token_scale, scale),
            (found.token_energy, expected.token_energy, energy),
        )
    ]
    return torch.stack([x.all() for x in (neuron, *token)]).all()


def _size(neuron: Float64[Tensor, "moment d_mlp"], layout: Layout) -> Float64[Tensor, "moment d_mlp"]:
    """What every sum is held against."""

    def largest(*names: str) -> Float64[Tensor, " d_mlp"]:
        return torch.cat([neuron[layout.rows[name]] for name in names]).abs().amax(dim=0)

    made_of = {"mixed": largest("mixed_hh") + largest("hh", "scaling"), "h_ab": largest("hh", "abab")}
    made_of["repaired"] = largest("repaired_hh", "repaired_balanced_hh", "repaired_scaling")
    plain, size = largest("hh", "balanced_hh"), neuron.abs()
    for name, rows in layout.rows.items():
        if name not in _EXACT:
            kind = next((made for start, made in made_of.items() if name.startswith(start)), plain)
            size[rows] += kind + kind.mean() / 100
    return size
