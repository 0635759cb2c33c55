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
_PIECE = "{}.safetensors"


@dataclass(frozen=True)
class Progress:
    """Pieces of one computation, by name.

    Attributes:
        folder: where they are; made with the first piece.
        identity: everything that decides the result, as JSON holds it.
    """

    folder: Path
    identity: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any], resume: bool) -> "Progress":
        """Go on with what is there, or begin anew and throw that away; UserError if it is of another computation."""
        known = folder / _IDENTITY
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        elif known.exists():
            _require_equal(json.loads(known.read_text(encoding="utf-8")), identity, folder)
        return cls(folder, identity)

    def finished(self, name: str) -> dict[str, Tensor] | None:
        """A piece, if it is finished."""
        path = self.folder / _PIECE.format(name)
        try:
            return load_file(path) if path.exists() else None
        except SafetensorError as error:
            raise UserError(f"{path} is damaged ({error}): delete it, or start without --resume") from error

    def keep(self, name: str, piece: dict[str, Tensor]) -> None:
        """Put a finished piece in its place."""
        path = self.folder / _PIECE.format(name)
        unfinished = path.with_suffix(".unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.identity, indent=2, ensure_ascii=False)
            (self.folder / _IDENTITY).write_text(text + "\n", encoding="utf-8")
            save_file({name: tensor.contiguous() for name, tensor in piece.items()}, unfinished)
            os.replace(unfinished, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"writing to {self.folder} failed ({error}): make room, then go on with --resume") from error


def _require_equal(known: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    for key in sorted({*known, *asked}):
        if known.get(key) != asked.get(key):
            raise UserError(
                f"{folder} is unfinished work with {key} {known.get(key)!r}, not {asked.get(key)!r}: "
                "repeat that call, or leave out --resume to start anew"
            )
