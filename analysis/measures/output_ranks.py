"""In how many directions a layer writes, and where the part that balanced exchange changes lies.

With y_s = (y + y′)/2 and y_a = (y − y′)/2 for y′ under balanced exchange, and C the covariance over tokens of either,

    effective rank   (tr C)² / tr C²          the participation ratio: d for d equal directions
    in the top 10    tr(P C_a) / tr C_a       P the projection on the ten largest eigenvectors of the covariance of y

Both are computed from a sample of tokens. tr C² is a mean of ⟨z, z′⟩² over pairs of tokens from different jackknife blocks:
over all pairs it would contain every token with itself, and a sample of n tokens could not show more than n directions.
What only tokens of one stretch of text share does not count: it is tr C² of the covariance that blocks share. The
ten directions are taken from half of the blocks and judged on the other half, and the halves change roles; found from few
tokens, they hold less than the true ones, which makes the share too low rather than too high. Errors are a
jackknife over blocks, for the second number over eight groups of them.
"""

import math

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from analysis.measures.jackknife import jackknife
from analysis.sums.output_moments import OutputSample
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS, N_JACKKNIFE_GROUPS

TOP_DIRECTIONS = 10
FEWEST_TOKENS = 4 * TOP_DIRECTIONS
"""A half of the blocks needs more tokens than directions."""

Rows = Float64[Tensor, "token d_model"]


def output_ranks(sample: OutputSample | None) -> dict[str, float]:
    """The columns of a layer; NaN without a sample, or with one from too few tokens or blocks."""
    names = ("output_symmetric_rank", "output_antisymmetric_rank", "output_antisymmetric_in_top10")
    missing = {f"{name}{part}": math.nan for name in names for part in ("", "_se")}
    if sample is None or len(sample.keys) < FEWEST_TOKENS or len(sample.blocks.unique()) < 2:
        return missing
    y, edited = sample.outputs.double()
    antisymmetric = (y - edited) / 2
    parts = {names[0]: (y + edited) / 2, names[1]: antisymmetric}
    found: dict[str, float] = {}
    for name, rows in parts.items():
        found[name], found[f"{name}_se"] = participation_ratio(rows, sample.blocks)
    found[names[2]], found[f"{names[2]}_se"] = share_in_top_directions(y, antisymmetric, sample.blocks)
    return found


def participation_ratio(rows: Rows, blocks: Int64[Tensor, " token"]) -> tuple[float, float]:
    """(tr C)² / tr C² of rows, and its standard error; NaN if they do not vary.

    Args:
        rows: one per token.
        blocks: their jackknife blocks, at least two different ones.
    """
    centred = rows - rows.mean(dim=0)
    member = torch.nn.functional.one_hot(blocks, N_JACKKNIFE_BLOCKS).double()
    member = member[:, member.sum(dim=0) > 0]
    count, trace = member.sum(dim=0), member.T @ centred.square().sum(dim=1)
    squares = member.T @ (centred @ centred.T).square() @ member
    pairs = count[:, None] * count
    squares, pairs = (table - table.diag().diag() for table in (squares, pairs))

    def ratio(kept: Float64[Tensor, " block"]) -> float:
        mean_trace = (kept @ trace) / (kept @ count)
        mean_square = (kept @ squares @ kept) / (kept @ pairs @ kept)
        return float(mean_trace.square() / mean_square)

    every = torch.ones_like(count)
    if len(count) < 3:
        return ratio(every), math.nan
    replicates = torch.tensor([ratio(every - row) for row in torch.eye(len(count)).double()], dtype=torch.float64)
    return ratio(every), float(jackknife(replicates))


def share_in_top_directions(y: Rows, part: Rows, blocks: Int64[Tensor, " token"]) -> tuple[float, float]:
    """The share of a part's energy, without its mean, in the ten directions in which y varies most, and its standard error.

    Args:
        y: one row per token.
        part: the part of y in question, likewise.
        blocks: their jackknife blocks.
    """
    half, group = blocks % 2, blocks * N_JACKKNIFE_GROUPS // N_JACKKNIFE_BLOCKS

    def share(kept: Tensor) -> float:
        inside, energy = 0.0, 0.0
        for one in (0, 1):
            mine, other = kept & (half == one), kept & (half != one)
            if int(mine.sum()) < FEWEST_TOKENS // 2 or int(other.sum()) < 2:
                return math.nan
            rows = part[other] - part[other].mean(dim=0)
            inside += float((rows @ _top_directions(y[mine])).square().sum())
            energy += float(rows.square().sum())
        return inside / energy if energy else math.nan

    replicates = [share(group != one) for one in group.unique()]
    return share(torch.ones_like(half, dtype=torch.bool)), float(jackknife(torch.tensor(replicates, dtype=torch.float64)))


def _top_directions(rows: Rows) -> Float64[Tensor, "d_model direction"]:
    """The eigenvectors of the covariance with the largest eigenvalues, from the inner products of the rows."""
    centred = rows - rows.mean(dim=0)
    if len(rows) >= rows.shape[1]:
        return torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -TOP_DIRECTIONS:]
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    directions = centred.T @ vectors[:, -TOP_DIRECTIONS:]
    return directions / values[-TOP_DIRECTIONS:].clamp(min=1e-300).sqrt()
