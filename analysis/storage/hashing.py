"""SHA-256 of files, read in pieces."""

import hashlib
from pathlib import Path

_PIECE = 1 << 20


def sha256_of(*paths: Path) -> str:
    """Hex digest of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()
