"""A table of numbers packed for a page: float32 with four significant digits, deflated, in base64.

The bytes of a column are stored in four planes, all lowest bytes first and all highest last: signs and exponents repeat,
and deflate compresses them only if they are adjacent. Layout: column after column, four planes each, one byte per row.
"""

import base64
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from markupsafe import Markup

KEPT_BITS = 14
"""Bits kept of a float32's 23-bit mantissa: a relative error of at most 2⁻¹⁵, four significant digits."""


@dataclass(frozen=True)
class PackedTable:
    """A table as a page's script reads it.

    Attributes:
        columns: the names of the columns, in order.
        rows: the number of rows.
        data: the packed columns; base64 needs no escaping.
    """

    columns: list[str]
    rows: int
    data: Markup


def packed(table: pd.DataFrame) -> PackedTable:
    """Pack a table of numbers and booleans; integers up to 2²⁴ stay exact."""
    planes = b"".join(_planes(table[name]) for name in table)
    return PackedTable(list(table.columns), len(table), Markup(base64.b64encode(zlib.compress(planes)).decode()))


def rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to ``KEPT_BITS`` bits of mantissa; NaN and ∞ are unchanged."""
    dropped = 23 - KEPT_BITS
    bits = values.view(np.uint32).astype(np.uint64) + (1 << (dropped - 1))
    near = (bits >> dropped << dropped).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(values), near, values)


def _planes(column: pd.Series) -> bytes:
    values = column.to_numpy(dtype="<f4")
    if not pd.api.types.is_integer_dtype(column):
        values = rounded(values)
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, 4).T).tobytes()
