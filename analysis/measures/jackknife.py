"""Standard errors by a jackknife over sequences: leaving out one block of them at a time.

Tokens of one sequence depend on each other, so the resampled unit is a block of consecutive sequences. With K blocks that
hold counted tokens, and R_(k) the number computed without block k,

    SE² = (K − 1)/K · Σ_k (R_(k) − R̄)²,   R̄ the mean of the R_(k)

(delete-one jackknife: Efron & Stein 1981, Ann. Statist. 9, 586). To first order it is correct for smooth functions of sums,
such as ratios; an interval is ± t_{K−1} SE. The error refers to this kind of text: it does not include the variation
between kinds of text.

Layers have ``N_JACKKNIFE_BLOCKS`` blocks; single neurons have ``N_JACKKNIFE_GROUPS`` groups of blocks.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float32, Float64, Int64
from scipy import stats
from torch import Tensor

from analysis.measures.asymmetry import Measure, layer_bilinear_share
from analysis.sums.layout import Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Moments
from analysis.sums.token_histograms import TokenHistograms, histogram_quantile

FEW_JACKKNIFE_BLOCKS = 8
"""With fewer jackknife blocks an error is itself very uncertain."""
NOTHING_LEFT = 1e-5
"""Fraction of a neuron's Σ r² below which the rest without a group counts as 0: group sums are in single precision."""


def filled_jackknife_blocks(moments: Moments) -> int:
    """How many jackknife blocks hold at least one counted token."""
    return int((moments.blocks > 0).sum())


def t95(n_blocks: int) -> float:
    """Half the width of a 95 % interval, in standard errors; NaN with fewer than two blocks."""
    return float(stats.t.ppf(0.975, n_blocks - 1)) if n_blocks > 1 else float("nan")


def jackknife(replicates: Float64[Tensor, "*shape block"]) -> Float64[Tensor, "*shape"]:
    """The standard error from the replicates, one without each block; NaN with fewer than two blocks."""
    n_blocks = replicates.shape[-1]
    if n_blocks < 2:
        return torch.full(replicates.shape[:-1], torch.nan, dtype=torch.float64)
    squares = (replicates - replicates.mean(dim=-1, keepdim=True)).square().sum(dim=-1)
    return ((n_blocks - 1) / n_blocks * squares).sqrt()


def pooled_error(measure: Measure, moments: Moments) -> Float64[Tensor, "*row"]:
    """The standard error of a pooled measure."""
    return jackknife(pooled_replicates(measure, moments))


def pooled_replicates(measure: Measure, moments: Moments) -> Float64[Tensor, "*row block"]:
    """A pooled measure without each of the filled jackknife blocks."""
    blocks = moments.pooled.values[:, moments.blocks > 0]
    return measure(Sums(moments.layout, blocks.sum(dim=1, keepdim=True) - blocks))


def neuron_replicates(function: Callable[[Sums], Tensor], moments: Moments) -> Float64[Tensor, "*shape group"]:
    """A function of the neurons' sums without each group of jackknife blocks that holds tokens.

    The sums are those of ``layout.by_neuron_and_group``; 0 for a neuron all of whose tokens are in the omitted group.
    """
    tokens = moments.blocks.reshape(N_JACKKNIFE_GROUPS, N_JACKKNIFE_BLOCKS // N_JACKKNIFE_GROUPS).sum(dim=1)
    total = moments.layout.narrow(moments.neuron.values)
    groups = (group for group, n in zip(moments.neuron_groups, tokens, strict=True) if n > 0)
    return torch.stack([function(_without(group, total, moments)) for group in groups], dim=-1)


def _without(group: Float32[Tensor, "kept d_mlp"], total: Float64[Tensor, "kept d_mlp"], moments: Moments) -> Sums:
    """The sums without a group; 0 for a neuron of which only rounding errors of the single-precision group sums remain."""
    rest = Sums(moments.layout.by_neuron_and_group, total - group.double())
    has_tokens = rest["weight"] > NOTHING_LEFT * moments.neuron["weight"]
    return Sums(rest.layout, rest.values * has_tokens)


def neuron_error(measure: Measure, moments: Moments) -> Float64[Tensor, " d_mlp"]:
    """The standard error of a measure of every neuron."""
    return jackknife(measure_replicates(measure, moments))


def measure_replicates(measure: Measure, moments: Moments) -> Float64[Tensor, "d_mlp group"]:
    """A measure of every neuron without each group of jackknife blocks."""
    return neuron_replicates(measure, moments)


def group_pooled_replicates(
    measure: Measure, weight: Float64[Tensor, " d_mlp"], moments: Moments
) -> Float64[Tensor, " group"]:
    """A pooled measure without each group of jackknife blocks, where there are no replicates by block to compare with."""
    return neuron_replicates(lambda sums: measure(sums.pool(weight))[0], moments)


def bilinear_share_replicates(weight: Float64[Tensor, " d_mlp"], moments: Moments) -> Float64[Tensor, " group"]:
    """A layer's bilinear share, which needs every neuron's sums, without each group of jackknife blocks."""
    return neuron_replicates(lambda sums: torch.tensor(layer_bilinear_share(sums, weight), dtype=torch.float64), moments)


def quantile_error(measure: str, q: float, tokens: TokenHistograms, blocks: Int64[Tensor, " block"]) -> float:
    """The standard error of a quantile over tokens of one of their measures, given the tokens in each jackknife block."""
    counts = tokens.ratio_blocks[tokens.measures.index(measure)][blocks > 0]
    without = counts.sum(dim=0) - counts
    replicates = [histogram_quantile(histogram, q) for histogram in without]
    return float(jackknife(torch.tensor(replicates, dtype=torch.float64)))


def gate_positive_error(moments: Moments) -> float:
    """The standard error of the share of (token, neuron) pairs with a > 0."""
    return float(jackknife(gate_positive_replicates(moments)))


def gate_positive_replicates(moments: Moments) -> Float64[Tensor, " block"]:
    """That share without each of the filled jackknife blocks."""
    signs = moments.signs[:, moments.blocks > 0]
    without = signs.sum(dim=1, keepdim=True) - signs
    return without[:2].sum(dim=0) / without.sum(dim=0)
