"""A window, one sequence of tokens; a batch of windows, which are read at once; and its tiles, which are summed at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from analysis.sums.token_sample import in_share, token_keys


@dataclass(frozen=True)
class Window:
    """One sequence of tokens, its index in the corpus, and the first position that is counted."""

    index: int
    tokens: Int64[Tensor, " pos"]
    counted_from: int

    @property
    def n_counted(self) -> int:
        return len(self.tokens) - self.counted_from


class Tile(NamedTuple):
    """Counted tokens of one jackknife block that are summed at once, in chunks of one length.

    Attributes:
        places: their places in the batch.
        live: which of them are tokens and not padding, which repeats the last token; None where there is no padding.
        routing_weight: their routing weights; None where all are 1.
        n_tokens: number of tokens, without padding.
        jackknife_block: their jackknife block.
    """

    places: Int64[Tensor, "chunk token"]
    live: Bool[Tensor, "chunk token"] | None
    routing_weight: Float[Tensor, "chunk token"] | None
    n_tokens: int
    jackknife_block: int


class SampledTile(NamedTuple):
    """Sampled tokens of one jackknife block.

    Attributes:
        places: their places in the batch.
        block: their jackknife block.
        keys: their keys (``analysis.sums.token_sample``), on the CPU.
    """

    places: Int64[Tensor, " token"]
    block: int
    keys: Int64[Tensor, " token"]


@dataclass(frozen=True)
class Batch:
    """Windows that are read together, padded on the right to one length: row i, position p is place i·length + p.

    The part of a batch that is routed to an expert is a batch too (``routed``), with places of its own.

    Attributes:
        windows: the windows, one per row.
        counted: the places of counted tokens, in reading order.
        uncounted: the places of tokens that are fed to the model but not counted.
        fed: the places of both, in reading order.
        places: window, position, token id, and 1 for a counted token, 0 for an uncounted one; all −1 for padding.
        runs: consecutive counted tokens of one jackknife block each: first, last + 1, block.
        blocks: the jackknife block of every counted token.
        routing_weight: the routing weight r of every place (energies are weighted with r²); None where all are 1.
        ranks: index of each counted token among those of the batch it was routed from; None for a whole batch.
        keys: of the counted tokens (``analysis.sums.token_sample``), on the CPU; None for a part of a batch.
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
    keys: Int64[Tensor, " token"] | None = None
    _sampled: dict[tuple[float, int], list[SampledTile]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
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
            keys=token_keys(places[:2, counted]),
        )

    def pieces(self, size: int) -> list[tuple[int, int, int]]:
        """The runs, cut into pieces of at most ``size`` tokens."""
        return [(at, min(at + size, stop), block) for start, stop, block in self.runs for at in range(start, stop, size)]

    def sampled(self, share: float, size: int) -> list[SampledTile]:
        """A random share of the counted tokens in reading order, in tiles; created once for all layers.

        Args:
            share: of the tokens, 1 for all.
            size: tokens in a tile at most.

        Raises:
            ValueError: it is a part of a batch.
        """
        if self.keys is None:
            raise ValueError("tokens are sampled from a whole batch, not from a part that was routed to an expert")
        if (share, size) not in self._sampled:
            chosen, tiles = in_share(self.keys, share), []
            for first, last, block in self.runs:
                own = chosen[(chosen >= first) & (chosen < last)]
                tiles += [
                    SampledTile(self.counted[tokens.to(self.counted.device)], block, self.keys[tokens])
                    for tokens in own.split(size)
                    if len(tokens)
                ]
            self._sampled[share, size] = tiles
        return self._sampled[share, size]

    def tiles(self, size: int, chunk: int, padded: bool) -> list[Tile]:
        """The runs, cut into tiles; created once for all layers, on the device and without synchronizing it.

        Args:
            size: tokens in a tile at most, a multiple of the chunk.
            chunk: tokens in a chunk.
            padded: whether to pad, so that all chunks are full and all tiles have at least two, as compiled code requires;
                otherwise the rest of a run after its last full chunk is a tile of its own.
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
        """The part that is routed to one expert: its place i is ``places[i]`` of this batch.

        Synchronizes once with a GPU that holds the places.

        Args:
            places: of the tokens routed to it, ascending, without padding.
            weight: their routing weights.

        Raises:
            ValueError: the places do not ascend, or include padding.
        """
        device, on_cpu = self.fed.device, places.cpu()
        kinds, blocks = self._on_cpu
        if bool((on_cpu.diff() <= 0).any()) or (len(on_cpu) and not 0 <= int(on_cpu[0]) <= int(on_cpu[-1]) < len(kinds)):
            raise ValueError(f"places routed to an expert must ascend within 0-{len(kinds) - 1}")
        kind = kinds[on_cpu]
        if bool((kind < 0).any()):
            raise ValueError("padding was routed to an expert: omit places that are not in Batch.fed")
        numbers, lengths = blocks[on_cpu[kind == 1]].unique_consecutive(return_counts=True)
        stops = lengths.cumsum(0)
        runs = tuple(zip((stops - lengths).tolist(), stops.tolist(), numbers.tolist(), strict=True))
        return self._part(places.to(device), weight.to(device), runs)

    def _part(
        self, places: Int64[Tensor, " routed"], weight: Float[Tensor, " routed"], runs: tuple[tuple[int, int, int], ...]
    ) -> "Batch":
        """The batch at some of its places, with the given runs of counted tokens; without synchronizing a device."""
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
        """The index of each counted place among the counted tokens; meaningless for other places."""
        return (self.places[3] == 1).long().cumsum(0) - 1

    @cached_property
    def _on_cpu(self) -> tuple[Int64[Tensor, " place"], Int64[Tensor, " place"]]:
        """1 for each counted place, 0 for an uncounted one, −1 for padding; and the jackknife block of counted places.

        Synchronizes with a GPU, once for all experts of all layers.
        """
        kinds = self.places[3].cpu()
        blocks = torch.full_like(kinds, -1)
        blocks[kinds == 1] = self.blocks.cpu()
        return kinds, blocks

    @property
    def n_tokens(self) -> int:
        """Tokens that are fed to the model, without padding."""
        return len(self.fed)
