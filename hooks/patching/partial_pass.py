"""Forward passes that start at a layer, from the input of that block in an earlier pass.

The blocks before an edited layer l compute the same for every edit, so they run once: a clean pass keeps the input of every
block, and a start-at-layer pass feeds block l with it and skips the blocks before. Embedding, masks, final norm and
unembedding are the model's own code, whatever the family. A pass from layer l on costs (L − l)/L of the blocks and one
unembedding.

A batch consists of several runs of the same window, so there is no padding.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from analysis.errors import UserError
from hooks.corpus import Window
from hooks.loading.network import run_network
from hooks.models import LoadedModel
from hooks.patching.interventions import Rewrite, rewriting

Hidden = Float[Tensor, "row pos d_model"]
Logits = Float[Tensor, "row pos vocab"]


@dataclass(frozen=True)
class Scored:
    """The scored positions of a window: counted, and followed by a token to be predicted.

    Attributes:
        first: the first scored position.
        targets: the tokens that follow the scored positions.
    """

    first: int
    targets: Int64[Tensor, " token"]

    @classmethod
    def of(cls, window: Window) -> "Scored":
        """The scored positions of this window."""
        return cls(window.counted_from, window.tokens[window.counted_from + 1 :])

    def __len__(self) -> int:
        return len(self.targets)

    def of_logits(self, logits: Float[Tensor, "*row pos vocab"]) -> Float[Tensor, "*row token vocab"]:
        """The logits that predict the targets."""
        return logits[..., self.first : self.first + len(self), :]


def full_pass(model: LoadedModel, tokens: Int64[Tensor, "row pos"]) -> Logits:
    """The logits of one full pass of the model; UserError if it does not fit into the GPU's memory."""
    try:
        return run_network(model.network, tokens.to(model.device)).logits
    except torch.cuda.OutOfMemoryError as error:
        raise UserError("out of GPU memory in a causal pass: use a shorter --context, or --causal none") from error


def pass_from_layer(
    model: LoadedModel,
    layer: int,
    hidden: Hidden,
    window: Window,
    rewrites: Mapping[int, Rewrite],
    keep: int | None = None,
) -> tuple[Logits, Hidden | None]:
    """Run the model from a block on.

    Args:
        model: the model.
        layer: the first block that runs.
        hidden: its input, one row per patched run of the window.
        window: the tokens, for masks and positions.
        rewrites: functions of (a, b, h) that give h′, by layer.
        keep: a later block whose input is returned too.

    Returns:
        The logits, and the input of block ``keep``, None if there is none.
    """
    kept: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(_starting_at(model, layer, hidden))
        stack.enter_context(rewriting(model, rewrites))
        if keep is not None:
            stack.enter_context(_inputs_kept(model, keep, kept))
        logits = full_pass(model, window.tokens.expand(len(hidden), -1))
    return logits, kept[0] if kept else None


def clean_pass(
    model: LoadedModel, window: Window, rewrites: Mapping[int, Rewrite]
) -> tuple[Float[Tensor, "1 pos vocab"], Float[Tensor, "layer pos d_model"]]:
    """The logits of one window, and the input of every block, under these rewrites.

    Raises:
        UserError: the blocks do not read a single residual stream, so that no pass can start at one.
    """
    inputs: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(rewriting(model, rewrites))
        for layer in range(len(model.blocks(model.network))):
            stack.enter_context(_inputs_kept(model, layer, inputs))
        logits = full_pass(model, window.tokens[None])
    shapes = {tuple(x.shape[:-1]) for x in inputs}
    if shapes != {(1, len(window.tokens))}:
        raise UserError(
            f"blocks of a {type(model.hf_model).__name__} read {shapes.pop()} vectors instead of one residual stream, so "
            "no pass can start at a layer: use --causal attribution"
        )
    return logits, torch.cat(inputs)


def observed_pass(model: LoadedModel, window: Window, observers: Mapping[int, Rewrite]) -> None:
    """One full pass over one window, in which ``observers`` read a, b and h, and return h unchanged."""
    with torch.no_grad(), rewriting(model, observers):
        full_pass(model, window.tokens[None])


@contextmanager
def _starting_at(model: LoadedModel, layer: int, hidden: Hidden) -> Iterator[None]:
    """Within the ``with`` block, the blocks before this layer are skipped: they only pass on its input."""
    blocks = model.blocks(model.network)
    hook = blocks[layer].register_forward_pre_hook(
        lambda _, args, kwargs: ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden}),
        with_kwargs=True,
    )
    try:
        for number, block in enumerate(blocks[:layer]):
            output = (hidden,) if number in model.located.returns_tuple else hidden
            vars(block)["forward"] = lambda *_, output=output, **__: output  # setattr would also change a wrapped module
        yield
    finally:
        hook.remove()
        for block in blocks[:layer]:
            vars(block).pop("forward", None)


@contextmanager
def _inputs_kept(model: LoadedModel, layer: int, inputs: list[Tensor]) -> Iterator[None]:
    """Within the ``with`` block, the input of a layer is appended to the list in every pass."""
    hook = model.blocks(model.network)[layer].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()
