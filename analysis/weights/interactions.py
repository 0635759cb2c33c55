"""The interaction tensor of a layer, and groups of neurons that form memories of higher rank. Weights only, no data.

A gated MLP whose gate were linear would compute y = Σ_j ⟨q_j,x⟩⟨k_j,x⟩ v_j, the quadratic map with the interaction tensor

    T = Σ_j v_j ⊗ q_j ⊗ k_j                                                       [d_model, d_model, d_model]

Since both factors take the same x, only the part of T that is symmetric in q ↔ k contributes, as in every symmetric
bilinear layer. The antisymmetric part can affect the output only through a nonlinear gate, and its share of the energy is

    ‖(T − Tˢ)/2‖² / ‖T‖² = (‖T‖² − ⟨T,Tˢ⟩) / (2‖T‖²)             in [0, 1]; Tˢ is T with its last two axes exchanged

By the Gram identity both numbers are sums over pairs of neurons, and T is never computed:

    ‖T‖²    = Σ_ij (v_i·v_j)(q_i·q_j)(k_i·k_j)
    ⟨T,Tˢ⟩  = Σ_ij (v_i·v_j)(q_i·k_j)(k_i·q_j)

0 where every q_j is parallel to its k_j, near 1/2 where q and k are unrelated, at most 1. The share is unchanged by
k → βk, v → v/β. Fold the gain of the norm before the MLP into q and k first. The measure is introduced here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

Vectors = Float[Tensor, "d_mlp d_model"]
ROWS_AT_ONCE = 512
"""Neurons whose products with all others are held in memory at once."""


def antisymmetric_share(q: Vectors, k: Vectors, v: Vectors, rows_at_once: int = ROWS_AT_ONCE) -> float:
    """Share of ‖T‖² that is antisymmetric in q ↔ k; NaN if T = 0. Memory: a few times rows_at_once·d_mlp numbers."""
    return pooled_antisymmetric_share([(q, k, v)], rows_at_once)


def pooled_antisymmetric_share(
    experts: Iterable[tuple[Vectors, Vectors, Vectors]], rows_at_once: int = ROWS_AT_ONCE
) -> float:
    """Σ over experts of the antisymmetric energy of T_e, over Σ ‖T_e‖²; each expert (q, k, v) has a tensor of its own.

    A number of the weights alone: how often tokens are routed to an expert has no influence.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for q, k, v in experts:
        total += torch.stack(_energies(q, k, v, rows_at_once)).cpu()
    whole, swapped = total
    return float((whole - swapped) / (2 * whole))


def _energies(q: Vectors, k: Vectors, v: Vectors, rows_at_once: int) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
    """‖T‖² and ⟨T,Tˢ⟩.

    Products are computed in the precision of the weights (at least float32), because their cost is d_mlp²·d_model; sums in
    float64.
    """
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    whole, swapped = torch.zeros(2, dtype=torch.float64, device=q.device)
    for rows, rest in _upper_rows(len(q), rows_at_once):
        values = v[rows] @ v[rest].T
        whole += _both_triangles(values * (q[rows] @ q[rest].T) * (k[rows] @ k[rest].T))
        swapped += _both_triangles(values * (q[rows] @ k[rest].T) * (k[rows] @ q[rest].T))
    return whole, swapped


def _upper_rows(size: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Some rows, and the columns from the first of them on: every pair i ≤ j once, pairs within these rows twice."""
    for start in range(0, size, rows):
        yield slice(start, start + rows), slice(start, None)


def _both_triangles(pairs: Float[Tensor, "row column"]) -> Float64[Tensor, ""]:
    """The contribution of some rows to the sum over a symmetric table, given their columns from the diagonal on."""
    return 2 * pairs.sum(dtype=torch.float64) - pairs[:, : len(pairs)].sum(dtype=torch.float64)


@dataclass(frozen=True)
class Spectrum:
    """The symmetric quadratic form x ↦ ⟨u, T(x,x)⟩ in its own axes.

    Attributes:
        eigenvalues: the largest first, by absolute value.
        eigenvectors: one row each, of length 1.
        effective_rank: (Σλ²)² / Σλ⁴ over all eigenvalues: 1 if one dominates, n if n are equal; NaN if all are 0.
    """

    eigenvalues: Float64[Tensor, " rank"]
    eigenvectors: Float64[Tensor, "rank d_model"]
    effective_rank: float


def spectrum(q: Vectors, k: Vectors, v: Vectors, u: Float[Tensor, " d_model"], top: int = 8) -> Spectrum:
    """The ``top`` eigenvectors of Σ_j ⟨u,v_j⟩ sym(q_j k_jᵀ), with sym(M) = (M + Mᵀ)/2."""
    q, k, weight = q.double(), k.double(), v.double() @ u.double()
    matrix = q.T @ (weight[:, None] * k)
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    order = values.abs().argsort(descending=True)
    energy = values.square()
    effective = float(energy.sum().square() / energy.square().sum())
    return Spectrum(values[order[:top]], vectors.T[order[:top]], effective)


@dataclass(frozen=True)
class Group:
    """Neurons whose values are nearly parallel: together one memory of rank r.

    Attributes:
        neurons: their indices, ascending.
        rank: of Σ_j ⟨v_1,v_j⟩ q_j k_jᵀ, at most their number.
    """

    neurons: tuple[int, ...]
    rank: int


def value_groups(q: Vectors, k: Vectors, v: Vectors, tau: float, rows_at_once: int = ROWS_AT_ONCE) -> list[Group]:
    """Groups of at least two neurons that are connected by |cos(v_i, v_j)| ≥ τ, the largest first.

    Neurons may be connected through others: the cosine of the ends of a long chain may be below τ.
    """
    if not 0 < tau <= 1:
        raise ValueError(f"τ = {tau:g} is out of range: give a cosine in (0, 1]")
    labels = _components(_near(v.double(), tau, rows_at_once))
    groups = [(labels == label).nonzero()[:, 0] for label in labels.unique().tolist()]
    found = [Group(tuple(group.tolist()), _joint_rank(q, k, v, group)) for group in groups if len(group) > 1]
    return sorted(found, key=lambda group: (-len(group.neurons), group.neurons))


def _near(v: Float64[Tensor, "d_mlp d_model"], tau: float, rows_at_once: int) -> Bool[Tensor, "d_mlp d_mlp"]:
    """Whether |cos(v_i, v_j)| ≥ τ, up to rounding; a zero vector is near itself only."""
    unit = torch.nn.functional.normalize(v, dim=1)
    near = torch.cat([(rows @ unit.T).abs() >= tau - 1e-12 for rows in unit.split(rows_at_once)])
    return near | torch.eye(len(v), dtype=torch.bool, device=v.device)


def _components(near: Bool[Tensor, "d_mlp d_mlp"]) -> Int64[Tensor, " d_mlp"]:
    """The smallest index that every neuron is connected to, found by label propagation."""
    first, second = near.nonzero(as_tuple=True)
    labels = torch.arange(len(near), device=near.device)
    while True:
        passed_on = labels.scatter_reduce(0, first, labels[second], "amin")
        if torch.equal(passed_on, labels):
            return labels
        labels = passed_on


def _joint_rank(q: Vectors, k: Vectors, v: Vectors, group: Int64[Tensor, " neuron"]) -> int:
    """Rank of the group's matrix Σ_j ⟨v_1,v_j⟩ q_j k_jᵀ.

    QᵀDK = (orthogonal) R_q D R_kᵀ (orthogonal)ᵀ, so the rank is that of a square matrix with one row per neuron of the
    group.
    """
    q, k, v = (weight[group].double() for weight in (q, k, v))
    r_q, r_k = (torch.linalg.qr(weight.T, mode="r").R for weight in (q, k))
    return int(torch.linalg.matrix_rank(r_q * (v @ v[0]) @ r_k.T))
