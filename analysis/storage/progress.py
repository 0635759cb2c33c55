"""The finished pieces of a long computation, kept on disk so that it can be interrupted and resumed.

A piece is written under a temporary name and then renamed, so it is never seen half-written. The folder also records which
computation it belongs to; resuming a different one is refused.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from analysis.errors import UserError
from analysis.storage.tensors import read_tensors

_IDENTITY = "identity.json"
_PIECE = "{}.safetensors"


@dataclass(frozen=True)
class Progress:
    """The finished pieces of one computation, by name.

    Attributes:
        folder: where they are kept; created with the first piece.
        identity: every setting that determines the result, as JSON values.
    """

    folder: Path
    identity: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any], resume: bool) -> "Progress":
        """Resume from the pieces in the folder, or delete them and start over; UserError if they are of other settings."""
        known = folder / _IDENTITY
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        elif known.exists():
            _require_equal(json.loads(known.read_text(encoding="utf-8")), identity, folder)
        return cls(folder, identity)

    def finished(self, name: str) -> dict[str, Tensor] | None:
        """The piece, or None if it is not finished."""
        path = self.folder / _PIECE.format(name)
        try:
            return read_tensors(path)[1] if path.exists() else None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): delete it, or start without --resume") from error

    def keep(self, name: str, piece: dict[str, Tensor]) -> None:
        """Store a finished piece."""
        path = self.folder / _PIECE.format(name)
        unfinished = path.with_suffix(".unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.identity, indent=2, ensure_ascii=False)
            (self.folder / _IDENTITY).write_text(text + "\n", encoding="utf-8")
            save_file({name: tensor.contiguous() for name, tensor in piece.items()}, unfinished)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"writing to {self.folder} failed ({error}): free some space, then use --resume") from error


def _require_equal(known: dict[str, Any], requested: dict[str, Any], folder: Path) -> None:
    for key in sorted({*known, *requested}):
        if known.get(key) != requested.get(key):
            raise UserError(
                f"{folder} is unfinished work with {key} {known.get(key)!r}, not {requested.get(key)!r}: "
                "repeat that command, or leave out --resume to start over"
            )
