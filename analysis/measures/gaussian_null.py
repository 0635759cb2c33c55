"""The Gaussian null: the asymmetries of jointly normal pre-activations.

If (a, b) were jointly normal with a neuron's own means and covariance, the asymmetry of two versions h, h′ would be

    A = E(h − h′)² / (2 (E h² + E h′²))

with expectations over that distribution. Every version is a function of a times a function of b, and for standard normal
x, y with correlation ρ and orthonormal Hermite polynomials η_k

    E[f(x) f′(y)] = Σ_k ρ^k E[f η_k] E[f′ η_k]        (Mehler 1866)

so that only integrals over one variable remain. They are computed by quadrature, without sampling noise and for any g. A
difference from this null is due to the shape of the distribution beyond its first two moments. (The permutation null makes
no such assumption and is summed during the forward pass: see ``analysis.measures.asymmetry``.)

A unit that couples the neurons of a layer has no such null, because the distribution of one neuron's (a, b) does not
determine its h. Its nulls are NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.sums.layout import Sums, scaling_name
from analysis.units.registry import Unit

NODES = 64
"""Nodes and polynomials for exchange: the error of a null is under 1 % even where a is 40 times wider than the gate."""
PER_NODE, REACH = 6, 8.0
"""Points of the grid for scaling per node, and its extent to each side in standard deviations."""
FINER = 4
"""Factor by which the grid is finer where up is not linear, and a factor may jump in a limit of scaling."""

Neurons = Float64[Tensor, " d_mlp"]


@dataclass(frozen=True)
class GaussianFit:
    """Means, standard deviations (population) and correlation of a and b of each neuron; NaN without tokens.

    In a mixture of experts a token counts with the square of its routing weight, as in the energies. std_b may be negative
    for b = mean_b + std_b·y, where y has the correlation corr_ab with x, and a = mean_a + std_a·x.
    """

    mean_a: Neurons
    mean_b: Neurons
    std_a: Neurons
    std_b: Neurons
    corr_ab: Neurons

    @classmethod
    def of(cls, sums: Sums) -> "GaussianFit":
        """From first and second moments; the correlation is NaN where a or b is constant."""
        weight = sums["weight"]
        mean_a, mean_b = sums["a"] / weight, sums["b"] / weight
        variance_a, variance_b = _variance(sums["aa"] / weight, mean_a), _variance(sums["bb"] / weight, mean_b)
        covariance = sums["ab"] / weight - mean_a * mean_b
        scale = (variance_a * variance_b).sqrt()
        correlation = torch.where(scale > 0, covariance / scale, torch.nan).clamp(-1, 1)
        return cls(mean_a, mean_b, variance_a.sqrt(), variance_b.sqrt(), correlation)


@dataclass(frozen=True)
class Parts:
    """E(h − h′)² and 2(E h² + E h′²), each [d_mlp]: numerator and denominator of an asymmetry, which pool as sums."""

    gap: Neurons
    scale: Neurons

    def summed(self, weight: Neurons) -> "Parts":
        """Both as sums over tokens, which pool as energies do, given Σ r² of each neuron; 0 for one without tokens."""
        return Parts(*(torch.where(weight > 0, weight * part, 0.0) for part in (self.gap, self.scale)))

    @property
    def by_neuron(self) -> Neurons:
        return self.gap / self.scale

    def pooled(self, weight: Neurons) -> float:
        return float(self.gap @ weight / (self.scale @ weight))


def gaussian_nulls(
    fit: GaussianFit, unit: Unit, balance: Neurons, alphas: Sequence[float], nodes: int = NODES
) -> dict[str, Parts]:
    """The Gaussian null of ``exchange``, ``exchange_balanced``, and of scaling at every α, by ``scaling_name(alpha)``."""
    if not unit.is_pointwise:
        nothing = Parts(*[torch.full_like(fit.mean_a, torch.nan)] * 2)
        return dict.fromkeys(("exchange", "exchange_balanced", *map(scaling_name, alphas)), nothing)
    points, transform = _hermite(nodes)
    mehler, a, b = _Mehler(transform, fit.corr_ab), fit.mean_a + fit.std_a * points, fit.mean_b + fit.std_b * points

    def exchange(key: Tensor) -> Parts:
        return mehler.compare((unit.gate(a), unit.up(a)), (unit.up(key), unit.gate(key)))

    balanced = exchange(balance * b)
    nulls = {
        "exchange": exchange(b),
        "exchange_balanced": Parts(balanced.gap / balance.square(), balanced.scale / balance.square()),
    }
    scaling = _scaling_nulls if unit.up_is_linear else _bounded_scaling_nulls
    return nulls | scaling(fit, unit, alphas, nodes)


@dataclass(frozen=True)
class _Mehler:
    """Sums over Hermite degrees: values at points, [point, d_mlp], become expectations."""

    transform: Float64[Tensor, "degree point"]
    correlation: Neurons

    def mean(self, of_a: Tensor, of_b: Tensor) -> Neurons:
        """E[f(a) f′(b)] from both factors at the points."""
        degrees = torch.arange(len(self.transform), dtype=torch.float64)[:, None]
        powers = self.correlation.nan_to_num(nan=0.0) ** degrees
        return ((self.transform @ of_a) * (self.transform @ of_b) * powers).sum(dim=0)

    def compare(self, gates: tuple[Tensor, Tensor], ups: tuple[Tensor, Tensor]) -> Parts:
        """The parts for h = gates[0](a)·ups[0](b) and h′ = gates[1](a)·ups[1](b)."""
        before, after = (self.mean(gate.square(), up.square()) for gate, up in zip(gates, ups, strict=True))
        gap = before + after - 2 * self.mean(gates[0] * gates[1], ups[0] * ups[1])
        return Parts(gap.clamp(min=0), 2 * (before + after))


def _bounded_scaling_nulls(fit: GaussianFit, unit: Unit, alphas: Sequence[float], nodes: int) -> dict[str, Parts]:
    """Scaling where up is not linear: as exchange, but with the integrals on an evenly spaced grid."""
    points, transform = _even(nodes, FINER * PER_NODE * nodes)
    mehler, a, b = _Mehler(transform, fit.corr_ab), fit.mean_a + fit.std_a * points, fit.mean_b + fit.std_b * points
    nulls = {}
    for alpha in alphas:
        gates, ups = (unit.gate(a), unit.scaled_gate(a, alpha)), (unit.up(b), unit.scaled_up(b, alpha))
        nulls[scaling_name(alpha)] = mehler.compare(gates, ups)
    return nulls


def _scaling_nulls(fit: GaussianFit, unit: Unit, alphas: Sequence[float], nodes: int) -> dict[str, Parts]:
    """Scaling where up(b) = b: given a, b² has the mean (m + ρsx)² + s²(1 − ρ²), and one integral over x remains.

    It is computed on an evenly spaced grid, which resolves a gate that is narrow compared with a, as few Hermite nodes do
    not.
    """
    x = torch.linspace(-REACH, REACH, PER_NODE * nodes, dtype=torch.float64)[:, None]
    density = torch.exp(-x.square() / 2)
    correlation = fit.corr_ab.nan_to_num(nan=0.0)
    square_of_b = (fit.mean_b + correlation * fit.std_b * x).square() + fit.std_b.square() * (1 - correlation.square())
    weight, a = density / density.sum() * square_of_b, fit.mean_a + fit.std_a * x
    gate, nulls = unit.gate(a), {}
    for alpha in alphas:
        scaled = unit.scaled_gate(a, alpha)
        gap = (weight * (gate - scaled).square()).sum(dim=0)
        scale = 2 * (weight * (gate.square() + scaled.square())).sum(dim=0)
        nulls[scaling_name(alpha)] = Parts(gap, scale)
    return nulls


@cache
def _hermite(nodes: int) -> tuple[Float64[Tensor, "node 1"], Float64[Tensor, "degree node"]]:
    """Nodes of the quadrature, and the matrix that maps values at the nodes to E[f η_k], k below the number of nodes."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    root_weight = np.sqrt(weights / weights.sum())
    rows = [root_weight, points * root_weight]  # η_k √w: the square roots of the weights keep every number in range
    for k in range(1, nodes - 1):
        rows.append((points * rows[k] - np.sqrt(k) * rows[k - 1]) / np.sqrt(k + 1))
    return torch.from_numpy(points)[:, None], torch.from_numpy(np.array(rows) * root_weight)


@cache
def _even(degrees: int, count: int) -> tuple[Float64[Tensor, "point 1"], Float64[Tensor, "degree point"]]:
    """The same on an evenly spaced grid, which resolves kinks and jumps better than few nodes."""
    x = torch.linspace(-REACH, REACH, count, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    rows = [torch.ones_like(x), x]
    for k in range(1, degrees - 1):
        rows.append((x * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    return x[:, None], torch.stack(rows) * (density / density.sum())


def _variance(square: Neurons, mean: Neurons) -> Neurons:
    """E[x²] − E[x]², and 0 where that is no larger than the rounding error of its terms."""
    variance = square - mean.square()
    return torch.where(variance > 1e-13 * square, variance, 0.0)
