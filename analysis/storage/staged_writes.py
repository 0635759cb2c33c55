"""Staged writes: the files of a directory are replaced all together or not at all.

They are written to a hidden folder inside the directory, so a full disk or an interruption leaves the old files as they
were. Only when all are complete are they moved over the old ones, ``run.json`` last, and moved back if one move fails.
Other files in the directory are left alone. (A process killed between two moves leaves files that ``Run.load`` refuses.)
"""

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from analysis.errors import UserError
from analysis.storage.files import PROGRESS, RUN_FILE, STAGING


def is_run(directory: Path) -> bool:
    """Whether the directory holds a run that this program wrote."""
    try:
        document = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "schema" in document


def check_writable(directory: Path, force: bool = False) -> None:
    """Raise UserError unless a run may be written there: absent, empty, a run already, or ``force``."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file: choose another --out")
    if not directory.exists() or force or is_run(directory):
        return
    others = sorted(path.name for path in directory.iterdir() if not path.name.startswith((STAGING, PROGRESS)))
    if others:
        raise UserError(f"{directory} holds something other than a run ({others[0]}): choose another --out or add --force")


@contextmanager
def staged(directory: Path, force: bool = False) -> Iterator[Path]:
    """A folder to write files into; if the block ends without an error, they all appear in ``directory``."""
    check_writable(directory, force)
    created = _first_missing(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=directory))
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error.strerror}): choose another --out") from error
    try:
        yield staging
        with _interrupt_deferred():
            _publish(staging, directory)
            created = None  # a deferred Ctrl-C is raised now, and must not remove what was just published
    except (OSError, SafetensorError) as error:  # safetensors raises its own error when the disk is full
        _discard(staging, created)
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"writing to {directory} failed ({reason}): nothing was changed there") from error
    except BaseException:
        _discard(staging, created)
        raise
    shutil.rmtree(staging)


def _publish(staging: Path, directory: Path) -> None:
    """Move every staged file into place, ``run.json`` last; if one cannot be moved, undo all moves."""
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    replaced = staging / "replaced"
    with ExitStack() as undo:
        for file in sorted(files, key=lambda file: file.name == RUN_FILE):
            target, kept = directory / file, replaced / file
            target.parent.mkdir(parents=True, exist_ok=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                os.replace(target, kept)
                undo.callback(os.replace, kept, target)
            else:
                undo.callback(target.unlink, missing_ok=True)
            os.replace(staging / file, target)
        undo.pop_all()


def _first_missing(directory: Path) -> Path | None:
    """The topmost of ``directory`` and its parents that does not exist yet."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    return missing[-1] if missing else None


def _discard(staging: Path, created: Path | None) -> None:
    shutil.rmtree(created or staging, ignore_errors=True)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            raise KeyboardInterrupt
