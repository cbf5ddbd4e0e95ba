"""Tile configurations: how a problem is cut, as data, with where each came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """rows, keys: queries and keys of a tile. source: where the figures come from."""

    rows: int
    keys: int
    source: str


# Large enough for the matrix products and for the cost of a dozen PyTorch calls a tile, small
# enough for a tile of several heads to stay in the last-level cache.
TILED = TileConfig(rows=256, keys=512, source="measured on a 2-core x86-64 CPU")
