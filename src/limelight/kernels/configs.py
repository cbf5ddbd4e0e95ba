"""How each kernel is cut, by architecture, size of an element and head_dim: data.

`source` says where a line comes from. "compiled": Triton 3.6 made it for this architecture, without
spills and within the shared memory, and nobody has measured it yet.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPILED = "compiled, not measured"
SPILLS = "compiled, spills registers, not measured"
H200 = "the fastest of about ten on an H200 at length 4096"
H200_OF_SEVEN = "the fastest of six or seven on an H200 at length 4096"
TURING = "no spills; among the fastest of sm_75's code on an H200, at Turing's occupancy"


@dataclass(frozen=True)
class Config:
    """rows, keys: queries and keys of a tile.

    max_registers: of a thread, where a bias would take so many that fewer programs share a
    multiprocessor.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    source: str = COMPILED
    max_registers: int | None = None


HALVES = 0  # in the place of an element's bytes: float32 in two halves
HALVES_FROM = 512  # queries and keys
TINY = Config(16, 16, 8, 1, SPILLS)

# Each line: the least compute capability and the bytes of an element that it serves, then a Config
# by the greatest padded head_dim. The 80 lines stay within 99 KB, to serve 86, 89 and 120 too.
# The 75 lines are for its tensor cores, which multiply float16 only.
_FORWARD = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(64, 16, 8, 1), 256: Config(32, 16, 8, 1)},
    (60, 4): {64: Config(32, 16, 8, 1), 128: Config(32, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (75, 2): {
        64: Config(64, 64, 4, 1, TURING),
        128: Config(128, 64, 8, 1, TURING),
        256: Config(64, 32, 8, 1, TURING),
    },
    (80, 2): {64: Config(128, 64, 4, 3), 128: Config(64, 64, 8, 2), 256: Config(64, 32, 8, 2)},
    (80, 4): {64: Config(32, 32, 4, 2), 128: Config(32, 32, 4, 1), 256: TINY},
    (90, 2): {
        64: Config(64, 64, 4, 3, H200, max_registers=168),
        128: Config(64, 64, 4, 3, H200),
        256: Config(128, 32, 8, 2),
    },
    (90, HALVES): {64: Config(64, 32, 4, 2, H200_OF_SEVEN)},
    (90, 4): {64: Config(128, 32, 4, 2, H200), 128: Config(32, 32, 4, 2, H200), 256: TINY},
}
# dK and dV, a program for each tile of keys.
_KEYS = {
    (60, 2): {64: Config(16, 64, 8, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (60, 4): {64: Config(16, 32, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 4, 8, 1)},
    (75, 2): {
        64: Config(32, 32, 4, 1, TURING),
        128: Config(32, 32, 4, 1, TURING),
        256: Config(16, 32, 8, 1, TURING),
    },
    (80, 2): {64: Config(32, 64, 4, 2), 128: Config(32, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    (80, 4): {64: Config(32, 32, 8, 1), 128: Config(16, 16, 4, 1), 256: TINY},
    (90, 2): {
        64: Config(64, 64, 4, 3, H200),
        128: Config(64, 128, 8, 2, H200),
        256: Config(32, 64, 8, 2, SPILLS),
    },
    (90, HALVES): {64: Config(64, 64, 4, 1, H200_OF_SEVEN)},
    (90, 4): {64: Config(32, 64, 4, 1, H200), 128: Config(32, 32, 4, 1, H200), 256: TINY},
    (100, 2): {64: Config(64, 64, 8, 2), 128: Config(64, 64, 8, 1), 256: Config(32, 32, 8, 2)},
}
# dQ, a program for each tile of queries.
_QUERIES = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (60, 4): {64: Config(32, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(4, 16, 8, 1)},
    (75, 2): {
        64: Config(64, 32, 4, 1, TURING),
        128: Config(32, 32, 4, 1, TURING),
        256: Config(16, 16, 4, 1, TURING),
    },
    (80, 2): {64: Config(64, 64, 4, 2), 128: Config(64, 32, 8, 2), 256: Config(64, 32, 8, 1)},
    (80, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 16, 8, 1), 256: TINY},
    (90, 2): {
        64: Config(64, 32, 4, 3, H200, max_registers=128),
        128: Config(64, 32, 4, 3, H200),
        256: Config(64, 32, 8, 2),
    },
    (90, HALVES): {64: Config(64, 64, 4, 2, H200_OF_SEVEN)},
    (90, 4): {64: Config(128, 32, 8, 1, H200), 128: Config(32, 32, 4, 1, H200), 256: TINY},
}
# The same where a bias of offsets is spread over the tile: a square one takes the fewest.
_QUERIES_OF_OFFSETS = _QUERIES | {
    (90, 2): {**_QUERIES[90, 2], 64: Config(64, 64, 4, 3, H200, max_registers=168)},
}
# The same where a bias has numbers for every row: sums of columns are of a line of keys.
_QUERIES_OF_ROWS = _QUERIES | {
    (90, 2): {**_QUERIES[90, 2], 64: Config(64, 64, 4, 2, H200)},
}
# A tile of a dense bias's gradient.
_DENSE = {
    (60, 2): {64: Config(64, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (60, 4): {64: Config(16, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(8, 8, 8, 1)},
    (75, 2): {64: Config(64, 32, 4, 1), 128: Config(32, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    (80, 2): {64: Config(64, 32, 4, 1), 128: Config(64, 32, 4, 1), 256: Config(32, 16, 4, 1)},
    (80, 4): {
        64: Config(32, 16, 4, 1),
        128: Config(16, 16, 8, 1),
        256: Config(16, 32, 8, 1, SPILLS),
    },
    (90, 2): {
        64: Config(64, 64, 4, 2, H200, max_registers=168),
        128: Config(64, 128, 8, 1),
        256: Config(64, 64, 8, 1),
    },
    (90, 4): {64: Config(32, 16, 4, 1), 128: Config(16, 16, 8, 1), 256: TINY},
}
SPLIT = Config(64, 1, 4, 1)
# A diagonal of tiles, of a bias of offsets; rows are at most keys.
_OFFSETS = {
    (60, 2): {
        64: Config(16, 64, 8, 1, SPILLS),
        128: Config(16, 16, 8, 1, SPILLS),
        256: TINY,
    },
    (60, 4): {64: Config(16, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: Config(16, 16, 8, 1)},
    (80, 2): {64: Config(64, 64, 4, 2), 128: Config(32, 64, 4, 1), 256: Config(16, 32, 4, 1)},
    (80, 4): {64: Config(16, 32, 4, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (90, 2): {
        64: Config(128, 128, 8, 2, H200),
        128: Config(64, 128, 4, 1, SPILLS),
        256: Config(64, 64, 8, 1, SPILLS),
    },
    (90, 4): {64: Config(16, 32, 4, 1), 128: Config(16, 16, 8, 1), 256: TINY},
}
# Where a walk has fewer programs than this, the batch is split: they should fill a large GPU.
MANY_PROGRAMS = 512
KEY_RANGES = Config(1, 1, 1, 1)
FOLD = Config(16, 128, 1, 1)
# Every kernel where a bias reads the query. A tile has as many rows as keys.
_READING = {
    (60, 2): {64: Config(16, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (60, 4): {64: Config(16, 16, 8, 1), 128: Config(16, 16, 8, 1), 256: TINY},
    (80, 2): {64: Config(32, 32, 4, 2), 128: Config(32, 32, 4, 1), 256: Config(16, 16, 4, 1)},
    (80, 4): {64: Config(16, 16, 4, 1), 128: Config(16, 16, 4, 1), 256: TINY},
    (90, 2): {
        64: Config(64, 64, 4, 2, H200_OF_SEVEN),
        128: Config(64, 64, 8, 2),
        256: Config(32, 32, 8, 1),
    },
    (90, 4): {64: Config(32, 32, 4, 1), 128: Config(32, 32, 8, 1), 256: TINY},
}
# The gradient of the vectors that it reads.
_BANDS = _READING | {(90, 2): {**_READING[90, 2], 64: Config(64, 64, 4, 1, H200_OF_SEVEN)}}
ROW_NUMBERS = Config(64, 1, 4, 1)
WIDE_ROW_NUMBERS = Config(64, 1, 8, 1)  # rows over half a kilobyte
PARTIAL_SUMS = Config(1, 128, 1, 1)
FOLD_BANDS = Config(32, 1, 1, 1)


def item(dtype: str) -> int:
    """Bytes of an element, as the tables have them."""
    return 4 if dtype == "float32" else 2


def in_halves(
    dtype: str, capability: int, dim: int, lengths: tuple[int, int], allow_tf32: bool
) -> bool:
    """Whether float32 is multiplied in halves, in heads that fit them.

    lengths: of queries and keys. Short ones take longer to split than that saves (an estimate). A
    head_dim of 128 is not measured; its dK and dV would spill 430 bytes and more.
    """
    return (
        dtype == "float32"
        and capability // 10 == 9
        and dim <= 64
        and min(lengths) >= HALVES_FROM
        and not allow_tf32
    )


def forward(capability: int, item_bytes: int, dim: int) -> Config:
    """capability: 90 for sm_90. dim: the larger of head_dim and value_dim."""
    return _find(_FORWARD, capability, item_bytes, dim)


def key_gradients(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_KEYS, capability, item_bytes, dim)


def query_gradient(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_QUERIES, capability, item_bytes, dim)


def query_gradient_of_offsets(capability: int, item_bytes: int, dim: int) -> Config:
    """Where a bias depends on the offset alone."""
    return _find(_QUERIES_OF_OFFSETS, capability, item_bytes, dim)


def query_gradient_of_rows(capability: int, item_bytes: int, dim: int) -> Config:
    """Where a bias has numbers for every row."""
    return _find(_QUERIES_OF_ROWS, capability, item_bytes, dim)


def row_numbers(capability: int, item_bytes: int, dim: int) -> Config:
    return WIDE_ROW_NUMBERS if item_bytes * dim > 512 else ROW_NUMBERS


def dense_gradient(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_DENSE, capability, item_bytes, dim)


def offset_gradient(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_OFFSETS, capability, item_bytes, dim)


def reading(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_READING, capability, item_bytes, dim)


def bands(capability: int, item_bytes: int, dim: int) -> Config:
    return _find(_BANDS, capability, item_bytes, dim)


_Table = dict[tuple[int, int], dict[int, Config]]


def _find(table: _Table, capability: int, item_bytes: int, dim: int) -> Config:
    # sm_120 has sm_80's matrix products and the 99 KB of sm_86; in float32 sm_100 is like it.
    if capability >= 120 or (capability >= 100 and item_bytes == 4):
        capability = 80
    least = max(c for c, item in table if c <= capability and item == item_bytes)
    by_dim = table[least, item_bytes]
    return by_dim[min(served for served in by_dim if served >= dim)]
