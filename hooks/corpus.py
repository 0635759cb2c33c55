"""The text that is read: a sample of our own, a user's file, or a dataset, cut into windows of tokens.

A document is cut into consecutive windows of ``context`` tokens, each beginning with BOS where the model expects one. A
window is one sequence: nothing is read across its edge. Windows are numbered over the whole corpus, and a shard K/N takes
those with number ≡ K (mod N), so that shards can be analyzed apart and merged.

The first ``skip_positions`` positions are fed but not counted, because a sequence's first token often carries a massive
activation. So does every repetition of it that follows at once: attention over identical tokens returns what the first one
returned, and the state at position 1 of "\\n\\n" equals that at position 0. Such a leading run is not counted either.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from analysis.errors import UserError
from analysis.sums.batch import Window
from analysis.sums.reducer import N_JACKKNIFE_BLOCKS

SAMPLE = "sample"
DEFAULT_CONTEXT = 256
_DOCUMENT_FIELD = "text"
MIN_COUNTED = 16
"""Fewer counted tokens than these are no measurement."""
_CHARACTERS_PER_TOKEN = 32
"""More than any text has on average: of a long file, only so much is read as can be needed."""


@dataclass(frozen=True)
class Corpus:
    """Windows ready to be read, and their provenance.

    Attributes:
        windows: those of this shard, in order.
        n_windows: how many the whole corpus has, over all shards.
        context: the longest window, BOS included.
        skip_positions: leading positions of each window that are fed but not counted.
        description: an entry of the ``corpus`` part of a run's provenance.
    """

    windows: tuple[Window, ...]
    n_windows: int
    context: int
    skip_positions: int
    description: dict[str, Any]

    @property
    def window_keys(self) -> Int64[Tensor, " window"]:
        """A number for each window of this shard, made from its place and its tokens: equal only for the same window."""
        return torch.tensor([_key(window) for window in self.windows])

    def jackknife_block_of(self, window: Window) -> int:
        """The jackknife block of a window: consecutive windows of the whole corpus share one, whatever the shard."""
        return window.index * N_JACKKNIFE_BLOCKS // self.n_windows

    @property
    def n_tokens(self) -> int:
        """Tokens fed."""
        return sum(len(window.tokens) for window in self.windows)

    @property
    def n_counted(self) -> int:
        """Tokens counted."""
        return sum(window.n_counted for window in self.windows)


def load_corpus(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    bos: int | None,
    context: int = DEFAULT_CONTEXT,
    skip_positions: int = 1,
    max_tokens: int | None = None,
    shard: str = "0/1",
) -> Corpus:
    """Read, encode and cut a text.

    Args:
        source: ``sample``, a UTF-8 text file, or a dataset: name[:configuration][:split], its documents in column ``text``.
        tokenizer: encodes without adding special tokens.
        bos: token put before every window, or None.
        context: tokens in a window, BOS included.
        skip_positions: leading positions not counted; windows without a counted token are dropped.
        max_tokens: stop after the window that reaches this many tokens fed; None reads everything.
        shard: K/N, with 0 ≤ K < N.

    Raises:
        UserError: the source is not there, is not text, or gives no counted token.
    """
    k, n = check_windows(context, skip_positions, shard)
    room = context - (bos is not None)
    windows: list[Window] = []
    text_digest, fed, truncated = hashlib.sha256(), 0, False
    for document in _documents(source, None if max_tokens is None else max_tokens * _CHARACTERS_PER_TOKEN):
        if truncated := max_tokens is not None and fed >= max_tokens:
            break
        text_digest.update(document.encode())
        ids = tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        for start in range(0, len(ids), room):
            if truncated := max_tokens is not None and fed >= max_tokens:
                break
            tokens = torch.tensor([*([] if bos is None else [bos]), *ids[start : start + room]])
            window = Window(len(windows), tokens, _first_counted(tokens, skip_positions))
            if window.n_counted > 0:
                windows.append(window)
                fed += len(tokens)
    counted = sum(window.n_counted for window in windows)
    if counted < MIN_COUNTED:
        raise UserError(f"{source} is too short, it has {counted} tokens to count: at least {MIN_COUNTED} are needed")
    mine = tuple(window for window in windows if window.index % n == k)
    if not mine:
        raise UserError(f"shard {shard} is empty, the corpus has {len(windows)} windows: use fewer shards")
    description = {
        "name": source if source == SAMPLE else Path(source).name,
        "text_sha256": text_digest.hexdigest(),
        "windows_sha256": _fingerprint(windows),
        "n_windows": len(windows),
        "shard": shard,
        "tokens_fed": sum(len(window.tokens) for window in mine),
        "tokens_counted": sum(window.n_counted for window in mine),
        "cut_at_max_tokens": truncated,
    }
    return Corpus(mine, len(windows), context, skip_positions, description)


def _first_counted(tokens: Int64[Tensor, " pos"], skip_positions: int) -> int:
    """Where counting begins: after the skipped positions, and after the repetitions of the first token that follow them."""
    if skip_positions == 0:
        return 0
    differs = (tokens != tokens[0]).nonzero()
    run = len(tokens) if len(differs) == 0 else int(differs[0])
    return max(skip_positions, run)


def _documents(source: str, characters: int | None) -> Iterator[str]:
    path = Path(source).expanduser()
    if source == SAMPLE:
        yield sample_text()
    elif path.is_file():
        yield _read_file(path, characters)
    else:
        yield from _dataset(source)


def _read_file(path: Path, characters: int | None) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(-1 if characters is None else characters)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or give another --corpus") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    if "\0" in text:
        raise UserError(f"{path} holds NUL bytes, so it is no text: give another --corpus")
    if not text.strip():
        raise UserError(f"{path} is empty: give a text to read")
    return text


def _dataset(source: str) -> Iterator[str]:
    """Documents of a dataset, streamed; its own code is never run."""
    from datasets import load_dataset

    name, configuration, split = [*source.split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, configuration or None, split=split or "train", streaming=True)
        for row in rows:
            if _DOCUMENT_FIELD not in row:
                raise UserError(f"dataset {name} has no column {_DOCUMENT_FIELD!r}, it has {', '.join(row)}")
            if row[_DOCUMENT_FIELD]:
                yield row[_DOCUMENT_FIELD]
    except UserError:
        raise
    except Exception as error:  # the library and the network raise many kinds; none is a bug of ours
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source} is neither a text file nor a dataset that can be read ({reason})") from error


def sample_text() -> str:
    """The text written for this project: many registers, code, arithmetic, lists, and three other languages."""
    return files("hooks").joinpath("sample.txt").read_text(encoding="utf-8")


def check_windows(context: int, skip_positions: int, shard: str) -> tuple[int, int]:
    """K and N of a shard K/N, once it is clear that windows of this length leave something to count."""
    if context <= skip_positions + 1:
        raise UserError(f"a context of {context} leaves no token after the {skip_positions} skipped: raise --context")
    return _parse_shard(shard)


def _parse_shard(shard: str) -> tuple[int, int]:
    try:
        k, n = map(int, shard.split("/"))
    except ValueError as error:
        raise UserError(f"shard {shard!r} is not of the form K/N, like 0/4") from error
    if not 0 <= k < n:
        raise UserError(f"shard {shard!r} is out of range: K/N needs 0 ≤ K < N")
    return k, n


def _key(window: Window) -> int:
    digest = hashlib.sha256(f"{window.index}:".encode() + window.tokens.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _fingerprint(windows: list[Window]) -> str:
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{len(window.tokens)}:".encode())
        digest.update(window.tokens.numpy().tobytes())
    return digest.hexdigest()
