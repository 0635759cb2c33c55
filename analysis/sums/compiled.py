"""``tile_sums`` compiled by torch, and the check of its results against eager ones.

One compilation serves all layers of a model and tiles of every length: the number of chunks is symbolic.
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
"""Largest difference between compiled and eager sums, relative to their size as defined in ``agree``."""
_EXACT = (*PRE_ACTIVATIONS, *(f"count_{quadrant}" for quadrant in QUADRANTS))
"""Sums with float64 products or of whole numbers, whose differences are compared with the sums themselves alone."""
_refused: set[tuple[Unit, Plan, torch.dtype, str]] = set()
"""What failed to compile before."""


class NotCompiledError(Exception):
    """There is no compiled function: use the eager one."""


@cache
def _function() -> Callable[..., TileSums]:
    """Created on the first call, because the compiler is slow to import."""
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
    """As ``tile_sums``, for tiles of two chunks or more.

    Raises:
        NotCompiledError: the compiler is missing, or fails on this function; it is not tried again.
    """
    kind = unit, plan, a.dtype, a.device.type
    if kind in _refused:
        raise NotCompiledError
    try:
        function = _function()
        for x in (a, b, live, routing_weight):
            torch._dynamo.mark_dynamic(x, 0)
        # Scales are constants: a second unit with other scales would make them symbolic, which does not compile.
        with torch._dynamo.config.patch(specialize_float=True), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the compiler's advice is of no use to a user
            return function(unit, plan, weights, a, b, live, routing_weight)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # compilers raise different errors, by version and device
        _refused.add(kind)
        raise NotCompiledError from error


def agree(found: TileSums, expected: TileSums, layout: Layout, live: Bool[Tensor, " token"]) -> Bool[Tensor, ""]:
    """Whether two ways of computing the sums of a tile agree within ``EXACTNESS``.

    The difference of a neuron's sum is compared with the sum itself plus the largest energy of its kind, because a gap that
    is mathematically 0 consists of rounding errors. A hundredth of the layer's mean of these energies is added, because the
    far tails of some activations consist of rounding errors too.
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
    """What the difference of each sum is compared with."""

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
