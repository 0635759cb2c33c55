"""A saved model whose projections are written in another form."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooks.loading.checkpoint import SINGLE

Files = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn


def rewrite(directory: Path, settings: dict[str, Any], change: Callable[[str, Tensor], Files]) -> dict[str, Any]:
    """Replace every projection of the MLPs and of attention by what ``change`` gives, and name the method in the config."""
    weights = load_file(directory / SINGLE)
    files: Files = {}
    for name, weight in weights.items():
        files |= change(name, weight) if "proj.weight" in name else {name: weight}
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in files.items()}, directory / SINGLE, metadata={"format": "pt"}
    )
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings or None}))
    return files
