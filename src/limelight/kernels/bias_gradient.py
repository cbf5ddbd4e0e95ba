"""Gradients of biases whose entries many scores share, without a matrix of scores in memory.

A dense bias may be broadcast: then the same tile of every batch element shares its entries, or of
every head, or a whole row or column of tiles. A bias of offsets is the same along every diagonal. A
program takes a tile of the bias, walks the tiles of scores that share it (its orbit), adds their
gradients in registers and folds them once. What programs leave is added in a fixed order, so that
gradients repeat bit for bit.
"""

import triton
import triton.language as tl

from limelight.kernels import dropout, ranges
from limelight.kernels.backward import rows_of
from limelight.kernels.products import Units, dot, load, no_number_in, operand, transposed
from limelight.kernels.row_numbers import load_row_numbers
from limelight.kernels.scores import (
    LOG2E,
    d_scores_of,
    matrix_of,
    place,
    scores_of,
    weights_of,
)
from limelight.kernels.tiles import head_of, load_or


@triton.jit
def dense_gradient(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers,
    gradient,
    strides, gradient_strides, sizes, numbers, options, own, orbit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """gradient: of the bias's shape. Grid: the bias's own batches * heads * row tiles * key tiles.

    own and orbit count, of each dimension, the bias's entries (or tiles of them) and the scores'
    that share one; orbit also says whether rows and keys are shared. Where both have batches, the
    gradient is partial: each of its own is the sum of orbit.batches.
    """
    program = tl.program_id(0)
    own_key = program % own.key_tiles
    own_row = program // own.key_tiles % own.row_tiles
    own_head = program // own.key_tiles // own.row_tiles % own.heads
    own_batch = program // own.key_tiles // own.row_tiles // own.heads
    first_batch = own_batch * orbit.batches
    batches = min(orbit.batches, orbit.all_batches - first_batch)
    steps = batches * orbit.heads * orbit.row_tiles * orbit.key_tiles
    is_full = steps < 0
    if not (orbit.shares_rows or orbit.shares_keys):
        visible, is_full = _visibility(
            own_row * TILE_M, own_key * TILE_N, first_batch, own_head, batches, query_starts, masks,
            sizes, numbers, TILE_M, TILE_N,
        )  # fmt: skip
        steps = tl.where(visible, steps, 0)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    if is_full:
        acc = _orbit(
            query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, own_row,
            own_key, own_head, first_batch, steps, strides, sizes, numbers, options, orbit,
            HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, PARTIAL=False,
        )  # fmt: skip
        if options.hides:
            is_full = not no_number_in(acc)
    if not is_full:
        acc = _orbit(
            query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, own_row,
            own_key, own_head, first_batch, steps, strides, sizes, numbers, options, orbit,
            HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, PARTIAL=True,
        )  # fmt: skip
    row = own_row * TILE_M + tl.arange(0, TILE_M)[:, None]
    key_place = own_key * TILE_N + tl.arange(0, TILE_N)[None, :]
    if orbit.shares_rows:
        acc = tl.sum(acc, 0, keep_dims=True)
        row = tl.zeros([1, 1], tl.int32)
    if orbit.shares_keys:
        acc = tl.sum(acc, 1, keep_dims=True)
        key_place = tl.zeros([1, 1], tl.int32)
    first = head_of(gradient, gradient_strides, own_batch, own_head)
    places = first + row.to(tl.int64) * gradient_strides.row
    places = places + key_place.to(tl.int64) * gradient_strides.key
    inside = (row < sizes.q_len) & (key_place < sizes.kv_len)
    tl.store(places, acc.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def _visibility(
    first_row, first_key, first_batch, head, batches, query_starts, masks, sizes, numbers,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Whether any of these batch elements may see some of the tile, and whether each sees all of
    it. No range asks the head."""
    stop_row = min(first_row + TILE_M, sizes.q_len)
    visible, is_full = first_row < 0, first_row + TILE_M <= sizes.q_len
    for batch in range(first_batch, first_batch + batches):
        matrix = matrix_of(batch, head, query_starts, sizes, numbers)
        start, full_start, full_stop, stop = ranges.key_range(
            matrix.query_start + first_row, matrix.query_start + stop_row, masks, matrix
        )
        visible = visible | ((first_key < stop) & (first_key + TILE_N > start))
        is_full = is_full & (first_key >= full_start) & (first_key + TILE_N <= full_stop)
    return visible, is_full


@triton.jit
def _orbit(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, own_row, own_key,
    own_head, first_batch, steps, strides, sizes, numbers, options, orbit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of the scores of the tiles that share one of the bias, [M, N]."""
    seed = dropout.seed_of(seeds, numbers)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in tl.range(0, steps):
        first_key = (own_key + step % orbit.key_tiles) * TILE_N
        first_row = (own_row + step // orbit.key_tiles % orbit.row_tiles) * TILE_M
        step = step // orbit.key_tiles // orbit.row_tiles
        matrix = matrix_of(
            first_batch + step // orbit.heads,
            own_head + step % orbit.heads,
            query_starts,
            sizes,
            numbers,
        )
        acc += gradient_of_scores(
            query, key, value, d_out, row_numbers, masks, biases, first_row, first_key,
            first_key - first_row, matrix, seed, strides, sizes, numbers, options, 0.0, HEAD_DIM,
            VALUE_DIM, TILE_M, TILE_N, PARTIAL, ANYWHERE=False,
        )  # fmt: skip
    return acc


@triton.jit
def key_ranges(query_starts, masks, found, sizes, numbers, options, TILE_M: tl.constexpr):
    """found [B, tiles, 4] int32: where the keys that a tile of queries may see start, where those
    that all of it sees start and stop, and where the first stop. Grid: tiles * B.
    """
    tiles = tl.cdiv(sizes.q_len, TILE_M)
    tile, batch = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    matrix = matrix_of(batch, 0, query_starts, sizes, numbers)  # no range asks the head
    first_row = tile * TILE_M
    stop_row = min(first_row + TILE_M, sizes.q_len)
    start, full_start, full_stop, stop = ranges.key_range(
        matrix.query_start + first_row, matrix.query_start + stop_row, masks, matrix
    )
    # Rows past the end are in no full tile.
    if options.hides:
        full_stop = full_start
    full_stop = tl.where(first_row + TILE_M > sizes.q_len, full_start, full_stop)
    found += tl.program_id(0) * 4
    tl.store(found, tl.cast(start, tl.int32))
    tl.store(found + 1, tl.cast(full_start, tl.int32))
    tl.store(found + 2, tl.cast(full_stop, tl.int32))
    tl.store(found + 3, tl.cast(stop, tl.int32))


@triton.jit
def offset_gradient(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers,
    constant, varying, seen,
    windows,
    strides, sizes, numbers, options, diagonals,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradient for each offset of a key's index from a query's. TILE_M is at most TILE_N.

    A diagonal's tiles are those of N keys that begin at the same multiple of N from their first
    query. windows [parts, H, diagonals, 2, N] float32: what each holds of the N offsets that begin
    there, and of the N before. Grid: parts * H * diagonals, the longest first; a part is of
    diagonals.batches batch elements. constant and varying: the biases of offsets and the others.
    seen: from `key_ranges`.
    """
    part = tl.program_id(0) % diagonals.parts
    head = tl.program_id(0) // diagonals.parts % sizes.q_heads
    diagonal = outwards(tl.program_id(0) // diagonals.parts // sizes.q_heads, diagonals.count)
    offset = (diagonals.first + diagonal) * TILE_N
    first_batch = part * diagonals.batches
    # Along a diagonal these biases stay the same: the sum of exp2(score + bias - shift) * x is
    # exp2(bias - most) times that of exp2(score - shift + most) * x. Unless they span too much.
    matrix = matrix_of(first_batch, head, query_starts, sizes, numbers)
    column = tl.arange(0, TILE_N)
    after = _exponents(offset + column, constant, matrix)
    before = _exponents(offset - TILE_N + column, constant, matrix)
    reached = column > TILE_N - TILE_M
    most = max(tl.max(after, 0), tl.max(tl.where(reached, before, float("-inf")), 0))
    least = min(tl.min(after, 0), tl.min(tl.where(reached, before, float("inf")), 0))
    if most - least < 64:
        acc = _walk(
            query, key, value, query_starts, seeds, masks, varying, d_out, row_numbers, seen,
            strides, sizes, numbers, options, diagonals, first_batch, head, offset, most, HEAD_DIM,
            VALUE_DIM, TILE_M, TILE_N,
        )  # fmt: skip
        after, before = tl.exp2(after - most), tl.exp2(before - most)
    else:
        acc = _walk(
            query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, seen,
            strides, sizes, numbers, options, diagonals, first_batch, head, offset, 0.0, HEAD_DIM,
            VALUE_DIM, TILE_M, TILE_N,
        )  # fmt: skip
        after, before = column * 0 + 1.0, column * 0 + 1.0
    # Row i turned left by i: a column then holds the scores of one offset, and of that less N.
    source = column[None, :] + tl.arange(0, TILE_M)[:, None]
    turned = tl.gather(acc, source % TILE_N, 1)
    after *= tl.sum(tl.where(source < TILE_N, turned, 0.0), 0)
    before *= tl.sum(tl.where(source < TILE_N, 0.0, turned), 0)
    window = (part * sizes.q_heads + head) * diagonals.count + diagonal
    window = windows + window.to(tl.int64) * 2 * TILE_N
    tl.store(window + column, after)
    tl.store(window + TILE_N + column, tl.where(reached, before, 0.0))


@triton.jit
def _exponents(offset, biases, matrix):
    """Biases of offsets (of indices), as exponents of two."""
    offset -= matrix.query_start
    total = offset * 0.0
    for i in tl.static_range(len(biases)):
        total += biases[i].bias.offset_fragment(offset, matrix, biases[i].bias)
    return total * LOG2E


@triton.jit
def _walk(
    query, key, value, query_starts, seeds, masks, biases, d_out, row_numbers, seen,
    strides, sizes, numbers, options, diagonals, first_batch, head, offset, most,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of the scores of a diagonal's tiles, [M, N].

    most: how much greater their exponents are, for what is missing in the biases.
    """
    seed = dropout.seed_of(seeds, numbers)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for batch in tl.range(first_batch, min(first_batch + diagonals.batches, diagonals.all_batches)):
        matrix = matrix_of(batch, head, query_starts, sizes, numbers)
        walk = along(offset, seen, matrix, TILE_M, TILE_N)
        for tile in tl.range(walk.full_first, walk.full_last):
            acc += gradient_of_scores(
                query, key, value, d_out, row_numbers, masks, biases, tile * TILE_M,
                tile * TILE_M + offset, offset, matrix, seed, strides, sizes, numbers, options,
                most, HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, PARTIAL=False, ANYWHERE=False,
            )  # fmt: skip
        for i in tl.range(0, walk.partial_count):
            first_row = ranges.partial_tile(walk, i) * TILE_M
            acc += gradient_of_scores(
                query, key, value, d_out, row_numbers, masks, biases, first_row,
                first_row + offset, offset, matrix, seed, strides, sizes, numbers, options, most,
                HEAD_DIM, VALUE_DIM, TILE_M, TILE_N, PARTIAL=True, ANYWHERE=True,
            )  # fmt: skip
    return acc


@triton.jit
def outwards(place, count):
    """The diagonals in order of length: from the middle one to both sides."""
    half = (place + 1) // 2
    return (count - 1) // 2 + tl.where(place % 2 == 1, half, -half)


@triton.jit
def along(offset, seen, matrix, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The tiles of queries that may see keys of a diagonal, from the first to the last."""
    TILES: tl.constexpr = 256
    tiles = tl.cdiv(matrix.q_len, TILE_M)
    first, last, full_first, full_last, full_count = tiles, tiles * 0, tiles, tiles * 0, tiles * 0
    for start in tl.range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        inside = tile < tiles
        found = seen + (matrix.batch * tiles + tile) * 4
        first_key = tile * TILE_M + offset
        stop_key = first_key + TILE_N
        sees = stop_key > tl.load(found, mask=inside, other=2**30)
        sees = sees & (first_key < tl.load(found + 3, mask=inside, other=-(2**30)))
        full = sees & (first_key >= tl.load(found + 1, mask=inside, other=2**30))
        full = full & (stop_key <= tl.load(found + 2, mask=inside, other=-(2**30)))
        first = min(first, tl.min(tl.where(sees, tile, tiles)))
        last = max(last, tl.max(tl.where(sees, tile + 1, 0)))
        full_first = min(full_first, tl.min(tl.where(full, tile, tiles)))
        full_last = max(full_last, tl.max(tl.where(full, tile + 1, 0)))
        full_count += tl.sum(full.to(tl.int32))
    last = max(first, last)
    if full_count != full_last - full_first:  # with partial ones among them
        full_first, full_last = first, first
    partial_count = (last - first) - (full_last - full_first)
    return ranges.Walk(first, full_first, full_last, partial_count, 0, matrix.kv_len)


@triton.jit
def fold_offsets(
    windows, query_starts, bias,
    gradient,
    gradient_strides, sizes, numbers, diagonals, orbit,
    ENTRIES: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradient of a table, from what `offset_gradient` left.

    bias: a tuple of the one bias (bare, its functions would be lost in the loop). orbit.heads: how
    many share an entry. Grid: tiles of entries * its heads.
    """
    tiles = tl.cdiv(orbit.entries, ENTRIES)
    first_entry = tl.program_id(0) % tiles * ENTRIES
    own_head = tl.program_id(0) // tiles
    column = tl.arange(0, TILE_N)
    acc = tl.zeros([ENTRIES, TILE_N], tl.float32)
    lines = diagonals.count + 1  # of N offsets
    # Named stages, as Triton reads ahead in a loop without products on request only.
    for step in tl.range(0, diagonals.parts * orbit.heads * lines, num_stages=4):
        line, matrix = step % lines, step // lines
        part, head = matrix // orbit.heads, own_head * orbit.heads + matrix % orbit.heads
        window = (part * sizes.q_heads + head) * diagonals.count + line
        window = windows + window.to(tl.int64) * 2 * TILE_N + column
        own = tl.load(window - 2 * TILE_N, mask=(column >= 0) & (line > 0), other=0.0)
        after = (column >= 0) & (line < diagonals.count)
        after = tl.load(window + TILE_N, mask=after, other=0.0)
        start = load_or(query_starts, part, numbers.query_start).to(tl.int32)
        offset = (diagonals.first + line - 1) * TILE_N + column - start
        entry = bias[0].entry(offset, bias[0])
        if _some_in(entry, first_entry, ENTRIES):
            acc += _by_entry(own + after, entry, first_entry, ENTRIES)
    _store_entries(acc, first_entry, own_head, gradient, gradient_strides, orbit.entries)


@triton.jit
def fold_pairs(
    sums, query_starts, bias,
    gradient,
    gradient_strides, sizes, numbers, parts, orbit,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same from sums [parts, H, M, N] over the batch elements of each part.

    orbit.parts: how many have the same query_start.
    """
    tiles = tl.cdiv(orbit.entries, ENTRIES)
    first_entry = tl.program_id(0) % tiles * ENTRIES
    own_head = tl.program_id(0) // tiles
    acc = tl.zeros([ENTRIES, BLOCK], tl.float32)
    scores = sizes.q_len * sizes.kv_len
    for first_part in tl.range(0, parts.count, orbit.parts):
        start = load_or(query_starts, first_part, numbers.query_start).to(tl.int32)
        for first in tl.range(0, scores, BLOCK):
            index = first + tl.arange(0, BLOCK)
            q_pos, k_pos = start + index // sizes.kv_len, index % sizes.kv_len
            entry = bias[0].entry(q_pos, k_pos, bias[0])
            if _some_in(entry, first_entry, ENTRIES):
                values = tl.zeros([BLOCK], tl.float32)
                for step in tl.range(0, orbit.parts * orbit.heads, loop_unroll_factor=4):
                    part = first_part + step // orbit.heads
                    head = own_head * orbit.heads + step % orbit.heads
                    matrix = sums + (part * sizes.q_heads + head).to(tl.int64) * scores
                    values += tl.load(matrix + index, mask=index < scores, other=0.0)
                acc += _by_entry(values, entry, first_entry, ENTRIES)
    _store_entries(acc, first_entry, own_head, gradient, gradient_strides, orbit.entries)


@triton.jit
def _some_in(entry, first_entry, ENTRIES: tl.constexpr):
    return (tl.max(entry, 0) >= first_entry) & (tl.min(entry, 0) < first_entry + ENTRIES)


@triton.jit
def _by_entry(values, entry, first_entry, ENTRIES: tl.constexpr):
    """[ENTRIES, BLOCK]: each value in the row of its entry, if that is there."""
    row = first_entry + tl.arange(0, ENTRIES)
    return tl.where(entry[None, :] == row[:, None], values[None, :], 0.0)


@triton.jit
def _store_entries(acc, first_entry, head, gradient, strides, entries):
    entry = first_entry + tl.arange(0, acc.shape[0])
    places = gradient + head * strides.head + entry * strides.entry
    total = tl.sum(acc, 1).to(gradient.dtype.element_ty)
    tl.store(places, total, mask=entry < entries)


@triton.jit
def gradient_of_scores(
    query, key, value, d_out, row_numbers, masks, biases, first_row, first_key, offset,
    matrix, seed, strides, sizes, numbers, options, more,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    PARTIAL: tl.constexpr, ANYWHERE: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of scores, [M, N]; zero outside the matrix.

    more: added to the exponent of two that each weight is. ANYWHERE: see `place`.
    """
    unit = Units(0.0, 0.0, 0.0, 0.0)
    rows = rows_of(query, d_out, row_numbers, unit, strides, matrix, sizes)
    row = first_row + tl.arange(0, TILE_M)
    kv_head = matrix.head // sizes.group
    q_tile = load(
        rows.query, first_row, 0, sizes.q_len, HEAD_DIM, TILE_M, PARTIAL, options
    )  # [M, D]
    k_tile = load(
        operand(key, strides.key, matrix.batch, kv_head, 0.0), first_key, 0, sizes.kv_len,
        HEAD_DIM, TILE_N, PARTIAL, options,
    )  # [N, D]  # fmt: skip
    d_out_tile = load(
        rows.d_out, first_row, 0, sizes.q_len, VALUE_DIM, TILE_M, PARTIAL, options
    )  # [M, E]
    v_tile = load(
        operand(value, strides.value, matrix.batch, kv_head, 0.0), first_key, 0, sizes.kv_len,
        VALUE_DIM, TILE_N, PARTIAL, options,
    )  # [N, E]  # fmt: skip
    shift, delta = load_row_numbers(rows.numbers, first_row, sizes.q_len, TILE_M, PARTIAL)
    products = dot(q_tile, transposed(k_tile, options), options)  # [M, N]
    d_weights = dot(d_out_tile, transposed(v_tile, options), options)  # [M, N]
    key = first_key + tl.arange(0, TILE_N)
    at = place(
        matrix, q_tile, first_row, first_key, offset, TILE_M, TILE_N, PARTIAL, ANYWHERE=ANYWHERE
    )
    scores, _ = scores_of(products, at, masks, biases, numbers, options, PARTIAL)
    if PARTIAL:
        inside = ((key >= 0) & (key < matrix.kv_len))[None, :] & (row < matrix.q_len)[:, None]
        scores = tl.where(inside, scores, float("-inf"))
    weights = weights_of(scores, (shift - more)[:, None], numbers, options)
    if options.dropout:
        d_weights = dropout.apply(d_weights, seed, matrix, first_row, first_key, numbers)
    return d_scores_of(weights, d_weights, delta[:, None], PARTIAL)
