"""The family of MLPs, from the key-value memory to the gated MLP and its higher ranks.

A row of weights belongs to one memory (neuron) j of d_mlp; x is [batch, d_model], and so is the output.

    KeyValueMemory              σ(x Kᵀ) V                                   the standard MLP, static keys
    GlobalQueryMemory           σ(x Q Kᵀ) V                                 one query matrix for all memories
    BilinearAttention           Σ_j σ(x Q_j K_jᵀ xᵀ) v_j                    a query and a key matrix per memory
    LowRankBilinearAttention    Σ_j σ(Σ_r ⟨x,q_jr⟩⟨x,k_jr⟩) v_j             Q_j, K_j with r columns
    Rank1BilinearAttention      σ((x Qᵀ) ⊙ (x Kᵀ)) V                        r = 1
    GatedMLP                    (σ(x Qᵀ) ⊙ (x Kᵀ)) V                        σ moved onto one factor
    LowRankGated                Σ_j (Σ_r σ(⟨x,q_jr⟩)⟨x,k_jr⟩) v_j           a generalization introduced here

(Breslow 2026, except for the last.) The gated forms take any unit g(a, b) and the gated MLP may have biases, so that it can
be the MLP of a real model; this too is introduced here.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from analysis.memory import require_memory
from analysis.units.activations import Activation
from analysis.units.registry import Unit

Rows = Float[Tensor, "batch d_model"]
Scores = Float[Tensor, "batch d_mlp"]
Vectors = Float[Tensor, "d_mlp d_model"]
Matrices = Float[Tensor, "d_mlp d_model rank"]
Shapes = dict[str, tuple[int, ...]]


class Form(ABC):
    """A map of x [batch, d_model] to Σ_j h_j(x) v_j, given by its weights.

    ``queries``, ``keys`` and ``per_neuron`` name the weights that an action on queries, on keys, or on the order of the
    neurons transforms together; ``v`` holds the values, one row per memory. ``has_basis`` is set if q and k share an axis,
    the last one, in which a basis can be chosen.
    """

    v: Vectors
    equation: ClassVar[str]
    queries: ClassVar[tuple[str, ...]] = ("q",)
    keys: ClassVar[tuple[str, ...]] = ("k",)
    per_neuron: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    has_basis: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        """The shape of every weight except biases; forms of fixed rank ignore ``rank``."""

    @staticmethod
    @abstractmethod
    def pointwise(d_model: int, rank: int) -> int:
        """Operations per memory outside matrix products: σ, pointwise products, sums over rank."""

    @abstractmethod
    def memories(self, x: Rows) -> Scores:
        """h_j(x): the coefficient of each value in the output."""

    @property
    def rank(self) -> int:
        """The number of query-key pairs of a memory."""
        return 1

    def __call__(self, x: Rows) -> Rows:
        return self.memories(x) @ self.v

    def __post_init__(self) -> None:
        if self.v.ndim != 2:
            raise ValueError(f"{type(self).__name__}.v is {list(self.v.shape)}: give it as [d_mlp, d_model]")
        d_mlp, d_model = self.v.shape
        sizes = {"d_model": d_model, "d_mlp": d_mlp, "rank": self.rank}
        if 0 in sizes.values():
            raise ValueError(f"{type(self).__name__} has {_listed(sizes)}: each must be at least 1")
        for name, shape in self.shapes(**sizes).items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(
                    f"{type(self).__name__}.{name} is {list(found)}: give it as {list(shape)} for {_listed(sizes)}"
                )

    @property
    def weights(self) -> dict[str, Tensor]:
        """Every tensor of the form by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def n_parameters(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())

    @property
    def flops(self) -> int:
        """Operations per token: two for every weight of a product, one for every bias and every pointwise step."""
        d_mlp, d_model = self.v.shape
        extra = self.n_parameters - self.count(d_model, d_mlp, self.rank)
        return self.count_flops(d_model, d_mlp, self.rank) + extra

    @classmethod
    def count(cls, d_model: int, d_mlp: int, rank: int = 1) -> int:
        """Parameters of a form of that size, without creating it."""
        return sum(math.prod(shape) for shape in cls.shapes(d_model, d_mlp, rank).values())

    @classmethod
    def count_flops(cls, d_model: int, d_mlp: int, rank: int = 1) -> int:
        """Operations per token of a form of that size, evaluated as its equation is written."""
        return 2 * cls.count(d_model, d_mlp, rank) + d_mlp * cls.pointwise(d_model, rank)

    @classmethod
    def random(
        cls,
        sigma: Activation | Unit,
        d_model: int,
        d_mlp: int,
        rank: int = 1,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> "Form":
        """Gaussian weights with variance 1/d_model; UserError if they do not fit into main memory."""
        require_memory(cls.count(d_model, d_mlp, rank), dtype, f"{cls.__name__} of d_model {d_model}, d_mlp {d_mlp}")
        build: Callable[..., Form] = cls
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=dtype) / math.sqrt(d_model)
            for name, shape in cls.shapes(d_model, d_mlp, rank).items()
        }
        return build(sigma, **drawn)


@dataclass(frozen=True)
class KeyValueMemory(Form):
    """σ(x Kᵀ) V."""

    equation = "σ(x Kᵀ) V"
    queries = ()
    per_neuron = ("k", "v")

    activation: Activation
    k: Vectors
    v: Vectors

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return {"k": (d_mlp, d_model), "v": (d_mlp, d_model)}

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 1

    def memories(self, x: Rows) -> Scores:
        return self.activation(x @ self.k.T)


@dataclass(frozen=True)
class GlobalQueryMemory(Form):
    """σ(x Q Kᵀ) V with one query matrix for all memories: no new expressivity, see ``absorb``."""

    equation = "σ(x Q Kᵀ) V"
    per_neuron = ("k", "v")
    has_basis = True

    activation: Activation
    q: Float[Tensor, "d_model d_model"]
    k: Vectors
    v: Vectors

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return {"q": (d_model, d_model), "k": (d_mlp, d_model), "v": (d_mlp, d_model)}

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 1

    def memories(self, x: Rows) -> Scores:
        return self.activation(x @ self.q @ self.k.T)

    def absorb(self) -> KeyValueMemory:
        """The key-value memory with keys K Qᵀ, the same function."""
        return KeyValueMemory(self.activation, self.k @ self.q.T, self.v)


@dataclass(frozen=True)
class LowRankBilinearAttention(Form):
    """Σ_j σ(Σ_r ⟨x,q_jr⟩⟨x,k_jr⟩) v_j; q_jr is column r of Q_j."""

    equation = "Σ_j σ(Σ_r ⟨x,q_jr⟩⟨x,k_jr⟩) v_j"
    has_basis = True

    activation: Activation
    q: Matrices
    k: Matrices
    v: Vectors

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return {"q": (d_mlp, d_model, rank), "k": (d_mlp, d_model, rank), "v": (d_mlp, d_model)}

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 2 * rank

    @property
    def rank(self) -> int:
        return self.q.shape[-1]

    def memories(self, x: Rows) -> Scores:
        a, b = projected(x, self.q), projected(x, self.k)
        return self.activation((a * b).sum(dim=-1))


@dataclass(frozen=True)
class BilinearAttention(LowRankBilinearAttention):
    """Σ_j σ(x Q_j K_jᵀ xᵀ) v_j with square Q_j, K_j: rank r = d_model, and prohibitively many parameters."""

    equation = "Σ_j σ(x Q_j K_jᵀ xᵀ) v_j"

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return LowRankBilinearAttention.shapes(d_model, d_mlp, d_model)

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return LowRankBilinearAttention.pointwise(d_model, d_model)


@dataclass(frozen=True)
class Rank1BilinearAttention(Form):
    """σ((x Qᵀ) ⊙ (x Kᵀ)) V: the symmetric ancestor of the gated MLP."""

    equation = "σ((x Qᵀ) ⊙ (x Kᵀ)) V"

    activation: Activation
    q: Vectors
    k: Vectors
    v: Vectors

    @staticmethod
    def shapes(d_model: int, d_mlp: int, rank: int) -> Shapes:
        return {"q": (d_mlp, d_model), "k": (d_mlp, d_model), "v": (d_mlp, d_model)}

    @staticmethod
    def pointwise(d_model: int, rank: int) -> int:
        return 2

    def memories(self, x: Rows) -> Scores:
        return self.activation((x @ self.q.T) * (x @ self.k.T))


def projected(x: Rows, directions: Matrices) -> Float[Tensor, "batch d_mlp rank"]:
    """⟨x, q_jr⟩ for every memory j and every r."""
    return einsum(x, directions, "batch d_model, d_mlp d_model rank -> batch d_mlp rank")


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
