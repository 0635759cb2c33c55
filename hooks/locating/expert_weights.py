"""Candidates for the fused weights of experts in a block, found by the shapes of parameters.

The experts of a layer have no modules of their own: their matrices are fused in parameters [expert, …, …], or concatenated
along the rows of a 2-D table. As in ``hooks.locating.projections``, each assignment of parameters to q, k and v is a
candidate, and ``hooks.locating.verify_experts`` checks which of them the model computes, if any.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of
from hooks.locating.projections import Rows, Weights, gate_up_slices

FUSED_NDIM = 3
"""Dimensions of a parameter with one matrix per expert."""


@dataclass(frozen=True)
class ExpertSlice:
    """How the matrix of one expert is sliced from the fused parameter, [expert, …, …] or concatenated along rows.

    Attributes:
        name: of the parameter.
        transposed: whether the input dimension comes first.
        rows: the outputs that belong to the projection.
    """

    name: str
    transposed: bool
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, fused: Tensor, n_experts: int, number: int) -> Float[Tensor, "out d_in"]:
        """The matrix of that expert, outputs first; a view."""
        matrix = fused.reshape(n_experts, -1, fused.shape[-1])[number]
        return (matrix.T if self.transposed else matrix)[self.rows]


@dataclass(frozen=True)
class FusedExperts:
    """Parameters that may be the weights of gated MLPs, one per expert.

    Attributes:
        path: name of the module in its block.
        module: the module that reads tokens, the experts of each, and their routing weights.
        holder: the module that contains the parameters, the same or a submodule.
        gate, up, down: how the matrices of an expert are sliced from the parameters.
        gate_up_bias, down_bias: names of the biases, None where there are none.
        n_experts: the number of experts.
        d_mlp: neurons per expert.
        is_flat: whether the matrices are concatenated along the rows of 2-D tables, whose shapes alone are ambiguous.
    """

    path: str
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
        """The weights of every expert; offloaded parameters are loaded once for all."""
        fetched = weights_of(self.holder, inside=False)
        return [ExpertWeights(self, number, fetched) for number in range(self.n_experts)]


@dataclass(frozen=True)
class ExpertWeights(Weights):
    """The weights of one expert.

    Attributes:
        expert_weights: the fused weights of all experts.
        number: of the expert, from 0.
        fetched: the parameters, if they have been loaded already.
    """

    expert_weights: FusedExperts
    number: int
    fetched: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def _parameters(self) -> dict[str, Tensor]:
        return weights_of(self.expert_weights.holder, inside=False) if self.fetched is None else self.fetched

    @property
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        fused, parameters = self.expert_weights, self._parameters()
        gate, up, down = (
            part.of(parameters[part.name], fused.n_experts, self.number) for part in (fused.gate, fused.up, fused.down)
        )
        return gate, up, down.T

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        fused, parameters = self.expert_weights, self._parameters()
        names = fused.gate_up_bias, fused.down_bias
        both, down = (None if name is None else parameters[name][self.number] for name in names)
        return (None, None, down) if both is None else (both[fused.gate.rows], both[fused.up.rows], down)

    @property
    def n_neurons(self) -> int:
        return self.expert_weights.d_mlp

    @property
    def module(self) -> nn.Module:
        return self.expert_weights.module


def fused_experts_of(block: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Every candidate for the fused weights of experts in a block."""
    for path, module in block.named_modules():
        yield from _fused(path, module, d_model)
        yield from _flat(path, block, d_model)


def _fused(path: str, module: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Candidates in a module with two 3-D parameters, one of which contains gate and up."""
    own = dict(module.named_parameters(recurse=False))
    matrices = [name for name, parameter in own.items() if parameter.ndim == FUSED_NDIM]
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
            for gate, up in gate_up_slices(d_mlp):
                slices = (
                    ExpertSlice(both, transposed, gate),
                    ExpertSlice(both, transposed, up),
                    ExpertSlice(down, transposed),
                )
                yield FusedExperts(path, module, module, *slices, bias, down_bias, n_experts, d_mlp)


def _flat(path: str, block: nn.Module, d_model: int) -> Iterator[FusedExperts]:
    """Candidates in a module with three tables of one shape: q, k and v of all experts, concatenated along rows.

    The shapes do not determine the number of experts: it must be an attribute of the module or of its parent.
    """
    holder = block.get_submodule(path)
    tables = {name: table for name, table in holder.named_parameters(recurse=False) if table.ndim == 2}
    shapes = {tuple(table.shape) for table in tables.values()}
    if len(tables) != 3 or len(shapes) != 1 or (shape := shapes.pop())[1] != d_model:
        return
    for outer in filter(None, (path, path.rpartition(".")[0])):
        module = block.get_submodule(outer)
        numbers = {value for one in (holder, module) for value in vars(one).values() if type(value) is int}
        for n_experts in sorted(number for number in numbers if 1 < number < shape[0] and shape[0] % number == 0):
            d_mlp = shape[0] // n_experts
            for gate, up, down in permutations(tables):
                slices = ExpertSlice(gate, False), ExpertSlice(up, False), ExpertSlice(down, True)
                yield FusedExperts(outer, module, holder, *slices, None, None, n_experts, d_mlp, is_flat=True)


def unmatched_expert_weights(block: nn.Module) -> Iterator[str]:
    """Names of modules with two or more 3-D parameters, as experts have them, except convolutions."""
    for name, module in block.named_modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, nn.Conv1d) and sum(parameter.ndim == FUSED_NDIM for parameter in own) >= 2:
            yield name


def _biases(own: dict[str, nn.Parameter], n_experts: int, *sizes: int) -> list[str | None]:
    """For each size, the name of the first table [expert, size] that is not taken yet, None if there is none."""
    tables = {name: one.shape[1] for name, one in own.items() if one.ndim == 2 and len(one) == n_experts}
    biases: list[str | None] = []
    for size in sizes:
        name = next((name for name, width in tables.items() if width == size), None)
        biases.append(name)
        if name is not None:
            del tables[name]
    return biases
