"""The safetensors files of a directory: which of them make up the model, whether each is complete, what they contain.

A safetensors file is ``[8 bytes: n] [n bytes: JSON header] [data]``. The header states each tensor's dtype, shape and
position in the data, so that a truncated file is recognised by its size alone. Weights in several shards have an index,
``{"weight_map": {tensor: file}}``. As in transformers, ``model.safetensors`` takes precedence over the index.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8 e4m3",
    "F8_E5M2": "float8 e5m2",
    "F8_E8M0": "float8 e8m0",
}
_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # as safetensors itself limits it
_LFS_POINTER = b"version https://git-lfs"
REMEDY = "download it again"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as described by a header; its dtype has its safetensors name, such as ``BF16``."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Complete files, and the tensors in each of them by name."""

    headers: dict[Path, dict[str, StoredTensor]]

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: stored for header in self.headers.values() for name, stored in header.items()}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self.headers))

    @property
    def summary(self) -> str:
        """How the weights are stored, such as ``safetensors in 3 shards, bfloat16``; the most common dtype comes first."""
        sizes: Counter[str] = Counter()
        for stored in self.tensors.values():
            sizes[DTYPE_NAMES.get(stored.dtype, stored.dtype)] += math.prod(stored.shape)
        shards = f" in {len(self.headers)} shards" if len(self.headers) > 1 else ""
        return f"safetensors{shards}, {' and '.join(name for name, _ in sizes.most_common())}"


def read_checkpoint(directory: Path) -> Checkpoint:
    """The directory's checkpoint, from its headers alone; UserError if a file is missing, truncated or contradictory."""
    single, index = directory / SINGLE, directory / INDEX
    if not index.is_file():
        return Checkpoint({single: header_of(single)} if single.is_file() else _refuse(directory))
    weight_map = _weight_map(index)
    if single.is_file():
        header = header_of(single)
        if differing := sorted(header.keys() ^ weight_map.keys()):
            raise UserError(
                f"{directory} holds two models, {SINGLE} with {len(header)} tensors and {INDEX} with {len(weight_map)}; "
                f"only one of them has {differing[0]}: remove the other one"
            )
        return Checkpoint({single: header})
    return _sharded(directory, weight_map)


def _refuse(directory: Path) -> dict[Path, dict[str, StoredTensor]]:
    """UserError that names the weights that a directory has instead of safetensors."""
    names = sorted(path.name for path in directory.iterdir())
    by_suffix = {suffix: [name for name in names if name.endswith(suffix)] for suffix in (".safetensors", ".gguf", ".bin")}
    if others := by_suffix[".safetensors"]:
        raise UserError(f"{directory} has {others[0]}, but no {SINGLE} and no {INDEX}: save it with save_pretrained")
    if others := by_suffix[".gguf"]:
        raise UserError(f"{directory} has no safetensors but {others[0]}: give that file itself")
    if others := by_suffix[".bin"]:
        raise UserError(
            f"{directory} has only pickled weights ({others[0]}), which are never loaded: save it as safetensors"
        )
    raise UserError(f"{directory} has no weights: save the model as safetensors")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of shards ({type(error).__name__}: {error}): {REMEDY}") from error


def _sharded(directory: Path, weight_map: dict[str, str]) -> Checkpoint:
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise UserError(
            f"{directory} lacks {len(missing)} of the {len(names)} shards in {INDEX} ({missing[0]}): download them too"
        )
    headers = {directory / name: header_of(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in headers[directory / name]:
            raise UserError(f"{directory / name} does not contain {tensor}, contrary to {INDEX}: {REMEDY}")
    for path, header in headers.items():
        if twice := [tensor for tensor in header if weight_map.get(tensor, path.name) != path.name]:
            raise UserError(f"{path} also contains {twice[0]}, which {INDEX} assigns to {weight_map[twice[0]]}: {REMEDY}")
    return Checkpoint(headers)


def header_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name; UserError if it is another kind of file, or truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(_LENGTH, len(_LFS_POINTER)))
        if start.startswith(_LFS_POINTER):
            raise UserError(f"{path} is a git-lfs pointer, not the weights: download them with 'git lfs pull'")
        length = int.from_bytes(start[:_LENGTH], "little")
        if size < _LENGTH or _LENGTH + length > size:
            problem = "ends within its header" if length <= _LONGEST_HEADER else "is not a safetensors file"
            raise UserError(f"{path} {problem} ({size} bytes): {REMEDY}")
        file.seek(_LENGTH)
        text = file.read(length)
    stored, end = _parsed(path, text)
    if (expected := _LENGTH + length + end) != size:
        raise UserError(f"{path} has {size} bytes, but its header says {expected}: {REMEDY}")
    return stored


def _parsed(path: Path, text: bytes) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a header, and the length in bytes of the data that follows it."""
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        stored = {name: StoredTensor(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        return stored, max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has no readable header ({type(error).__name__}): {REMEDY}") from error
