"""Taps: where in a block of a model gated units may be, found by the shapes of its weights.

Nothing here relies on what a family calls its parts. Two projections d_model → d_mlp, or one that holds both, beside one
d_mlp → d_model may be a gated MLP; two stacks of matrices in one module may be experts, or three tables of one shape. Each
way in which the parts may be meant is a claim; ``hooks.sites`` proves one of them on what the model computes, or none.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.weights import weights_of

Rows = Float[Tensor, "d_mlp d_model"]
STACKED = 3
"""Dimensions of a stack of matrices, one an expert."""


@dataclass(frozen=True)
class Tap:
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
class Claim(Weights):
    """One way in which the projections of a module may be those of a gated MLP.

    Attributes:
        where: the module's name in its block.
        gate, up: what may give a and b.
        down: what may read h.
    """

    where: str
    gate: Tap
    up: Tap
    down: nn.Linear

    @property
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        return self.gate.weight, self.up.weight, weights_of(self.down)["weight"].T

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.gate.bias, self.up.bias, Tap(self.down).bias

    @property
    def n_neurons(self) -> int:
        return self.gate.width

    @property
    def module(self) -> nn.Module:
        return self.down


def claims_of(block: nn.Module) -> Iterator[Claim]:
    """Every claim in a block, those first in which the gate comes before the up."""
    for where, parent in block.named_modules():
        linear = [child for child in parent.children() if isinstance(child, nn.Linear)]
        for down in linear:
            readers = [one for one in linear if one is not down and one.in_features == down.out_features]
            whole = [Tap(one) for one in readers if one.out_features == down.in_features]
            for gate, up in permutations(whole, 2):
                yield Claim(where, gate, up, down)
            for one in readers:
                if one.out_features == 2 * down.in_features:
                    for gate_rows, up_rows in halves(down.in_features):
                        yield Claim(where, Tap(one, gate_rows), Tap(one, up_rows), down)


def halves(d_mlp: int) -> Iterator[tuple[slice, slice]]:
    """The ways in which two projections may share one: gate and up one after the other, or row by row."""
    first, second = slice(0, d_mlp), slice(d_mlp, 2 * d_mlp)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    yield from ((first, second), (second, first), (even, odd), (odd, even))


@dataclass(frozen=True)
class Cut:
    """How the matrix of an expert is cut from a parameter that holds those of all, [expert, …, …] or one under the other.

    Attributes:
        name: of the parameter.
        turned: whether the matrices stand with their inputs first.
        rows: which outputs of the matrix are meant.
    """

    name: str
    turned: bool
    rows: slice = field(default_factory=lambda: slice(None))

    def of(self, whole: Tensor, n_experts: int, number: int) -> Float[Tensor, "out d_in"]:
        """The matrix of that expert, outputs first; a view."""
        matrix = whole.reshape(n_experts, -1, whole.shape[-1])[number]
        return (matrix.T if self.turned else matrix)[self.rows]


@dataclass(frozen=True)
class Stacks:
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
    gate: Cut
    up: Cut
    down: Cut
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
        stacks: of all of them.
        number: which.
        fetched: the module's weights, where they have been fetched already.
    """

    stacks: Stacks
    number: int
    fetched: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def _all(self) -> dict[str, Tensor]:
        return weights_of(self.stacks.holder, inside=False) if self.fetched is None else self.fetched

    @property
    def matrices(self) -> tuple[Rows, Rows, Rows]:
        stacks, every = self.stacks, self._all()
        gate, up, down = (
            cut.of(every[cut.name], stacks.n_experts, self.number) for cut in (stacks.gate, stacks.up, stacks.down)
        )
        return gate, up, down.T

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        stacks, every = self.stacks, self._all()
        names = stacks.gate_up_bias, stacks.down_bias
        both, down = (None if name is None else every[name][self.number] for name in names)
        return (None, None, down) if both is None else (both[stacks.gate.rows], both[stacks.up.rows], down)

    @property
    def n_neurons(self) -> int:
        return self.stacks.d_mlp

    @property
    def module(self) -> nn.Module:
        return self.stacks.module


def stacks_of(block: nn.Module, d_model: int) -> Iterator[Stacks]:
    """Every claim on the matrices of experts in a block."""
    for where, module in block.named_modules():
        yield from _pairs(where, module, d_model)
        yield from _flat(where, block, d_model)


def _pairs(where: str, module: nn.Module, d_model: int) -> Iterator[Stacks]:
    """Of a module with two stacks of matrices, of which one holds gate and up."""
    own = dict(module.named_parameters(recurse=False))
    matrices = [name for name, stack in own.items() if stack.ndim == STACKED]
    if len(matrices) != 2:
        return
    for both, down in permutations(matrices):
        for turned in (False, True):
            d_mlp = own[down].shape[1 if turned else 2]
            wide, narrow = (d_model, 2 * d_mlp), (d_mlp, d_model)
            if not turned:
                wide, narrow = wide[::-1], narrow[::-1]
            n_experts = len(own[down])
            if own[both].shape != (n_experts, *wide) or own[down].shape != (n_experts, *narrow):
                continue
            bias, down_bias = _biases(own, n_experts, 2 * d_mlp, d_model)
            for gate, up in halves(d_mlp):
                cuts = Cut(both, turned, gate), Cut(both, turned, up), Cut(down, turned)
                yield Stacks(where, module, module, *cuts, bias, down_bias, n_experts, d_mlp)


def _flat(where: str, block: nn.Module, d_model: int) -> Iterator[Stacks]:
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
                cuts = Cut(gate, False), Cut(up, False), Cut(down, True)
                yield Stacks(outer, module, holder, *cuts, None, None, n_experts, shape[0] // n_experts, is_flat=True)


def unread_stacks(block: nn.Module) -> Iterator[str]:
    """Names of modules that hold stacks of matrices, as experts have them; the kernel of a convolution is none."""
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


@dataclass(frozen=True)
class Routing:
    """What a module of experts was given.

    Attributes:
        x: rows of inputs.
        experts: the experts that each row was sent to.
        weights: what each expert's output is multiplied by.
        place: the token that each row is of.
        scaled: whether a row is its token times a weight: then that weight acts before the gate, and none after it.
    """

    x: Float[Tensor, "row d_model"]
    experts: Int[Tensor, "row slot"]
    weights: Float[Tensor, "row slot"]
    place: Int[Tensor, " row"]
    scaled: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], n_experts: int) -> "Routing | None":
        """From the arguments of the module's forward, told apart by their kinds; None if they are of other kinds."""
        given = [value.detach() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not given:
            return None
        x = given[0].flatten(0, -2)
        if len(given) == 1:
            return None if len(x) % n_experts else cls._of_every_expert(x, n_experts)
        chosen = [value for value in given[1:] if not value.is_floating_point() and value.dtype != torch.bool]
        weights = [value for value in given[1:] if value.is_floating_point()]
        if len(chosen) != 1 or len(weights) != 1 or chosen[0].ndim != 2 or len(chosen[0]) != len(x):
            return None
        experts, weight = chosen[0], weights[0]
        if weight.shape != experts.shape:
            if weight.shape != (len(x), n_experts):
                return None
            weight = weight.gather(1, experts)  # a table of all experts
        return cls(x, experts, weight, torch.arange(len(x), device=x.device))

    @classmethod
    def _of_every_expert(cls, x: Float[Tensor, "row d_model"], n_experts: int) -> "Routing":
        """Where every expert is given every token times its weight, which is 0 for a token that is not sent to it."""
        row, n_tokens = torch.arange(len(x), device=x.device), len(x) // n_experts
        expert = torch.where(x.any(dim=1), row // n_tokens, n_experts)
        return cls(x, expert[:, None], torch.ones_like(x[:, :1]), row % n_tokens, scaled=True)

    def by_expert(self, n_experts: int) -> list[tuple[Int[Tensor, " routed"], Float[Tensor, " routed"]]]:
        """For every expert the rows that were sent to it, ascending, and their weights; waits for the device once."""
        flat = self.experts.flatten()
        flat = torch.where((flat >= 0) & (flat < n_experts), flat, n_experts)  # some families mask by a number beyond
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=n_experts + 1)[:n_experts].tolist()
        row, weight = order // self.experts.shape[1], self.weights.flatten()[order]
        sizes = [*counts, len(order) - sum(counts)]
        return list(zip(row.split(sizes), weight.split(sizes), strict=True))[:n_experts]

    def rounds(self, n_experts: int) -> Iterator["Routing"]:
        """The same rows sent to others, until every expert had one."""
        if self.scaled:
            tokens = self.x.view(n_experts, -1, self.x.shape[1]).sum(dim=0)
            yield self._of_every_expert(tokens.repeat(n_experts, 1), n_experts)
            return
        number = torch.arange(self.experts.numel(), device=self.experts.device).view_as(self.experts)
        for first in range(0, n_experts, self.experts.numel()):
            experts = ((first + number) % n_experts).to(self.experts.dtype)
            yield replace(self, experts=experts, weights=torch.full_like(self.weights, 0.5))

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward, as ``of`` reads them, with what is meant here in their places."""
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

        def meant(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype == torch.bool:
                return value
            if value is first:
                return self.x.view_as(value)
            if not value.is_floating_point():
                return self.experts
            if value.shape == self.experts.shape:
                return self.weights.to(value.dtype)
            return torch.zeros_like(value).scatter(1, self.experts.long(), self.weights.to(value.dtype))

        return tuple(map(meant, args)), {name: meant(value) for name, value in kwargs.items()}
