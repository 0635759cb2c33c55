"""SHA-256 of files, read in chunks."""

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def sha256_of(*paths: Path) -> str:
    """Hex digest of the files' bytes, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
