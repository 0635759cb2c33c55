"""The same model in TransformerLens: a view for those who use its hook names, offered where it computes the same.

No list says which families TransformerLens wraps, or what its hooks carry. Both are verified on a probe: the wrapped model
must give the same logits, and the hooks of a layer the same x, a, b, h and y as the model's own modules. In a mixture of
experts the hook named ``gate`` is the router; such a layer gets no hook names.
"""

import logging
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

from analysis.checks import Check
from hooks.loading.network import outputs_of, run_network
from hooks.loading.prepare import use_eager
from hooks.loading.sources import first_line
from hooks.locating.sites import Site
from hooks.tolerance import OUTPUT_SLACK, TOLERANCE, relative_error

HOOKS = {"x": "hook_in", "a": "gate.hook_out", "b": "in.hook_out", "h": "out.hook_in", "y": "hook_out"}
"""TransformerLens's names for them, within ``blocks.L.mlp``."""
LOGITS_CHECK = "logits with and without TransformerLens"

Probe = Int[Tensor, "batch pos"]
logger = logging.getLogger(__name__)


def bridge_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    precision: torch.dtype,
    probe: Probe,
    reference: Float[Tensor, "batch pos vocab"],
    limit: float,
) -> tuple[TransformerBridge | None, Check | None]:
    """The model in TransformerLens if that gives the same logits, and the check of it.

    Args:
        model: to be wrapped; its attention is made eager. It may share weights with others, but not its modules.
        tokenizer: of the model; TransformerLens may add special tokens to it.
        name: of the model, for TransformerLens.
        precision: dtype of the weights.
        probe: tokens.
        reference: the model's logits on the probe.
        limit: the largest relative error of the logits that is accepted.

    Returns:
        The wrapped model and its check; None and a check that states the reason; or None twice for a model without an
        unembedding, which TransformerLens does not wrap.
    """
    if model.get_output_embeddings() is None:
        return None, None
    use_eager(model)
    bridge, reason = wrap(model, tokenizer, name, precision)
    if bridge is not None:
        try:
            error = relative_error(outputs_of(bridge.original_model, probe), reference)
        except Exception as failure:  # a family that it takes for another one
            reason = f"TransformerLens cannot run a {type(model).__name__} ({type(failure).__name__})"
        else:
            if error <= limit:
                return bridge, Check(LOGITS_CHECK, error, limit)
            reason = f"the logits in TransformerLens differ by {error:.1e} (limit {limit:.0e})"
    logger.info(f"{reason}: the model's own modules are used, model.bridge is None")
    return None, without_bridge(reason)


def without_bridge(reason: str) -> Check:
    """The check of a model that has no view in TransformerLens."""
    return Check.stated(LOGITS_CHECK, f"none: {reason}", "optional")


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, precision: torch.dtype
) -> tuple[TransformerBridge | None, str]:
    """The wrapped model, or None and the reason."""
    try:
        return TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer, dtype=precision), ""
    except Exception as error:  # of many kinds; each means that it does not support this family
        reason = shorten(first_line(error), 80, placeholder="…")
        return None, f"TransformerLens cannot wrap a {type(model).__name__} ({reason})"


def has_user_hooks(bridge: TransformerBridge) -> bool:
    """Whether code other than this package has registered a hook at one of TransformerLens's hook points."""
    hooks = (hook for point in bridge.hook_dict.values() for hook in point._forward_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("hooks.") for hook in hooks)


def with_hook_names(
    sites: Mapping[int, Site], hf_model: PreTrainedModel, bridge: TransformerBridge, probe: Probe
) -> dict[int, Site]:
    """The sites, with TransformerLens's hook names in the layers where its hooks carry the same x, a, b, h and y.

    Some bridges split a projection that holds both gate and up, so that their forward pass calls other modules than the
    model's own. Then the hook points of a and b are kept in the site as well.
    """
    names = {layer: {symbol: f"blocks.{layer}.mlp.{hook}" for symbol, hook in HOOKS.items()} for layer in sites}
    theirs, called = _bridge_activations(sites, bridge, [name for own in names.values() for name in own.values()], probe)
    with torch.no_grad():
        ours = _model_activations(sites, hf_model, probe)
    result = {}
    for layer, site in sites.items():
        own = names[layer]
        agrees = all(name in theirs and _equal(theirs[name], ours[layer][symbol]) for symbol, name in own.items())
        if agrees:
            a, b = ((bridge.hook_dict[own[symbol]],) for symbol in "ab")
            splits = site.projections.gate.module not in called
            site = replace(site, hook_names=own, bridge_points=(a, b) if splits else ((), ()))
        result[layer] = site
    return result


def _equal(value: Tensor, reference: Float[Tensor, "place _"]) -> bool:
    """Whether they agree; the limit is wider than for one module, for TransformerLens has its own attention and norms."""
    value, limit = value.flatten(0, -2), OUTPUT_SLACK * OUTPUT_SLACK * TOLERANCE[reference.dtype]
    return value.shape == reference.shape and relative_error(value, reference) <= limit


def _bridge_activations(
    sites: Mapping[int, Site], bridge: TransformerBridge, names: list[str], probe: Probe
) -> tuple[dict[str, Tensor], set[nn.Module]]:
    """What the hooks of these names carry, none if the bridge does not run; and which gate projections it calls."""
    called: set[nn.Module] = set()
    cache: Mapping[str, Tensor] = {}
    with torch.no_grad(), ExitStack() as stack:
        for site in sites.values():
            gate = site.projections.gate.module
            stack.callback(gate.register_forward_hook(lambda module, *_: called.add(module)).remove)
        with suppress(Exception):  # a bridge that does not run gives no hook names
            known = [name for name in names if name in bridge.hook_dict]
            _, cache = bridge.run_with_cache(probe, names_filter=known, return_type=None)
    return dict(cache), called


def _model_activations(
    sites: Mapping[int, Site], hf_model: PreTrainedModel, probe: Probe
) -> dict[int, dict[str, Float[Tensor, "place _"]]]:
    """x, a, b, h and y of every site, from the model's own modules."""
    activations: dict[int, dict[str, Tensor]] = {layer: {} for layer in sites}

    def keep(layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        projections = sites[layer].projections
        if module is projections.down:
            activations[layer] |= {"h": inputs[0].flatten(0, -2), "y": output.flatten(0, -2)}
        if module is projections.gate.module:
            activations[layer] |= {"x": inputs[0].flatten(0, -2), "a": projections.gate.of(output).flatten(0, -2)}
        if module is projections.up.module:
            activations[layer]["b"] = projections.up.of(output).flatten(0, -2)

    with ExitStack() as stack:
        for layer, site in sites.items():
            for module in {site.projections.gate.module, site.projections.up.module, site.projections.down}:
                stack.callback(module.register_forward_hook(partial(keep, layer)).remove)
        run_network(hf_model, probe)
    return activations
