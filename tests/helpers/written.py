"""Independent twin of the numbers of what a layer writes: loops over tokens and floats, written from the formulas.

Symbols: y[t] is the vector that a layer adds to the residual stream on token t, e[t] the same with its units edited;
blocks[t] is the jackknife block of token t.  Knows nothing of ours.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.helpers.reference import Grid, Vector, dot, jackknife, ratio

Number = Callable[[Grid, Grid], float]


def layer_output(h: Grid, v: Grid, after: Callable[[Vector], Vector] = lambda y: y) -> Grid:
    """What a layer of neurons with the values v writes: sum_j h_j v_j on every token, and then what stands behind it."""
    width = range(len(v[0]))
    return [after([math.fsum(float(row[j]) * float(v[j][i]) for j in range(len(v))) for i in width]) for row in h]


def rms_norm(gain: Vector) -> Callable[[Vector], Vector]:
    """y / sqrt(mean(y^2) + 1e-6) * gain."""
    return lambda y: [g * x / math.sqrt(dot(y, y) / len(y) + 1e-6) for x, g in zip(y, gain)]


def energy(y: Grid) -> float:
    """Sum over tokens of |y|^2."""
    return math.fsum(dot(row, row) for row in y)


def difference(y: Grid, e: Grid) -> Grid:
    """y - e on every token."""
    return [[a - b for a, b in zip(row, other)] for row, other in zip(y, e)]


def mean(y: Grid) -> Vector:
    """The mean over tokens."""
    return [math.fsum(column) / len(y) for column in zip(*y)]


def centred(y: Grid) -> Grid:
    """y without its mean over tokens."""
    middle = mean(y)
    return [[a - m for a, m in zip(row, middle)] for row in y]


def asymmetry(y: Grid, e: Grid) -> float:
    """sum |y - e|^2 / (2 (sum |y|^2 + sum |e|^2))."""
    return ratio(energy(difference(y, e)), 2 * (energy(y) + energy(e)))


def centred_asymmetry(y: Grid, e: Grid) -> float:
    """The same of y and e, each without its mean."""
    return asymmetry(centred(y), centred(e))


def change(y: Grid, e: Grid) -> float:
    """sqrt(sum |e - y|^2 / sum |y|^2)."""
    return math.sqrt(ratio(energy(difference(y, e)), energy(y)))


def mean_share(y: Grid, _: Grid) -> float:
    """n |mean y|^2 / sum |y|^2."""
    return ratio(len(y) * dot(mean(y), mean(y)), energy(y))


def by_token(y: Grid, e: Grid) -> list[float]:
    """Each token's own asymmetry."""
    return [asymmetry([row], [other]) for row, other in zip(y, e)]


def without_top(y: Grid, e: Grid, share: float) -> float:
    """The asymmetry without the given share of tokens, rounded up, those of largest |y|^2."""
    kept = sorted(range(len(y)), key=lambda t: dot(y[t], y[t]))[: len(y) - math.ceil(share * len(y))]
    return asymmetry([y[t] for t in kept], [e[t] for t in kept])


def error(number: Number, y: Grid, e: Grid, blocks: Sequence[int]) -> float:
    """The jackknife error of a number over blocks."""
    return jackknife([without_block(number, y, e, blocks, block) for block in sorted(set(blocks))])


def without_block(number: Number, y: Grid, e: Grid, blocks: Sequence[int], block: int) -> float:
    """A number without the tokens of one block."""
    kept = [t for t in range(len(y)) if blocks[t] != block]
    return number([y[t] for t in kept], [e[t] for t in kept])


def participation_ratio(y: Grid, blocks: Sequence[int]) -> float:
    """(tr C)^2 / tr C^2 of the covariance C of y, tr C^2 from pairs of tokens of different blocks."""
    z = centred(y)
    pairs = [dot(z[s], z[t]) ** 2 for s in range(len(z)) for t in range(len(z)) if blocks[s] != blocks[t]]
    return (energy(z) / len(z)) ** 2 / (math.fsum(pairs) / len(pairs))


def share_in_top_directions(y: Grid, part: Grid, blocks: Sequence[int], n: int) -> float:
    """Share of the centred energy of ``part`` in the n main directions of y, each found on the other half of the blocks."""
    inside = total = 0.0
    for half in (0, 1):
        fitted = np.array(centred([row for row, block in zip(y, blocks) if block % 2 == half]))
        judged = centred([row for row, block in zip(part, blocks) if block % 2 != half])
        directions = np.linalg.svd(fitted, full_matrices=False)[2][:n]
        inside += math.fsum(dot(row, direction) ** 2 for row in judged for direction in directions.tolist())
        total += energy(judged)
    return inside / total
