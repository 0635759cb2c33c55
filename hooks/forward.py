"""One hooked forward pass over a batch of windows, no further than what is read."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from analysis.errors import UserError
from analysis.window import Window
from hooks.models import LoadedModel

HookFunction = Callable[[Tensor, HookPoint], None]


def forward(
    model: LoadedModel, batch: Sequence[Window], hooks: list[tuple[str, HookFunction]], last_layer: int
) -> Float[Tensor, "batch pos d_model"]:
    """One hooked pass, without the unembedding and without the layers after the last one that is read.

    Returns the residual stream after that layer; after the very last one it has passed the final norm.
    """
    tokens, mask = _padded(batch)
    tokens = tokens.to(model.device)
    attention = {} if mask is None else {"attention_mask": mask.to(model.device)}
    try:
        with torch.no_grad(), model.bridge.hooks(fwd_hooks=hooks):
            if last_layer + 1 < len(model.bridge.blocks):
                return model.bridge(tokens, return_type=None, stop_at_layer=last_layer + 1, **attention)
            return model.bridge.original_model.base_model(tokens, use_cache=False, **attention).last_hidden_state
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory with {len(batch)} windows a batch: use a smaller --batch-size") from error


def _padded(batch: Sequence[Window]) -> tuple[Int64[Tensor, "batch pos"], Int64[Tensor, "batch pos"] | None]:
    """Tokens padded on the right, and the attention mask if any were; padding is never counted."""
    tokens = torch.nn.utils.rnn.pad_sequence([window.tokens for window in batch], batch_first=True)
    lengths = torch.tensor([len(window.tokens) for window in batch])
    if bool((lengths == tokens.shape[1]).all()):
        return tokens, None
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
