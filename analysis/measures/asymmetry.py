"""The measures: how far a gated unit is from each symmetry, computed from its sums.

Each function maps a table of sums to one number per column. Given the sums of every neuron it returns one number per
neuron; given the pooled sums, the layer's number, a ratio of sums and never a mean of ratios; given the leave-one-block-out
sums, the jackknife replicates. The functions make no difference between these tables.

The asymmetry of two versions f, f′ of one quantity is

    A = E‖f − f′‖² / (2 (E‖f‖² + E‖f′‖²))                        in [0, 1]

For an involution, exchange or sign flip, it is the share of the energy that is antisymmetric: 0 invariant, 1/2 where
E[f·f′] = 0, 1 odd. A SiLU, GELU or ReLU neuron has h·h′ ≥ 0 on every token, so 1/2 is its ceiling. The relative change is
sqrt(E‖f′ − f‖² / E‖f‖²).

What they do not show: how much the model's loss depends on it. A large asymmetry is a statement about activations only.
A neuron without energy has no asymmetry: its numbers are NaN, never 0.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float64
from torch import Tensor

from analysis.sums.layout import MAIN_SCALES, QUADRANTS, Sums

Values = Float64[Tensor, "*row column"]
Broadcast = Float64[Tensor, "*#shape"]
Measure = Callable[[Sums], Values]


def asymmetry(gap: Broadcast, energy: Broadcast, changed_energy: Broadcast) -> Float64[Tensor, "*shape"]:
    """Σ(f − f′)² / (2 (Σf² + Σf′²)); NaN where there is no energy at all."""
    return gap / (2 * (energy + changed_energy))


def _relative(gap: Broadcast, energy: Broadcast) -> Float64[Tensor, "*shape"]:
    """sqrt(Σ(f′ − f)² / Σf²); NaN where f has no energy."""
    return torch.where(energy > 0, gap / energy, torch.nan).sqrt()


def exchange(sums: Sums) -> Values:
    """Asymmetry of h under a ↔ b; for g = σ(a)·b the difference is ab(φ(a) − φ(b)) with φ(z) = σ(z)/z."""
    return asymmetry(sums["exchange_gap"], sums["hh"], sums["exchange"])


def exchange_balanced(sums: Sums) -> Values:
    """Exchange asymmetry in the balanced gauge.

    A gated MLP does not change when k → βk and v → v/β, for any β, but σ(a)·b and its exchanged form σ(b)·a do not scale
    alike: the plain exchange asymmetry depends on β, which does not affect the model's output. Here k is first rescaled to
    the length of q, with the sign that makes cos(q, k) ≥ 0, so the number is the same for every β.
    """
    return asymmetry(sums["balanced_exchange_gap"], sums["balanced_hh"], sums["balanced_exchange"])


def exchange_relative_change(sums: Sums) -> Values:
    """sqrt(Σ(h′ − h)² / Σh²) under exchange; may exceed 1."""
    return _relative(sums["exchange_gap"], sums["hh"])


def exchange_null_repaired(sums: Sums) -> Values:
    """Exchange asymmetry under the permutation null: each neuron's a with another neuron's b, draws summed in the ratio."""
    return asymmetry(*(sums[name].sum(dim=0) for name in ("repaired_exchange_gap", "repaired_hh", "repaired_exchange")))


def exchange_balanced_null_repaired(sums: Sums) -> Values:
    """The same in the balanced gauge of each pair: the partner's key is rescaled to the length and sign of the query.

    Energies are weighted as if the partner's key had the length of the neuron's own, so that the null is the same in every
    gauge.
    """
    names = ("repaired_balanced_exchange_gap", "repaired_balanced_hh", "repaired_balanced_exchange")
    return asymmetry(*(sums[name].sum(dim=0) for name in names))


def exchange_of_draws(sums: Sums) -> Float64[Tensor, "draw column"]:
    """Exchange asymmetry for each random permutation."""
    return asymmetry(sums["repaired_exchange_gap"], sums["repaired_hh"], sums["repaired_exchange"])


def exchange_balanced_of_draws(sums: Sums) -> Float64[Tensor, "draw column"]:
    """Balanced exchange asymmetry for each random permutation."""
    return asymmetry(
        sums["repaired_balanced_exchange_gap"], sums["repaired_balanced_hh"], sums["repaired_balanced_exchange"]
    )


def scaling(sums: Sums) -> Float64[Tensor, "alpha column"]:
    """Asymmetry of h under (a, b) → (αa, b/α), one row per α."""
    return asymmetry(sums["scaling_gap"], sums["hh"], sums["scaling"])


def scaling_relative_change(sums: Sums) -> Float64[Tensor, "alpha column"]:
    """sqrt(Σ(h_α − h)² / Σh²), one row per α."""
    return _relative(sums["scaling_gap"], sums["hh"])


def scaling_null_repaired(sums: Sums) -> Float64[Tensor, "alpha column"]:
    """Scaling asymmetry under the permutation null, one row per α: each neuron's a with every other neuron's b.

    All pairs are summed instead of drawing some, with every key rescaled to the length of the neuron's own, so that the
    number is the same in every gauge.
    """
    before, after = sums["mixed_hh"], sums["mixed_scaling"]
    gap = (before + after - 2 * sums["mixed_product"]).clamp(min=0)  # rounding may make the difference negative
    return asymmetry(gap, before, after)


def at_scale(curve: Measure, alpha: float) -> Measure:
    """One row of a measure that has one per α; NaN if the run did not include that scale."""

    def measure(sums: Sums) -> Values:
        if alpha not in sums.layout.alphas:
            return torch.full_like(sums["hh"], torch.nan)
        return curve(sums)[sums.layout.alphas.index(alpha)]

    return measure


def euler_residual(sums: Sums) -> Values:
    """sqrt(Σ(a ∂g/∂a − b ∂g/∂b)² / Σh²): the break of infinitesimal scaling; 0 where σ is homogeneous of degree 1."""
    return _relative(sums["euler"], sums["hh"])


def bilinear_coefficient(sums: Sums) -> Values:
    """The c of the least-squares approximation c·ab of h."""
    return sums["h_ab"] / sums["abab"]


def bilinear_energy(sums: Sums) -> Values:
    """The energy of h that the best c·ab explains, Σ over tokens; 0 for a neuron whose ab is always 0."""
    return (sums["h_ab"].square() / sums["abab"]).nan_to_num(nan=0.0)


def bilinear_share(sums: Sums) -> Values:
    """(Σ h·ab)² / (Σh² Σ(ab)²): the share of a neuron's energy that c·ab explains, in [0, 1].

    Each neuron has its own c, so a layer's share is pooled energy explained over pooled energy:
    see ``layer_bilinear_share``.
    """
    return sums["h_ab"].square() / (sums["hh"] * sums["abab"])


def layer_bilinear_share(neurons: Sums, value_weight: Float64[Tensor, " d_mlp"]) -> float:
    """Σ_j w_j (energy of neuron j explained by its own c_j·ab) / Σ_j w_j Σ h_j²."""
    return float(bilinear_energy(neurons) @ value_weight / (neurons["hh"] @ value_weight))


def placement(sums: Sums) -> Values:
    """Asymmetry of σ(a)·b and σ(ab): the distance to the symmetric form with the nonlinearity outside."""
    return asymmetry(sums["placement_gap"], sums["hh"], sums["placement"])


def placement_balanced(sums: Sums) -> Values:
    """Placement in the balanced gauge: see ``exchange_balanced``."""
    return asymmetry(sums["balanced_placement_gap"], sums["balanced_hh"], sums["balanced_placement"])


def quadrant_tokens(sums: Sums) -> Float64[Tensor, "quadrant column"]:
    """Share of tokens in each sign pair of (a, b), in the order of ``QUADRANTS``."""
    counts = torch.stack([sums[f"count_{quadrant}"] for quadrant in QUADRANTS])
    return counts / counts.sum(dim=0)


def quadrant_energy(sums: Sums) -> Float64[Tensor, "quadrant column"]:
    """Share of the energy of h in each sign pair of (a, b)."""
    return torch.stack([sums[f"energy_{quadrant}"] for quadrant in QUADRANTS]) / sums["hh"]


def gate_positive(sums: Sums) -> Values:
    """Share of tokens with a > 0. It does not pool as energies do: see ``layer_gate_positive``."""
    return quadrant_tokens(sums)[:2].sum(dim=0)


def tokens_seen(sums: Sums) -> Values:
    """Counted tokens of each neuron: all of them in a dense layer, those routed to its expert in a mixture of experts."""
    return torch.stack([sums[f"count_{quadrant}"] for quadrant in QUADRANTS]).sum(dim=0)


def layer_gate_positive(neurons: Sums) -> float:
    """Share of (token, neuron) pairs with a > 0; in a dense layer the mean over neurons."""
    counts = torch.stack([neurons[f"count_{quadrant}"].sum() for quadrant in QUADRANTS])
    return float(counts[:2].sum() / counts.sum())


LAYER_MEASURES: dict[str, Measure] = {
    "exchange": exchange,
    "exchange_balanced": exchange_balanced,
    "exchange_relative_change": exchange_relative_change,
    **{name: at_scale(scaling, alpha) for name, alpha in MAIN_SCALES.items()},
    "euler_residual": euler_residual,
    "placement": placement,
    "placement_balanced": placement_balanced,
}
"""Measures that pool as one ratio of sums, so that they have a jackknife error."""

REPAIRED_NULLS: dict[str, Measure] = {
    "exchange": exchange_null_repaired,
    "exchange_balanced": exchange_balanced_null_repaired,
    **{name: at_scale(scaling_null_repaired, alpha) for name, alpha in MAIN_SCALES.items()},
}
"""The permutation null of each measure that has one; the columns are called ``…_null_repaired``."""


def excess_over_repaired(name: str) -> Measure:
    """A measure of ``REPAIRED_NULLS`` minus its null."""
    return lambda sums: LAYER_MEASURES[name](sums) - REPAIRED_NULLS[name](sums)
