"""One pass over a batch of windows in which some modules are listened to, and no further than what is read.

The pass is the Hugging Face model's own: without the unembedding, without the layers after the last one that is read, and
with the attention that is fastest on this machine. Where something is hooked to the model in TransformerLens, which may
change what it computes, that view is run instead: it shares the modules that are listened to, or has others for the same.
One thread at a time listens to a model.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from analysis.sums.batch import Window
from hooks.loading.network import base_of, hidden_of, run_network
from hooks.models import LoadedModel

OnOutput = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""What is done with what a module was given, by place and by name, and with what it gave."""


class CaptureHook(NamedTuple):
    """What listens to a module."""

    module: nn.Module
    capture: OnOutput


class _ReadError(Exception):
    """Not an error: everything that is read has been seen, and this leaves the pass."""


def capture_pass(
    model: LoadedModel, windows: Sequence[Window], capture_hooks: Sequence[CaptureHook], last_layer: int
) -> Float[Tensor, "*batch pos d_model"]:
    """One pass with capture_hooks on some modules; returns the residual stream after the last layer that is read.

    Raises:
        torch.OutOfMemoryError: there is no room for so many windows at once.
    """
    tokens, mask = _padded(windows)
    found: list[Tensor] = []

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(hidden_of(output))
        raise _ReadError

    with model.lock, ExitStack() as stack, torch.no_grad():
        network = model.network
        for module, capture in capture_hooks:
            stack.callback(module.register_forward_hook(_hook(capture), with_kwargs=True).remove)
        stack.callback(model.blocks(network)[last_layer].register_forward_hook(leave).remove)
        with suppress(_ReadError):
            run_network(base_of(network), tokens.to(model.device), None if mask is None else mask.to(model.device))
    return found[0]


def _hook(capture: OnOutput) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    return lambda module, args, kwargs, output: capture(args, kwargs, output)


def _padded(windows: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], Int64[Tensor, "batch pos"] | None]:
    """Tokens padded on the right, and the attention mask if any were; padding is never counted."""
    tokens = torch.nn.utils.rnn.pad_sequence([window.tokens for window in windows], batch_first=True)
    lengths = torch.tensor([len(window.tokens) for window in windows])
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
