"""Running a model from one of its blocks on, from what that block was given in an earlier pass.

The clean prefix of an edit in layer l is the same for every edit, so it is computed once: a clean pass keeps the input of
every block, and a suffix hands block l its input again, skipping the blocks before it. Embedding, masks, final norm and
unembedding are the model's own code, whatever the family. A suffix of layer l costs (L − l)/L of the blocks and one
unembedding.

A batch is one window in many versions, so nothing is padded.
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
    """The positions of a window on which costs are taken: counted, and followed by a token that can be predicted."""

    first: int
    targets: Int64[Tensor, " token"]

    @classmethod
    def of(cls, window: Window) -> "Scored":
        return cls(window.counted_from, window.tokens[window.counted_from + 1 :])

    def __len__(self) -> int:
        return len(self.targets)

    def of_logits(self, logits: Float[Tensor, "*row pos vocab"]) -> Float[Tensor, "*row token vocab"]:
        """The logits that predict the targets."""
        return logits[..., self.first : self.first + len(self), :]


def full_pass(model: LoadedModel, tokens: Int64[Tensor, "row pos"]) -> Logits:
    """The logits of one whole pass of the model."""
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
    """Run from a block on.

    Args:
        model: the model.
        layer: the first block that runs.
        hidden: what it is given, one row a version of the window.
        window: the tokens, for masks and positions.
        rewrites: what becomes of h, by layer.
        keep: a later block whose input is wanted too.

    Returns:
        The logits, and what block ``keep`` was given.
    """
    kept: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(_entering(model, layer, hidden))
        stack.enter_context(rewriting(model, rewrites))
        if keep is not None:
            stack.enter_context(_inputs_kept(model, keep, kept))
        logits = full_pass(model, window.tokens.expand(len(hidden), -1))
    return logits, kept[0] if kept else None


def clean_pass(
    model: LoadedModel, window: Window, rewrites: Mapping[int, Rewrite]
) -> tuple[Float[Tensor, "1 pos vocab"], Float[Tensor, "layer pos d_model"]]:
    """Logits of one window, and the input of every block; ``rewrites`` may look at h on the way.

    Raises:
        UserError: the blocks are given something else than one residual stream, so that none can be entered.
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
            f"blocks of a {type(model.hf_model).__name__} are given {shapes.pop()} vectors instead of one residual stream, "
            "so no pass can start at a layer: use --causal attribution"
        )
    return logits, torch.cat(inputs)


def observed_pass(model: LoadedModel, window: Window, looks: Mapping[int, Rewrite]) -> None:
    """One whole pass over one window, in which ``looks`` see a, b and h and give h back."""
    with torch.no_grad(), rewriting(model, looks):
        full_pass(model, window.tokens[None])


@contextmanager
def _entering(model: LoadedModel, layer: int, hidden: Hidden) -> Iterator[None]:
    """Within the block, the layers before this one do nothing but hand on its input."""
    blocks = model.blocks(model.network)
    hook = blocks[layer].register_forward_pre_hook(
        lambda _, args, kwargs: ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden}),
        with_kwargs=True,
    )
    try:
        for number, block in enumerate(blocks[:layer]):
            handed_on = (hidden,) if number in model.located.returns_tuple else hidden
            vars(block)["forward"] = lambda *_, handed_on=handed_on, **__: handed_on  # setattr would reach a wrapped module
        yield
    finally:
        hook.remove()
        for block in blocks[:layer]:
            vars(block).pop("forward", None)


@contextmanager
def _inputs_kept(model: LoadedModel, layer: int, inputs: list[Tensor]) -> Iterator[None]:
    """Within the block, what a layer is given is appended to the list."""
    hook = model.blocks(model.network)[layer].register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()
