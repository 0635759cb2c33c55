"""The symmetries as actions on the weights of a form.

    Exchange           q ↔ k
    Scaling(α)         q → αq, k → k/α
    SignFlip           q → −q, k → −k: the scaling at α = −1
    ValueRescaling(β)  k_j → β_j k_j, v_j → v_j/β_j
    Permutation(π)     the order of the neurons
    ChangeOfBasis(A)   Q_j → Q_j A, K_j → K_j A⁻ᵀ, A any invertible [rank, rank]; r = 1 is the scaling

An action maps a form to a form of the same kind; biases are transformed with the weights they belong to. It is a symmetry
if the output does not change: ``residual`` is the relative change. Exchange and scaling are the symmetries of the rank-1
form (Breslow 2026); which of the others hold on which form, and for which σ, is derived in ``docs/theory.md``.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.theory.forms import Form, Rows

AnyForm = TypeVar("AnyForm", bound=Form)


class Action(ABC):
    """A map of a form to a form of the same kind."""

    @abstractmethod
    def changes(self, form: Form) -> dict[str, Tensor | None]:
        """The weights that the action replaces; ValueError if it is not defined on this form."""

    def __call__(self, form: AnyForm) -> AnyForm:
        changed: Any = self.changes(form)
        return replace(form, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class Exchange(Action):
    """Queries and keys are exchanged."""

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        _require_queries(form, self)
        if "q" not in form.per_neuron:
            raise ValueError(f"{type(form).__name__} has one query for all of its keys: exchange needs one query per key")
        pairs = list(zip(form.queries, form.keys, strict=True))
        return {q: getattr(form, k) for q, k in pairs} | {k: getattr(form, q) for q, k in pairs}


@dataclass(frozen=True)
class Scaling(Action):
    """q → αq, k → k/α."""

    alpha: float

    def __post_init__(self) -> None:
        if self.alpha == 0:
            raise ValueError("scaling by α = 0 has no inverse: give another α")

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        _require_queries(form, self)
        return _times(form, form.queries, self.alpha) | _times(form, form.keys, 1 / self.alpha)


@dataclass(frozen=True)
class SignFlip(Action):
    """q → −q, k → −k."""

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        return Scaling(-1.0).changes(form)


@dataclass(frozen=True)
class ValueRescaling(Action):
    """k_j → β_j k_j, v_j → v_j/β_j, with one β of either sign per neuron, or one for all."""

    beta: Float[Tensor, " #d_mlp"]

    def __post_init__(self) -> None:
        if not bool((self.beta != 0).all()):
            raise ValueError("rescaling by β = 0 has no inverse: give another β")

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        return _times(form, form.keys, self.beta) | _times(form, ("v",), 1 / self.beta)


@dataclass(frozen=True)
class Permutation(Action):
    """The neurons in another order: neuron ``order[j]`` moves to position j."""

    order: Int[Tensor, " d_mlp"]

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        d_mlp = len(form.v)
        if not torch.equal(self.order.sort().values, torch.arange(d_mlp)):
            raise ValueError(f"{self.order.tolist()} is not a permutation of {d_mlp} neurons: give each index once")
        return {name: weight[self.order] for name, weight in form.weights.items() if name in form.per_neuron}


@dataclass(frozen=True)
class ChangeOfBasis(Action):
    """Q_j → Q_j A, K_j → K_j A⁻ᵀ, which does not change Q_j K_jᵀ."""

    a: Float[Tensor, "rank rank"]

    def changes(self, form: Form) -> dict[str, Tensor | None]:
        _require_queries(form, self)
        if not form.has_basis:
            raise ValueError(f"{type(form).__name__} has one direction per query: use Scaling instead")
        size = form.weights["q"].shape[-1]
        if self.a.shape != (size, size):
            raise ValueError(f"A is {list(self.a.shape)}: {type(form).__name__} here needs [{size}, {size}]")
        return {"q": form.weights["q"] @ self.a, "k": form.weights["k"] @ torch.linalg.inv(self.a).T}


def residual(form: Form, action: Action, x: Rows) -> float:
    """‖y′ − y‖ / ‖y‖ over all of x, y′ the output after the action; NaN where y = 0."""
    before, after = form(x), action(form)(x)
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before))


def _require_queries(form: Form, action: Action) -> None:
    if not form.queries:
        raise ValueError(f"{type(form).__name__} has keys only: {type(action).__name__} needs queries")


def _times(form: Form, names: tuple[str, ...], factor: float | Float[Tensor, " #d_mlp"]) -> dict[str, Tensor | None]:
    """The named weights times one number, or times one number per neuron."""
    present = {name: weight for name, weight in form.weights.items() if name in names}
    if isinstance(factor, float):
        return {name: factor * weight for name, weight in present.items()}
    return {name: factor.reshape(-1, *[1] * (weight.ndim - 1)) * weight for name, weight in present.items()}
