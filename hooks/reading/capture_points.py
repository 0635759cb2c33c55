"""What is heard of a layer while the model runs: a and b of its units, or how tokens are routed to its experts.

Everything that is heard has a name, and may be heard at one of several modules of which only one runs in a pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from hooks.locating.routing import Routing
from hooks.locating.sites import Mixture, Site

Extract = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
"""From what a module was given, by place and by name, and what it gave: what is meant."""


class Source(NamedTuple):
    """A module, and how what is heard is taken from it."""

    module: nn.Module
    extract: Extract


Sources = dict[str, tuple[Source, ...]]


def sources_of(layer: Site | Mixture) -> Sources:
    """Everything that must be heard of a layer before a batch can be taken in, by name.

    Of a site a and b; of a mixture the ``routing``, a and b of its shared expert, and the ``weight`` of that.
    """
    if isinstance(layer, Site):
        return {symbol: _pre_activation(layer, symbol) for symbol in "ab"}
    stacks, shared = layer.stacks, layer.shared
    routed = Source(stacks.module, lambda args, kwargs, output: Routing.of(args, kwargs, stacks.n_experts))
    sources: Sources = {"routing": (routed,)}
    if shared is not None:
        sources |= sources_of(shared)
        if shared.token_gate is not None:
            sources["weight"] = (Source(shared.token_gate, lambda args, kwargs, output: output.sigmoid()),)
    return sources


def input_of(site: Site) -> Source:
    """Where x is heard."""
    return Source(site.taps.gate.module, lambda args, kwargs, output: args[0])


def _pre_activation(site: Site, symbol: str) -> tuple[Source, ...]:
    tap, others = (site.taps.gate, site.also[0]) if symbol == "a" else (site.taps.up, site.also[1])
    own = Source(tap.module, lambda args, kwargs, output: tap.of(output).clone() if site.in_place else tap.of(output))
    return (own, *(Source(other, lambda args, kwargs, output: output) for other in others))
