"""The machine's memory: whether it has room for what is about to be made, and how it is handed back."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from analysis.errors import UserError


def machine_memory() -> int:
    """Bytes of main memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_needed(n_numbers: int, dtype: torch.dtype) -> int:
    """Bytes of that many numbers."""
    return n_numbers * dtype.itemsize


def require_memory(n_numbers: int, dtype: torch.dtype, what: str) -> None:
    """Raise UserError, naming the need and what there is, if the numbers do not fit into this machine's memory."""
    needed, there = bytes_needed(n_numbers, dtype), machine_memory()
    if needed > there:
        raise UserError(
            f"{what} needs {needed / 1e9:,.1f} GB for {n_numbers:,} numbers in {str(dtype).removeprefix('torch.')}, this "
            f"machine has {there / 1e9:,.1f} GB: choose a lower rank or a smaller size"
        )


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within the block, glibc keeps what is freed for what is asked for next, and gives it back at the end.

    Every layer's activations are as large as those of the layer before. By default they go back to the kernel in between
    and return page by page, each cleared, which is a tenth to a quarter of a forward pass on a CPU. Where the C library is
    another one, nothing happens.
    """
    if sys.platform != "linux":
        yield
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):  # musl
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, 2**30)
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, 2**25)  # the most that glibc would have come to by itself
        library.mallopt(_TRIM_THRESHOLD, 2**26)
        library.malloc_trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
