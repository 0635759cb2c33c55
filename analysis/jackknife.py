"""Standard errors by leaving out one block of sequences at a time.

Tokens of one sequence depend on each other, so the unit that is resampled is a block of consecutive sequences. With K
blocks that hold tokens and R_(k) the measure without block k,

    SE² = (K − 1)/K · Σ_k (R_(k) − R̄)²,   R̄ the mean of the R_(k)

(delete-one jackknife: Efron & Stein 1981, Ann. Statist. 9, 586). It is right for ratios of sums to first order. It does not
know of tokens that the corpus does not hold: the error is about this kind of text.
"""

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures import Measure
from analysis.sums import QUADRANTS, Sums


def filled_blocks(pooled: Sums) -> int:
    """How many blocks hold at least one counted token."""
    return int((_tokens(pooled) > 0).sum())


def standard_error(measure: Measure, pooled: Sums) -> Float64[Tensor, "*row"]:
    """The jackknife standard error of a pooled measure; NaN with fewer than two filled blocks."""
    blocks = pooled.values[:, _tokens(pooled) > 0]
    n_blocks = blocks.shape[1]
    left_out = Sums(pooled.layout, blocks.sum(dim=1, keepdim=True) - blocks)
    replicates = measure(left_out)
    if n_blocks < 2:
        return torch.full(replicates.shape[:-1], torch.nan, dtype=torch.float64)
    spread = (replicates - replicates.mean(dim=-1, keepdim=True)).square().sum(dim=-1)
    return ((n_blocks - 1) / n_blocks * spread).sqrt()


def _tokens(pooled: Sums) -> Float64[Tensor, " block"]:
    return torch.stack([pooled[f"count_{quadrant}"] for quadrant in QUADRANTS]).sum(dim=0)
