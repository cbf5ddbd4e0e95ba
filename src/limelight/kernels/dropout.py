"""Which weights dropout keeps, as `limelight.dropout` says, on a tile."""

import triton
import triton.language as tl

from limelight.kernels.tiles import load_or


@triton.jit
def seed_of(seeds, numbers):
    return load_or(seeds, 0, numbers.seed).to(tl.int64)


@triton.jit
def apply(weights, seed, matrix, first_row, first_key, numbers):
    """weights [M, N], rescaled where kept and zero where dropped. first_key: a multiple of four."""
    ROWS: tl.constexpr = weights.shape[0]
    KEYS: tl.constexpr = weights.shape[1]
    words = _words(seed, matrix, first_row, first_key, ROWS, KEYS)
    words = tl.reshape(words, [ROWS, KEYS])
    return _scaled(weights, words, numbers)


@triton.jit
def apply_transposed(weights, seed, matrix, first_row, first_key, numbers):
    """The same for weights [N, M]."""
    ROWS: tl.constexpr = weights.shape[1]
    KEYS: tl.constexpr = weights.shape[0]
    words = _words(seed, matrix, first_row, first_key, ROWS, KEYS)
    words = tl.reshape(tl.permute(words, (1, 2, 3, 0)), [KEYS, ROWS])
    return _scaled(weights, words, numbers)


@triton.jit
def _scaled(weights, words, numbers):
    return tl.where(words < numbers.drop_below.to(tl.uint32), 0.0, weights * numbers.keep_scale)


@triton.jit
def _words(seed, matrix, first_row, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Random words [ROWS, KEYS / 4, 2, 2]: a call of the generator serves four keys in a row."""
    row = first_row + tl.arange(0, ROWS)[:, None] + tl.zeros([ROWS, KEYS // 4], tl.int32)
    group = first_key // 4 + tl.arange(0, KEYS // 4)[None, :] + tl.zeros_like(row)
    head = matrix.head + tl.zeros_like(row)
    batch = matrix.batch + tl.zeros_like(row)
    w0, w1, w2, w3 = tl.philox(seed, group, row, head, batch)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))
