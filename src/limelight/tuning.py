"""Tile configurations: how a problem is cut, as data, with where each came from."""

from __future__ import annotations

from dataclasses import dataclass

from limelight.tile import Size


@dataclass(frozen=True)
class TileConfig:
    """rows, keys: queries and keys of a tile. source: where the figures come from."""

    rows: int
    keys: int
    source: str


# Large enough for the matrix products and for the cost of a dozen PyTorch calls a tile, small
# enough for a tile of several heads to stay in the last-level cache.
TILED = TileConfig(rows=256, keys=512, source="measured on a 2-core x86-64 CPU")


def tiled_jax(size: Size) -> TileConfig:
    """For a loop of compiled steps, each over all batch elements and heads."""
    matrices = size.batch * size.q_heads
    side = 512
    while side > 64 and matrices * side**2 > 2**20:
        side //= 2
    while -(-size.q_len // side) * -(-size.kv_len // side) > 2**12:
        side *= 2
    return TileConfig(side, side, "4 MiB of scores at once, and at most 4096 steps")
