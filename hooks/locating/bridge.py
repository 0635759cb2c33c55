"""The model in TransformerLens: a view for whoever knows its hooks, offered where it computes the same.

Whether TransformerLens wraps a family, and whether what passes its hooks is what their names say, is not taken from a list:
the wrapped model must give the same logits, and the hooks of a layer the same x, a, b, h and y as the model's own modules.
In a mixture of experts the hook of that name is the router; such a layer has no names.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hooks.loading.network import run_whole
from hooks.loading.sources import first_line
from hooks.locating.sites import Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error

ENDS = {"x": "hook_in", "a": "gate.hook_out", "b": "in.hook_out", "h": "out.hook_in", "y": "hook_out"}
"""Where TransformerLens has them, within ``blocks.L.mlp``."""

Probe = Int[Tensor, "batch pos"]


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, precision: torch.dtype
) -> tuple[TransformerBridge | None, str]:
    """The wrapped model, or None and why not."""
    try:
        return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer, dtype=precision), ""
    except Exception as error:  # it raises many kinds; each means that it does not know this family
        reason = shorten(first_line(error), 80, placeholder="…")
        return None, f"TransformerLens cannot wrap a {type(model).__name__} ({reason})"


def named(sites: Mapping[int, Site], hf_model: PreTrainedModel, bridge: TransformerBridge, probe: Probe) -> dict[int, Site]:
    """The sites with the names of the hooks at which TransformerLens sees the same, and with its own projections."""
    names = {layer: {symbol: f"blocks.{layer}.mlp.{end}" for symbol, end in ENDS.items()} for layer in sites}
    known = {layer: mine for layer, mine in names.items() if all(name in bridge.hook_dict for name in mine.values())}
    wanted = [name for mine in known.values() for name in mine.values()]
    ran: set[nn.Module] = set()
    with torch.no_grad(), ExitStack() as stack:
        for site in sites.values():
            stack.callback(site.projections.gate.module.register_forward_hook(lambda module, *_: ran.add(module)).remove)
        theirs: dict[str, Tensor] = {}
        with suppress(Exception):  # what it cannot run has no names
            _, theirs = bridge.run_with_cache(probe, names_filter=wanted, return_type=None)
    with torch.no_grad():
        ours = _own(sites, hf_model, probe)
    found = {}
    for layer, site in sites.items():
        agrees = layer in known and all(name in theirs for name in known[layer].values())
        for symbol in ENDS if agrees else ():
            value, reference = theirs[names[layer][symbol]].flatten(0, -2), ours[layer][symbol]
            limit = OUTPUT_SLACK * OUTPUT_SLACK * TOLERANCE[reference.dtype]  # its attention and norms are its own
            agrees = agrees and value.shape == reference.shape and relative_error(value, reference) <= limit
        points = tuple((bridge.hook_dict[names[layer][symbol]],) for symbol in "ab") if agrees else ()
        # Where TransformerLens has cut a projection that holds both, its own pass calls other modules.
        also = (points[0], points[1]) if agrees and site.projections.gate.module not in ran else ((), ())
        found[layer] = replace(site, hook_names=names[layer], also=also) if agrees else site
    return found


def _own(
    sites: Mapping[int, Site], hf_model: PreTrainedModel, probe: Probe
) -> dict[int, dict[str, Float[Tensor, "place _"]]]:
    """What passes the modules of every site on the probe."""
    recording: dict[int, dict[str, Tensor]] = {layer: {} for layer in sites}

    def keep(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        projections = sites[layer].projections
        if module is projections.down:
            recording[layer] |= {"h": inputs[0].flatten(0, -2), "y": output.flatten(0, -2)}
        if module is projections.gate.module:
            recording[layer] |= {"x": inputs[0].flatten(0, -2), "a": projections.gate.of(output).flatten(0, -2)}
        if module is projections.up.module:
            recording[layer]["b"] = projections.up.of(output).flatten(0, -2)

    with ExitStack() as stack:
        for layer, site in sites.items():
            for module in {site.projections.gate.module, site.projections.up.module, site.projections.down}:
                stack.callback(module.register_forward_hook(partial(keep, layer)).remove)
        run_whole(hf_model, probe)
    return recording
