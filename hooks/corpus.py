"""The text: the built-in sample, a user's file, or a dataset, cut into windows of tokens.

A document is cut into consecutive windows of ``context`` tokens, each beginning with BOS where the model expects one. A
window is one sequence, independent of the others. Windows are numbered over the whole corpus, and a shard K/N consists of
those with number ≡ K (mod N), so that shards can be analysed separately and merged.

The first ``skip_positions`` positions are fed but not counted, because the first token of a sequence often has a massive
activation. So have immediate repetitions of it: attention over identical tokens returns the same as for the first one, and
the state at position 1 of "\\n\\n" equals that at position 0. Such a leading run is not counted either.
"""

import hashlib
from collections.abc import Iterable, Iterator
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
"""The least number of counted tokens."""
_CHARACTERS_PER_TOKEN = 32
"""More than any text has on average; it bounds how much of a long file is read."""


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens, and their provenance.

    Attributes:
        windows: those of this shard, in order.
        n_windows: the number of windows in the whole corpus, over all shards.
        n_counted_everywhere: the number of counted tokens in it.
        context: tokens in the longest window, BOS included.
        skip_positions: leading positions of each window that are fed but not counted.
        description: an entry of the ``corpus`` part of a run's provenance.
    """

    windows: tuple[Window, ...]
    n_windows: int
    n_counted_everywhere: int
    context: int
    skip_positions: int
    description: dict[str, Any]

    @property
    def window_keys(self) -> Int64[Tensor, " window"]:
        """A hash for each window of this shard, of its number and tokens: equal only for the same window."""
        return torch.tensor([_key(window) for window in self.windows])

    def jackknife_block_of(self, window: Window) -> int:
        """The jackknife block of a window: consecutive windows of the whole corpus share one, also across shards."""
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
    """Read a text, encode it, and cut it into windows.

    Args:
        source: ``sample``, a UTF-8 text file, or a dataset: name[:configuration][:split], its documents in column ``text``.
        tokenizer: encodes without adding special tokens.
        bos: token put before every window, or None.
        context: tokens in a window, BOS included.
        skip_positions: leading positions not counted; windows without a counted token are dropped.
        max_tokens: stop after the window that reaches this many tokens fed; None reads everything.
        shard: K/N, with 0 ≤ K < N.

    Raises:
        UserError: the source does not exist, is not text, or has too few counted tokens.
    """
    k, n = check_windows(context, skip_positions, shard)
    documents = _documents(source, None if max_tokens is None else max_tokens * _CHARACTERS_PER_TOKEN)
    windows, text_sha256, truncated = _cut(documents, tokenizer, bos, context, skip_positions, max_tokens)
    counted = sum(window.n_counted for window in windows)
    if counted < MIN_COUNTED:
        raise UserError(f"{source} is too short, it has {counted} tokens to count: at least {MIN_COUNTED} are needed")
    of_shard = tuple(window for window in windows if window.index % n == k)
    if not of_shard:
        raise UserError(f"shard {shard} is empty, the corpus has {len(windows)} windows: use fewer shards")
    description = {
        "name": source if source == SAMPLE else Path(source).name,
        "text_sha256": text_sha256,
        "windows_sha256": _fingerprint(windows),
        "n_windows": len(windows),
        "shard": shard,
        "tokens_fed": sum(len(window.tokens) for window in of_shard),
        "tokens_counted": sum(window.n_counted for window in of_shard),
        "cut_at_max_tokens": truncated,
    }
    return Corpus(of_shard, len(windows), counted, context, skip_positions, description)


def _cut(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    bos: int | None,
    context: int,
    skip_positions: int,
    max_tokens: int | None,
) -> tuple[list[Window], str, bool]:
    """The windows of all documents, the SHA-256 of the text, and whether it was truncated at ``max_tokens``."""
    prefix = [] if bos is None else [bos]
    length = context - len(prefix)
    windows: list[Window] = []
    digest, fed, truncated = hashlib.sha256(), 0, False
    for document in documents:
        if truncated := max_tokens is not None and fed >= max_tokens:
            break
        digest.update(document.encode())
        ids = tokenizer(document, add_special_tokens=False, verbose=False).input_ids
        for start in range(0, len(ids), length):
            if truncated := max_tokens is not None and fed >= max_tokens:
                break
            tokens = torch.tensor([*prefix, *ids[start : start + length]])
            window = Window(len(windows), tokens, _first_counted(tokens, skip_positions))
            if window.n_counted > 0:
                windows.append(window)
                fed += len(tokens)
    return windows, digest.hexdigest(), truncated


def _first_counted(tokens: Int64[Tensor, " pos"], skip_positions: int) -> int:
    """The first counted position: after the skipped ones, and after a leading run of identical tokens."""
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
        raise UserError(f"{path} holds NUL bytes, so it is not text: give another --corpus")
    if not text.strip():
        raise UserError(f"{path} is empty: give another --corpus")
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
    except Exception as error:  # of many kinds, from the library or the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{source} is neither a text file nor a dataset that can be read ({reason})") from error


def sample_text() -> str:
    """The built-in text: many registers, code, arithmetic, lists, and three other languages."""
    return files("hooks").joinpath("sample.txt").read_text(encoding="utf-8")


def check_windows(context: int, skip_positions: int, shard: str) -> tuple[int, int]:
    """K and N of a shard K/N.

    Raises:
        UserError: windows of this length leave no token to count, or the shard is not of this form.
    """
    if context <= skip_positions + 1:
        raise UserError(f"a context of {context} leaves no token after the {skip_positions} skipped: raise --context")
    return _parse_shard(shard)


def _parse_shard(shard: str) -> tuple[int, int]:
    try:
        k, n = map(int, shard.split("/"))
    except ValueError as error:
        raise UserError(f"shard {shard!r} is not of the form K/N: write it like 0/4") from error
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
