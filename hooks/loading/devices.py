"""A model's weights: their precision, and the device they are on.

A model that is spread over several devices keeps some of its weights on another device or on disk. Its parameters are then
on torch's ``meta`` device, without values, and accelerate loads the values before a module runs. ``weights_of`` loads them
for code that reads them.
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
    """The model with its weights cast to this precision, in place.

    Non-persistent buffers keep the precision in which they were computed: in bfloat16 the rotary frequencies would be off
    by up to 0.2 %, that is 0.4 radians at the 200th position.
    """
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None and weight.is_floating_point():
                weight.data = weight.data.to(precision)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(precision)
    return model


def spread_options() -> dict[str, Any]:
    """Options of ``from_pretrained`` that spread a model; what is offloaded to disk goes to a temporary folder.

    Raises:
        UserError: accelerate is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError(f"--device {SPREAD} needs accelerate, which is not installed: pip install 'accelerate>=1.1'")
    folder = tempfile.TemporaryDirectory(prefix="gated-mlp-symmetry-")
    _FOLDERS.append(folder)  # removed when the program ends
    return {"device_map": "auto", "offload_folder": folder.name}


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate moves inputs or weights of this model between devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1 or bool(offloaded(model))


def weights_of(module: nn.Module, inside: bool = True) -> dict[str, Tensor]:
    """The weights of a module by name, each on the device where it is used.

    Weights in memory are the module's own, detached; offloaded ones are copies, to be released as soon as they are read.

    Args:
        module: the module.
        inside: also return the weights of its submodules.

    Raises:
        ValueError: a weight is on the meta device and accelerate does not know its values.
    """
    return {
        f"{prefix}.{name}" if prefix else name: _fetched(inner, name, weight)
        for prefix, inner in (module.named_modules() if inside else (("", module),))
        for name, weight in inner.named_parameters(recurse=False)
    }


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module computes and expects its inputs; ValueError for a module without weights."""
    for inner in module.modules():
        for hook in _hooks_of(inner):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
        for weight in inner.parameters(recurse=False):
            return weight.device
    raise ValueError(f"a {type(module).__name__} has no weights, so it has no device of its own")


def _fetched(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    if weight.device.type != "meta":
        return weight.detach()
    for hook in _hooks_of(module):
        if hook.weights_map is not None:
            return hook.weights_map[name].to(device_of(module))
    raise ValueError(f"{name} of a {type(module).__name__} is on the meta device, and its values are not known")


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """The accelerate hooks of a module that state its device; there may be several in sequence."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if hasattr(each, "execution_device"):
            yield each


def offloaded(model: nn.Module) -> list[str]:
    """Names of the weights that are on the meta device."""
    return [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
