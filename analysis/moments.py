"""Moments: the sums over counted tokens from which every measure of a layer is computed.

One forward pass streams (a, b) of shape [token, d_mlp] through ``Moments.of``; what remains is one float64 table of sums
per neuron and the same table pooled over neurons, one column per jackknife block. Moments of disjoint sets of tokens add,
so batches, shards and machines combine by ``+``, in any order, and a new measure costs no forward pass.

Rows of the table (``Layout``), for h = g(a, b) and a changed version h′ of it:

    a b aa bb ab                first and second moments of the pre-activations
    hh                          Σ h²
    exchange, exchange_gap      Σ h′², Σ (h − h′)²  with h′ = g(b, a)
    scaling, scaling_gap        the same with h′ = g(αa, b/α), one row per α
    balanced, balanced_swapped, balanced_gap, balanced_placed, balanced_placed_gap
                                exchange and placement in the balanced gauge: Σ h̃² and Σ h̃′², Σ (h̃ − h̃′)² with
                                h̃ = g(a, βb)/β and h̃′ = g(βb, a)/β or g(aβb, 1)/β, one β a neuron
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
RATIO_BINS = 4096
"""Equal bins on [0, 1] that hold the asymmetries of single tokens: a median read from them is off by at most 1/4096."""
TILE = 64
"""Tokens worked on at a time: few enough to stay in a core's cache and to be summed safely in float32."""

_PER_NEURON = (
    *("a", "b", "aa", "bb", "ab", "hh", "exchange", "exchange_gap", "placement", "placement_gap"),
    *("balanced", "balanced_swapped", "balanced_gap", "balanced_placed", "balanced_placed_gap", "euler", "h_ab", "abab"),
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
        counts = dict.fromkeys(_PER_NEURON, 1)
        counts |= dict.fromkeys(_PER_ALPHA, len(self.alphas)) | dict.fromkeys(_PER_DRAW, self.draws)
        rows, start = {}, 0
        for name, count in counts.items():
            rows[name] = slice(start, start + count)
            start += count
        return rows

    @property
    def token_measures(self) -> tuple[str, ...]:
        """The measures that are also taken token by token, pooled over the neurons of the layer.

        Each is a ratio r = gap / (2·energy of both versions) in [0, 1]; for the Euler residual ρ it is ρ²/(1 + ρ²).
        """
        return (
            "exchange",
            "balanced",
            "placement",
            "balanced_placed",
            "euler",
            *(f"scaling {alpha:g}" for alpha in self.alphas),
        )

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
        tile_of = _Tile(unit, layout, value_weight.to(a.device, wide), balance.to(a.device, wide), partners)
        ratios, top_energy = [], 0.0
        for tile_a, tile_b in zip(a.to(wide).split(TILE), b.to(wide).split(TILE), strict=True):
            rows, token_ratio, token_energy = tile_of(tile_a, tile_b)
            neuron += rows
            ratios.append(token_ratio)
            top_energy = max(top_energy, float(token_energy.max()))
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


def layout_for(unit: Unit, alphas: Sequence[float] = DEFAULT_ALPHAS, draws: int = 1) -> Layout:
    """The scales asked for plus the limits that exist for this unit, ascending."""
    return Layout(tuple(sorted({*map(float, alphas), *unit.limits})), draws)


@dataclass(frozen=True)
class _Tile:
    """Everything that is computed from one tile of tokens."""

    unit: Unit
    layout: Layout
    weight: Float[Tensor, " d_mlp"]
    balance: Float[Tensor, " d_mlp"]
    partners: Int64[Tensor, "draw d_mlp"]

    def __call__(
        self, a: Float[Tensor, "token d_mlp"], b: Float[Tensor, "token d_mlp"]
    ) -> tuple[Float64[Tensor, "moment d_mlp"], Float[Tensor, "measure token"], Float[Tensor, " token"]]:
        """The rows of the table, the per-token ratio of every token measure, and the energy of every token."""
        unit, h = self.unit, self.unit(a, b)
        hh, ab = h.square(), a * b
        token_energy = hh @ self.weight
        ratios: list[Tensor] = []

        def compared(changed: Tensor, of: Tensor = h, ratio: bool = True) -> tuple[Tensor, Tensor]:
            """Σ h′² and Σ (h − h′)² by neuron; the ratio of every token is kept aside."""
            energy, gap = changed.square(), (of - changed).square()
            if ratio:
                ratios.append(gap @ self.weight / (2 * (token_energy + energy @ self.weight)))
            return _total(energy), _total(gap)

        precise_a, precise_b = a.double(), b.double()
        rows = [_total(precise_a), _total(precise_b)]
        rows += [_total(precise_a.square()), _total(precise_b.square()), _total(precise_a * precise_b), _total(hh)]
        rows += compared(unit.exchanged(a, b))
        balanced_b = self.balance * b
        base = unit(a, balanced_b) / self.balance
        balanced = [_total(base.square()), *compared(unit.exchanged(a, balanced_b) / self.balance, of=base)]
        rows += compared(unit.placed_outside(a, b))
        balanced += compared(unit.placed_outside(a, balanced_b) / self.balance, of=base)
        euler = unit.euler(a, b).square()
        token_euler = euler @ self.weight
        ratios.append(token_euler / (token_euler + token_energy))
        rows += [*balanced, _total(euler), _total(h * ab), _total(ab.square())]
        rows += self._quadrants(a, b, hh)
        scaled = [compared(unit.scaled(a, b, alpha)) for alpha in self.layout.alphas]
        rows += [energy for energy, _ in scaled] + [gap for _, gap in scaled]
        repaired = []
        for partner in self.partners:
            other = b[:, partner]
            before = unit(a, other)
            repaired.append((_total(before.square()), *compared(unit.exchanged(a, other), of=before, ratio=False)))
        rows += [sums[kind] for kind in range(3) for sums in repaired]
        return torch.stack(rows), torch.stack(ratios), token_energy

    def _quadrants(self, a: Tensor, b: Tensor, hh: Tensor) -> list[Tensor]:
        """Counts and energies by the signs of (a, b), in the order of ``QUADRANTS``."""
        p, q = a > 0, b > 0
        signs = [p & q, p & ~q, ~p & q, ~(p | q)]
        return [_total(sign.to(a.dtype)) for sign in signs] + [_total(hh * sign) for sign in signs]


def _total(x: Float[Tensor, "token d_mlp"]) -> Float64[Tensor, " d_mlp"]:
    return x.sum(dim=0).double()


def _histogram(ratios: Float[Tensor, "measure token"]) -> Int64[Tensor, "measure bin"]:
    """Counts by bin; a token without any energy has no ratio and is left out."""
    n_measures = len(ratios)
    bins = (ratios.double() * RATIO_BINS).nan_to_num(nan=-1).long().clamp(max=RATIO_BINS - 1)
    flat = bins + RATIO_BINS * torch.arange(n_measures, device=bins.device)[:, None]
    counts = torch.bincount(flat[bins >= 0], minlength=n_measures * RATIO_BINS)
    return counts.reshape(n_measures, RATIO_BINS)


def histogram_median(counts: Int64[Tensor, " bin"]) -> float:
    """The median of the histogrammed values in [0, 1], evenly spread within their bins; NaN when nothing was counted."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    cumulative = counts.cumsum(0)

    def value_of_rank(rank: int) -> float:
        index = int(torch.searchsorted(cumulative, rank + 1))
        before, inside = int(cumulative[index] - counts[index]), int(counts[index])
        return (index + (rank - before + 0.5) / inside) / len(counts)

    return (value_of_rank((total - 1) // 2) + value_of_rank(total // 2)) / 2
