"""Standard errors by leaving out one block of sequences at a time.

Tokens of one sequence depend on each other, so the unit that is resampled is a block of consecutive sequences. With K
blocks that hold tokens and R_(k) the number without block k,

    SE² = (K − 1)/K · Σ_k (R_(k) − R̄)²,   R̄ the mean of the R_(k)

(delete-one jackknife: Efron & Stein 1981, Ann. Statist. 9, 586). It is right for ratios of sums, and for smooth functions
of sums, to first order; an interval is ± t_{K−1} SE. It does not know of tokens that the corpus does not hold: the error is
about this kind of text.

Layers have ``N_JACKKNIFE_BLOCKS`` blocks; single neurons have ``N_JACKKNIFE_GROUPS`` groups of them.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float32, Float64
from scipy import stats
from torch import Tensor

from analysis.measures.asymmetry import Measure, layer_bilinear_share
from analysis.sums.layout import Sums
from analysis.sums.moments import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS, Moments, histogram_quantile

FEW_JACKKNIFE_BLOCKS = 8
"""With fewer blocks an error is itself very uncertain."""
NOTHING_LEFT = 1e-5
"""Of a neuron's Σ r², what is taken for none without a group of blocks: sums of groups are kept in single precision."""


def filled_jackknife_blocks(moments: Moments) -> int:
    """How many blocks hold at least one counted token."""
    return int((moments.blocks > 0).sum())


def t95(n_blocks: int) -> float:
    """How many standard errors a 95 % interval reaches to each side; NaN with fewer than two blocks."""
    return float(stats.t.ppf(0.975, n_blocks - 1)) if n_blocks > 1 else float("nan")


def jackknife(replicates: Float64[Tensor, "*shape block"]) -> Float64[Tensor, "*shape"]:
    """The standard error from the numbers without each block; NaN with fewer than two blocks."""
    n_blocks = replicates.shape[-1]
    if n_blocks < 2:
        return torch.full(replicates.shape[:-1], torch.nan, dtype=torch.float64)
    spread = (replicates - replicates.mean(dim=-1, keepdim=True)).square().sum(dim=-1)
    return ((n_blocks - 1) / n_blocks * spread).sqrt()


def pooled_error(measure: Measure, moments: Moments) -> Float64[Tensor, "*row"]:
    """The standard error of a pooled measure."""
    return jackknife(pooled_replicates(measure, moments))


def pooled_replicates(measure: Measure, moments: Moments) -> Float64[Tensor, "*row block"]:
    """A pooled measure without each of the filled blocks."""
    blocks = moments.pooled.values[:, moments.blocks > 0]
    return measure(Sums(moments.layout, blocks.sum(dim=1, keepdim=True) - blocks))


def neuron_replicates(function: Callable[[Sums], Tensor], moments: Moments) -> Float64[Tensor, "*shape group"]:
    """A function of the neurons' sums without each group of blocks that holds tokens.

    The sums are those of ``layout.by_neuron_and_group``; 0 for a neuron that saw all its tokens in the group left out.
    """
    tokens = moments.blocks.reshape(N_JACKKNIFE_GROUPS, N_JACKKNIFE_BLOCKS // N_JACKKNIFE_GROUPS).sum(dim=1)
    total = moments.layout.narrow(moments.neuron.values)
    groups = (group for group, n in zip(moments.neuron_groups, tokens, strict=True) if n > 0)
    return torch.stack([function(_without(group, total, moments)) for group in groups], dim=-1)


def _without(group: Float32[Tensor, "kept d_mlp"], total: Float64[Tensor, "kept d_mlp"], moments: Moments) -> Sums:
    """What is left of the sums; rounding of the single precision of groups is not taken for tokens."""
    rest = Sums(moments.layout.by_neuron_and_group, total - group.double())
    some = rest["weight"] > NOTHING_LEFT * moments.neuron["weight"]
    return Sums(rest.layout, rest.values * some)


def neuron_error(measure: Measure, moments: Moments) -> Float64[Tensor, " d_mlp"]:
    """The standard error of a measure of every neuron."""
    return jackknife(measure_replicates(measure, moments))


def measure_replicates(measure: Measure, moments: Moments) -> Float64[Tensor, "d_mlp group"]:
    """A measure of every neuron without each group of blocks."""
    return neuron_replicates(measure, moments)


def group_pooled_replicates(
    measure: Measure, weight: Float64[Tensor, " d_mlp"], moments: Moments
) -> Float64[Tensor, " group"]:
    """A pooled measure without each group of blocks, to be compared with neurons or with what has no finer replicates."""
    return neuron_replicates(lambda sums: measure(sums.pool(weight))[0], moments)


def bilinear_share_replicates(weight: Float64[Tensor, " d_mlp"], moments: Moments) -> Float64[Tensor, " group"]:
    """A layer's bilinear share, which needs the neurons one by one, without each group of blocks."""
    return neuron_replicates(lambda sums: torch.tensor(layer_bilinear_share(sums, weight), dtype=torch.float64), moments)


def quantile_error(token_measure: str, q: float, moments: Moments) -> float:
    """The standard error of a quantile over tokens of one of ``layout.token_measures``."""
    counts = moments.token_ratio_blocks[moments.layout.token_measures.index(token_measure)][moments.blocks > 0]
    without = counts.sum(dim=0) - counts
    replicates = [histogram_quantile(block, q) for block in without]
    return float(jackknife(torch.tensor(replicates, dtype=torch.float64)))


def gate_positive_error(moments: Moments) -> float:
    """The standard error of the share of (token, neuron) pairs with a > 0."""
    return float(jackknife(gate_positive_replicates(moments)))


def gate_positive_replicates(moments: Moments) -> Float64[Tensor, " block"]:
    """That share without each of the filled blocks."""
    signs = moments.signs[:, moments.blocks > 0]
    without = signs.sum(dim=1, keepdim=True) - signs
    return without[:2].sum(dim=0) / without.sum(dim=0)
