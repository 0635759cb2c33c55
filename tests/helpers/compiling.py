"""What torch compiles, and what would wait for a GPU."""

import shutil
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")


def graphs() -> int:
    """How often something was compiled."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Waits(TorchDispatchMode):
    """Fails where a GPU would be waited for, or where memory is copied from or to the host."""

    NAMES = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "lift_fresh")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.name().removeprefix("aten::").split(".")[0], kwargs or {}
        assert name not in self.NAMES, name
        if name.startswith("index"):  # a mask waits for the number of places that it holds
            places = args[1] if isinstance(args[1], list | tuple) else args
            assert not any(isinstance(x, Tensor) and x.dtype == torch.bool for x in places), f"{name} with a mask"
        if name == "_to_copy":
            assert kwargs.get("device") in (None, args[0].device), f"a copy to {kwargs['device']}"
        return function(*args, **kwargs)
