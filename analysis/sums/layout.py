"""The table of sums of a layer: which sums there are, and the row of each; and the range of scales α.

For h = g(a, b) and a changed version h′ of it, the name of a sum stands for Σ h′² and its ``_gap`` for Σ (h − h′)², both
over counted tokens. In a mixture of experts a token counts for the neurons of an expert if it was routed to it, with the
square of its routing weight r, because the neuron writes r·h: every Σ here is then Σ r². Only the ``count`` rows count
tokens:

    weight                Σ 1
    a b aa bb ab          first and second moments of the pre-activations
    hh                    Σ h²
    exchange              h′ = g(b, a)
    placement             h′ = g(ab, 1)
    scaling               h′ = g(αa, b/α), one row per α
    balanced_hh           Σ h̃² with h̃ = g(a, βb)/β, one β per neuron: the balanced gauge, as for the next two
    balanced_exchange     h̃′ = g(βb, a)/β
    balanced_placement    h̃′ = g(βab, 1)/β
    euler                 Σ (a ∂g/∂a − b ∂g/∂b)²
    h_ab, abab            Σ h·ab, Σ (ab)²
    count_pp … count_nn   tokens by the signs of (a, b); p means > 0, n means ≤ 0
    energy_pp … energy_nn Σ h² by the same signs

and for the permutation null, in which a neuron's a is combined with the b of another neuron of its layer (``repaired``
where random permutations are drawn, ``mixed`` where all other neurons are summed):

    repaired_hh, repaired_exchange, …_gap              one row per permutation
    repaired_balanced_hh, repaired_balanced_exchange,  the same in the balanced gauge of each pair
        …_gap
    repaired_scaling, repaired_product                 for the same permutations Σ g(αa, b/α)² and Σ g(a, b)·g(αa, b/α), one
                                                       row per permutation and main scale
    mixed_hh              Σ h² over every other neuron's b, its key first rescaled to the length of the neuron's own
    mixed_scaling         the same for g(αa, b/α), one row per α
    mixed_product         Σ g(a, b)·g(αa, b/α) over the same pairs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.errors import UserError
from analysis.units.registry import Unit

DEFAULT_ALPHAS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
DEFAULT_DRAWS = 4
"""Permutations drawn for the permutation null."""
SMALLEST_ALPHA, LARGEST_ALPHA = 1e-4, 1e4
"""Range of |α| that can be asked for. Beyond it (αa, b/α) leaves the range of float32; the limits 0 and ∞ show what happens
there, and are added where a unit has them."""
MAIN_SCALES = {"scaling_half": 0.5, "scaling_double": 2.0, "scaling_flip": -1.0}
"""The main scales: those with columns of their own, by column name."""
QUADRANTS = ("pp", "pn", "np", "nn")

_ONE_ROW = (
    "weight",
    *("a", "b", "aa", "bb", "ab", "hh", "exchange", "exchange_gap", "placement", "placement_gap"),
    *("balanced_hh", "balanced_exchange", "balanced_exchange_gap", "balanced_placement", "balanced_placement_gap"),
    *("euler", "h_ab", "abab"),
    *(f"count_{quadrant}" for quadrant in QUADRANTS),
    *(f"energy_{quadrant}" for quadrant in QUADRANTS),
    "mixed_hh",
)
_ROW_PER_ALPHA = ("scaling", "scaling_gap", "mixed_scaling", "mixed_product")
_ROW_PER_DRAW = (
    *("repaired_hh", "repaired_exchange", "repaired_exchange_gap"),
    *("repaired_balanced_hh", "repaired_balanced_exchange", "repaired_balanced_exchange_gap"),
)
_ROW_PER_DRAW_AND_SCALE = ("repaired_scaling", "repaired_product")


@dataclass(frozen=True)
class Layout:
    """Which row of the table holds which sum.

    Attributes:
        alphas: the scales, one row each in ``scaling``, ``scaling_gap`` and their mixed counterparts; 0 and ∞ are the
            limits.
        draws: number of random permutations for the permutation null.
        names: the sums in the table, in order.
    """

    alphas: tuple[float, ...]
    draws: int = DEFAULT_DRAWS
    names: tuple[str, ...] = (*_ONE_ROW, *_ROW_PER_ALPHA, *_ROW_PER_DRAW, *_ROW_PER_DRAW_AND_SCALE)

    @classmethod
    def of(cls, unit: Unit, alphas: Sequence[float] = DEFAULT_ALPHAS, draws: int = DEFAULT_DRAWS) -> "Layout":
        """The scales asked for plus the limits that exist for this unit, ascending."""
        return cls(tuple(sorted({*map(float, alphas), *unit.limits})), draws)

    @property
    def main_alphas(self) -> tuple[float, ...]:
        """Those of the scales that are main scales."""
        return tuple(alpha for alpha in self.alphas if alpha in MAIN_SCALES.values())

    @cached_property
    def by_neuron_and_group(self) -> "Layout":
        """The sums that are also kept by neuron and group of jackknife blocks: only some, to save memory.

        Permutations are summed, and of the scales only the main ones are included.
        """
        names = (
            *("weight", "a", "b", "aa", "bb", "ab", "hh", "exchange", "exchange_gap", "h_ab", "abab", "mixed_hh"),
            *("balanced_hh", "balanced_exchange", "balanced_exchange_gap", *_ROW_PER_ALPHA, *_ROW_PER_DRAW),
        )
        return Layout(self.main_alphas, 1, names)

    @cached_property
    def rows(self) -> dict[str, slice]:
        """The rows of every sum, in order."""
        counts = dict.fromkeys(_ONE_ROW, 1)
        counts |= dict.fromkeys(_ROW_PER_ALPHA, len(self.alphas)) | dict.fromkeys(_ROW_PER_DRAW, self.draws)
        counts |= dict.fromkeys(_ROW_PER_DRAW_AND_SCALE, self.draws * len(self.main_alphas))
        rows, start = {}, 0
        for name in self.names:
            rows[name] = slice(start, start + counts[name])
            start += counts[name]
        return rows

    @property
    def size(self) -> int:
        """How many rows the table has."""
        return max(rows.stop for rows in self.rows.values())

    @property
    def token_measures(self) -> tuple[str, ...]:
        """The measures that are also computed token by token, pooled over the neurons of the layer.

        Each is a ratio r = gap / (2 (Σ h² + Σ h′²)) in [0, 1]; for the Euler residual ρ it is ρ²/(1 + ρ²).
        """
        fixed = ("exchange", "placement", "balanced_exchange", "balanced_placement", "euler")
        return (*fixed, *(scaling_name(alpha) for alpha in self.alphas))

    @cached_property
    def narrowing(self) -> tuple[int, ...]:
        """The row in ``by_neuron_and_group`` of each row of this layout; −1 for rows that are not included there."""
        kept = self.by_neuron_and_group
        place = [-1] * self.size
        for name in kept.names:
            start, rows = kept.rows[name].start, range(self.size)[self.rows[name]]
            for i, row in enumerate(rows):
                if name not in _ROW_PER_ALPHA:
                    place[row] = start
                elif self.alphas[i] in kept.alphas:
                    place[row] = start + kept.alphas.index(self.alphas[i])
        return tuple(place)

    def narrow(
        self, table: Float64[Tensor, "moment column"], kept: Int64[Tensor, "2 kept_moment"] | None = None
    ) -> Float64[Tensor, "kept column"]:
        """The rows of ``by_neuron_and_group`` of a whole table; given ``kept_rows``, without synchronizing a device."""
        rows, place = self.kept_rows(table.device) if kept is None else kept
        return table.new_zeros(self.by_neuron_and_group.size, table.shape[1]).index_add_(0, place, table[rows])

    def kept_rows(self, device: torch.device | str) -> Int64[Tensor, "2 kept_moment"]:
        """The rows that are included in ``by_neuron_and_group``, and the row of each there."""
        kept = [(row, place) for row, place in enumerate(self.narrowing) if place >= 0]
        return torch.tensor(kept, device=device).T.contiguous()


def scaling_name(alpha: float) -> str:
    """The name of the scaling at α in ``Layout.token_measures`` and among the Gaussian nulls."""
    return f"scaling {alpha:g}"


def check_alphas(alphas: Sequence[float], remedy: str = "the limits 0 and ∞ are added where they exist") -> None:
    """Raise UserError if a scale is out of range: 0, infinite, NaN, or |α| outside 1e-4 to 1e4."""
    wrong = [f"{alpha:g}" for alpha in alphas if not SMALLEST_ALPHA <= abs(alpha) <= LARGEST_ALPHA]
    if wrong:
        raise UserError(f"α = {', '.join(wrong)} is out of range, |α| must lie between 1e-4 and 1e4: {remedy}")


@dataclass(frozen=True)
class Sums:
    """A table of sums read by name; the columns are neurons, jackknife blocks, or jackknife replicates."""

    layout: Layout
    values: Float64[Tensor, "moment column"]

    def __getitem__(self, name: str) -> Float64[Tensor, "*row column"]:
        """[column] for one sum; [alpha, column] or [draw, column] for one row per scale or per permutation.

        For one row per permutation and main scale [draw·main alpha, column], the scales of each permutation together.
        """
        rows = self.values[self.layout.rows[name]]
        return rows[0] if name in _ONE_ROW else rows

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.layout, self.values + other.values)

    def pool(self, weight: Float64[Tensor, " column"]) -> "Sums":
        """The weighted sum over columns, as a table with one column."""
        return Sums(self.layout, (self.values @ weight)[:, None])
