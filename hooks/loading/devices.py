"""A model's weights: in which precision they are, and where.

A model that is spread over several devices keeps some weights in the memory of another device or on disk; in the model they
are then on torch's ``meta`` device, without numbers, and accelerate fetches them before a module runs. ``weights_of``
fetches them for whoever wants to read them.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from analysis.errors import UserError

Module = TypeVar("Module", bound=nn.Module)
SPREAD = "spread"
"""The device that is all of them: GPUs first, then the CPU's memory, then disk."""


def in_precision(model: Module, precision: torch.dtype) -> Module:
    """The model with its weights in this precision, in place.

    Buffers that are not saved are computed, in the precision that they need: in bfloat16 the frequencies of rotary
    positions would be off by up to 0.2 %, 0.4 radians at the 200th position.
    """
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None and weight.is_floating_point():
                weight.data = weight.data.to(precision)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(precision)
    return model


def spreading() -> dict[str, Any]:
    """What transformers needs to spread a model; weights that go to disk and are not there yet go to a temporary folder."""
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(f"--device {SPREAD} needs accelerate, which is not installed: pip install 'accelerate>=1.1'")
    folder = tempfile.TemporaryDirectory(prefix="gated-mlp-symmetry-")
    _FOLDERS.append(folder)  # removed when the program ends
    return {"device_map": "auto", "offload_folder": folder.name}


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate moves inputs and weights of this model about."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1 or bool(offloaded(model))


def weights_of(module: nn.Module, inside: bool = True) -> dict[str, Tensor]:
    """The weights of a module, and of those inside it, by name, on the device where each is used.

    Weights in memory are the module's own, detached; offloaded ones are copies, so let them go when they have been read.
    """
    return {
        f"{prefix}.{name}" if prefix else name: _fetched(inner, name, weight)
        for prefix, inner in (module.named_modules() if inside else (("", module),))
        for name, weight in inner.named_parameters(recurse=False)
    }


def place_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its inputs have to be."""
    for inner in module.modules():
        for hook in _hooks_of(inner):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
        for weight in inner.parameters(recurse=False):
            return weight.device
    raise ValueError(f"a {type(module).__name__} without weights computes wherever its input is")


def _fetched(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    if weight.device.type != "meta":
        return weight.detach()
    for hook in _hooks_of(module):
        if hook.weights_map is not None:
            return hook.weights_map[name].to(place_of(module))
    raise ValueError(f"{name} of a {type(module).__name__} is on the meta device, and nothing knows where its numbers are")


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate that place a module, one or several in a row."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if hasattr(each, "execution_device"):
            yield each


def offloaded(model: nn.Module) -> list[str]:
    """Names of the weights that are not on the device where they are used."""
    return [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
