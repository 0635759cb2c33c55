"""Tensors read from safetensors files, each in memory of its own."""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata of a file, empty if it has none, and its tensors by name.

    They are copied one by one into aligned memory. Where a tensor lies in a file depends on its neighbours, and on some
    processors so does the last bit of a sum over it; copied, saved results give the numbers of the run that saved them.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118, not a dict
        return file.metadata() or {}, tensors
