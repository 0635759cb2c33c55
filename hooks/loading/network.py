"""What the networks of all families have in common: a list of transformer blocks, and the arguments of a forward pass."""

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from analysis.errors import UserError

Tokens = Int[Tensor, "batch pos"]


def blocks_of(network: nn.Module, n_layers: int) -> nn.ModuleList:
    """The transformer blocks: the outermost ModuleList with one module per layer; UserError if there is none."""
    lists = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.ModuleList)]
    outer = (blocks for name, blocks in lists if not any(name.startswith(f"{other}.") for other, _ in lists))
    found = next((blocks for blocks in outer if len(blocks) == n_layers), None)
    if found is None:
        lengths = ", ".join(str(len(blocks)) for _, blocks in lists) or "none"
        raise UserError(
            f"{type(network).__name__} has no ModuleList of {n_layers} blocks (lengths: {lengths}): it is not supported"
        )
    return found


def hidden_of(output: Any) -> Tensor:
    """The residual stream in the output of a block, which may be a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def base_of(network: nn.Module) -> nn.Module:
    """The network without its unembedding."""
    base = network.base_model
    return base if isinstance(base, nn.Module) else network


def run_network(network: nn.Module, tokens: Tokens, mask: Int[Tensor, "batch pos"] | None = None) -> Any:
    """One forward pass without a key-value cache."""
    options: dict[str, Any] = {"use_cache": False} if _accepts(network, "use_cache") else {}
    if mask is not None:
        options["attention_mask"] = mask
    return network(tokens, **options)


def outputs_of(network: nn.Module, tokens: Tokens) -> Float[Tensor, "batch pos out"]:
    """Logits if the model has any, else the last hidden state."""
    with torch.no_grad():
        output = run_network(network, tokens)
    return output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state


def _accepts(network: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(network.forward).parameters
