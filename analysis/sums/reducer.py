"""What a batch of activations is reduced to, and by what: the contract between ``Accumulator`` and its reducers.

``analysis.sums.tiled`` has the one for every device, precision and unit, in torch; ``analysis.sums.kernel`` the fast one
for a CPU.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from analysis.sums.batch import Batch
from analysis.sums.extremes import Peaks
from analysis.sums.layout import Layout
from analysis.units.registry import Unit

N_JACKKNIFE_BLOCKS = 16
"""Blocks of consecutive sequences that the jackknife leaves out one by one."""
N_JACKKNIFE_GROUPS = 8
"""Groups of consecutive blocks, left out one by one for the errors of single neurons."""


@dataclass
class Totals:
    """The sums of a layer as they grow, added to in place, on the device of the activations.

    Attributes:
        table: the layout's sums of each neuron.
        pooled: the same pooled with the value weights, by jackknife block.
        groups: the sums of ``layout.by_neuron_and_group`` of each neuron by group of blocks.
        signs: tokens × neurons in each quadrant, by jackknife block.
        peaks: each neuron's largest |r·h|.
        peak_size: the same as a reducer itself computes it, by which equal ones are known as equal; −1 for none.
    """

    table: Float64[Tensor, "d_mlp moment"]
    pooled: Float64[Tensor, "block moment"]
    groups: Float32[Tensor, "d_mlp group kept"]
    signs: Float64[Tensor, "block 4"]
    peaks: Peaks
    peak_size: Float32[Tensor, " d_mlp"]

    @classmethod
    def empty(cls, d_mlp: int, layout: Layout, device: torch.device | str = "cpu") -> "Totals":
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(d_mlp, layout.size),
            zeros(N_JACKKNIFE_BLOCKS, layout.size),
            zeros(d_mlp, N_JACKKNIFE_GROUPS, layout.by_neuron_and_group.size, dtype=torch.float32),
            zeros(N_JACKKNIFE_BLOCKS, 4),
            Peaks.empty(d_mlp, device),
            zeros(d_mlp, dtype=torch.float32) - 1,
        )

    def of(self, neurons: slice) -> "Totals":
        """Those of some neurons; what is added to them is added here."""
        peaks = Peaks(self.peaks.values[:, neurons], self.peaks.places[:, neurons])
        groups, peak_size = self.groups[neurons], self.peak_size[neurons]
        return Totals(self.table[neurons], self.pooled, groups, self.signs, peaks, peak_size)

    def raise_peaks(self, peaks: Peaks) -> None:
        """Take in peaks of its neurons."""
        total = self.peaks + peaks
        self.peaks.values.copy_(total.values)
        self.peaks.places.copy_(total.places)


@dataclass(frozen=True)
class TokenSums:
    """What every token of a batch gives.

    Attributes:
        gap, scale: for each of the layout's token measures and every token, the two sums over neurons whose ratio is the
            token's number.
        energy: Σ_j w_j h_j² of every token, the squared routing weight included, as in the others.
    """

    gap: Float64[Tensor, "measure token"]
    scale: Float64[Tensor, "measure token"]
    energy: Float64[Tensor, " token"]

    @classmethod
    def empty(cls, n_measures: int, n_tokens: int, device: torch.device | str = "cpu") -> "TokenSums":
        """Tokens of which nothing has been seen yet."""
        gap, scale = torch.zeros(2, n_measures, n_tokens, dtype=torch.float64, device=device)
        return cls(gap, scale, torch.zeros(n_tokens, dtype=torch.float64, device=device))

    def add_at(self, tokens: Int64[Tensor, " part_token"], part: "TokenSums") -> None:
        """Add what some neurons give on some of the tokens, in place."""
        self.gap.index_add_(1, tokens, part.gap)
        self.scale.index_add_(1, tokens, part.scale)
        self.energy.index_add_(0, tokens, part.energy)


class Reducer(ABC):
    """What reduces batches of (a, b) of one layer to sums.

    Attributes:
        unit: g.
        layout: which sums there are.
        value_weight: w, on the device of the activations.
        dtype: precision of the products.
        kind: how it computes: "fused", "compiled" or "eager".
    """

    unit: Unit
    layout: Layout
    value_weight: Float64[Tensor, " d_mlp"]
    dtype: torch.dtype
    kind: str

    @abstractmethod
    def add(
        self, a: Float[Tensor, "place d_mlp"], b: Float[Tensor, "place d_mlp"], batch: Batch, totals: Totals
    ) -> TokenSums:
        """Add a batch to the totals.

        Args:
            a: gate pre-activations at all places of the batch, padding included.
            b: up pre-activations.
            batch: which places are counted, in which jackknife block, and with which routing weight.
            totals: what is added to.

        Returns:
            what its counted tokens give, in reading order.
        """
