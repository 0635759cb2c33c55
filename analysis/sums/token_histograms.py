"""Histograms over tokens: quantiles of a measure taken token by token, and a measure without the tokens of largest energy.

A pooled measure is one ratio of sums over all tokens. The same ratio of a single token, and the pooled ratio without the
tokens that hold most of the energy, show whether it describes the text or a handful of its tokens. Counts and sums in bins
need no memory that grows with the text, and add.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.sums.reducer import N_JACKKNIFE_BLOCKS, TokenSums

RATIO_BINS = 4096
"""Bins for the asymmetries r of single tokens, of equal width in √r: the error of a median m is at most about √m/2048."""
BLOCK_RATIO_BINS = 512
"""The same by jackknife block, used only for the error of a median."""
_BINS_PER_OCTAVE = 8
_LOWEST_OCTAVE = -64
ENERGY_BINS = 128 * _BINS_PER_OCTAVE
"""Bins for tokens of similar energy, 8 per octave from 2^-64 to 2^64."""


@dataclass(frozen=True)
class TokenHistograms:
    """What is kept of single tokens: a monoid under ``+`` with ``empty`` as its zero; ``add_tokens`` alone works in place.

    Attributes:
        measures: names of the measures, each a ratio in [0, 1] of two sums over what a layer computes on a token.
        ratios: for each measure, the histogram over tokens of each token's own value.
        ratio_blocks: the same by jackknife block in coarser bins.
        by_energy: sums over tokens of similar energy: their number, their energy, and for each measure the two sums whose
            ratio it is, [2 + 2·measure, ENERGY_BINS].
    """

    measures: tuple[str, ...]
    ratios: Int64[Tensor, "measure bin"]
    ratio_blocks: Int64[Tensor, "measure block coarse_bin"]
    by_energy: Float64[Tensor, "part energy_bin"]

    @classmethod
    def empty(cls, measures: tuple[str, ...], device: torch.device | str = "cpu") -> "TokenHistograms":
        n = len(measures)
        return cls(
            measures,
            torch.zeros(n, RATIO_BINS, dtype=torch.int64, device=device),
            torch.zeros(n, N_JACKKNIFE_BLOCKS, BLOCK_RATIO_BINS, dtype=torch.int64, device=device),
            torch.zeros(2 + 2 * n, ENERGY_BINS, dtype=torch.float64, device=device),
        )

    def add_tokens(self, tokens: TokenSums, blocks: Int64[Tensor, " token"]) -> None:
        """Add the sums of some tokens, each in its jackknife block, in place."""
        square_root = (tokens.gap / tokens.scale).sqrt()
        _count(self.ratios, square_root)
        _count(self.ratio_blocks, square_root, blocks)
        parts = torch.stack([tokens.gap, tokens.scale], dim=1).flatten(0, 1)
        parts = torch.cat([torch.ones_like(tokens.energy)[None], tokens.energy[None], parts])
        self.by_energy.index_add_(1, _energy_bin(tokens.energy), parts)

    def __add__(self, other: "TokenHistograms") -> "TokenHistograms":
        return TokenHistograms(
            self.measures,
            self.ratios + other.ratios,
            self.ratio_blocks + other.ratio_blocks,
            self.by_energy + other.by_energy,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for writing."""
        return {"ratios": self.ratios, "ratio_blocks": self.ratio_blocks, "by_energy": self.by_energy}

    def to(self, device: torch.device | str, copy: bool = False) -> "TokenHistograms":
        """The same on a device."""
        return TokenHistograms(self.measures, *(values.to(device, copy=copy) for values in self.tensors().values()))

    @property
    def n_tokens(self) -> int:
        return round(float(self.by_energy[0].sum()))

    @property
    def energy(self) -> float:
        """The energy of all tokens."""
        return float(self.by_energy[1].sum())

    def quantile(self, measure: str, q: float) -> float:
        """A quantile over tokens of a measure; NaN if no token has energy."""
        return histogram_quantile(self.ratios[self.measures.index(measure)], q)

    def without_top(self, measure: str, share: float) -> float:
        """A measure pooled as one ratio without the given share of the tokens, those of largest energy.

        The number of tokens left out is rounded up. Tokens are binned by energy, 8 bins per octave; for a bin of which only
        a part is left out, all sums are reduced in proportion.
        """
        row = 2 + 2 * self.measures.index(measure)
        gap, scale = self.by_energy[row : row + 2] @ self._kept(share)
        return float(gap / scale)

    def top_share(self, share: float) -> float:
        """The share of the energy held by the given share of the tokens, those of largest energy."""
        energy = self.by_energy[1]
        return float(1 - energy @ self._kept(share) / energy.sum())

    @property
    def effective(self) -> float:
        """(Σ e)² / Σ e² over the energies e of the tokens: the effective number of tokens that hold the energy.

        Tokens in one energy bin are taken as equal.
        """
        count, energy = self.by_energy[:2]
        return float(energy.sum() ** 2 / (energy.square() / count.clamp(min=1)).sum())

    def _kept(self, share: float) -> Float64[Tensor, " energy_bin"]:
        """The fraction of every energy bin that remains without the given share of tokens of largest energy."""
        counts = self.by_energy[0].flip(0)
        before = counts.cumsum(0) - counts
        left_out = (math.ceil(share * self.n_tokens) - before).clamp(min=0).minimum(counts)
        return (1 - left_out / counts.clamp(min=1)).flip(0)


def _count(
    histogram: Int64[Tensor, "measure *block bin"],
    square_root: Float64[Tensor, "measure token"],
    jackknife_block: Int64[Tensor, " token"] | None = None,
) -> None:
    """Count every token in its bin of √r; a token without energy has no ratio and is not counted."""
    n_measures, n_bins = histogram.shape[0], histogram.shape[-1]
    bins = (square_root * n_bins).nan_to_num(nan=0.0).long().clamp(max=n_bins - 1)
    if jackknife_block is not None:
        bins = bins + n_bins * jackknife_block
    bins = bins + torch.arange(n_measures, device=bins.device)[:, None] * (histogram.numel() // n_measures)
    histogram.view(-1).index_add_(0, bins.flatten(), (~square_root.isnan()).long().flatten())


def _energy_bin(energy: Float64[Tensor, " token"]) -> Int64[Tensor, " token"]:
    octave = energy.log2().clamp(min=_LOWEST_OCTAVE)  # a token without energy is in the lowest bin
    return ((octave - _LOWEST_OCTAVE) * _BINS_PER_OCTAVE).nan_to_num(nan=0.0).clamp(0, ENERGY_BINS - 1).long()


def histogram_quantile(counts: Int64[Tensor, " bin"], q: float) -> float:
    """A quantile of values whose square roots were counted in bins, spaced evenly within each; NaN for empty bins.

    Between two values it is interpolated linearly, as numpy does.
    """
    total = int(counts.sum())
    if total == 0:
        return math.nan
    cumulative = counts.cumsum(0)

    def value_of_rank(rank: int) -> float:
        index = int(torch.searchsorted(cumulative, rank + 1))
        before, inside = int(cumulative[index] - counts[index]), int(counts[index])
        return ((index + (rank - before + 0.5) / inside) / len(counts)) ** 2

    below, part = divmod(q * (total - 1), 1)
    lower, upper = value_of_rank(int(below)), value_of_rank(min(int(below) + 1, total - 1))
    return lower + part * (upper - lower)
