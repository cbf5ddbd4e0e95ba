"""Which attention weights dropout keeps: a pure function of the seed and of the weight's place.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator
of Triton's and cuRAND's. The counter is (j // 4, i, head, batch), the key the 64-bit seed; word
j % 4 of the four that come out belongs to key j. So a seed drops the same weights on every backend,
with every tile size, on every device.
"""

from __future__ import annotations

from typing import Any

from limelight.tile import Tile

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], seed: Any) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for each counter, in int64 arrays (no library lacks those).

    counter: four int64 arrays of 32-bit words, broadcast together. seed: an int64 array or number.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # Products of two 32-bit words wrap around in int64, which leaves all 64 bits right.
        a, b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def kept(at: Tile, seed: Any, dropout_p: float, xp: Any) -> Any:
    """Booleans [batch, heads, rows, keys] of a tile: True where the weight survives."""
    start, stop = at.k_start, at.k_stop
    first = start // 4
    group = xp.arange(first, (stop + 3) // 4, dtype=xp.int64, device=at.k_pos.device)
    words = philox((group, at.row, at.head, at.batch), seed)
    words = xp.stack(xp.broadcast_arrays(*words), axis=-1)  # [B, H, M, groups, 4]
    words = xp.reshape(words, (*words.shape[:3], 4 * group.shape[0]))
    words = words[..., start - 4 * first : stop - 4 * first]
    return words >= threshold(dropout_p)


def threshold(dropout_p: float) -> int:
    """A weight is dropped where its 32-bit word lies under this."""
    return round(dropout_p * 2**32)
