"""One forward pass over a batch of windows with capture hooks on some modules, up to the last layer that is needed.

The pass is the Hugging Face model's own, without the unembedding, without the layers after the last one, and with its
fastest attention kernel. If the user has registered hooks in TransformerLens, which may change the activations, the bridge
runs instead: it shares the captured modules, or has hook points for the same activations.
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
"""Called with a module's positional arguments, its keyword arguments, and its output."""


class CaptureHook(NamedTuple):
    """A function to be called whenever a module has run."""

    module: nn.Module
    capture: OnOutput


class _AllCapturedError(Exception):
    """Not an error: it ends the pass after the last layer that is needed."""


def capture_pass(
    model: LoadedModel, windows: Sequence[Window], capture_hooks: Sequence[CaptureHook], last_layer: int
) -> Float[Tensor, "*batch pos d_model"]:
    """One pass with capture hooks.

    Args:
        model: from ``load_model``.
        windows: the batch; shorter windows are padded on the right.
        capture_hooks: called during the pass.
        last_layer: index of the last block that runs.

    Returns:
        The residual stream after that block.

    Raises:
        torch.OutOfMemoryError: so many windows do not fit into the GPU's memory at once.
    """
    tokens, mask = _padded(windows)
    residual: list[Tensor] = []

    def stop(module: nn.Module, inputs: Any, output: Any) -> None:
        residual.append(hidden_of(output))
        raise _AllCapturedError

    with model.lock, ExitStack() as stack, torch.no_grad():
        network = model.network
        for module, capture in capture_hooks:
            stack.callback(module.register_forward_hook(_hook(capture), with_kwargs=True).remove)
        stack.callback(model.blocks(network)[last_layer].register_forward_hook(stop).remove)
        with suppress(_AllCapturedError):
            run_network(base_of(network), tokens.to(model.device), None if mask is None else mask.to(model.device))
    return residual[0]


def _hook(capture: OnOutput) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
    return lambda module, args, kwargs, output: capture(args, kwargs, output)


def _padded(windows: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], Int64[Tensor, "batch pos"] | None]:
    """Tokens padded on the right, and the attention mask if there is padding, which is never counted."""
    tokens = torch.nn.utils.rnn.pad_sequence([window.tokens for window in windows], batch_first=True)
    lengths = torch.tensor([len(window.tokens) for window in windows])
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
