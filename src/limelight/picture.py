"""Masks and biases as pictures: text for docstrings and terminals, PNG for documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from limelight.biases import Bias
from limelight.masks import Mask
from limelight.tile import Positions, Size


def dense(
    term: Mask | Bias, q_len: int, kv_len: int, *, heads: int = 1, query_start: int = 0
) -> Any:
    """The values [heads, q_len, kv_len] of a mask or bias for one batch element."""
    size = Size(1, heads, q_len, kv_len)
    term = term.resolved(heads, np.asarray).map_tensors(np.asarray)
    at = Positions.of(
        np, size=size, dtype=np.float64, device="cpu", query_start=query_start
    ).whole()
    return np.broadcast_to(term.values(at, np), (1, heads, q_len, kv_len))[0]


def matrix(term: Mask | Bias, q_len: int, kv_len: int) -> str:
    """The first head's values as rows of numbers: queries down, keys across."""
    values = dense(term, q_len, kv_len)[0]
    if values.dtype == bool:
        return "\n".join(" ".join(str(int(seen)) for seen in row) for row in values)
    cells = [[f"{value + 0.0:.1f}" for value in row] for row in values]
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)
