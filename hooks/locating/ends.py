"""The two ends of the residual stream: the embedding, and the unembedding with the gain of the norm before it."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from hooks.loading.devices import weights_of
from hooks.loading.network import Tokens, outputs_of
from hooks.locating.norm_gains import match_gain


@dataclass(frozen=True)
class Ends:
    """The tables with which tokens enter and leave the residual stream.

    Attributes:
        embedding, unembedding: one row per token, as in the model.
        gain: gain of the norm before the unembedding, ones if none was verified.
        gain_source: which norm that is, in words.
    """

    embedding: Float[Tensor, "token d_model"]
    unembedding: Float[Tensor, "token d_model"]
    gain: Float[Tensor, " d_model"]
    gain_source: str


def find_ends(network: PreTrainedModel, probe: Tokens, d_model: int) -> Ends | None:
    """Both ends of a model.

    Args:
        network: the model.
        probe: tokens on which the gain of the last norm is verified.
        d_model: width of the residual stream.

    Returns:
        The ends; None if the tables are not as wide as the residual stream.
    """
    tables = [network.get_input_embeddings(), network.get_output_embeddings()]
    weights = [weights_of(table)["weight"] for table in tables if isinstance(table, nn.Embedding | nn.Linear)]
    if len(weights) < 2 or any(weight.shape[1] != d_model for weight in weights):
        return None
    norms: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    read: list[Tensor] = []

    def keep(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: Any, output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor) and output.shape[-1] == d_model:
                norms.append((name, module, inputs[0].flatten(0, -2), output.flatten(0, -2)))

        return module.register_forward_hook(hook)

    head = tables[1]
    handles = [head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].flatten(0, -2)))]
    handles += [keep(name, module) for name, module in network.named_modules() if _may_be_norm(module, d_model)]
    try:
        outputs_of(network, probe)
    finally:
        for handle in handles:
            handle.remove()
    embedding, unembedding = weights
    gain, source = torch.ones_like(unembedding[0]), "none: the unembedding does not read a norm's output"
    for name, module, before, after in norms:
        if read and after.shape == read[0].shape and torch.equal(after, read[0]):
            match = match_gain(module, before, after)
            if match is not None:
                gain, source = match[0], f"{name}, {match[1]}"
    return Ends(embedding, unembedding, gain, source)


def _may_be_norm(module: nn.Module, d_model: int) -> bool:
    weight = getattr(module, "weight", None)
    is_named_norm = "norm" in type(module).__name__.lower()
    return is_named_norm or (isinstance(weight, Tensor) and weight.shape == (d_model,))
