"""The fast reducer for a CPU, and the choice of a reducer: what surrounds the compiled loops of ``analysis.sums.kernel``.

The counted tokens of a batch are cut into tiles, which are transposed so that a neuron's tokens are adjacent. Every thread
then takes an equal share of the neurons through all tiles.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from numpy import ndarray
from torch import Tensor

from analysis.sums.batch import Batch
from analysis.sums.extremes import Peaks
from analysis.sums.kernel import (
    ENERGY,
    KINDS,
    LINE,
    N_WORK_ROWS,
    STEP,
    Buffers,
    FirstRows,
    Neurons,
    Scales,
    Tiles,
    reduce_neurons,
    transpose_tile,
)
from analysis.sums.layout import Layout
from analysis.sums.reducer import Reducer, TokenSums, Totals
from analysis.sums.tiled import TileReducer
from analysis.units.registry import GatedUnit, Unit
from analysis.weights.geometry import Geometry, PermutedPairs

TILE = 256
"""Tokens in a tile; shorter ones are padded with a = b = 0, which adds nothing to any sum except counts by sign."""
EXPERT_TILE = 64
"""Tokens in a short tile, for experts with few tokens in a batch: even shorter ones would hardly save work."""
ROOM = 16
"""Floats of padding between rows: rows a power of two apart would map to the same cache lines."""
NEURONS_AT_ONCE = 128
"""Neurons over which the sums of single tokens are accumulated in float32 before they are added in float64."""
TILE_BYTES = 2**24
"""Memory for the tiles that are transposed at once."""


class FusedReducer(Reducer):
    """Reduces batches of (a, b) of one layer on the CPU, on as many threads as torch uses."""

    kind, dtype = "fused", torch.float32

    def __init__(self, unit: GatedUnit, layout: Layout, geometry: Geometry, pairs: PermutedPairs) -> None:
        """As ``TileReducer``; the activation must be one of ``KINDS``."""
        self.unit, self.layout = unit, layout
        self.value_weight = geometry.value_weight
        self._kind = KINDS[unit.activation.name]
        self._neurons = Neurons(
            geometry.value_weight.numpy(),
            torch.where(geometry.norm_k > 0, 1 / geometry.norm_k, 0.0).float().numpy(),
            geometry.norm_k.square().numpy(),
            geometry.balance.float().numpy(),
            pairs.partners.int().numpy(),
            pairs.balance.float().numpy(),
        )
        self._scales = _scales_of(unit, layout)
        self._rows = FirstRows(*(layout.rows[name].start for name in layout.names))
        self._kept = layout.kept_rows("cpu").int().numpy()

    def add(
        self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch, totals: Totals
    ) -> TokenSums:
        """As ``Reducer.add``."""
        a, b = a.float().contiguous(), b.float().contiguous()
        known, peak_at = totals.peak_size.clone(), np.full(a.shape[1], -1)
        parts = np.zeros((1 + 2 * len(self.layout.token_measures), len(batch.counted)))
        shares, weighted = _shares(a.shape[1]), () if batch.routing_weight is None else ((),)
        for tile, group in _tiled(batch, a.shape[1]):
            tiles = self._tiles(a.numpy(), b.numpy(), batch, group, shares, tile)

            def reduce(first: int, last: int, tiles: Tiles = tiles, tile: int = tile) -> Buffers:
                buffers = Buffers(
                    totals.table.numpy(),
                    totals.groups.numpy(),
                    totals.peak_size.numpy(),
                    peak_at,
                    np.zeros(totals.pooled.shape),
                    np.zeros(totals.signs.shape),
                    np.zeros((len(tiles.first), len(parts), tile)),
                    _aligned(N_WORK_ROWS, tile + ROOM),
                    _aligned(len(parts), tile + ROOM),
                    np.zeros(self.layout.size),
                    np.zeros(self.layout.by_neuron_and_group.size, np.float32),
                    *self._kept,
                )
                layer, constants = (self._neurons, self._scales, self._rows), (_steps(tile), weighted)
                for some in range(first, last, NEURONS_AT_ONCE):
                    until = min(some + NEURONS_AT_ONCE, last)
                    reduce_neurons(self._kind, some, until, tiles, *layer, buffers, *constants)
                return buffers

            for buffers in _on_threads(reduce, shares):
                totals.pooled += torch.from_numpy(buffers.pooled)
                totals.signs += torch.from_numpy(buffers.signs)
                for (first, last, _), sums in zip(group, buffers.tokens, strict=True):
                    parts[:, first:last] += sums[:, : last - first]
        self._raise_peaks(totals, peak_at, a, b, batch, known)
        return self._token_sums(torch.from_numpy(parts))

    def _tiles(
        self,
        a: Float32[ndarray, "place d_mlp"],
        b: Float32[ndarray, "place d_mlp"],
        batch: Batch,
        pieces: Sequence["Piece"],
        shares: Sequence[tuple[int, int]],
        tile: int,
    ) -> Tiles:
        """These pieces of the counted tokens, transposed."""
        counted, n_tokens = batch.counted.numpy(), np.array([last - first for first, last, _ in pieces])
        routing_weight = (np.arange(tile) < n_tokens[:, None]).astype(np.float32)
        if batch.routing_weight is not None:
            weight = batch.routing_weight.float().numpy()
            for row, (first, last, _) in zip(routing_weight, pieces, strict=True):
                row[: last - first] = weight[counted[first:last]]
        tiles_a, tiles_b = _room(len(pieces), a.shape[1], tile + ROOM)
        tiles = Tiles(
            a=tiles_a,
            b=tiles_b,
            power=np.zeros((len(pieces), tile), np.float32),
            routing_weight=routing_weight,
            square=np.square(routing_weight, dtype=np.float64),
            n_tokens=n_tokens,
            first=np.array([first for first, _, _ in pieces]),
            jackknife_block=np.array([block for _, _, block in pieces]),
        )

        def transpose(first: int, last: int) -> Float32[ndarray, "tile token"]:
            power, unused, s = _aligned(len(pieces), tile), _aligned(tile), _aligned(LINE, tile + ROOM)
            for at, (start, stop, _) in enumerate(pieces):
                there = first, last, counted[start:stop]
                transpose_tile(*there, a, neurons.per_length, tiles.a[at], unused, s, _steps(tile))
                transpose_tile(*there, b, neurons.per_length, tiles.b[at], power[at], s, _steps(tile))
            return power

        neurons = self._neurons
        for power in _on_threads(transpose, shares):
            tiles.power[:] += power
        return tiles

    def _token_sums(self, parts: Float64[Tensor, "part token"]) -> TokenSums:
        """Gap and scale of every token measure, from the gaps and energies summed over the neurons."""
        energy, gap, changed = parts[ENERGY], parts[1::2], parts[2::2]
        scale = 2 * (changed + energy)
        euler = self.layout.token_measures.index("euler")
        scale[euler] = gap[euler] + energy
        return TokenSums(gap, scale, energy)

    def _raise_peaks(
        self,
        totals: Totals,
        peak_at: Int64[ndarray, " d_mlp"],
        a: Float32[Tensor, "place d_mlp"],
        b: Float32[Tensor, "place d_mlp"],
        batch: Batch,
        known: Float32[Tensor, " d_mlp"],
    ) -> None:
        """Update the peaks: counted tokens at ``peak_at``, and uncounted ones that are larger than ``known``."""
        neuron = torch.from_numpy(np.flatnonzero(peak_at >= 0))
        place = batch.counted[torch.from_numpy(peak_at)[neuron]]
        x, y = a[place, neuron], b[place, neuron]
        weight = batch.routing_weight
        h = self.unit(x, y) if weight is None else self.unit(x, y) * weight[place].float()
        totals.peaks.values[:, neuron] = torch.stack([h, x, y]).double()
        totals.peaks.places[:, neuron] = batch.places[:, place]
        rest = batch.uncounted
        if not len(rest):
            return
        peaks = Peaks.of(a[rest], b[rest], self.unit, batch.places[:, rest], None if weight is None else weight[rest])
        if bool((peaks.values[0].abs() > known).any()):
            torch.maximum(totals.peak_size, peaks.values[0].abs().float(), out=totals.peak_size)
            totals.raise_peaks(peaks)


def reducer_of(
    unit: Unit, layout: Layout, geometry: Geometry, pairs: PermutedPairs, device: torch.device, dtype: torch.dtype
) -> Reducer:
    """The fastest reducer for activations of this dtype on this device.

    On a CPU the fused loop, where it implements the activation; otherwise eager torch, because compiling it would take
    longer than most runs. On a GPU compiled torch.
    """
    if isinstance(unit, GatedUnit) and unit.activation.name in KINDS and device.type == "cpu" and dtype != torch.float64:
        return FusedReducer(unit, layout, geometry, pairs)
    return TileReducer(unit, layout, geometry, pairs, device, dtype, compiled=device.type == "cuda")


def _scales_of(unit: GatedUnit, layout: Layout) -> Scales:
    limits = {0.0: unit.activation.slope_at_zero, math.inf: unit.activation.slope_at_infinity}
    slopes = [limits.get(alpha) or (0.0, 0.0) for alpha in layout.alphas]
    main = layout.main_alphas
    return Scales(
        alpha=np.array([1.0 if alpha in limits else alpha for alpha in layout.alphas], np.float32),
        is_limit=np.array([alpha in limits for alpha in layout.alphas], np.int32),
        below=np.array([below for below, _ in slopes], np.float32),
        above=np.array([above for _, above in slopes], np.float32),
        main=np.array([main.index(alpha) if alpha in main else -1 for alpha in layout.alphas], np.int32),
        n_main=len(main),
    )


_kept = threading.local()


def _room(*shape: int) -> Sequence[Float32[ndarray, "tile d_mlp room"]]:
    """Memory for two sets of transposed tiles, reused from batch to batch: allocating it costs more than filling it."""
    size = math.prod(shape)
    if getattr(_kept, "size", 0) < size:
        _kept.size, _kept.room = size, [_aligned(size) for _ in range(2)]
    return [room[:size].reshape(shape) for room in _kept.room]


@cache
def _steps(tile: int) -> tuple[tuple[()], ...]:
    """A tuple whose length encodes the tile length, which is then a constant to the compiler."""
    return ((),) * (tile // STEP)  # of empty tuples, which cost nothing to pass


def _aligned(*shape: int) -> Float32[ndarray, "..."]:
    """Zeros aligned to a cache line, as torch allocates them and numpy does not."""
    return torch.zeros(shape).numpy()


Piece = tuple[int, int, int]
"""First counted token, last + 1, jackknife block."""


def _tiled(batch: Batch, d_mlp: int) -> Iterator[tuple[int, list[Piece]]]:
    """Tile lengths with pieces of the counted tokens, one a tile, in order; as many at once as ``TILE_BYTES`` allows.

    In a mixture of experts, pieces of at most half a tile are cut into short tiles.
    """
    pieces = ((TILE, piece) for piece in batch.pieces(TILE))
    if batch.routing_weight is not None:
        pieces = (sized for _, piece in pieces for sized in _cut(*piece))
    for tile, same in groupby(pieces, key=itemgetter(0)):
        group = [piece for _, piece in same]
        at_once = max(1, TILE_BYTES // (2 * 4 * tile * d_mlp))
        for start in range(0, len(group), at_once):
            yield tile, group[start : start + at_once]


def _cut(first: int, last: int, block: int) -> Iterator[tuple[int, Piece]]:
    """A piece as one long tile, or as short ones if these need less work."""
    if last - first > 2 * EXPERT_TILE:
        yield TILE, (first, last, block)
        return
    for start in range(first, last, EXPERT_TILE):
        yield EXPERT_TILE, (start, min(start + EXPERT_TILE, last), block)


def _shares(n_neurons: int) -> list[tuple[int, int]]:
    """The range of neurons of each thread."""
    edges = np.linspace(0, n_neurons, min(torch.get_num_threads(), n_neurons) + 1).astype(int).tolist()
    return list(pairwise(edges))


_T = TypeVar("_T")


def _on_threads(function: Callable[[int, int], _T], shares: Sequence[tuple[int, int]]) -> list[_T]:
    """The function's result for every share, each on a thread of its own, the first on the calling one."""
    others = [_threads().submit(function, *share) for share in shares[1:]]
    return [function(*shares[0]), *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fused")
