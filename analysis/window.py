"""A window, one sequence of tokens; and a batch of windows, which is read at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """One sequence of tokens, its number in the corpus, and the first position that is counted."""

    index: int
    tokens: Int64[Tensor, " pos"]
    counted_from: int

    @property
    def n_counted(self) -> int:
        return len(self.tokens) - self.counted_from


@dataclass(frozen=True)
class Batch:
    """Windows that are read together, padded on the right to one length: row i, position p is place i·length + p.

    Attributes:
        windows: the windows, one a row.
        counted: the places of counted tokens, in reading order.
        uncounted: the places of tokens that are fed but not counted.
        places: window, position, token id, and 1 if the token is counted, of every place; −1 in the padding.
        runs: stretches of counted tokens that belong to one jackknife block: first, last + 1, block.
        blocks: the jackknife block of every counted token.
    """

    windows: tuple[Window, ...]
    counted: Int64[Tensor, " token"]
    uncounted: Int64[Tensor, " uncounted"]
    places: Int64[Tensor, "4 place"]
    runs: tuple[tuple[int, int, int], ...]
    blocks: Int64[Tensor, " token"]

    @classmethod
    def of(cls, windows: Sequence[Window], blocks: Sequence[int], device: torch.device | str = "cpu") -> "Batch":
        """These windows, each with its jackknife block; tensors go to the device of the activations."""
        length = max(len(window.tokens) for window in windows)
        places = torch.full((4, len(windows), length), -1)
        for row, window in zip(places.unbind(1), windows, strict=True):
            position = torch.arange(len(window.tokens))
            index, counted = torch.full_like(position, window.index), (position >= window.counted_from).long()
            row[:, : len(position)] = torch.stack([index, position, window.tokens.cpu(), counted])
        places = places.flatten(1)
        counted, uncounted = ((places[3] == kind).nonzero()[:, 0] for kind in (1, 0))
        of_token = [block for window, block in zip(windows, blocks, strict=True) for _ in range(window.n_counted)]
        runs, start = [], 0
        for block, tokens in groupby(of_token):
            stop = start + len(list(tokens))
            runs.append((start, stop, block))
            start = stop
        return cls(
            windows=tuple(windows),
            counted=counted.to(device),
            uncounted=uncounted.to(device),
            places=places.to(device),
            runs=tuple(runs),
            blocks=torch.tensor(of_token, dtype=torch.int64, device=device),
        )

    def pieces(self, size: int) -> list[tuple[int, int, int]]:
        """The runs, cut into stretches of at most that many tokens."""
        return [(at, min(at + size, stop), block) for start, stop, block in self.runs for at in range(start, stop, size)]

    @property
    def n_tokens(self) -> int:
        """Tokens that are fed."""
        return sum(len(window.tokens) for window in self.windows)
