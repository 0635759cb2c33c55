"""What a long computation has finished so far, kept on disk piece by piece, so that it can be stopped and continued.

A piece appears as a whole or not at all: it is written under another name and renamed. The folder remembers what it is the
progress of; continuing something else is refused.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from analysis.errors import UserError

_IDENTITY = "identity.json"
_PIECE = "piece-{}.safetensors"


@dataclass(frozen=True)
class Progress:
    """Pieces of one computation, by number.

    Attributes:
        folder: where they are.
    """

    folder: Path

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any], resume: bool) -> "Progress":
        """Begin anew, or go on with what is there; UserError if that is of another computation.

        Args:
            folder: made if it is not there; without ``resume`` an old one is thrown away.
            identity: everything that decides the result, as JSON holds it.
            resume: go on.
        """
        known = folder / _IDENTITY
        if resume and known.exists():
            _require_equal(json.loads(known.read_text(encoding="utf-8")), identity, folder)
            return cls(folder)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(parents=True)
            known.write_text(json.dumps(identity, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
        return cls(folder)

    def finished(self, number: int) -> dict[str, Tensor] | None:
        """A piece, if it is finished."""
        path = self.folder / _PIECE.format(number)
        try:
            return load_file(path) if path.exists() else None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): delete it, or start without --resume") from error

    def keep(self, number: int, piece: dict[str, Tensor]) -> None:
        """Put a finished piece in its place."""
        path = self.folder / _PIECE.format(number)
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file({name: tensor.contiguous() for name, tensor in piece.items()}, unfinished)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"writing to {self.folder} failed ({error}): go on with --resume when there is room") from error

    def discard(self) -> None:
        """Delete everything, once the whole is written elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _require_equal(known: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    for key in sorted({*known, *asked}):
        if known.get(key) != asked.get(key):
            raise UserError(
                f"{folder} is unfinished work with {key} {known.get(key)!r}, not {asked.get(key)!r}: "
                "repeat that call, or leave out --resume to start anew"
            )
