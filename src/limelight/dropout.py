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
    for round_ in range(10):
        # Products of two 32-bit words wrap around in int64, which leaves all 64 bits right.
        if round_ < 2:  # the words still vary along few axes only
            a, b = c0 * _ROUND_A, c2 * _ROUND_B
            c0, c2 = ((b >> 32) ^ c1 ^ k0) & _LOW, ((a >> 32) ^ c3 ^ k1) & _LOW
            c1, c3 = b & _LOW, a & _LOW
        else:  # in place, which halves the time
            if round_ == 2:
                full = c0 + c1 + c2 + c3
                c0, c1, c2, c3 = (word + (full & 0) for word in (c0, c1, c2, c3))
            c0 *= _ROUND_A
            c2 *= _ROUND_B
            c1 ^= c2 >> 32
            c1 ^= k0
            c1 &= _LOW
            c3 ^= c0 >> 32
            c3 ^= k1
            c3 &= _LOW
            c0 &= _LOW
            c2 &= _LOW
            c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + _KEY_A) & _LOW, (k1 + _KEY_B) & _LOW
    return c0, c1, c2, c3


def dropped(at: Tile, seed: Any, dropout_p: float, xp: Any) -> Any:
    """Booleans [batch, heads, rows, keys] of a tile: True where the weight is dropped."""
    start, stop = at.k_start, at.k_stop
    first = start // 4
    group = xp.arange(first, (stop + 3) // 4, dtype=xp.int64, device=at.k_pos.device)
    words = philox((group, at.row, at.head, at.batch), seed)
    limit = threshold(dropout_p)
    each = xp.stack([word < limit for word in words], axis=-1)  # [B, H, M, groups, 4]
    each = xp.reshape(each, (*each.shape[:3], 4 * group.shape[0]))
    return each[..., start - 4 * first : stop - 4 * first]


def threshold(dropout_p: float) -> int:
    """A weight is dropped where its 32-bit word lies under this."""
    return round(dropout_p * 2**32)


def rescale(dropout_p: float) -> float:
    """What the weights that survive are multiplied by, so that their expectation stays."""
    return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
