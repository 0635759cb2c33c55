"""Whether this machine has room for what is about to be made, asked before it is made."""

import os

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
