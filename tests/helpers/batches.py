"""Batches of windows of any lengths, and pre-activations as a model gives them for these."""

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.sums.batch import Batch, Window


def batch_of(
    lengths: Sequence[int],
    blocks: Sequence[int],
    counted_from: int = 1,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> Batch:
    windows = [
        Window(first + i, torch.arange(length) + 7 * i, min(counted_from, length)) for i, length in enumerate(lengths)
    ]
    return Batch.of(windows, blocks, device)


def padded(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rows of windows, with what must not be seen behind their ends."""
    out = torch.full((len(lengths), max(lengths), x.shape[1]), 1e4, dtype=x.dtype)
    for row, part in zip(out, x.split(list(lengths)), strict=True):
        row[: len(part)] = part
    return out
