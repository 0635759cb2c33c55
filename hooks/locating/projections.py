"""Taps: where in a block of a model gated units may be, found by the shapes of its weights.

Nothing here relies on what a family calls its parts. Two projections d_model → d_mlp, or one that holds both, beside one
d_mlp → d_model may be a gated MLP. Each way in which the parts may be meant is a candidate; ``hooks.locating.verify_dense``
proves one of them on what the model computes, or none. Experts are in ``hooks.locating.expert_weights``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of

Rows = Float[Tensor, "d_mlp d_model"]


@dataclass(frozen=True)
class Projection:
    """Some outputs of a linear module: all of them, or those of one of two projections that it holds.

    Attributes:
        module: the module.
        rows: which of its outputs, which are rows of its weight.
    """

    module: nn.Linear
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, output: Float[Tensor, "*place out"]) -> Float[Tensor, "*place d_mlp"]:
        """Of what the module gave, the part that is meant; a view."""
        return output[..., self.rows]

    @property
    def width(self) -> int:
        return len(range(*self.rows.indices(self.module.out_features)))

    @property
    def weight(self) -> Float[Tensor, "d_mlp d_model"]:
        return weights_of(self.module)["weight"][self.rows]

    @property
    def bias(self) -> Float[Tensor, " d_mlp"] | None:
        return None if self.module.bias is None else weights_of(self.module)["bias"][self.rows]


class Weights(ABC):
    """The weights of a gated MLP as the model holds them: views of its own, or copies of what it keeps elsewhere."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        """q, k and v, one row a neuron."""

    @property
    @abstractmethod
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of a, b and y, None where there are none."""

    @property
    @abstractmethod
    def n_neurons(self) -> int:
        """Rows of q."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """A module that holds some of them, and computes where they are used."""


@dataclass(frozen=True)
class Candidate(Weights):
    """One way in which the projections of a module may be those of a gated MLP.

    Attributes:
        where: the module's name in its block.
        gate, up: what may give a and b.
        down: what may read h.
    """

    where: str
    gate: Projection
    up: Projection
    down: nn.Linear

    @property
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        return self.gate.weight, self.up.weight, weights_of(self.down)["weight"].T

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.gate.bias, self.up.bias, Projection(self.down).bias

    @property
    def n_neurons(self) -> int:
        return self.gate.width

    @property
    def module(self) -> nn.Module:
        return self.down


def candidates_of(block: nn.Module) -> Iterator[Candidate]:
    """Every candidate in a block, those first in which the gate comes before the up."""
    for where, parent in block.named_modules():
        linear = [child for child in parent.children() if isinstance(child, nn.Linear)]
        for down in linear:
            readers = [one for one in linear if one is not down and one.in_features == down.out_features]
            whole = [Projection(one) for one in readers if one.out_features == down.in_features]
            for gate, up in permutations(whole, 2):
                yield Candidate(where, gate, up, down)
            for one in readers:
                if one.out_features == 2 * down.in_features:
                    for gate_rows, up_rows in halves(down.in_features):
                        yield Candidate(where, Projection(one, gate_rows), Projection(one, up_rows), down)


def halves(d_mlp: int) -> Iterator[tuple[slice, slice]]:
    """The ways in which two projections may share one: gate and up one after the other, or row by row."""
    first, second = slice(0, d_mlp), slice(d_mlp, 2 * d_mlp)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    yield from ((first, second), (second, first), (even, odd), (odd, even))
