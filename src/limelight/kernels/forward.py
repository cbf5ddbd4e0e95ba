"""The forward: FlashAttention-2 (Dao, arXiv:2307.08691), one program for each tile of queries.

A program keeps its queries and walks the tiles of keys that they see: first the full ones, where no
mask is evaluated, then the partial ones. Axes: M queries and N keys of a tile, D head_dim, E
value_dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels import dropout, ranges, softmax
from limelight.kernels.products import (
    add_dot,
    dot,
    is_elsewhere,
    load,
    no_number_in,
    operand,
    transposed,
    units_of,
    zero_unseen,
)
from limelight.kernels.scores import (
    exponent_factor,
    hide_past_end,
    matrix_of,
    place,
    scores_of,
)
from limelight.kernels.tiles import head_of, is_given, load_or, padded, store_rows


class Keys(NamedTuple):
    """What the walk over keys reads: one head of keys and values, as Operands."""

    key: Any
    value: Any


@triton.jit
def forward(
    query, key, value, sinks, query_starts, seeds, masks, biases, units,
    out, lse,
    strides, sizes, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """out [B, H, M, E] in its own dtype, lse [B, H, M] float32, contiguous. Grid: tiles * H * B.

    sinks, query_starts, seeds and lse may be null. masks and biases: tuples, see masks/base.py and
    biases/base.py. strides, sizes, numbers, options: see plan.py.
    """
    tile, head, batch = program_tile(sizes, TILE_M)
    kv_head = head // sizes.group
    unit = units_of(units, batch, kv_head, sizes)
    if is_elsewhere(unit, options):
        return
    matrix = matrix_of(batch, head, query_starts, sizes, numbers)
    first_row = tile * TILE_M
    row = first_row + tl.arange(0, TILE_M)
    stop_row = min(first_row + TILE_M, sizes.q_len)
    q_tile = load(
        operand(query, strides.query, batch, head, unit.query), first_row, 0, sizes.q_len,
        HEAD_DIM, TILE_M, True, options,
    )  # [M, D]  # fmt: skip
    keys = Keys(
        operand(key, strides.key, batch, kv_head, unit.key),
        operand(value, strides.value, batch, kv_head, unit.value),
    )
    seed = dropout.seed_of(seeds, numbers)
    state = _attend_keys(
        q_tile, row, first_row, stop_row, keys, matrix, masks, biases, seed, numbers, options,
        HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, CAREFUL=False,
    )  # fmt: skip
    if options.gaps:
        if no_number_in(state.acc):
            state = _attend_keys(
                q_tile, row, first_row, stop_row, keys, matrix, masks, biases, seed, numbers,
                options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, CAREFUL=True,
            )  # fmt: skip
    sink = load_or(sinks, head, float("-inf")).to(tl.float32)
    out_tile, log_sum_exp = softmax.finish(state, sink)
    store_rows(
        head_of(out, strides.out, batch, head), strides.out.row, first_row, sizes.q_len, out_tile,
        VALUE_DIM, TILE_M,
    )  # fmt: skip
    lse_row = lse + (batch.to(tl.int64) * sizes.q_heads + head) * sizes.q_len + row
    tl.store(lse_row, log_sum_exp, mask=(row < sizes.q_len) & is_given(lse))


@triton.jit
def _attend_keys(
    q_tile, row, first_row, stop_row, keys, matrix, masks, biases, seed, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The softmax's state after all keys that a tile of queries sees. CAREFUL: see ranges.py."""
    q_start = matrix.query_start + first_row
    walk = ranges.keys_of(
        q_start, matrix.query_start + stop_row, masks, matrix, TILE_N, ALL_PARTIAL=CAREFUL
    )
    state = softmax.start(TILE_M, padded(VALUE_DIM))
    for part in tl.range(0, ranges.parts_of(walk, options)):
        full, partial = ranges.key_tiles(
            part, walk, q_start, masks, matrix, options, TILE_M, TILE_N, ALL_PARTIAL=CAREFUL
        )
        if not CAREFUL:
            bits = full.bits
            for i in tl.range(0, full.count):
                k_tile, bits = ranges.next_full(full, i, bits, options)
                state = _attend(
                    state, q_tile, row, first_row, k_tile * TILE_N, keys, walk, matrix, masks,
                    biases, seed, numbers, options, HEAD_DIM, VALUE_DIM, TILE_N, PARTIAL=False,
                    CAREFUL=False,
                )  # fmt: skip
        bits = partial.bits
        for i in tl.range(0, partial.count):
            k_tile, bits = ranges.next_partial(partial, walk, i, bits, options)
            state = _attend(
                state, q_tile, row, first_row, k_tile * TILE_N, keys, walk, matrix, masks, biases,
                seed, numbers, options, HEAD_DIM, VALUE_DIM, TILE_N, PARTIAL=True, CAREFUL=CAREFUL,
            )  # fmt: skip
    return state


@triton.jit
def _attend(
    state, q_tile, row, first_row, first_key, keys, walk, matrix, masks, biases, seed, numbers,
    options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_N: tl.constexpr, PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The softmax's state after one more tile of keys."""
    k_tile = load(
        keys.key, first_key, walk.low, walk.high, HEAD_DIM, TILE_N, PARTIAL, options
    )  # [N, D]
    products = dot(q_tile, transposed(k_tile, options), options)  # [M, N]
    at = place(
        matrix, q_tile, first_row, first_key, first_key - first_row, row.shape[0], TILE_N, PARTIAL
    )
    scores, _ = scores_of(products, at, masks, biases, numbers, options, PARTIAL)
    if PARTIAL:
        scores = hide_past_end(scores, at.k_pos, matrix.kv_len)
    state, weights = softmax.update(
        state, scores, exponent_factor(numbers, options), GUARDED=PARTIAL or options.hides
    )
    if options.dropout:
        weights = dropout.apply(weights, seed, matrix, first_row, first_key, numbers)
    v_tile = load(
        keys.value, first_key, walk.low, walk.high, VALUE_DIM, TILE_N, PARTIAL, options
    )  # [N, E]
    if CAREFUL:
        seen = (scores != float("-inf")) & (row < matrix.q_len)[:, None]
        v_tile = zero_unseen(v_tile, seen, options)
    acc = add_dot(weights, v_tile, state.acc, options)  # [M, E]
    return softmax.Softmax(state.row_max, state.row_sum, acc)


@triton.jit
def program_tile(sizes, TILE_M: tl.constexpr):
    """This program's tile of queries, head and batch element.

    The tiles of a head run side by side and share its keys in the L2 cache, last first: under a
    causal mask those have the most work. Then come the other batch elements, which may share a
    bias.
    """
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    batches = tl.num_programs(0) // (tiles * sizes.q_heads)
    batch = program // tiles % batches
    head = program // tiles // batches
    return tile, head, batch
