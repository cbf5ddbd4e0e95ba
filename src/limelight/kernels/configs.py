"""How each kernel is cut, by architecture, size of an element and head_dim: data.

`source` says where a line comes from. "compiled": it has no spills and fits the shared memory, and
nobody has measured it yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows, keys: queries and keys of a tile."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    source: str = "compiled, not measured"


# By the least compute capability, bytes of an element and the greatest padded head_dim that a line
# serves; the last matching capability wins.
_FORWARD = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(64, 16, 8, 1), 256: Config(32, 16, 8, 1)},
    (60, 4): {64: Config(64, 16, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (80, 2): {64: Config(128, 64, 4, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 32, 4, 2)},
    (80, 4): {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 16, 4, 2)},
    (90, 2): {64: Config(128, 128, 8, 3), 128: Config(128, 128, 8, 2), 256: Config(128, 64, 8, 2)},
    (90, 4): {64: Config(64, 32, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(32, 32, 4, 2)},
}
# dK and dV, a program for each tile of keys.
_KEYS = {
    (60, 2): {64: Config(16, 64, 8, 1), 128: Config(16, 64, 8, 1), 256: Config(16, 32, 8, 1)},
    (60, 4): {64: Config(16, 64, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 16, 8, 1)},
    (80, 2): {64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 2), 256: Config(32, 64, 8, 1)},
    (80, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    (90, 2): {64: Config(64, 128, 8, 3), 128: Config(64, 128, 8, 2), 256: Config(64, 64, 8, 1)},
    (90, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 32, 4, 1)},
}
# dQ, a program for each tile of queries.
_QUERIES = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(64, 16, 8, 1), 256: Config(32, 16, 8, 1)},
    (60, 4): {64: Config(64, 16, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (80, 2): {64: Config(64, 64, 4, 2), 128: Config(64, 32, 4, 2), 256: Config(64, 32, 8, 1)},
    (80, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    (90, 2): {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 2), 256: Config(64, 64, 8, 1)},
    (90, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
}

# A tile of a dense bias's gradient.
_DENSE = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (60, 4): {64: Config(32, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (80, 2): {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 1), 256: Config(32, 32, 4, 1)},
    (80, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    (90, 2): {64: Config(64, 128, 4, 2), 128: Config(64, 128, 4, 1), 256: Config(64, 64, 4, 1)},
    (90, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
}
ROW_NUMBERS = Config(64, 1, 4, 1)
PARTIAL_SUMS = Config(1, 128, 1, 1)


def forward(capability: int, item_bytes: int, dim: int) -> Config:
    """capability: 90 for sm_90. dim: the larger of head_dim and value_dim."""
    return _find(_FORWARD, capability, item_bytes, dim)


def key_gradients(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_KEYS, capability, item_bytes, dim)


def query_gradient(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_QUERIES, capability, item_bytes, dim)


def dense_gradient(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_DENSE, capability, item_bytes, dim)


_Table = dict[tuple[int, int], dict[int, Config]]


def _find(table: _Table, capability: int, item_bytes: int, dim: int) -> Config:
    least = max(key[0] for key in table if key[0] <= capability)
    by_dim = table[least, item_bytes]
    return by_dim[min(served for served in by_dim if served >= dim)]
