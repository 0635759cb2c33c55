"""Routing: the tokens that a module of experts reads, the experts chosen for each, and the routing weights."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The arguments of a module of experts.

    Attributes:
        x: one input per row.
        experts: the experts that each row is routed to.
        weights: routing weights, by which the experts' outputs are multiplied.
        place: the index of each row's token in the batch.
        scaled: whether rows are tokens times their routing weight: then it acts before the gate, and ``weights`` are 1.
    """

    x: Float[Tensor, "row d_model"]
    experts: Int[Tensor, "row slot"]
    weights: Float[Tensor, "row slot"]
    place: Int[Tensor, " row"]
    scaled: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], n_experts: int) -> "Routing | None":
        """From the arguments of the module's forward, distinguished by dtype and shape; None if these do not fit."""
        tensors = [value.detach() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors:
            return None
        x = tensors[0].flatten(0, -2)
        if len(tensors) == 1:
            return None if len(x) % n_experts else cls._of_every_expert(x, n_experts)
        chosen = [value for value in tensors[1:] if not value.is_floating_point() and value.dtype != torch.bool]
        weights = [value for value in tensors[1:] if value.is_floating_point()]
        if len(chosen) != 1 or len(weights) != 1 or chosen[0].ndim != 2 or len(chosen[0]) != len(x):
            return None
        experts, weight = chosen[0], weights[0]
        if weight.shape != experts.shape:
            if weight.shape != (len(x), n_experts):
                return None
            weight = weight.gather(1, experts)  # of a table with a column for every expert
        return cls(x, experts, weight, torch.arange(len(x), device=x.device))

    @classmethod
    def _of_every_expert(cls, x: Float[Tensor, "row d_model"], n_experts: int) -> "Routing":
        """Every expert reads every token times its routing weight, which is 0 for tokens not routed to it."""
        row, n_tokens = torch.arange(len(x), device=x.device), len(x) // n_experts
        expert = torch.where(x.any(dim=1), row // n_tokens, n_experts)
        return cls(x, expert[:, None], torch.ones_like(x[:, :1]), row % n_tokens, scaled=True)

    def by_expert(self, n_experts: int) -> list[tuple[Int[Tensor, " routed"], Float[Tensor, " routed"]]]:
        """For every expert the rows routed to it, ascending, and their routing weights; synchronizes the device once."""
        flat = self.experts.flatten()
        flat = torch.where((flat >= 0) & (flat < n_experts), flat, n_experts)  # some families mask by an invalid index
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=n_experts + 1)[:n_experts].tolist()
        row, weight = order // self.experts.shape[1], self.weights.flatten()[order]
        sizes = [*counts, len(order) - sum(counts)]
        return list(zip(row.split(sizes), weight.split(sizes), strict=True))[:n_experts]

    def covering_all(self, n_experts: int) -> Iterator["Routing"]:
        """The same rows routed to other experts, until every expert has had a row."""
        if self.scaled:
            tokens = self.x.view(n_experts, -1, self.x.shape[1]).sum(dim=0)
            yield self._of_every_expert(tokens.repeat(n_experts, 1), n_experts)
            return
        number = torch.arange(self.experts.numel(), device=self.experts.device).view_as(self.experts)
        for first in range(0, n_experts, self.experts.numel()):
            experts = ((first + number) % n_experts).to(self.experts.dtype)
            yield replace(self, experts=experts, weights=torch.full_like(self.weights, 0.5))

    def substituted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward, as ``of`` reads them, with this routing in their place."""
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

        def substitute(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dtype == torch.bool:
                return value
            if value is first:
                return self.x.view_as(value)
            if not value.is_floating_point():
                return self.experts
            if value.shape == self.experts.shape:
                return self.weights.to(value.dtype)
            return torch.zeros_like(value).scatter(1, self.experts.long(), self.weights.to(value.dtype))

        return tuple(map(substitute, args)), {name: substitute(value) for name, value in kwargs.items()}
