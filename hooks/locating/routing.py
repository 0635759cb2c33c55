"""Routing: which tokens a module of experts was given, which experts they are sent to, and with which weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
