"""A window, one sequence of tokens; and a batch of windows, which is read at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
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


class Tile(NamedTuple):
    """Counted tokens of one jackknife block that are summed at once, in chunks of one length.

    Attributes:
        places: their places.
        live: which of them are there and not padding, which repeats the last one; None where there is no padding.
        routing_weight: their routing weights; None where all are 1.
        n_tokens: how many are there.
        block: their jackknife block.
    """

    places: Int64[Tensor, "chunk token"]
    live: Bool[Tensor, "chunk token"] | None
    routing_weight: Float[Tensor, "chunk token"] | None
    n_tokens: int
    block: int


@dataclass(frozen=True)
class Batch:
    """Windows that are read together, padded on the right to one length: row i, position p is place i·length + p.

    What an expert sees of a batch is a batch too, ``routed`` to it, with places of its own.

    Attributes:
        windows: the windows, one a row.
        counted: the places of counted tokens, in reading order.
        uncounted: the places of tokens that are fed but not counted.
        fed: the places of both, in reading order.
        places: window, position, token id, and 1 if the token is counted, of every place; −1 in the padding.
        runs: stretches of counted tokens that belong to one jackknife block: first, last + 1, block.
        blocks: the jackknife block of every counted token.
        routing_weight: the routing weight r of every place, by whose square energies are weighted; None where all are 1.
        ranks: of every counted token, its number among those of the batch that it was routed from; None in a whole batch.
    """

    windows: tuple[Window, ...]
    counted: Int64[Tensor, " token"]
    uncounted: Int64[Tensor, " uncounted"]
    fed: Int64[Tensor, " fed"]
    places: Int64[Tensor, "4 place"]
    runs: tuple[tuple[int, int, int], ...]
    blocks: Int64[Tensor, " token"]
    routing_weight: Float[Tensor, " place"] | None = None
    ranks: Int64[Tensor, " token"] | None = None
    _tiles: dict[tuple[int, int, bool], list[Tile]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        counted, uncounted, fed = (kind.nonzero()[:, 0] for kind in (places[3] == 1, places[3] == 0, places[3] >= 0))
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
            fed=fed.to(device),
            places=places.to(device),
            runs=tuple(runs),
            blocks=torch.tensor(of_token, dtype=torch.int64, device=device),
        )

    def pieces(self, size: int) -> list[tuple[int, int, int]]:
        """The runs, cut into stretches of at most that many tokens."""
        return [(at, min(at + size, stop), block) for start, stop, block in self.runs for at in range(start, stop, size)]

    def tiles(self, size: int, chunk: int, padded: bool) -> list[Tile]:
        """The runs, cut into tiles; made once for all layers, on the device and without waiting for it.

        Args:
            size: tokens in a tile at most, a multiple of the chunk.
            chunk: tokens in a chunk.
            padded: whether every chunk is full and every tile has two or more, so that all are of one kind; if not, what
                is left of a run behind its last full chunk is a tile of its own.
        """
        key = size, chunk, padded
        if key not in self._tiles:
            cut = self._padded if padded else self._exact
            self._tiles[key] = [tile for piece in self.pieces(size) for tile in cut(chunk, *piece)]
        return self._tiles[key]

    def _padded(self, chunk: int, first: int, last: int, block: int) -> list[Tile]:
        shape = max(2, -(-(last - first) // chunk)), chunk
        token = torch.arange(first, first + shape[0] * chunk, device=self.counted.device).view(shape)
        places = self.counted[token.clamp(max=last - 1)]
        return [Tile(places, token < last, self._routing_weight(places), last - first, block)]

    def _exact(self, chunk: int, first: int, last: int, block: int) -> list[Tile]:
        middle = last - (last - first) % chunk
        parts = (self.counted[first:middle].view(-1, chunk), self.counted[None, middle:last])
        return [Tile(part, None, self._routing_weight(part), part.numel(), block) for part in parts if part.numel()]

    def _routing_weight(self, places: Int64[Tensor, "chunk token"]) -> Float[Tensor, "chunk token"] | None:
        return None if self.routing_weight is None else self.routing_weight[places]

    def routed(self, places: Int64[Tensor, " routed"], weight: Float[Tensor, " routed"]) -> "Batch":
        """What one expert sees: its place i is ``places[i]`` of this batch.

        A GPU is waited for once, if the places are on it.

        Args:
            places: of the tokens routed to it, ascending, none of them padding.
            weight: their routing weights.

        Raises:
            ValueError: the places are not such.
        """
        device, there = self.fed.device, places.cpu()
        kinds, blocks = self._on_cpu
        if bool((there.diff() <= 0).any()) or (len(there) and not 0 <= int(there.min()) <= int(there.max()) < len(kinds)):
            raise ValueError(f"places routed to an expert must ascend within 0-{len(kinds) - 1}")
        kind = kinds[there]
        if bool((kind < 0).any()):
            raise ValueError("padding was routed to an expert: leave out the places that are not in Batch.fed")
        numbers, lengths = blocks[there[kind == 1]].unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0)
        runs = tuple(zip((stops - lengths).tolist(), stops.tolist(), numbers.tolist(), strict=True))
        return self._part(places.to(device), weight.to(device), runs)

    def _part(
        self, places: Int64[Tensor, " routed"], weight: Float[Tensor, " routed"], runs: tuple[tuple[int, int, int], ...]
    ) -> "Batch":
        """The batch at some of its places, in which the runs of counted tokens are known; waits for no device."""
        of_place, n_counted = self.places[:, places], runs[-1][1] if runs else 0
        counted_first = (of_place[3] != 1).long().argsort(stable=True)
        counted = counted_first[:n_counted]
        ranks = self._ranks[places[counted]]
        return Batch(
            windows=self.windows,
            counted=counted,
            uncounted=counted_first[n_counted:],
            fed=torch.arange(len(places), device=places.device),
            places=of_place,
            runs=runs,
            blocks=self.blocks[ranks],
            routing_weight=weight,
            ranks=ranks,
        )

    @cached_property
    def _ranks(self) -> Int64[Tensor, " place"]:
        """Of every counted place, the number of its token among the counted ones."""
        return (self.places[3] == 1).long().cumsum(0) - 1

    @cached_property
    def _on_cpu(self) -> tuple[Int64[Tensor, " place"], Int64[Tensor, " place"]]:
        """Of every place, 1 if it is counted, 0 if it is fed only, −1 in padding; and its block if it is counted.

        A GPU is waited for, once for all experts of all layers.
        """
        kinds = self.places[3].cpu()
        blocks = torch.full_like(kinds, -1)
        blocks[kinds == 1] = self.blocks.cpu()
        return kinds, blocks

    @property
    def n_tokens(self) -> int:
        """Tokens that are fed."""
        return len(self.fed)
