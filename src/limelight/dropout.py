"""Which attention weights dropout keeps: a pure function of the seed and of the weight's place.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator
of Triton's and cuRAND's. The counter is (j // 4, i, head, batch), the key the 64-bit seed; word
j % 4 of the four that come out belongs to key j. So a seed drops the same weights on every backend,
with every tile size, on every device.
"""

from __future__ import annotations

from typing import Any

from limelight.tile import Tile, device_of

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


def philox_32(counter: tuple[Any, Any, Any, Any], seed: Any, xp: Any) -> tuple[Any, ...]:
    """The same in uint32 arrays, for a library without 64-bit integers.

    counter: four integer arrays. seed: a number, or an integer array of up to 32 bits.
    """

    def word(number: int) -> Any:
        return xp.asarray(number & _LOW, dtype=xp.uint32)

    def product(factor: Any, constant: int) -> tuple[Any, Any]:
        """The high and the low word, from products of 16 bits by 16."""
        high, low = factor >> 16, factor & 0xFFFF
        one = high * (constant & 0xFFFF) + (low * (constant & 0xFFFF) >> 16)
        two = low * (constant >> 16) + (one & 0xFFFF)
        return high * (constant >> 16) + (one >> 16) + (two >> 16), factor * word(constant)

    if isinstance(seed, int):
        k0, k1 = word(seed), word(seed >> 32)
    else:
        k0 = xp.astype(seed, xp.uint32)
        k1 = xp.where(seed < 0, word(_LOW), word(0))
    c0, c1, c2, c3 = (xp.astype(each, xp.uint32) for each in counter)
    for _ in range(10):
        high_a, low_a = product(c0, _ROUND_A)
        high_b, low_b = product(c2, _ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = k0 + word(_KEY_A), k1 + word(_KEY_B)
    return c0, c1, c2, c3


def dropped(at: Tile, seed: Any, dropout_p: float, xp: Any) -> Any:
    """Booleans [batch, heads, rows, keys] of a tile: True where the weight is dropped."""
    start, count = at.k_start, at.k_pos.shape[3]
    first = start // 4
    groups = (start + count + 3) // 4 - first if isinstance(start, int) else count // 4 + 2
    group = first + xp.arange(groups, dtype=xp.int64, device=device_of(at.k_pos))
    counter = (group, at.row, at.head, at.batch)
    limit: Any = threshold(dropout_p)
    if str(group.dtype) == "int32":  # JAX, unless it is told to use more bits
        words = philox_32(counter, seed, xp)
        # Where everything is dropped, what survives is multiplied by 0 besides.
        limit = xp.asarray(min(limit, _LOW), dtype=xp.uint32)
    else:
        words = philox(counter, seed)
    each = xp.stack([word < limit for word in words], axis=-1)  # [B, H, M, groups, 4]
    each = xp.reshape(each, (*each.shape[:3], 4 * groups))
    begin = start - 4 * first
    if isinstance(start, int):
        return each[..., begin : begin + count]
    return xp.take(each, begin + xp.arange(count), axis=-1)


def threshold(dropout_p: float) -> int:
    """A weight is dropped where its 32-bit word lies under this."""
    return round(dropout_p * 2**32)


def rescale(dropout_p: float) -> float:
    """What the weights that survive are multiplied by, so that their expectation stays."""
    return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
