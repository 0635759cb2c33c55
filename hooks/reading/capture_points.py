"""What is captured of a layer while the model runs: a and b of its units, or how tokens are routed to its experts.

Everything that is captured has a name, and may be captured at one of several modules of which only one runs in a pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site

Extract = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""From what a module was given, by place and by name, and what it gave: what is meant."""


class CapturePoint(NamedTuple):
    """A module, and how what is captured is taken from it."""

    module: nn.Module
    extract: Extract


CapturePoints = dict[str, tuple[CapturePoint, ...]]


def capture_points_of(layer: Site | Mixture) -> CapturePoints:
    """Everything that must be captured of a layer before a batch can be taken in, by name.

    Of a site a and b; of a mixture the ``routing``, a and b of its shared expert, and the ``weight`` of that.
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
    """Where x is captured."""
    return CapturePoint(site.projections.gate.module, lambda args, kwargs, output: args[0])


def _pre_activation(site: Site, symbol: str) -> tuple[CapturePoint, ...]:
    tap, others = (
        (site.projections.gate, site.bridge_points[0]) if symbol == "a" else (site.projections.up, site.bridge_points[1])
    )
    own = CapturePoint(tap.module, lambda args, kwargs, output: tap.of(output).clone() if site.in_place else tap.of(output))
    return (own, *(CapturePoint(other, lambda args, kwargs, output: output) for other in others))
