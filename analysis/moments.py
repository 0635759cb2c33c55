"""Moments: the sums over counted tokens from which every measure of a layer is computed.

One forward pass streams (a, b) of shape [token, d_mlp] through ``Moments.of``; what remains is one float64 table of sums
per neuron and the same table pooled over neurons, one column per jackknife block. Moments of disjoint sets of tokens add,
so batches, shards and machines combine by ``+``, in any order, and a new measure costs no forward pass.

Rows of the table (``Layout``), for h = g(a, b) and a changed version h′ of it:

    a b aa bb ab                first and second moments of the pre-activations
    hh                          Σ h²
    exchange, exchange_gap      Σ h′², Σ (h − h′)²  with h′ = g(b, a)
    scaling, scaling_gap        the same with h′ = g(αa, b/α), one row per α
    repaired, repaired_swapped, repaired_gap
                                Σ h², Σ h′², Σ (h − h′)² of exchange with b taken from another neuron, one row per draw
    placement, placement_gap    the same with h′ = g(ab, 1)
    euler                       Σ (a ∂g/∂a − b ∂g/∂b)²
    h_ab, abab                  Σ h·ab, Σ (ab)²
    count_pp … count_nn         tokens by the signs of (a, b); p means > 0, n means ≤ 0
    energy_pp … energy_nn       Σ h² by the same signs

Arithmetic: products in the precision of the activations (at least float32), summed over tiles of at most 64 tokens and
added up in float64; a and b themselves are squared in float64, because a variance is a difference of large numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from analysis.units import Unit

DEFAULT_ALPHAS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
QUADRANTS = ("pp", "pn", "np", "nn")
N_BLOCKS = 32
"""Blocks of consecutive sequences that the jackknife leaves out one by one."""
RATIO_BINS = 8192
"""Equal bins on [0, 1] that hold the per-token exchange asymmetry: a median read from them is off by at most 1/8192."""
TILE = 64
"""Tokens worked on at a time: few enough to stay in a core's cache and to be summed safely in float32."""

_PER_NEURON = (
    *("a", "b", "aa", "bb", "ab", "hh", "exchange", "exchange_gap", "placement", "placement_gap"),
    *("euler", "h_ab", "abab"),
    *(f"count_{quadrant}" for quadrant in QUADRANTS),
    *(f"energy_{quadrant}" for quadrant in QUADRANTS),
)
_PER_ALPHA = ("scaling", "scaling_gap")
_PER_DRAW = ("repaired", "repaired_swapped", "repaired_gap")


@dataclass(frozen=True)
class Layout:
    """Which row of the table holds which sum.

    Attributes:
        alphas: the scales, one row each in ``scaling`` and ``scaling_gap``; 0 and ∞ are the limits.
        draws: how many random re-pairings of neurons are followed.
    """

    alphas: tuple[float, ...]
    draws: int = 1

    @cached_property
    def rows(self) -> dict[str, slice]:
        counts = {name: 1 for name in _PER_NEURON}
        counts |= {name: len(self.alphas) for name in _PER_ALPHA} | {name: self.draws for name in _PER_DRAW}
        rows, start = {}, 0
        for name, count in counts.items():
            rows[name] = slice(start, start + count)
            start += count
        return rows

    @property
    def size(self) -> int:
        return len(_PER_NEURON) + len(_PER_ALPHA) * len(self.alphas) + len(_PER_DRAW) * self.draws


@dataclass(frozen=True)
class Sums:
    """A table of sums read by name; the columns are neurons, blocks, or leave-one-block-out replicates."""

    layout: Layout
    values: Float64[Tensor, "moment column"]

    def __getitem__(self, name: str) -> Float64[Tensor, "*row column"]:
        """[column] for one sum; [alpha, column] or [draw, column] where there is one row per scale or per draw."""
        rows = self.values[self.layout.rows[name]]
        return rows[0] if name in _PER_NEURON else rows

    def pool(self, weight: Float64[Tensor, " column"]) -> "Sums":
        """The weighted sum over columns, as a table with one column."""
        return Sums(self.layout, (self.values @ weight)[:, None])


@dataclass(frozen=True)
class Moments:
    """What was seen of one layer: immutable, and a monoid under ``+`` with ``empty`` as its zero.

    Attributes:
        neuron: the sums of each neuron, [moment, d_mlp].
        pooled: the same sums pooled with the value weights w_j, by jackknife block, [moment, block].
        token_ratios: histogram over tokens of the exchange asymmetry of that token pooled over neurons, [RATIO_BINS].
        top_energy: the largest Σ_j w_j h_j² of a single token.
        n_tokens: tokens counted.
        n_sequences: sequences that gave at least one counted token.
    """

    neuron: Sums
    pooled: Sums
    token_ratios: Int64[Tensor, " bin"]
    top_energy: float
    n_tokens: int
    n_sequences: int

    @classmethod
    def empty(cls, d_mlp: int, layout: Layout) -> "Moments":
        def zeros(columns: int) -> Sums:
            return Sums(layout, torch.zeros(layout.size, columns, dtype=torch.float64))

        return cls(zeros(d_mlp), zeros(N_BLOCKS), torch.zeros(RATIO_BINS, dtype=torch.int64), 0.0, 0, 0)

    @classmethod
    def of(
        cls,
        a: Float[Tensor, "token d_mlp"],
        b: Float[Tensor, "token d_mlp"],
        *,
        unit: Unit,
        value_weight: Float64[Tensor, " d_mlp"],
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
            layout: which scales and how many draws to follow.
            partners: for each draw, the neuron whose b is paired with each neuron's a.
            block: jackknife block of the sequence, below ``N_BLOCKS``.
        """
        n_tokens, d_mlp = a.shape
        neuron = torch.zeros(layout.size, d_mlp, dtype=torch.float64, device=a.device)
        ratios, top_energy = torch.zeros(RATIO_BINS, dtype=torch.int64, device=a.device), 0.0
        wide = torch.promote_types(a.dtype, torch.float32)
        weight = value_weight.to(device=a.device, dtype=wide)
        for tile_a, tile_b in zip(a.to(wide).split(TILE), b.to(wide).split(TILE), strict=True):
            rows, energy, change = _tile(tile_a, tile_b, unit, weight, layout, partners)
            neuron += rows
            ratios += _histogram(change, energy)
            top_energy = max(top_energy, float(energy[0].max()))
        neuron = neuron.cpu()
        pooled = torch.zeros(layout.size, N_BLOCKS, dtype=torch.float64)
        pooled[:, block] = neuron @ value_weight.cpu()
        return cls(Sums(layout, neuron), Sums(layout, pooled), ratios.cpu(), top_energy, n_tokens, 1)

    def __add__(self, other: "Moments") -> "Moments":
        if self.neuron.layout != other.neuron.layout:
            raise ValueError(f"moments of different layouts do not add: {self.neuron.layout}, {other.neuron.layout}")
        layout = self.neuron.layout
        return Moments(
            Sums(layout, self.neuron.values + other.neuron.values),
            Sums(layout, self.pooled.values + other.pooled.values),
            self.token_ratios + other.token_ratios,
            max(self.top_energy, other.top_energy),
            self.n_tokens + other.n_tokens,
            self.n_sequences + other.n_sequences,
        )


def derangements(d_mlp: int, draws: int, seed: int) -> Int64[Tensor, "draw d_mlp"]:
    """Random re-pairings of neurons in which no neuron keeps its own b: each is one cycle through a random order."""
    generator = torch.Generator().manual_seed(seed)
    partners = torch.empty(draws, d_mlp, dtype=torch.int64)
    for draw in range(draws):
        order = torch.randperm(d_mlp, generator=generator)
        partners[draw, order] = order.roll(1)
    return partners


def layout_for(unit: Unit, alphas: Sequence[float] = DEFAULT_ALPHAS, draws: int = 1) -> Layout:
    """The scales asked for plus the limits that exist for this unit, ascending."""
    return Layout(tuple(sorted({*map(float, alphas), *unit.limits})), draws)


def _tile(
    a: Float[Tensor, "token d_mlp"],
    b: Float[Tensor, "token d_mlp"],
    unit: Unit,
    weight: Float[Tensor, " d_mlp"],
    layout: Layout,
    partners: Int64[Tensor, "draw d_mlp"],
) -> tuple[Float64[Tensor, "moment d_mlp"], Float[Tensor, "2 token"], Float[Tensor, " token"]]:
    """Sums of one tile, the token energies of h and of its exchanged form, and the token energy of their difference."""
    h, swapped, ab = unit(a, b), unit.exchanged(a, b), a * b
    hh, swapped_squared, gap = h.square(), swapped.square(), (h - swapped).square()
    token_energy = torch.stack([hh @ weight, swapped_squared @ weight])
    token_gap = gap @ weight

    def total(x: Tensor) -> Float64[Tensor, " d_mlp"]:
        return x.sum(dim=0).double()

    def energy_and_gap(version: Tensor, of: Tensor = h) -> tuple[Tensor, Tensor]:
        return total(version.square()), total((of - version).square())

    precise_a, precise_b = a.double(), b.double()
    rows = [total(precise_a), total(precise_b)]
    rows += [total(precise_a.square()), total(precise_b.square()), total(precise_a * precise_b)]
    rows += [total(hh), total(swapped_squared), total(gap), *energy_and_gap(unit.placed_outside(a, b))]
    rows += [total(unit.euler(a, b).square()), total(h * ab), total(ab.square())]
    a_positive, b_positive = a > 0, b > 0
    signs = [a_positive & b_positive, a_positive & ~b_positive, ~a_positive & b_positive, ~(a_positive | b_positive)]
    rows += [total(sign.to(a.dtype)) for sign in signs] + [total(hh * sign) for sign in signs]
    scaled = [energy_and_gap(unit.scaled(a, b, alpha)) for alpha in layout.alphas]
    rows += [energy for energy, _ in scaled] + [change for _, change in scaled]
    repaired = []
    for partner in partners:
        before, after = unit(a, b[:, partner]), unit.exchanged(a, b[:, partner])
        repaired.append((total(before.square()), *energy_and_gap(after, of=before)))
    rows += [sums[kind] for kind in range(3) for sums in repaired]
    return torch.stack(rows), token_energy, token_gap


def _histogram(change: Float[Tensor, " token"], energy: Float[Tensor, "2 token"]) -> Int64[Tensor, " bin"]:
    """Counts of the per-token asymmetry; a token without any energy has none and is left out."""
    ratio = (change / (2 * energy.sum(dim=0))).double()
    bins = (ratio[ratio.isfinite()] * RATIO_BINS).long().clamp(0, RATIO_BINS - 1)
    return torch.bincount(bins, minlength=RATIO_BINS)


def histogram_median(counts: Int64[Tensor, " bin"]) -> float:
    """The median of the histogrammed values, linear within its bin; NaN when nothing was counted."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    below = counts.cumsum(0)
    index = int(torch.searchsorted(below, (total + 1) // 2))
    before = int(below[index] - counts[index])
    return (index + (total / 2 - before) / int(counts[index])) / len(counts)
