"""The experts of a layer that is a mixture of them: which of its neurons belong to which.

The neurons of a layer are those of its experts, one expert after the other. Every neuron has the number of its expert,
ascending from 0; the shared experts, which every token goes to, come last and are one, with the number −1. A dense layer
has no such numbers: None.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

SHARED = -1

Experts = Int64[Tensor, " d_mlp"]


def expert_slices(experts: Experts) -> dict[int, slice]:
    """The neurons of every expert; ValueError if numbers are not in order."""
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
    """Of every neuron, its index among those of its expert."""
    return torch.cat([torch.arange(neurons.stop - neurons.start) for neurons in expert_slices(experts).values()])


def same_experts(first: Experts | None, second: Experts | None) -> bool:
    """Whether two layers are parted into experts alike; two dense ones are."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def expert_name(expert: int) -> str:
    """Its number, or that it is shared."""
    return "shared" if expert == SHARED else str(expert)


def neuron_name(place: Mapping[str, Any]) -> str:
    """A neuron within its layer: 1229, or 3:17 and shared:17 where it has an expert."""
    neuron, expert = int(place["neuron"]), place.get("expert")
    return str(neuron) if expert is None or expert != expert else f"{expert_name(int(expert))}:{neuron}"
