"""Columns of numbers as text: their bytes grouped by place, deflated, in base64; book_data.js reads them.

The first bytes of all numbers come first, then the second ones, and so on: bytes of one place are alike and shrink
more.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

TYPES = ("u1", "u2", "u4", "i2", "f4")  # as numpy names them; little-endian


def column(values: np.ndarray, kind: str) -> dict[str, str]:
    """Return numbers of any shape as a column, row by row.

    Args:
        kind: of TYPES; every value must fit.
    """
    if kind not in TYPES:
        raise ValueError(f"kind {kind!r}: must be one of {', '.join(TYPES)}")
    stored = np.ascontiguousarray(values).astype(np.dtype(f"<{kind}"), casting="unsafe")
    if kind != "f4" and not np.array_equal(stored, values):
        raise ValueError(f"a value does not fit into {kind}: they reach from {values.min()} to {values.max()}")
    planes = np.ascontiguousarray(stored.reshape(-1, 1).view(np.uint8).T)
    return {"kind": kind, "data": base64.b64encode(zlib.compress(planes.tobytes(), level=6)).decode()}


def numbers(stored: dict[str, Any]) -> np.ndarray:
    """Return the numbers of a column, as the page does, (num,)."""
    content = np.frombuffer(zlib.decompress(base64.b64decode(stored["data"])), dtype=np.uint8)
    dtype = np.dtype(f"<{stored['kind']}")
    return np.ascontiguousarray(content.reshape(dtype.itemsize, -1).T).view(dtype)[:, 0]
