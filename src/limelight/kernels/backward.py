"""The backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2), in two kernels without atomics.

`key_gradients` keeps a tile of keys and walks the queries that see it; `query_gradient` keeps a
tile of queries and walks its keys. Each recomputes the weights, seven products a tile instead of
five, and each writes what it owns once: gradients repeat bit for bit. Axes: M queries and N keys of
a tile, D head_dim, E value_dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels import dropout, ranges
from limelight.kernels.forward import Keys, program_tile
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
from limelight.kernels.row_numbers import ROW_NUMBERS, load_row_numbers
from limelight.kernels.scores import (
    d_products_of,
    d_scores_of,
    hide_past_end,
    matrix_of,
    place,
    scores_of,
    weights_of,
)
from limelight.kernels.tiles import head_of, is_given, padded, store_rows

SLOPE_ROWS = tl.constexpr(16)  # that any tile of queries is a multiple of


class Rows(NamedTuple):
    """What a walk over queries reads: one head of queries and what belongs to its rows."""

    query: Any
    d_out: Any
    numbers: Any  # see row_numbers.py


class KeyGradients(NamedTuple):
    d_key: Any  # [N, D], not yet scaled
    d_value: Any  # [N, E]


class QuerySums(NamedTuple):
    d_query: Any  # [M, D], not yet scaled
    biases: Any  # of each bias, what its gradient is made of, summed over keys; see _no_sums


@triton.jit
def rows_of(query, d_out, row_numbers, unit, strides, matrix, sizes):
    """The Rows of one head."""
    batch, head = matrix.batch, matrix.head
    first = (batch.to(tl.int64) * sizes.q_heads + head) * sizes.q_len
    return Rows(
        operand(query, strides.query, batch, head, unit.query),
        operand(d_out, strides.d_out, batch, head, unit.d_out),
        row_numbers + first * ROW_NUMBERS,
    )


@triton.jit
def key_gradients(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, units,
    d_key, d_value,
    strides, sizes, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """d_key [B, G, N, D] and d_value [B, G, N, E]; either may be null. Grid: tiles of keys * G * B.

    Scores are kept transposed, [N, M], unless a bias needs them upright: the weights then feed
    d_value and d_key from registers.
    """
    tiles = tl.cdiv(sizes.kv_len, TILE_N)
    first_key = tl.program_id(0) % tiles * TILE_N
    kv_heads = sizes.q_heads // sizes.group
    batches = tl.num_programs(0) // (tiles * kv_heads)
    batch = tl.program_id(0) // tiles % batches
    kv_head = tl.program_id(0) // tiles // batches
    unit = units_of(units, batch, kv_head, sizes)
    if is_elsewhere(unit, options):
        return
    k_tile = load(
        operand(key, strides.key, batch, kv_head, unit.key), first_key, 0, sizes.kv_len,
        HEAD_DIM, TILE_N, True, options,
    )  # [N, D]  # fmt: skip
    v_tile = load(
        operand(value, strides.value, batch, kv_head, unit.value), first_key, 0, sizes.kv_len,
        VALUE_DIM, TILE_N, True, options,
    )  # [N, E]  # fmt: skip
    seed = dropout.seed_of(seeds, numbers)
    sums = _sum_queries(
        query, d_out, row_numbers, query_starts, k_tile, v_tile, first_key, kv_head, batch, unit,
        masks, biases, seed, strides, sizes, numbers, options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
        CAREFUL=False,
    )  # fmt: skip
    if options.hides:
        if no_number_in(sums.d_key) | no_number_in(sums.d_value):
            sums = _sum_queries(
                query, d_out, row_numbers, query_starts, k_tile, v_tile, first_key, kv_head, batch,
                unit, masks, biases, seed, strides, sizes, numbers, options, HEAD_DIM, VALUE_DIM,
                TILE_M, TILE_N, CAREFUL=True,
            )  # fmt: skip
    stop = tl.where(is_given(d_key), sizes.kv_len, 0)
    d_key_head = head_of(d_key, strides.d_key, batch, kv_head)
    d_key_tile = sums.d_key * numbers.scale
    store_rows(d_key_head, strides.d_key.row, first_key, stop, d_key_tile, HEAD_DIM, TILE_N)
    stop = tl.where(is_given(d_value), sizes.kv_len, 0)
    d_value_head = head_of(d_value, strides.d_value, batch, kv_head)
    store_rows(d_value_head, strides.d_value.row, first_key, stop, sums.d_value, VALUE_DIM, TILE_N)


@triton.jit
def _sum_queries(
    query, d_out, row_numbers, query_starts, k_tile, v_tile, first_key, kv_head, batch, unit, masks,
    biases, seed, strides, sizes, numbers, options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The sums over all queries that see a tile of keys. CAREFUL: see ranges.py."""
    sums = KeyGradients(
        tl.zeros([TILE_N, padded(HEAD_DIM)], tl.float32),
        tl.zeros([TILE_N, padded(VALUE_DIM)], tl.float32),
    )
    for head in tl.range(kv_head * sizes.group, (kv_head + 1) * sizes.group):
        matrix = matrix_of(batch, head, query_starts, sizes, numbers)
        rows = rows_of(query, d_out, row_numbers, unit, strides, matrix, sizes)
        stop_key = min(first_key + TILE_N, sizes.kv_len)
        walk = ranges.queries_of(first_key, stop_key, masks, matrix, TILE_M, ALL_PARTIAL=CAREFUL)
        for part in tl.range(0, ranges.parts_of(walk, options)):
            full, partial = ranges.query_tiles(
                part, walk, first_key, masks, matrix, options, TILE_M, TILE_N, ALL_PARTIAL=CAREFUL
            )
            if not CAREFUL:
                bits = full.bits
                for i in tl.range(0, full.count):
                    q_tile, bits = ranges.next_full(full, i, bits, options)
                    sums = _add_queries(
                        sums, k_tile, v_tile, first_key, q_tile * TILE_M, rows, walk, matrix, masks,
                        biases, seed, numbers, options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
                        PARTIAL=False,
                    )  # fmt: skip
            bits = partial.bits
            for i in tl.range(0, partial.count):
                q_tile, bits = ranges.next_partial(partial, walk, i, bits, options)
                sums = _add_queries(
                    sums, k_tile, v_tile, first_key, q_tile * TILE_M, rows, walk, matrix, masks,
                    biases, seed, numbers, options, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
                    PARTIAL=True,
                )  # fmt: skip
    return sums


@triton.jit
def _add_queries(
    sums, k_tile, v_tile, first_key, first_row, rows, walk, matrix, masks, biases, seed, numbers,
    options,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """The sums after one more tile of queries."""
    q_tile = load(
        rows.query, first_row, 0, matrix.q_len, HEAD_DIM, TILE_M, PARTIAL, options
    )  # [M, D]
    d_out_tile = load(
        rows.d_out, first_row, 0, matrix.q_len, VALUE_DIM, TILE_M, PARTIAL, options
    )  # [M, E]
    row = first_row + tl.arange(0, TILE_M)
    shift, delta = load_row_numbers(rows.numbers, first_row, matrix.q_len, TILE_M, PARTIAL)
    if options.upright:
        row, shift, delta = row[:, None], shift[:, None], delta[:, None]
    else:
        row, shift, delta = row[None, :], shift[None, :], delta[None, :]
    products = _of_tile(q_tile, k_tile, options)
    # Made early, d_weights leave d_value's product to run beside what follows; halves have too few
    # registers for that.
    if options.precision != "fp16x3":
        d_weights = _of_tile(d_out_tile, v_tile, options)
    at = place(
        matrix, q_tile, first_row, first_key, first_key - first_row, TILE_M, TILE_N, PARTIAL,
        TRANSPOSED=not options.upright,
    )  # fmt: skip
    scores, saturation = scores_of(products, at, masks, biases, numbers, options, PARTIAL)
    if PARTIAL:
        scores = hide_past_end(scores, row, matrix.q_len)
    weights = weights_of(scores, shift, numbers, options)
    kept = weights
    if options.dropout:
        kept = _dropped(weights, seed, matrix, first_row, first_key, numbers, options)
    d_value = _add_to_keys(kept, d_out_tile, sums.d_value, options)
    if options.precision == "fp16x3":
        d_weights = _of_tile(d_out_tile, v_tile, options)
    if options.dropout:
        d_weights = _dropped(d_weights, seed, matrix, first_row, first_key, numbers, options)
    d_scores = d_scores_of(weights, d_weights, delta, PARTIAL)
    d_products = d_products_of(d_scores, saturation, options)
    d_key = _add_to_keys(d_products, q_tile, sums.d_key, options)
    return KeyGradients(d_key, d_value)


@triton.jit
def _of_tile(of_queries, of_keys, options):
    """The products of rows of both, [M, N] where upright, else [N, M]."""
    if options.upright:
        products = dot(of_queries, transposed(of_keys, options), options)
    else:
        products = dot(of_keys, transposed(of_queries, options), options)
    return products


@triton.jit
def _add_to_keys(of_scores, of_queries, acc, options):
    """acc and what the queries' rows, times these numbers, add to each key."""
    if options.upright:
        if options.precision != "fp16x3":
            of_scores = of_scores.to(of_queries.dtype)
        of_scores = tl.trans(of_scores)
    return add_dot(of_scores, of_queries, acc, options)


@triton.jit
def _dropped(weights, seed, matrix, first_row, first_key, numbers, options):
    if options.upright:
        kept = dropout.apply(weights, seed, matrix, first_row, first_key, numbers)
    else:
        kept = dropout.apply_transposed(weights, seed, matrix, first_row, first_key, numbers)
    return kept


@triton.jit
def query_gradient(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, units,
    d_query, slope_sums, d_biases,
    strides, sizes, numbers, options, adding,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """d_query [B, H, M, D], which may be null. Grid: tiles of queries * H * B.

    adding: of each bias, whether its gradient is made here, and how. slope_sums [biases, B, H,
    parts] float32 takes the sum of every SLOPE_ROWS rows of a number per head; d_biases: of each
    bias, the same NamedTuple around its tensors' gradients, which take the rows.
    """
    tile, head, batch = program_tile(sizes, TILE_M)
    kv_head = head // sizes.group
    unit = units_of(units, batch, kv_head, sizes)
    if is_elsewhere(unit, options):
        return
    matrix = matrix_of(batch, head, query_starts, sizes, numbers)
    rows = rows_of(query, d_out, row_numbers, unit, strides, matrix, sizes)
    first_row = tile * TILE_M
    row = first_row + tl.arange(0, TILE_M)
    stop_row = min(first_row + TILE_M, sizes.q_len)
    q_tile = load(rows.query, first_row, 0, sizes.q_len, HEAD_DIM, TILE_M, True, options)  # [M, D]
    d_out_tile = load(
        rows.d_out, first_row, 0, sizes.q_len, VALUE_DIM, TILE_M, True, options
    )  # [M, E]
    shift, delta = load_row_numbers(rows.numbers, first_row, sizes.q_len, TILE_M, BOUNDED=True)
    keys = Keys(
        operand(key, strides.key, batch, kv_head, unit.key),
        operand(value, strides.value, batch, kv_head, unit.value),
    )
    seed = dropout.seed_of(seeds, numbers)
    sums = _sum_keys(
        q_tile, d_out_tile, shift, delta, row, first_row, stop_row, keys, matrix, masks, biases,
        seed, numbers, options, adding, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, CAREFUL=False,
    )  # fmt: skip
    if options.gaps:
        if no_number_in(sums.d_query):
            sums = _sum_keys(
                q_tile, d_out_tile, shift, delta, row, first_row, stop_row, keys, matrix, masks,
                biases, seed, numbers, options, adding, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N,
                CAREFUL=True,
            )  # fmt: skip
    stop = tl.where(is_given(d_query), sizes.q_len, 0)
    d_query_head = head_of(d_query, strides.d_query, batch, head)
    d_query_tile = sums.d_query * numbers.scale
    store_rows(d_query_head, strides.d_query.row, first_row, stop, d_query_tile, HEAD_DIM, TILE_M)
    for i in tl.static_range(len(biases)):
        if adding.head[i]:
            parts = tl.cdiv(sizes.q_len, SLOPE_ROWS)
            part = first_row // SLOPE_ROWS + tl.arange(0, TILE_M // SLOPE_ROWS)
            matrices = tl.num_programs(0) // tl.cdiv(sizes.q_len, TILE_M)
            this = i * matrices + batch * sizes.q_heads + head
            sums_of_rows = tl.reshape(sums.biases[i], [TILE_M // SLOPE_ROWS, SLOPE_ROWS])
            places = slope_sums + tl.cast(this, tl.int64) * parts + part
            tl.store(places, tl.sum(sums_of_rows, 1), mask=part < parts)
        elif adding.rows[i]:
            d_biases[i].bias.store_rows(sums.biases[i], row, matrix, d_biases[i].bias)


@triton.jit
def _sum_keys(
    q_tile, d_out_tile, shift, delta, row, first_row, stop_row, keys, matrix, masks, biases, seed,
    numbers, options, adding,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The sums over all keys that a tile of queries sees. CAREFUL: see ranges.py."""
    q_start = matrix.query_start + first_row
    walk = ranges.keys_of(
        q_start, matrix.query_start + stop_row, masks, matrix, TILE_N, ALL_PARTIAL=CAREFUL
    )
    sums = QuerySums(
        tl.zeros([TILE_M, padded(HEAD_DIM)], tl.float32), _no_sums(biases, adding, TILE_M, TILE_N)
    )
    for part in tl.range(0, ranges.parts_of(walk, options)):
        full, partial = ranges.key_tiles(
            part, walk, q_start, masks, matrix, options, TILE_M, TILE_N, ALL_PARTIAL=CAREFUL
        )
        if not CAREFUL:
            bits = full.bits
            for i in tl.range(0, full.count):
                k_tile, bits = ranges.next_full(full, i, bits, options)
                sums = _add_keys(
                    sums, q_tile, d_out_tile, shift, delta, row, first_row, k_tile * TILE_N, keys,
                    walk, matrix, masks, biases, seed, numbers, options, adding, HEAD_DIM,
                    VALUE_DIM, TILE_N, PARTIAL=False, CAREFUL=False,
                )  # fmt: skip
        bits = partial.bits
        for i in tl.range(0, partial.count):
            k_tile, bits = ranges.next_partial(partial, walk, i, bits, options)
            sums = _add_keys(
                sums, q_tile, d_out_tile, shift, delta, row, first_row, k_tile * TILE_N, keys, walk,
                matrix, masks, biases, seed, numbers, options, adding, HEAD_DIM, VALUE_DIM, TILE_N,
                PARTIAL=True, CAREFUL=CAREFUL,
            )  # fmt: skip
    return sums


@triton.jit
def _add_keys(
    sums, q_tile, d_out_tile, shift, delta, row, first_row, first_key, keys, walk, matrix, masks,
    biases, seed, numbers, options, adding,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_N: tl.constexpr, PARTIAL: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The sums after one more tile of keys."""
    k_tile = load(
        keys.key, first_key, walk.low, walk.high, HEAD_DIM, TILE_N, PARTIAL, options
    )  # [N, D]
    v_tile = load(
        keys.value, first_key, walk.low, walk.high, VALUE_DIM, TILE_N, PARTIAL, options
    )  # [N, E]
    products = dot(q_tile, transposed(k_tile, options), options)  # [M, N]
    d_weights = dot(d_out_tile, transposed(v_tile, options), options)  # [M, N]
    at = place(
        matrix, q_tile, first_row, first_key, first_key - first_row, row.shape[0], TILE_N, PARTIAL
    )
    scores, saturation = scores_of(products, at, masks, biases, numbers, options, PARTIAL)
    if PARTIAL:
        scores = hide_past_end(scores, at.k_pos, matrix.kv_len)
    weights = weights_of(scores, shift[:, None], numbers, options)
    if options.dropout:
        d_weights = dropout.apply(d_weights, seed, matrix, first_row, first_key, numbers)
    d_scores = d_scores_of(weights, d_weights, delta[:, None], PARTIAL)
    bias_sums = _add_sums(sums.biases, d_scores, at, biases, options, adding)
    if CAREFUL:
        seen = (weights != 0) & (row < matrix.q_len)[:, None]
        k_tile = zero_unseen(k_tile, seen, options)
    d_products = d_products_of(d_scores, saturation, options)
    d_query = add_dot(d_products, k_tile, sums.d_query, options)  # [M, D]
    for i in tl.static_range(len(biases)):
        if options.reading[i]:
            d_query = biases[i].bias.add_to_query(
                d_query, d_scores, at, biases[i].bias, options.precision
            )
    return QuerySums(d_query, bias_sums)


@triton.jit
def _no_sums(biases, adding, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The sums before the first tile: of a number per head, its slope times d_scores, [ROWS]; of
    rows, what the bias says."""
    sums = ()
    for i in tl.static_range(len(biases)):
        if adding.head[i]:
            sums = sums + (tl.zeros([ROWS], tl.float32),)
        elif adding.rows[i]:
            sums = sums + (biases[i].bias.no_rows(biases[i].bias, ROWS, KEYS),)
        else:
            sums = sums + (0.0,)
    return sums


@triton.jit
def _add_sums(before, d_scores, at, biases, options, adding):
    sums = ()
    for i in tl.static_range(len(biases)):
        if adding.head[i]:
            part = tl.sum(d_scores * biases[i].slope(at, biases[i]), 1)
            sums = sums + (before[i] + part,)
        elif adding.rows[i]:
            own = biases[i].bias.add_rows(
                before[i], d_scores, at, biases[i].bias, options.precision
            )
            sums = sums + (own,)
        else:
            sums = sums + (before[i],)
    return sums
