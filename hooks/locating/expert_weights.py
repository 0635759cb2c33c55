"""FusedExperts: where in a block the weights of experts may be, found by their shapes.

Experts of a layer have no modules of their own: their matrices stand in expert_weights, or one under the other in a table.
As in ``hooks.locating.projections``, each way in which a module's parameters may be meant is a candidate, and
``hooks.locating.verify_experts`` proves one of them, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of
from hooks.locating.projections import Rows, Weights, halves

STACKED = 3
"""Dimensions of a stack of matrices, one an expert."""


@dataclass(frozen=True)
class ExpertSlice:
    """How the matrix of an expert is cut from a parameter that holds those of all, [expert, …, …] or one under the other.

    Attributes:
        name: of the parameter.
        transposed: whether the matrices stand with their inputs first.
        rows: which outputs of the matrix are meant.
    """

    name: str
    transposed: bool
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, whole: Tensor, n_experts: int, number: int) -> Float[Tensor, "out d_in"]:
        """The matrix of that expert, outputs first; a view."""
        matrix = whole.reshape(n_experts, -1, whole.shape[-1])[number]
        return (matrix.T if self.transposed else matrix)[self.rows]


@dataclass(frozen=True)
class FusedExperts:
    """One way in which the weights of a module may be those of many gated MLPs, one an expert.

    Attributes:
        where: the module's name in its block.
        module: the module; it is given tokens, the experts of each, and their routing weights.
        holder: the module that holds the weights, itself or inside it.
        gate, up, down: what they are cut from.
        gate_up_bias, down_bias: names of its biases, None where there are none.
        n_experts: how many there are.
        d_mlp: neurons of each.
        is_flat: whether the matrices stand one under the other, in tables that may be anything else by their shapes.
    """

    where: str
    module: nn.Module
    holder: nn.Module
    gate: ExpertSlice
    up: ExpertSlice
    down: ExpertSlice
    gate_up_bias: str | None
    down_bias: str | None
    n_experts: int
    d_mlp: int
    is_flat: bool = False

    def experts(self) -> list["ExpertWeights"]:
        """All of them, with what a spread model keeps elsewhere fetched once."""
        fetched = weights_of(self.holder, inside=False)
        return [ExpertWeights(self, number, fetched) for number in range(self.n_experts)]


@dataclass(frozen=True)
class ExpertWeights(Weights):
    """Those of one expert.

    Attributes:
        expert_weights: of all of them.
        number: which.
        fetched: the module's weights, where they have been fetched already.
    """

    expert_weights: FusedExperts
    number: int
    fetched: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def _all(self) -> dict[str, Tensor]:
        return weights_of(self.expert_weights.holder, inside=False) if self.fetched is None else self.fetched

    @property
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        expert_weights, every = self.expert_weights, self._all()
        gate, up, down = (
            cut.of(every[cut.name], expert_weights.n_experts, self.number)
            for cut in (expert_weights.gate, expert_weights.up, expert_weights.down)
        )
        return gate, up, down.T

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        expert_weights, every = self.expert_weights, self._all()
        names = expert_weights.gate_up_bias, expert_weights.down_bias
        both, down = (None if name is None else every[name][self.number] for name in names)
        return (None, None, down) if both is None else (both[expert_weights.gate.rows], both[expert_weights.up.rows], down)

    @property
    def n_neurons(self) -> int:
        return self.expert_weights.d_mlp

    @property
    def module(self) -> nn.Module:
        return self.expert_weights.module


def fused_experts_of(block: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Every candidate on the matrices of experts in a block."""
    for where, module in block.named_modules():
        yield from _pairs(where, module, d_model)
        yield from _flat(where, block, d_model)


def _pairs(where: str, module: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Of a module with two expert_weights of matrices, of which one holds gate and up."""
    own = dict(module.named_parameters(recurse=False))
    matrices = [name for name, stack in own.items() if stack.ndim == STACKED]
    if len(matrices) != 2:
        return
    for both, down in permutations(matrices):
        for transposed in (False, True):
            d_mlp = own[down].shape[1 if transposed else 2]
            wide, narrow = (d_model, 2 * d_mlp), (d_mlp, d_model)
            if not transposed:
                wide, narrow = wide[::-1], narrow[::-1]
            n_experts = len(own[down])
            if own[both].shape != (n_experts, *wide) or own[down].shape != (n_experts, *narrow):
                continue
            bias, down_bias = _biases(own, n_experts, 2 * d_mlp, d_model)
            for gate, up in halves(d_mlp):
                cuts = ExpertSlice(both, transposed, gate), ExpertSlice(both, transposed, up), ExpertSlice(down, transposed)
                yield FusedExperts(where, module, module, *cuts, bias, down_bias, n_experts, d_mlp)


def _flat(where: str, block: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Of a module with three tables of one shape, q, k and v of all experts one under the other.

    How many experts share them no shape says, but a number that the module holds, or the one around it.
    """
    holder = block.get_submodule(where)
    tables = {name: table for name, table in holder.named_parameters(recurse=False) if table.ndim == 2}
    shapes = {tuple(table.shape) for table in tables.values()}
    if len(tables) != 3 or len(shapes) != 1 or (shape := shapes.pop())[1] != d_model:
        return
    for outer in filter(None, (where, where.rpartition(".")[0])):
        module = block.get_submodule(outer)
        numbers = {value for one in (holder, module) for value in vars(one).values() if type(value) is int}
        for n_experts in sorted(number for number in numbers if 1 < number < shape[0] and shape[0] % number == 0):
            for gate, up, down in permutations(tables):
                cuts = ExpertSlice(gate, False), ExpertSlice(up, False), ExpertSlice(down, True)
                yield FusedExperts(outer, module, holder, *cuts, None, None, n_experts, shape[0] // n_experts, is_flat=True)


def unmatched_expert_weights(block: nn.Module) -> Iterator[str]:
    """Names of modules that hold expert_weights of matrices, as experts have them; the kernel of a convolution is none."""
    for name, module in block.named_modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, nn.Conv1d) and sum(parameter.ndim == STACKED for parameter in own) >= 2:
            yield name


def _biases(own: dict[str, nn.Parameter], n_experts: int, *sizes: int) -> list[str | None]:
    """Names of the tables that are as wide as these outputs, in the module's order."""
    tables = {name: one.shape[1] for name, one in own.items() if one.ndim == 2 and len(one) == n_experts}
    found: list[str | None] = []
    for size in sizes:
        fits = next((name for name, width in tables.items() if width == size), None)
        found.append(fits)
        if fits is not None:
            del tables[fits]
    return found
