"""Activations and top-k gates on floats."""

import math

import torch

from tests.helpers import reference
from tests.helpers.random_layers import TWINS

ACTIVATION = {name: reference.ACTIVATIONS[twin][0] for name, twin in TWINS.items()}


def quantile_of_normal(share: float) -> float:
    """Φ⁻¹ by bisection of erfc, at the share that float32 has."""
    share, low, high = float(torch.tensor(share, dtype=torch.float32)), -9.0, 9.0
    while high - low > 1e-13:
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(-middle / math.sqrt(2)) / 2 < share else (low, middle)
    return low


def top_k_gates(row: list[float], sigma: reference.Scalar, share: float) -> list[float]:
    """The gates of one token by a loop over the neurons of its layer."""
    mean = math.fsum(row) / len(row)
    deviation = math.sqrt(math.fsum((z - mean) ** 2 for z in row) / len(row))
    cutoff = mean + deviation * quantile_of_normal(share)
    return [sigma(max(z - cutoff, 0.0)) for z in row]
