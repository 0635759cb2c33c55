"""The gated forms: σ on one factor of the product.

    GatedMLP        (σ(x Qᵀ) ⊙ (x Kᵀ)) V                      (Breslow 2026), here with any unit g and optional biases:
                    a = x Qᵀ + b_q,  b = x Kᵀ + b_k,  y = g(a, b) V + b_v
    LowRankGated    Σ_j (Σ_r σ(⟨x,q_jr⟩)⟨x,k_jr⟩) v_j         a generalization introduced here

A rank-r gated memory is r neurons of a gated MLP that share one value vector. Neurons of real layers approximate it if
their values are nearly parallel: see ``analysis.weights.interactions.value_groups``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from analysis.theory.forms import (
    BilinearAttention,
    Form,
    GlobalQueryMemory,
    KeyValueMemory,
    LowRankBilinearAttention,
    Matrices,
    Rank1BilinearAttention,
    Rows,
    Scores,
    Shapes,
    Vectors,
    projected,
)
from analysis.units.registry import Unit


@dataclass(frozen=True)
class GatedMLP(Form):
    """g(x Qᵀ + b_q, x Kᵀ + b_k) V + b_v; g(a, b) = σ(a)·b and no biases in the paper."""

    equation = "(σ(x Qᵀ) ⊙ (x Kᵀ)) V"
    queries = ("q", "q_bias")
    keys = ("k", "k_bias")
    per_neuron = ("q", "k", "v", "q_bias", "k_bias")

    unit: Unit
    q: Vectors
    k: Vectors
    v: Vectors
    q_bias: Float[Tensor, " d_mlp"] | None = None
    k_bias: Float[Tensor, " d_mlp"] | None = None
    v_bias: Float[Tensor, " d_model"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        d_mlp, d_model = self.v.shape
        for name, size in (("q_bias", d_mlp), ("k_bias", d_mlp), ("v_bias", d_model)):
            bias = getattr(self, name)
            if bias is not None and tuple(bias.shape) != (size,):
                raise ValueError(f"GatedMLP.{name} is {list(bias.shape)}: give it as [{size}]")

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return Rank1BilinearAttention.shapes(d_model, d_mlp, rank)

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 2

    @property
    def has_biases(self) -> bool:
        return any(bias is not None for bias in (self.q_bias, self.k_bias, self.v_bias))

    def to(self, dtype: torch.dtype) -> "GatedMLP":
        """The same weights in another precision."""
        changed: Any = {name: weight.to(dtype) for name, weight in self.weights.items()}
        return replace(self, **changed)

    def pre_activations(self, x: Rows) -> tuple[Scores, Scores]:
        """a and b of every neuron, [batch, d_mlp] each."""
        return linear(x, self.q, self.q_bias), linear(x, self.k, self.k_bias)

    def memories(self, x: Rows) -> Scores:
        return self.unit(*self.pre_activations(x))

    def __call__(self, x: Rows) -> Rows:
        return linear(self.memories(x), self.v.T, self.v_bias)


@dataclass(frozen=True)
class LowRankGated(Form):
    """Σ_j (Σ_r g(⟨x,q_jr⟩, ⟨x,k_jr⟩)) v_j, g(a, b) = σ(a)·b.

    For a unit that couples the neurons of a layer, all d_mlp·rank pairs are its neurons.
    """

    equation = "Σ_j (Σ_r σ(⟨x,q_jr⟩)⟨x,k_jr⟩) v_j"
    has_basis = True

    unit: Unit
    q: Matrices
    k: Matrices
    v: Vectors

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return LowRankBilinearAttention.shapes(d_model, d_mlp, rank)

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 3 * rank - 1

    @property
    def rank(self) -> int:
        return self.q.shape[-1]

    def memories(self, x: Rows) -> Scores:
        a, b = (projected(x, weights) for weights in (self.q, self.k))
        return self.unit(a.flatten(1), b.flatten(1)).view_as(a).sum(dim=-1)


FAMILY: tuple[type[Form], ...] = (
    KeyValueMemory,
    GlobalQueryMemory,
    BilinearAttention,
    LowRankBilinearAttention,
    Rank1BilinearAttention,
    GatedMLP,
    LowRankGated,
)
"""All seven forms, each derived from the one before."""

GATED: tuple[type[Form], ...] = (GatedMLP, LowRankGated)
"""The forms with σ on one factor; they take a unit, the others an activation."""
