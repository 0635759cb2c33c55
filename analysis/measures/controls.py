"""Controls: what must be zero, and what must not be, measured on each layer's own weights and data.

The symmetries that remain in every gated MLP with a linear up, k → βk with v → v/β and any permutation of the neurons, must
leave its output unchanged. Exchange with σ = SiLU must not: a measurement that does not detect this break would not detect
any. For this control each neuron's a is combined with another neuron's b, because a layer with q = k is unchanged by
exchange.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.checks import Check
from analysis.measures.asymmetry import asymmetry
from analysis.theory.actions import Action, Permutation, ValueRescaling, residual
from analysis.theory.gated import GatedMLP
from analysis.units.activations import activation_named
from analysis.units.registry import GatedUnit
from analysis.weights.geometry import derangements

FACTORS = (3.0, -1.0)
HOLDS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest relative change of the output that rounding may cause."""
BREAKS = 1e-6
"""Exchange asymmetry that must be exceeded."""


def measure_controls(mlp: GatedMLP, x: Float[Tensor, "token d_model"], seed: int = 0) -> list[Check]:
    """Each control with its value and its limit, which it must not exceed, or must exceed; none for a layer without output.

    Args:
        mlp: a layer, in float32 or float64.
        x: inputs of that layer.
        seed: of the permutation.
    """
    if not bool(mlp(x).any()):
        return []  # an output of 0 has no relative change
    limit, order = HOLDS[x.dtype], torch.randperm(len(mlp.v), generator=torch.Generator().manual_seed(seed))
    actions: dict[str, Action] = {}
    if mlp.unit.up_is_linear:
        actions = {f"k → {beta:g}k, v → v/{beta:g}": ValueRescaling(x.new_tensor([beta])) for beta in FACTORS}
    actions["a random order of the neurons"] = Permutation(order)
    found = [Check(name, residual(mlp, action, x), limit) for name, action in actions.items()]
    return [*found, Check("exchange of SiLU(a)·b, re-paired", _exchange(mlp, x, seed), BREAKS, "more than")]


def _exchange(mlp: GatedMLP, x: Float[Tensor, "token d_model"], seed: int) -> float:
    a, b = mlp.pre_activations(x)
    unit, b = GatedUnit(activation_named("silu")), b[:, derangements(b.shape[1], 1, seed)[0].to(b.device)]
    weight = mlp.v.square().sum(dim=1)
    before, after = unit(a, b), unit.exchanged(a, b)
    energies = [(h.square().sum(dim=0) @ weight)[None].double() for h in (before - after, before, after)]
    return float(asymmetry(*energies))
