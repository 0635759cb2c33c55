"""What chance gives: the exchange asymmetry of Gaussian pre-activations.

If (a, b) were jointly normal with a neuron's own means and covariance, the asymmetry would be

    A = E(g(a,b) − g(b,a))² / (2 (E g(a,b)² + E g(b,a)²))

with expectations over that normal law. They are integrals against a Gaussian weight, done by Gauss-Hermite quadrature in
both directions: no sampling noise, any g. What differs from this null is due to the shape of the data beyond its first two
moments. (The other null, re-paired neurons, needs no assumption and is streamed: see ``analysis.measures``.)
"""

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.measures import asymmetry
from analysis.moments import Moments
from analysis.units import Unit

NODES = 64
"""Nodes per direction; smooth gates at the widths seen in real neurons need fewer, a kink (ReLU) converges slowest."""


def first_moments(moments: Moments) -> dict[str, Float64[Tensor, " d_mlp"]]:
    """mean_a, mean_b, std_a, std_b (population) and corr_ab of each neuron; corr is NaN where a or b is constant."""
    n, sums = moments.n_tokens, moments.neuron
    mean_a, mean_b = sums["a"] / n, sums["b"] / n
    variance_a, variance_b = _variance(sums["aa"] / n, mean_a), _variance(sums["bb"] / n, mean_b)
    covariance = sums["ab"] / n - mean_a * mean_b
    scale = (variance_a * variance_b).sqrt()
    correlation = torch.where(scale > 0, covariance / scale, torch.nan).clamp(-1, 1)
    return {
        "mean_a": mean_a,
        "mean_b": mean_b,
        "std_a": variance_a.sqrt(),
        "std_b": variance_b.sqrt(),
        "corr_ab": correlation,
    }


def _variance(square: Float64[Tensor, " d_mlp"], mean: Float64[Tensor, " d_mlp"]) -> Float64[Tensor, " d_mlp"]:
    """E[x²] − E[x]², and 0 where that is no more than the rounding of its terms."""
    variance = square - mean.square()
    return torch.where(variance > 1e-13 * square, variance, 0.0)


def gaussian_exchange(
    moments: Moments, unit: Unit, value_weight: Float64[Tensor, " d_mlp"], nodes: int = NODES
) -> tuple[Float64[Tensor, " d_mlp"], float]:
    """The Gaussian null of exchange for each neuron, and pooled over the layer with the value weights."""
    law = first_moments(moments)
    correlation = law["corr_ab"].nan_to_num(nan=0.0)
    points, weights = (torch.from_numpy(array) for array in np.polynomial.hermite_e.hermegauss(nodes))
    weights = weights / weights.sum()
    gap, energy, swapped_energy = torch.zeros(3, len(correlation), dtype=torch.float64)
    along_b = points[:, None] * (1 - correlation.square()).sqrt()
    for point, weight in zip(points, weights, strict=True):
        a = (law["mean_a"] + law["std_a"] * point).expand(nodes, -1)
        b = law["mean_b"] + law["std_b"] * (correlation * point + along_b)
        h, swapped = unit(a, b), unit.exchanged(a, b)
        gap += weight * (weights @ (h - swapped).square())
        energy += weight * (weights @ h.square())
        swapped_energy += weight * (weights @ swapped.square())
    pooled = (values @ value_weight for values in (gap, energy, swapped_energy))
    return asymmetry(gap, energy, swapped_energy), float(asymmetry(*pooled))
