"""The modules at which a layer is captured: a and b of its gated units, or the routing of tokens to its experts.

Every captured quantity has a name, and one or several modules, of which exactly one runs in a pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site

Extract = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""From a module's positional arguments, keyword arguments and output to the captured quantity."""


class CapturePoint(NamedTuple):
    """A module, and how the captured quantity is extracted from its arguments or output."""

    module: nn.Module
    extract: Extract


CapturePoints = dict[str, tuple[CapturePoint, ...]]


def capture_points_of(layer: Site | Mixture) -> CapturePoints:
    """All capture points of a layer by the name of the quantity.

    Of a site ``a`` and ``b``; of a mixture ``routing``, and of its shared expert ``a``, ``b`` and, if there is one for each
    token, ``weight``.
    """
    if isinstance(layer, Site):
        return {symbol: _pre_activation(layer, symbol) for symbol in "ab"}
    expert_weights, shared = layer.expert_weights, layer.shared
    routed = CapturePoint(
        expert_weights.module, lambda args, kwargs, output: Routing.of(args, kwargs, expert_weights.n_experts)
    )
    points: CapturePoints = {"routing": (routed,)}
    if shared is not None:
        points |= capture_points_of(shared)
        if shared.token_gate is not None:
            points["weight"] = (CapturePoint(shared.token_gate, lambda args, kwargs, output: output.sigmoid()),)
    return points


def input_point(site: Site) -> CapturePoint:
    """The capture point of x."""
    return CapturePoint(site.projections.gate.module, lambda args, kwargs, output: args[0])


def _pre_activation(site: Site, symbol: str) -> tuple[CapturePoint, ...]:
    projection, others = (
        (site.projections.gate, site.bridge_points[0]) if symbol == "a" else (site.projections.up, site.bridge_points[1])
    )
    own = CapturePoint(projection.module, lambda args, kwargs, output: _copied_if(site.in_place, projection.of(output)))
    return (own, *(CapturePoint(other, lambda args, kwargs, output: output) for other in others))


def _copied_if(in_place: bool, output: Tensor) -> Tensor:
    """The output, copied if the model overwrites it."""
    return output.clone() if in_place else output
