"""One pass over a batch of windows in which a and b of some layers are listened to, and no further than what is read.

The pass is the Hugging Face model's own: without the unembedding, without the layers after the last one that is read, and
with the attention that is fastest on this machine. Listeners sit on the projections themselves, which the model wrapped by
TransformerLens shares. Where that has other projections (it splits fused ones), or something is hooked to it that may
change what it computes, its own pass is taken, through its hook points. One thread at a time listens to a model.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from analysis.window import Window
from hooks.models import LoadedModel
from hooks.sites import Site

HookFunction = Callable[[Tensor, HookPoint], None]
See = Callable[[Float[Tensor, "batch pos d_mlp"]], None]


@dataclass(frozen=True)
class Listener:
    """What is done with a and with b of one site; they come in either order."""

    site: Site
    see_a: See
    see_b: See


class _ReadError(Exception):
    """Not an error: everything that is read has been seen, and this leaves the pass."""


def listen(
    model: LoadedModel, windows: Sequence[Window], listeners: Sequence[Listener], last_layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """One pass with listeners; returns the residual stream after the last layer that is read.

    Raises:
        torch.OutOfMemoryError: there is no room for so many windows at once.
    """
    with model.passing:
        if model.is_hooked or not all(model.is_plain(listener.site) for listener in listeners):
            heard = [(listener.site.hook_a, listener.see_a) for listener in listeners]
            heard += [(listener.site.hook_b, listener.see_b) for listener in listeners]
            return forward(model, windows, [(name, _hook(see)) for name, see in heard], last_layer)
        return _plain_pass(model, windows, listeners, last_layer)


def _plain_pass(
    model: LoadedModel, windows: Sequence[Window], listeners: Sequence[Listener], last_layer: int
) -> Float[Tensor, "batch pos d_model"]:
    tokens, attention = _inputs(model, windows)
    found: list[Tensor] = []

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])
        raise _ReadError

    with ExitStack() as stack, torch.no_grad():
        hooks = [(listener.site.gate_module, _module_hook(listener.see_a)) for listener in listeners]
        hooks += [(listener.site.up_module, _module_hook(listener.see_b)) for listener in listeners]
        for module, hook in [*hooks, (model.plain_blocks[last_layer], leave)]:
            stack.callback(module.register_forward_hook(hook).remove)
        with suppress(_ReadError):
            model.plain.base_model(tokens, use_cache=False, **attention)
    return found[0]


def forward(
    model: LoadedModel, windows: Sequence[Window], hooks: list[tuple[str, HookFunction]], last_layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """One pass of the wrapped model with any of its hooks, no further than the last layer that is read.

    Returns the residual stream after that layer; after the very last one it has passed the final norm.
    """
    tokens, attention = _inputs(model, windows)
    with model.passing, torch.no_grad(), model.bridge.hooks(fwd_hooks=hooks):
        if last_layer + 1 < len(model.bridge.blocks):
            return model.bridge(tokens, return_type=None, stop_at_layer=last_layer + 1, **attention)
        return model.bridge.original_model.base_model(tokens, use_cache=False, **attention).last_hidden_state


def _module_hook(see: See) -> Callable[[nn.Module, Any, Tensor], None]:
    return lambda module, inputs, output: see(output)


def _hook(see: See) -> HookFunction:
    return lambda tensor, hook: see(tensor)


def _inputs(model: LoadedModel, windows: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], dict[str, Tensor]]:
    tokens, mask = _padded(windows)
    return tokens.to(model.device), {} if mask is None else {"attention_mask": mask.to(model.device)}


def _padded(windows: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], Int64[Tensor, "batch pos"] | None]:
    """Tokens padded on the right, and the attention mask if any were; padding is never counted."""
    tokens = torch.nn.utils.rnn.pad_sequence([window.tokens for window in windows], batch_first=True)
    lengths = torch.tensor([len(window.tokens) for window in windows])
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
