"""The table of sums of a layer: which sums there are, and in which row each stands.

For h = g(a, b) and a changed version h′ of it, a name alone is Σ h′² and its ``_gap`` is Σ (h − h′)², over counted tokens:

    a b aa bb ab          first and second moments of the pre-activations
    hh                    Σ h²
    exchange              h′ = g(b, a)
    placement             h′ = g(ab, 1)
    scaling               h′ = g(αa, b/α), one row per α
    balanced_hh           Σ h̃² with h̃ = g(a, βb)/β, one β a neuron: the balanced gauge, in which stand also
    balanced_exchange     h̃′ = g(βb, a)/β
    balanced_placement    h̃′ = g(βab, 1)/β
    repaired_hh           Σ h² with b taken from another neuron, one row per random pairing, and for the same pairs
    repaired_exchange     h′ = g(b, a)
    euler                 Σ (a ∂g/∂a − b ∂g/∂b)²
    h_ab, abab            Σ h·ab, Σ (ab)²
    count_pp … count_nn   tokens by the signs of (a, b); p means > 0, n means ≤ 0
    energy_pp … energy_nn Σ h² by the same signs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float64
from torch import Tensor

from analysis.units import Unit

DEFAULT_ALPHAS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
QUADRANTS = ("pp", "pn", "np", "nn")

_ONE_ROW = (
    *("a", "b", "aa", "bb", "ab", "hh", "exchange", "exchange_gap", "placement", "placement_gap"),
    *("balanced_hh", "balanced_exchange", "balanced_exchange_gap", "balanced_placement", "balanced_placement_gap"),
    *("euler", "h_ab", "abab"),
    *(f"count_{quadrant}" for quadrant in QUADRANTS),
    *(f"energy_{quadrant}" for quadrant in QUADRANTS),
)
_ROW_PER_ALPHA = ("scaling", "scaling_gap")
_ROW_PER_DRAW = ("repaired_hh", "repaired_exchange", "repaired_exchange_gap")


@dataclass(frozen=True)
class Layout:
    """Which row of the table holds which sum.

    Attributes:
        alphas: the scales, one row each in ``scaling`` and ``scaling_gap``; 0 and ∞ are the limits.
        draws: how many random re-pairings of neurons are followed.
    """

    alphas: tuple[float, ...]
    draws: int = 1

    @classmethod
    def of(cls, unit: Unit, alphas: Sequence[float] = DEFAULT_ALPHAS, draws: int = 1) -> "Layout":
        """The scales asked for plus the limits that exist for this unit, ascending."""
        return cls(tuple(sorted({*map(float, alphas), *unit.limits})), draws)

    @cached_property
    def rows(self) -> dict[str, slice]:
        """The rows of every sum, in order."""
        counts = dict.fromkeys(_ONE_ROW, 1)
        counts |= dict.fromkeys(_ROW_PER_ALPHA, len(self.alphas)) | dict.fromkeys(_ROW_PER_DRAW, self.draws)
        rows, start = {}, 0
        for name, count in counts.items():
            rows[name] = slice(start, start + count)
            start += count
        return rows

    @property
    def size(self) -> int:
        """How many rows the table has."""
        return max(rows.stop for rows in self.rows.values())

    @property
    def token_measures(self) -> tuple[str, ...]:
        """The measures that are also taken token by token, pooled over the neurons of the layer.

        Each is a ratio r = gap / (2·energy of both versions) in [0, 1]; for the Euler residual ρ it is ρ²/(1 + ρ²).
        """
        fixed = ("exchange", "placement", "balanced_exchange", "balanced_placement", "euler")
        return (*fixed, *(scaling_name(alpha) for alpha in self.alphas))


def scaling_name(alpha: float) -> str:
    """The name under which the scaling asymmetry of single tokens at α is kept."""
    return f"scaling {alpha:g}"


@dataclass(frozen=True)
class Sums:
    """A table of sums read by name; the columns are neurons, blocks, or leave-one-block-out replicates."""

    layout: Layout
    values: Float64[Tensor, "moment column"]

    def __getitem__(self, name: str) -> Float64[Tensor, "*row column"]:
        """[column] for one sum; [alpha, column] or [draw, column] where there is one row per scale or per draw."""
        rows = self.values[self.layout.rows[name]]
        return rows[0] if name in _ONE_ROW else rows

    def pool(self, weight: Float64[Tensor, " column"]) -> "Sums":
        """The weighted sum over columns, as a table with one column."""
        return Sums(self.layout, (self.values @ weight)[:, None])
