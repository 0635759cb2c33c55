"""The experts of a layer that is a mixture of experts: which of its neurons belong to which expert.

The neurons of such a layer are those of its experts, in order. ``Experts`` holds the number of every neuron's expert,
ascending from 0; shared experts, which every token is routed to, come last and count as one, with the number −1. For a
dense layer it is None.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

SHARED = -1

Experts = Int64[Tensor, " d_mlp"]


def expert_slices(experts: Experts) -> dict[int, slice]:
    """The neurons of every expert, by number; ValueError if the numbers are not in order."""
    numbers, counts = experts.unique_consecutive(return_counts=True)
    routed = numbers[:-1] if len(numbers) and int(numbers[-1]) == SHARED else numbers
    if bool((routed < 0).any()) or bool((routed.diff() <= 0).any()):
        raise ValueError(f"experts {numbers.tolist()} are not in order: ascending from 0, shared ones (-1) last")
    stops = counts.cumsum(0)
    starts = stops - counts
    return {
        expert: slice(start, stop)
        for expert, start, stop in zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
    }


def index_within(experts: Experts) -> Experts:
    """The index of every neuron within its expert."""
    return torch.cat([torch.arange(neurons.stop - neurons.start) for neurons in expert_slices(experts).values()])


def same_experts(first: Experts | None, second: Experts | None) -> bool:
    """Whether two layers have the same experts; two dense layers do."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def expert_name(expert: int) -> str:
    """The number of an expert as text, or "shared"."""
    return "shared" if expert == SHARED else str(expert)


def neuron_name(place: Mapping[str, Any]) -> str:
    """A neuron within its layer as text: 1229, or in a mixture of experts 3:17 or shared:17."""
    neuron, expert = int(place["neuron"]), place.get("expert")
    return str(neuron) if expert is None or expert != expert else f"{expert_name(int(expert))}:{neuron}"
