"""Candidates for the gate, up and down projections of a block, found by the shapes of its linear modules.

Names of modules are not used. Two projections d_model → d_mlp, or one that contains both, and one d_mlp → d_model in the
same module may be a gated MLP. Each assignment of gate and up is a candidate; ``hooks.locating.verify_dense`` checks
which of them the model computes, if any. Experts are in ``hooks.locating.expert_weights``.
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
    """A linear module, or one of the two projections that it contains.

    Attributes:
        module: the module.
        rows: the outputs that belong to the projection, which are rows of the weight.
    """

    module: nn.Linear
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, output: Float[Tensor, "*place out"]) -> Float[Tensor, "*place d_mlp"]:
        """The projection's part of the module's output; a view."""
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
    """The weights of a gated MLP: views of the model's own, or copies of those that are offloaded."""

    @property
    @abstractmethod
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        """q, k and v, one row per neuron."""

    @property
    @abstractmethod
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The biases of a [d_mlp], b [d_mlp] and y [d_model], None where there are none."""

    @property
    @abstractmethod
    def n_neurons(self) -> int:
        """Rows of q."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """A module that contains some of them, on the device where they are used."""


@dataclass(frozen=True)
class Candidate(Weights):
    """Three projections that may be those of a gated MLP.

    Attributes:
        path: name of their parent module in its block.
        gate, up: the projections that may compute a and b.
        down: the projection that may read h.
    """

    path: str
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
    """Every candidate in a block; of the two orders of a pair, gate before up comes first."""
    for path, parent in block.named_modules():
        linear = [child for child in parent.children() if isinstance(child, nn.Linear)]
        for down in linear:
            readers = [one for one in linear if one is not down and one.in_features == down.out_features]
            separate = [Projection(one) for one in readers if one.out_features == down.in_features]
            for gate, up in permutations(separate, 2):
                yield Candidate(path, gate, up, down)
            for one in readers:
                if one.out_features == 2 * down.in_features:
                    for gate_rows, up_rows in gate_up_slices(down.in_features):
                        yield Candidate(path, Projection(one, gate_rows), Projection(one, up_rows), down)


def gate_up_slices(d_mlp: int) -> Iterator[tuple[slice, slice]]:
    """The rows of gate and up in a projection 2·d_mlp wide that contains both: two halves, or alternating rows."""
    first, second = slice(0, d_mlp), slice(d_mlp, 2 * d_mlp)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    yield from ((first, second), (second, first), (even, odd), (odd, even))
