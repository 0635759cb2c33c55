"""What stands between an MLP's output and the residual stream: a factor, a norm, or both.

    added to the residual stream = factor ⊙ norm(y)

A norm divides by the size of y, which differs from token to token and from version to version, so what it does to an edited
output is computed with the model's own module, never linearized.
"""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.loading.devices import weights_of


@dataclass(frozen=True)
class OutputPath:
    """The path of an output to the residual stream, as verified on the block itself.

    Attributes:
        factor: of each component, after the norm.
        norm: the norm that the output passes first, None if there is none.
    """

    factor: Float[Tensor, " d_model"]
    norm: nn.Module | None = None

    def __call__(self, y: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        """What is added to the residual stream if the MLP's output is y."""
        # forward, so that hooks on the norm are not called for an output that the model never has
        normed = y if self.norm is None else self.norm.forward(y)
        return normed * self.factor.to(y.device, y.dtype)

    def to(self, dtype: torch.dtype) -> "OutputPath":
        """The same in another precision, with weights of its own in memory; the model's norm is left as it is."""
        if self.norm is None:
            return OutputPath(self.factor.to(dtype))
        norm, own = copy.copy(self.norm), weights_of(self.norm, inside=False)
        norm.__dict__.pop("forward", None)  # accelerate's, which would fetch the model's weights
        norm._parameters = {
            name: nn.Parameter(own[name].to(dtype), False) if name in own else None for name in norm._parameters
        }
        return OutputPath(self.factor.to(dtype), norm)
