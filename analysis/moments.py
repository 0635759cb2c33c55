"""Moments: the sums over counted tokens from which every measure of a layer is computed.

One forward pass streams (a, b) of shape [token, d_mlp] through ``Moments.of``; what remains is one float64 table of sums
per neuron (rows in ``analysis.sums``), the same table pooled over neurons, one column per jackknife block, and histograms
over tokens. Moments of disjoint sets of tokens add, so batches, shards and machines combine by ``+``, in any order, and a
new measure costs no forward pass.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.sums import Layout, Sums
from analysis.tile import TILE, TileReducer
from analysis.units import Unit

N_BLOCKS = 32
"""Blocks of consecutive sequences that the jackknife leaves out one by one."""
RATIO_BINS = 4096
"""Bins that hold the asymmetries r of single tokens, of equal width in √r: a median m is off by at most about √m/2048."""


@dataclass(frozen=True)
class Moments:
    """What was seen of one layer: immutable, and a monoid under ``+`` with ``empty`` as its zero.

    Attributes:
        neuron: the sums of each neuron, [moment, d_mlp].
        pooled: the same sums pooled with the value weights w_j, by jackknife block, [moment, block].
        token_ratios: for each of ``layout.token_measures``, the histogram over tokens of that token's own asymmetry,
            pooled over neurons, [measure, RATIO_BINS].
        top_energy: the largest Σ_j w_j h_j² of a single token.
        n_tokens: tokens counted.
        n_sequences: sequences that gave at least one counted token.
    """

    neuron: Sums
    pooled: Sums
    token_ratios: Int64[Tensor, "measure bin"]
    top_energy: float
    n_tokens: int
    n_sequences: int

    @classmethod
    def empty(cls, d_mlp: int, layout: Layout) -> "Moments":
        def zeros(columns: int) -> Sums:
            return Sums(layout, torch.zeros(layout.size, columns, dtype=torch.float64))

        ratios = torch.zeros(len(layout.token_measures), RATIO_BINS, dtype=torch.int64)
        return cls(zeros(d_mlp), zeros(N_BLOCKS), ratios, 0.0, 0, 0)

    @classmethod
    def of(
        cls,
        a: Float[Tensor, "token d_mlp"],
        b: Float[Tensor, "token d_mlp"],
        *,
        unit: Unit,
        value_weight: Float64[Tensor, " d_mlp"],
        balance: Float64[Tensor, " d_mlp"],
        layout: Layout,
        partners: Int64[Tensor, "draw d_mlp"],
        block: int,
    ) -> "Moments":
        """The moments of the counted tokens of one sequence.

        Args:
            a: gate pre-activations.
            b: up pre-activations.
            unit: g.
            value_weight: w_j = ‖v_j‖².
            balance: β_j, the rescaling of k that brings it to the size and the side of q.
            layout: which scales and how many draws to follow.
            partners: for each draw, the neuron whose b is paired with each neuron's a.
            block: jackknife block of the sequence, below ``N_BLOCKS``.
        """
        n_tokens, d_mlp = a.shape
        neuron = torch.zeros(layout.size, d_mlp, dtype=torch.float64, device=a.device)
        wide = torch.promote_types(a.dtype, torch.float32)
        reduce = TileReducer(unit, layout, value_weight.to(a.device, wide), balance.to(a.device, wide), partners)
        ratios, top_energy = [], 0.0
        for tile_a, tile_b in zip(a.to(wide).split(TILE), b.to(wide).split(TILE), strict=True):
            tile = reduce(tile_a, tile_b)
            neuron += tile.neuron
            ratios.append(tile.token_ratios)
            top_energy = max(top_energy, float(tile.token_energy.max()))
        neuron = neuron.cpu()
        pooled = torch.zeros(layout.size, N_BLOCKS, dtype=torch.float64)
        pooled[:, block] = neuron @ value_weight.cpu()
        histogram = _histogram(torch.cat(ratios, dim=1)).cpu()
        return cls(Sums(layout, neuron), Sums(layout, pooled), histogram, top_energy, n_tokens, 1)

    def __add__(self, other: "Moments") -> "Moments":
        if self.neuron.layout != other.neuron.layout or self.neuron.values.shape != other.neuron.values.shape:
            raise ValueError(
                f"moments of different layouts or widths do not add: {self.neuron.layout}, {other.neuron.layout}"
            )
        layout = self.neuron.layout
        return Moments(
            Sums(layout, self.neuron.values + other.neuron.values),
            Sums(layout, self.pooled.values + other.pooled.values),
            self.token_ratios + other.token_ratios,
            max(self.top_energy, other.top_energy),
            self.n_tokens + other.n_tokens,
            self.n_sequences + other.n_sequences,
        )

    def token_median(self, measure: str) -> float:
        """The median over tokens of one of ``layout.token_measures``; NaN where no token had energy."""
        return histogram_median(self.token_ratios[self.neuron.layout.token_measures.index(measure)])


def derangements(d_mlp: int, draws: int, seed: int) -> Int64[Tensor, "draw d_mlp"]:
    """Random re-pairings of neurons in which no neuron keeps its own b: each is one cycle through a random order."""
    generator = torch.Generator().manual_seed(seed)
    partners = torch.empty(draws, d_mlp, dtype=torch.int64)
    for draw in range(draws):
        order = torch.randperm(d_mlp, generator=generator)
        partners[draw, order] = order.roll(1)
    return partners


def _histogram(ratios: Float[Tensor, "measure token"]) -> Int64[Tensor, "measure bin"]:
    """Counts by bin; a token without any energy has no ratio and is left out."""
    n_measures = len(ratios)
    bins = (ratios.double().sqrt() * RATIO_BINS).nan_to_num(nan=-1).long().clamp(max=RATIO_BINS - 1)
    flat = bins + RATIO_BINS * torch.arange(n_measures, device=bins.device)[:, None]
    counts = torch.bincount(flat[bins >= 0], minlength=n_measures * RATIO_BINS)
    return counts.reshape(n_measures, RATIO_BINS)


def histogram_median(counts: Int64[Tensor, " bin"]) -> float:
    """The median of the values whose square roots were histogrammed, evenly within bins; NaN when nothing was counted."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    cumulative = counts.cumsum(0)

    def value_of_rank(rank: int) -> float:
        index = int(torch.searchsorted(cumulative, rank + 1))
        before, inside = int(cumulative[index] - counts[index]), int(counts[index])
        return ((index + (rank - before + 0.5) / inside) / len(counts)) ** 2

    return (value_of_rank((total - 1) // 2) + value_of_rank(total // 2)) / 2
