"""The safetensors files of a directory: which of them make the model, whether each is whole, what they hold.

A safetensors file is ``[8 bytes: n] [n bytes: JSON header] [data]``; the header gives each tensor's dtype, shape and place
in the data, so that a file cut short is known by its size alone. Weights in several shards come with an index,
``{"weight_map": {tensor: file}}``. Files are chosen as transformers chooses them: ``model.safetensors`` before the index.
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
PLAIN = ("F64", "F32", "F16", "BF16")
_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # as safetensors itself limits it
_LFS_POINTER = b"version https://git-lfs"
AGAIN = "download it again"


@dataclass(frozen=True)
class Stored:
    """One tensor as a header describes it; dtype by its safetensors name, as ``BF16``."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Files that are whole, and what each of them holds, by tensor name."""

    headers: dict[Path, dict[str, Stored]]

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        return {name: stored for header in self.headers.values() for name, stored in header.items()}

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(self.headers))

    @property
    def summary(self) -> str:
        """Where the weights are and in which dtypes, by number of values, as in ``safetensors in 3 shards, bfloat16``."""
        sizes: Counter[str] = Counter()
        for stored in self.tensors.values():
            sizes[DTYPE_NAMES.get(stored.dtype, stored.dtype)] += math.prod(stored.shape)
        shards = f" in {len(self.headers)} shards" if len(self.headers) > 1 else ""
        return f"safetensors{shards}, {' and '.join(name for name, _ in sizes.most_common())}"


def read_checkpoint(directory: Path) -> Checkpoint:
    """The directory's checkpoint, from its headers alone; UserError if a file is missing or not whole."""
    single, index = directory / SINGLE, directory / INDEX
    if not index.is_file():
        return Checkpoint({single: header_of(single)} if single.is_file() else _none(directory))
    placed = _weight_map(index)
    if single.is_file():
        header = header_of(single)
        if differing := sorted(header.keys() ^ placed.keys()):
            raise UserError(
                f"{directory} holds two models, {SINGLE} with {len(header)} tensors and {INDEX} with {len(placed)}, of "
                f"which only one has {differing[0]}: remove the one that is not meant"
            )
        return Checkpoint({single: header})
    return _sharded(directory, placed)


def _none(directory: Path) -> dict[Path, dict[str, Stored]]:
    """Says what a directory has in place of weights that can be read."""
    names = sorted(path.name for path in directory.iterdir())
    kinds = {suffix: [name for name in names if name.endswith(suffix)] for suffix in (".safetensors", ".gguf", ".bin")}
    if found := kinds[".safetensors"]:
        raise UserError(f"{directory} has {found[0]}, but no {SINGLE} and no {INDEX}: give what save_pretrained wrote")
    if found := kinds[".gguf"]:
        raise UserError(f"{directory} has no safetensors but {found[0]}: give that file itself")
    if found := kinds[".bin"]:
        raise UserError(
            f"{directory} has only pickled weights ({found[0]}), which are never loaded: save it as safetensors"
        )
    raise UserError(f"{directory} has no weights: save the model as safetensors")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of shards ({type(error).__name__}: {error}): {AGAIN}") from error


def _sharded(directory: Path, placed: dict[str, str]) -> Checkpoint:
    names = sorted(set(placed.values()))
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise UserError(
            f"{directory} lacks {len(missing)} of the {len(names)} shards that {INDEX} names ({missing[0]}): fetch them too"
        )
    headers = {directory / name: header_of(directory / name) for name in names}
    for tensor, name in placed.items():
        if tensor not in headers[directory / name]:
            raise UserError(f"{directory / name} does not hold {tensor}, which {INDEX} looks for there: {AGAIN}")
    for path, header in headers.items():
        if twice := [tensor for tensor in header if placed.get(tensor, path.name) != path.name]:
            raise UserError(f"{path} holds {twice[0]} too, which {INDEX} places in {placed[twice[0]]}: {AGAIN}")
    return Checkpoint(headers)


def header_of(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds, by name; UserError if it is not one, or not all of one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(_LENGTH, len(_LFS_POINTER)))
        if start.startswith(_LFS_POINTER):
            raise UserError(f"{path} is a git-lfs pointer and not the weights: fetch them with 'git lfs pull'")
        length = int.from_bytes(start[:_LENGTH], "little")
        if size < _LENGTH or _LENGTH + length > size:
            what = "is cut short within its header" if length <= _LONGEST_HEADER else "is no safetensors file"
            raise UserError(f"{path} {what} ({size} bytes): {AGAIN}")
        file.seek(_LENGTH)
        text = file.read(length)
    stored, end = _parsed(path, text)
    if (expected := _LENGTH + length + end) != size:
        raise UserError(f"{path} has {size} bytes where its header says {expected}: {AGAIN}")
    return stored


def _parsed(path: Path, text: bytes) -> tuple[dict[str, Stored], int]:
    """The tensors of a header, and the length of the data that follows it."""
    try:
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        stored = {name: Stored(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in entries.items()}
        return stored, max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has no readable header ({type(error).__name__}): {AGAIN}") from error
