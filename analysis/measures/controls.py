"""Controls: what must be zero, and what must not, measured on each layer's own weights and data.

The symmetries that remain in every gated MLP with a linear up, k → βk with v → v/β and any order of the neurons, must leave
its output as it is. Exchange on σ = SiLU must not: a measurement that finds no break there would find none anywhere. For it
each neuron's a is taken with another neuron's b, because a layer whose own q and k are equal is truly unchanged by
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
"""Largest relative change of the output that is rounding."""
BREAKS = 1e-6
"""Smallest exchange asymmetry that is none."""


def measure_controls(mlp: GatedMLP, x: Float[Tensor, "token d_model"], seed: int = 0) -> list[Check]:
    """Each control with its value and its limit, below which it must stay or above which it must rise.

    A layer without any output has none.

    Args:
        mlp: a layer, in float32 or float64.
        x: inputs of that layer.
        seed: of the permutation.
    """
    if not bool(mlp(x).any()):
        return []  # a layer that gives nothing cannot be changed
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
