"""Main memory: whether an allocation fits into it, and keeping freed memory in the process."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from analysis.errors import UserError


def machine_memory() -> int:
    """Main memory of the machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bytes_needed(n_numbers: int, dtype: torch.dtype) -> int:
    """Bytes of that many numbers."""
    return n_numbers * dtype.itemsize


def require_memory(n_numbers: int, dtype: torch.dtype, what: str) -> None:
    """Raise UserError with the memory needed and available, if the numbers do not fit into main memory."""
    needed, available = bytes_needed(n_numbers, dtype), machine_memory()
    if needed > available:
        raise UserError(
            f"{what} needs {needed / 1e9:,.1f} GB for {n_numbers:,} numbers in {str(dtype).removeprefix('torch.')}, this "
            f"machine has {available / 1e9:,.1f} GB: choose a lower rank or a smaller size"
        )


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Within this context glibc keeps freed memory for later allocations, and returns it to the system at the end.

    The activations of every layer have the same size. By default glibc returns their memory to the kernel and gets it back
    page by page, each cleared, which takes a tenth to a quarter of a forward pass on a CPU. With another C library this has
    no effect.
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
        library.mallopt(_MMAP_THRESHOLD, 2**25)  # the largest value that glibc sets by itself
        library.mallopt(_TRIM_THRESHOLD, 2**26)
        library.malloc_trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
