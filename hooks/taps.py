"""Taps: where in a block of a model gated units may be, found by the shapes of its weights.

Nothing here relies on what a family calls its parts. Two projections d_model → d_mlp, or one that holds both, beside one
d_mlp → d_model may be a gated MLP; two stacks of matrices in one module may be experts. Each way in which the parts may be
meant is a claim; ``hooks.sites`` proves one of them on what the model computes, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

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
    def weight(self) -> Float[Tensor, "d_mlp d_model"]:
        return self.module.weight.detach()[self.rows]

    @property
    def bias(self) -> Float[Tensor, " d_mlp"] | None:
        return None if self.module.bias is None else self.module.bias.detach()[self.rows]


@dataclass(frozen=True)
class Claim:
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
class Stacks:
    """One way in which the weights of a module may be those of many gated MLPs, one an expert.

    Attributes:
        where: the module's name in its block.
        module: the module; it is given tokens, the experts of each, and their routing weights.
        gate_up, down: its stacks, [expert, …].
        gate_up_bias, down_bias: its biases, None where there are none.
        turned: whether the matrices stand with their inputs first.
        gate, up: which rows of the first are which.
    """

    where: str
    module: nn.Module
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    turned: bool
    gate: slice
    up: slice

    @property
    def n_experts(self) -> int:
        return len(self.gate_up)

    def matrices(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of an expert; views."""
        both, down = self.gate_up.detach()[expert], self.down.detach()[expert]
        both, down = (both.T, down.T) if self.turned else (both, down)
        return both[self.gate], both[self.up], down.T

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of a, b and y of an expert, None where there are none."""
        both = None if self.gate_up_bias is None else self.gate_up_bias.detach()[expert]
        down = None if self.down_bias is None else self.down_bias.detach()[expert]
        return (None, None, down) if both is None else (both[self.gate], both[self.up], down)


def stacks_of(block: nn.Module, d_model: int) -> Iterator[Stacks]:
    """Every claim on the stacks of matrices in a block."""
    for where, module in block.named_modules():
        own = dict(module.named_parameters(recurse=False))
        matrices = [stack for stack in own.values() if stack.ndim == STACKED]
        if len(matrices) != 2:
            continue
        for gate_up, down in permutations(matrices):
            for turned in (False, True):
                d_mlp = down.shape[1 if turned else 2]
                wide, narrow = (d_model, 2 * d_mlp), (d_mlp, d_model)
                if not turned:
                    wide, narrow = wide[::-1], narrow[::-1]
                if len(gate_up) != len(down) or tuple(gate_up.shape[1:]) != wide or tuple(down.shape[1:]) != narrow:
                    continue
                bias, down_bias = _biases(own, len(down), 2 * d_mlp, d_model)
                for gate, up in halves(d_mlp):
                    yield Stacks(where, module, gate_up, down, bias, down_bias, turned, gate, up)


def unread_stacks(block: nn.Module) -> Iterator[str]:
    """Names of modules that hold stacks of matrices, as experts have them; the kernel of a convolution is none."""
    for name, module in block.named_modules():
        own = list(module.parameters(recurse=False))
        if not isinstance(module, nn.Conv1d) and sum(parameter.ndim == STACKED for parameter in own) >= 2:
            yield name


def _biases(own: dict[str, nn.Parameter], n_experts: int, *sizes: int) -> list[Tensor | None]:
    """The tables that are as wide as these outputs, in the module's order."""
    tables = [one for one in own.values() if one.ndim == 2 and len(one) == n_experts]
    found: list[Tensor | None] = []
    for size in sizes:
        fits = next((place for place, one in enumerate(tables) if one.shape[1] == size), None)
        found.append(None if fits is None else tables.pop(fits))
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
