"""Conversions between forms: with the same outputs where possible, otherwise with the error reported.

    absorbed_biases       a gated MLP with biases = one without, on x extended by a constant 1 (introduced here)
    static_query          σ(x Kᵀ)V = rank-1 bilinear attention on the extended x, with a query that reads the 1
    full_rank, truncated  rank r ↔ bilinear attention; to full rank exact, to rank r by singular value decomposition
    one_rank, low_rank    rank 1 ↔ rank r with r = 1
    symmetric_sibling     σ(a)·b → σ(ab): another function, the symmetric ancestor with the same q, k, v
    bilinear_sibling      σ(a)·b → c_j·ab: another function, with given or fitted c_j

With a linear σ the gated MLP, its symmetric sibling and its bilinear sibling are one function (Breslow 2026).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.memory import require_memory
from analysis.theory.actions import Exchange
from analysis.theory.forms import (
    BilinearAttention,
    KeyValueMemory,
    LowRankBilinearAttention,
    Rank1BilinearAttention,
    Rows,
)
from analysis.theory.gated import GatedMLP, LowRankGated
from analysis.units.activations import activation_named
from analysis.units.registry import GatedUnit


def extended(x: Float[Tensor, "batch d_model"], constant: float = 1.0) -> Float[Tensor, "batch _"]:
    """x with one more coordinate, a constant, in every row."""
    return torch.nn.functional.pad(x, (0, 1), value=constant)


def full_rank(form: LowRankBilinearAttention) -> BilinearAttention:
    """The same function with square matrices: Q_j K_jᵀ as the query matrix, the identity as the key matrix."""
    d_mlp, d_model, _ = form.q.shape
    require_memory(BilinearAttention.count(d_model, d_mlp), form.q.dtype, f"full rank of d_model {d_model}, d_mlp {d_mlp}")
    identity = torch.eye(d_model, dtype=form.k.dtype, device=form.k.device).expand(d_mlp, d_model, d_model)
    return BilinearAttention(form.activation, form.q @ form.k.mT, identity, form.v)


def truncated(form: LowRankBilinearAttention, rank: int) -> tuple[LowRankBilinearAttention, float]:
    """The nearest form of that rank, and the error of its matrices: sqrt(Σ_j‖M′_j − M_j‖² / Σ_j‖M_j‖²), M_j = Q_j K_jᵀ.

    Exact up to rounding if no M_j has a higher rank. The function depends only on the symmetric parts of the matrices, so
    its own error may differ.
    """
    d_model = form.v.shape[1]
    if not 1 <= rank <= d_model:
        raise ValueError(f"rank {rank} is out of range: matrices of d_model {d_model} have ranks 1-{d_model}")
    left, values, right = torch.linalg.svd(form.q @ form.k.mT)
    factor = values[:, None, :rank].sqrt()
    shorter = LowRankBilinearAttention(form.activation, left[..., :rank] * factor, right.mT[..., :rank] * factor, form.v)
    return shorter, float((values[:, rank:].square().sum() / values.square().sum()).sqrt())


def low_rank(form: Rank1BilinearAttention) -> LowRankBilinearAttention:
    """The same function as a form of rank r = 1."""
    return LowRankBilinearAttention(form.activation, form.q[..., None], form.k[..., None], form.v)


def one_rank(form: LowRankBilinearAttention) -> Rank1BilinearAttention:
    """The same function as a rank-1 form; ValueError if r is not 1."""
    if form.rank != 1:
        raise ValueError(f"the form has rank {form.rank}: truncate it to rank 1 first")
    return Rank1BilinearAttention(form.activation, form.q[..., 0], form.k[..., 0], form.v)


def low_rank_gated(form: GatedMLP) -> LowRankGated:
    """The same function as a gated form of rank r = 1."""
    _require_no_biases(form)
    return LowRankGated(form.unit, form.q[..., None], form.k[..., None], form.v)


def static_query(form: KeyValueMemory) -> Rank1BilinearAttention:
    """The same function of ``extended(x)``: every query is the unit vector along the constant coordinate.

    The output has one more coordinate, which is 0.
    """
    queries = extended(torch.zeros_like(form.k))
    return Rank1BilinearAttention(form.activation, queries, extended(form.k, 0.0), extended(form.v, 0.0))


def absorbed_biases(form: GatedMLP) -> GatedMLP:
    """The same function of ``extended(x)`` without biases; the output has one more coordinate, which is 0.

    The biases of a and b become the weights of queries and keys on the constant. The output's bias becomes the value of an
    additional neuron with a = b = 1 everywhere; its symmetric sibling has the same constant output. ValueError for a unit
    that couples the neurons, because an additional neuron would change the others.
    """
    if not form.unit.is_pointwise:
        raise ValueError(f"unit {form.unit.name} has a cutoff over all neurons: no neuron can be added for the bias")
    d_mlp, d_model = form.v.shape
    bias = {
        name: form.v.new_zeros(size) if getattr(form, name) is None else getattr(form, name)
        for name, size in (("q_bias", d_mlp), ("k_bias", d_mlp), ("v_bias", d_model))
    }
    one, constant = form.v.new_ones(()), form.v.new_zeros(1, d_model + 1)
    constant[0, -1] = 1
    value = (bias["v_bias"] / form.unit(one, one))[None]
    q, k = (torch.cat([weight, bias[name][:, None]], 1) for weight, name in ((form.q, "q_bias"), (form.k, "k_bias")))
    v = extended(torch.cat([form.v, value]), 0.0)
    return GatedMLP(form.unit, torch.cat([q, constant]), torch.cat([k, constant]), v)


def symmetric_sibling(form: GatedMLP) -> Rank1BilinearAttention:
    """σ(ab) in place of σ(a)·b, with the same q, k, v."""
    _require_no_biases(form)
    if not isinstance(form.unit, GatedUnit):
        raise ValueError(f"unit {form.unit.name} is not σ(a)·b: it has no σ to move outside the product")
    return Rank1BilinearAttention(form.unit.activation, form.q, form.k, form.v)


def bilinear_sibling(form: GatedMLP, coefficients: Float[Tensor, " d_mlp"]) -> Rank1BilinearAttention:
    """c_j·ab in place of g(a, b); the c_j are multiplied into the values."""
    _require_no_biases(form)
    return Rank1BilinearAttention(activation_named("linear"), form.q, form.k, coefficients[:, None] * form.v)


def fitted_coefficients(form: GatedMLP, x: Rows) -> Float[Tensor, " d_mlp"]:
    """c_j = Σ h·ab / Σ (ab)² over x: the least-squares c of each neuron; NaN where ab is always 0."""
    a, b = form.pre_activations(x)
    return (form.unit(a, b) * a * b).sum(dim=0) / (a * b).square().sum(dim=0)


def exchanged_twin(form: GatedMLP) -> GatedMLP:
    """g(b, a) in place of g(a, b)."""
    return Exchange()(form)


def _require_no_biases(form: GatedMLP) -> None:
    if form.has_biases:
        raise ValueError("the gated MLP has biases: use absorbed_biases(form) and extended(x)")
