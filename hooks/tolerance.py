"""How nearly two computations of one quantity must agree."""

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Relative error below which two computations of one quantity agree, by dtype of the model."""
OUTPUT_SLACK = 10
"""The output of the MLP sums d_mlp rounded products: its error may be this much larger."""


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN counts as an error by every comparison."""
    reference = reference.double()
    return float((value.double() - reference).norm() / reference.norm())
