"""What reduces a batch of activations to sums, and the sums it adds to: the interface between ``Accumulator`` and reducers.

``analysis.sums.tiled`` has the reducer for every device, precision and unit, in torch; ``analysis.sums.fused_reducer`` the
fast one for a CPU.
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
"""Jackknife blocks of consecutive sequences, which are left out one at a time."""
N_JACKKNIFE_GROUPS = 8
"""Groups of consecutive jackknife blocks, left out one at a time for the errors of single neurons."""


@dataclass
class Totals:
    """The running sums of a layer, updated in place, on the device of the activations.

    Attributes:
        table: the sums of the layout for each neuron.
        pooled: the same pooled with the value weights, by jackknife block.
        groups: the sums of ``layout.by_neuron_and_group`` for each neuron, by group of jackknife blocks.
        signs: tokens × neurons in each quadrant, by jackknife block.
        peaks: each neuron's largest |r·h|.
        peak_size: |r·h| of the peaks as the reducer computes it, so that equal values compare as equal; −1 for none.
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
        """A view of the totals of some neurons."""
        peaks = Peaks(self.peaks.values[:, neurons], self.peaks.places[:, neurons])
        groups, peak_size = self.groups[neurons], self.peak_size[neurons]
        return Totals(self.table[neurons], self.pooled, groups, self.signs, peaks, peak_size)

    def raise_peaks(self, peaks: Peaks) -> None:
        """Replace peaks by larger ones, in place."""
        total = self.peaks + peaks
        self.peaks.values.copy_(total.values)
        self.peaks.places.copy_(total.places)


@dataclass(frozen=True)
class TokenSums:
    """The sums over neurons for every counted token of a batch.

    Attributes:
        gap, scale: for each of the layout's token measures, the two sums whose ratio is the token's value.
        energy: Σ_j w_j h_j² of every token, the squared routing weight included, as in the others.
    """

    gap: Float64[Tensor, "measure token"]
    scale: Float64[Tensor, "measure token"]
    energy: Float64[Tensor, " token"]

    @classmethod
    def empty(cls, n_measures: int, n_tokens: int, device: torch.device | str = "cpu") -> "TokenSums":
        """Sums of 0 for every token."""
        gap, scale = torch.zeros(2, n_measures, n_tokens, dtype=torch.float64, device=device)
        return cls(gap, scale, torch.zeros(n_tokens, dtype=torch.float64, device=device))

    def add_at(self, tokens: Int64[Tensor, " part_token"], part: "TokenSums") -> None:
        """Add the sums of some neurons for some of the tokens, in place."""
        self.gap.index_add_(1, tokens, part.gap)
        self.scale.index_add_(1, tokens, part.scale)
        self.energy.index_add_(0, tokens, part.energy)


class Reducer(ABC):
    """Reduces batches of (a, b) of one layer to sums.

    Attributes:
        unit: g.
        layout: which sums to compute.
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
            totals: the running sums, updated in place.

        Returns:
            the sums of its counted tokens, in reading order.
        """
