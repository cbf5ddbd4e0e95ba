"""The backward on Hopper: five products a tile, each made once.

After FlashAttention-3 (arXiv:2407.08608). docs/hopper.md draws the pipeline. Axes: M queries of a
tile; N keys of a tile, of which each consumer has R; D head_dim, E value_dim, both padded.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from limelight.kernels import ranges
from limelight.kernels.hopper.gluon_names import add_out, copy_in
from limelight.kernels.hopper.items import place_of
from limelight.kernels.hopper.layouts import operand, products_layout, rounded, widened
from limelight.kernels.hopper.rings import (
    await_empty,
    await_tile,
    descriptor,
    empty,
    fill,
    hand_over,
    padded,
    ring,
    ring_of,
    stage_of,
    tile_of,
    tiles_beside,
)
from limelight.kernels.scores import (
    d_products_of,
    d_scores_of,
    hide_past_end,
    matrix_of,
    place_offsets,
    scores_of,
    weights_of,
)
from limelight.kernels.tiles import head_of, is_given


class Sources(NamedTuple):
    """What the copy engine reads, and at last where it adds."""

    query: Any
    d_out: Any
    numbers: Any
    key: Any
    value: Any
    d_query: Any


class Rings(NamedTuple):
    query: Any
    d_out: Any  # these two arrive with the queries
    numbers: Any
    key: Any  # of one tile, as is the next
    value: Any
    d_scores: Any  # [STAGES, 1, 1, N, M], which both consumers fill and empty


class Target(NamedTuple):
    """Where a consumer's part of d_query goes: a place in shared memory, from there to sums."""

    place: Any
    sums: Any


class Item(NamedTuple):
    """A tile of keys of one matrix, for all query heads that share it."""

    first_key: Any
    batch: Any
    kv_head: Any


class Sums(NamedTuple):
    """What a consumer carries from one tile of queries to the next."""

    d_key: Any  # [R, D], not yet scaled, and without the last tile's part
    d_value: Any  # [R, E]
    d_scores: Any  # [R, M] of the last tile, rounded


class Before(NamedTuple):
    """Where the last tile of queries lay."""

    head: Any
    first_row: Any


@gluon.jit
def backward(query, key, value, d_out, numbers, d_query, d_key, d_value, strides, task):
    """d_key and d_value, in their own dtypes; either may be null.

    numbers [B, H, 2, M'] float32: shift and delta of the rows (row_numbers.py); M' is q_len,
    rounded up to a multiple of 64. d_query [B, H, M, D'] float32 is added to, not yet scaled; D' is
    head_dim, padded. Grid: any number of programs; together they take all items. strides: see
    arguments.py; task: see backward_plan.py.
    """
    sizes = task.sizes
    batches, kv_heads = task.order.batches, sizes.q_heads // sizes.group
    sources = Sources(
        descriptor(
            query, strides.query, batches, sizes.q_heads, sizes.q_len, task.cut.head_dim,
            task.cut.rows,
        ),
        descriptor(
            d_out, strides.d_out, batches, sizes.q_heads, sizes.q_len, task.cut.value_dim,
            task.cut.rows,
        ),
        _numbers_source(numbers, task),
        descriptor(
            key, strides.key, batches, kv_heads, sizes.kv_len, task.cut.head_dim, task.cut.keys
        ),
        descriptor(
            value, strides.value, batches, kv_heads, sizes.kv_len, task.cut.value_dim, task.cut.keys
        ),
        _d_query_sums(d_query, task),
    )  # fmt: skip
    queries = ring(sources.query, task.cut.stages, 2)
    rings = Rings(
        queries,
        tiles_beside(queries, sources.d_out),
        tiles_beside(queries, sources.numbers),
        ring(sources.key, 1, 2),
        ring(sources.value, 1, 2),
        _d_scores_ring(task, query.dtype.element_ty),
    )
    places = gl.allocate_shared_memory(
        gl.float32, [2] + sources.d_query.block_type.shape, sources.d_query.layout
    )
    sums = sources.d_query
    gl.warp_specialize(
        [
            (_consumer, (0, Target(places.index(0), sums), rings, d_key, d_value, strides, task)),
            (_consumer, (1, Target(places.index(1), sums), rings, d_key, d_value, strides, task)),
            (_producer, (sources, rings, task)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _numbers_source(numbers, task):
    BLOCK: gl.constexpr = [1, 1, 2, task.cut.rows]
    layout: gl.constexpr = gl.NVMMASharedLayout(0, 32, 4)  # a row lies as it is
    sizes = task.sizes
    row = (sizes.q_len + 63) // 64 * 64
    head = row.to(gl.int64) * 2
    return tma.make_tensor_descriptor(
        numbers,
        [task.order.batches, sizes.q_heads, 2, row],
        [head * sizes.q_heads, head, row, 1],
        BLOCK,
        layout,
    )


@gluon.jit
def _d_query_sums(d_query, task):
    """The sums of d_query, which consumers add to by parts of 64 rows."""
    DIM: gl.constexpr = padded(task.cut.head_dim)
    BLOCK: gl.constexpr = [1, 1, 64, _part_width(task.cut.head_dim, task.cut.rows)]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(BLOCK, gl.float32)
    sizes = task.sizes
    head = sizes.q_len.to(gl.int64) * DIM
    return tma.make_tensor_descriptor(
        d_query,
        [task.order.batches, sizes.q_heads, sizes.q_len, DIM],
        [head * sizes.q_heads, head, DIM, 1],
        BLOCK,
        layout,
    )


@gluon.constexpr_function
def _part_width(head_dim, rows):
    """Of a tile of d_query each consumer makes half: 64 of 128 rows, or half of the columns."""
    return padded(head_dim) // (1 if rows == 128 else 2)


@gluon.jit
def _d_scores_ring(task, DTYPE: gl.constexpr):
    SHAPE: gl.constexpr = [1, 1, task.cut.keys, task.cut.rows]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, DTYPE)
    return ring_of(gl.allocate_shared_memory(DTYPE, [2] + SHAPE, layout), 2, 2)


@gluon.jit
def _item(index, task):
    """The item at this index. First tiles first: under a causal mask they have the most work."""
    kv_heads = task.sizes.q_heads // task.sizes.group
    tiles = (task.sizes.kv_len + task.cut.keys - 1) // task.cut.keys
    tile, number = place_of(index, tiles, kv_heads, task.order)
    return Item(tile * task.cut.keys, number // kv_heads, number % kv_heads)


@gluon.jit
def _queries(item, head, task):
    """The matrix of scores of this query head, the tiles of queries that see the item's keys, and
    how many these are.

    Where the tile of keys goes past the end all count as partial, so that what is there is hidden.
    """
    sizes = task.sizes
    matrix = matrix_of(item.batch, head, task.query_starts, sizes, task.numbers)
    past_end = item.first_key + task.cut.keys > sizes.kv_len
    stop_key = min(item.first_key + task.cut.keys, sizes.kv_len)
    walk = ranges.queries_of(
        item.first_key, stop_key, task.masks, matrix, task.cut.rows, task.options.hides
    )
    full = gl.where(past_end, 0, walk.full_last - walk.full_first)
    count = walk.partial_count + walk.full_last - walk.full_first
    walk = ranges.Walk(
        walk.first, walk.full_first, walk.full_first + full, count - full, walk.low, walk.high
    )
    return matrix, walk, count


@gluon.jit
def _first_row(walk, i, task):
    """Where the i-th tile of queries begins that is visited: partial ones first, then full ones."""
    full = walk.full_first + i - walk.partial_count
    is_full = i >= walk.partial_count
    return gl.where(is_full, full, ranges.partial_tile(walk, i)) * task.cut.rows


@gluon.jit
def _producer(sources, rings, task):
    n = 0
    items = 0
    group = task.sizes.group
    for index in range(gl.program_id(0), task.order.items, gl.num_programs(0)):
        item = _item(index, task)
        fill(rings.key, items, sources.key, item.batch, item.kv_head, item.first_key)
        fill(rings.value, items, sources.value, item.batch, item.kv_head, item.first_key)
        for head in range(item.kv_head * group, (item.kv_head + 1) * group):
            _, walk, count = _queries(item, head, task)
            for i in range(count):
                _fill_queries(sources, rings, n + i, item.batch, head, _first_row(walk, i, task))
            n += count
        items = items + 1


@gluon.jit
def _fill_queries(sources, rings, n, batch, head, row):
    """Queries, the gradient of their outputs and their numbers, as soon as there is room."""
    stage, _ = stage_of(rings.query, n)
    await_empty(rings.query, n)
    BYTES: gl.constexpr = (
        sources.query.block_type.nbytes
        + sources.d_out.block_type.nbytes
        + sources.numbers.block_type.nbytes
    )
    filled = rings.query.filled.index(stage)
    mbarrier.expect(filled, BYTES)
    copy_in(sources.query, [batch, head, row, 0], filled, rings.query.tiles.index(stage))
    copy_in(sources.numbers, [batch, head, 0, row], filled, rings.numbers.tiles.index(stage))
    copy_in(sources.d_out, [batch, head, row, 0], filled, rings.d_out.tiles.index(stage))


@gluon.jit
def _consumer(ME: gl.constexpr, target, rings, d_key, d_value, strides, task):
    KEYS: gl.constexpr = task.cut.own_keys
    ROWS: gl.constexpr = task.cut.rows
    HEAD_DIM: gl.constexpr = padded(task.cut.head_dim)
    VALUE_DIM: gl.constexpr = padded(task.cut.value_dim)
    zeros = gl.zeros([KEYS, ROWS], gl.float32, products_layout(ROWS))
    nothing = operand(rounded(zeros, rings.query.tiles), HEAD_DIM)
    n = 0
    items = 0
    group = task.sizes.group
    for index in range(gl.program_id(0), task.order.items, gl.num_programs(0)):
        item = _item(index, task)
        k_tile = await_tile(rings.key, items)
        v_tile = await_tile(rings.value, items)
        _zero_hidden(k_tile, item, task)
        sums = Sums(
            gl.zeros([KEYS, HEAD_DIM], gl.float32, products_layout(HEAD_DIM)),
            gl.zeros([KEYS, VALUE_DIM], gl.float32, products_layout(VALUE_DIM)),
            nothing,
        )
        first = n
        before = Before(item.kv_head * group, 0)
        for head in range(item.kv_head * group, (item.kv_head + 1) * group):
            matrix, walk, count = _queries(item, head, task)
            for i in range(walk.partial_count):
                sums, before = _step(
                    sums, before, k_tile, v_tile, target, item, matrix, walk, i, rings, n + i,
                    first, task, ME, PARTIAL=True,
                )  # fmt: skip
            for i in range(walk.partial_count, count):
                sums, before = _step(
                    sums, before, k_tile, v_tile, target, item, matrix, walk, i, rings, n + i,
                    first, task, ME, PARTIAL=False,
                )  # fmt: skip
            n += count
        d_key_tile = sums.d_key
        if n > first:
            d_key_tile = _last_products(sums, before, k_tile, target, item, rings, n - 1, task, ME)
        empty(rings.key, items)
        empty(rings.value, items)
        items = items + 1
        row = item.first_key + ME * KEYS
        _store(
            d_key, strides.d_key, item, row, d_key_tile * task.numbers.scale, task.sizes.kv_len,
            task.cut.head_dim,
        )  # fmt: skip
        _store(
            d_value, strides.d_value, item, row, sums.d_value, task.sizes.kv_len,
            task.cut.value_dim,
        )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit
def _step(
    sums, before, k_tile, v_tile, target, item, matrix, walk, i, rings, n, first, task,
    ME: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """One more tile of queries: the i-th of its head, the n-th of all.

    Scores are kept transposed, [R, M]: weights and d_scores then feed d_value and d_key from
    registers. The last step's d_scores go into d_key beside this step's softmax, and into d_query
    beside this step's other products. An item's first step has none: it adds zeros to d_key, and
    what it makes of d_query is dropped.
    """
    KEYS: gl.constexpr = task.cut.own_keys
    HEAD_DIM: gl.constexpr = padded(task.cut.head_dim)
    VALUE_DIM: gl.constexpr = padded(task.cut.value_dim)
    k_own = k_tile.slice(ME * KEYS, KEYS, 0)
    v_own = v_tile.slice(ME * KEYS, KEYS, 0)
    last = max(n - 1, first)

    q_tile = await_tile(rings.query, n)
    d_out_tile = tile_of(rings.d_out, n)
    products = _products(k_own, q_tile)
    d_key = warpgroup_mma(sums.d_scores, tile_of(rings.query, last), sums.d_key, is_async=True)
    products = warpgroup_mma_wait(1, deps=(products,))
    first_row = _first_row(walk, i, task)
    weights, saturation = _weights(products, item, matrix, first_row, rings, n, task, ME, PARTIAL)
    low_weights = rounded(weights, q_tile)
    # A loop, behind which ptxas leaves the wait.
    await_empty(rings.d_scores, n)
    d_key = warpgroup_mma_wait(0, deps=(d_key,))

    if n > first:
        await_tile(rings.d_scores, last)
    d_query = _d_query(rings, last, k_tile, task, ME)
    empty(rings.query, n - 1, n > first)
    d_weights = _products(v_own, d_out_tile)
    d_value = warpgroup_mma(
        operand(low_weights, VALUE_DIM), d_out_tile, sums.d_value, is_async=True
    )
    d_query = warpgroup_mma_wait(2, deps=(d_query,))
    empty(rings.d_scores, n - 1, n > first)
    _add_out(d_query, target, item, before, n > first, task, ME)

    d_weights = warpgroup_mma_wait(1, deps=(d_weights,))
    delta = _numbers(rings, n, 1)
    # Of the rounded weights: the others would take registers all the while.
    d_scores = d_scores_of(widened(low_weights), d_weights, delta, PARTIAL)
    low_d_scores = rounded(d_products_of(d_scores, saturation, task.options), q_tile)
    tile_of(rings.d_scores, n).slice(ME * KEYS, KEYS, 0).store(low_d_scores)
    fence_async_shared()
    hand_over(rings.d_scores, n)
    d_value = warpgroup_mma_wait(0, deps=(d_value,))
    return Sums(d_key, d_value, operand(low_d_scores, HEAD_DIM)), Before(matrix.head, first_row)


@gluon.jit
def _last_products(sums, before, k_tile, target, item, rings, n, task, ME: gl.constexpr):
    """What an item's last step, the n-th of all, left to do. Returns the whole d_key."""
    q_tile = tile_of(rings.query, n)
    await_tile(rings.d_scores, n)
    d_key = warpgroup_mma(sums.d_scores, q_tile, sums.d_key, is_async=True)
    d_query = _d_query(rings, n, k_tile, task, ME)
    d_key, d_query = warpgroup_mma_wait(0, deps=(d_key, d_query))
    empty(rings.query, n)
    empty(rings.d_scores, n)
    _add_out(d_query, target, item, before, True, task, ME)
    return d_key


@gluon.jit
def _products(own, other):
    """Starts the products of this consumer's keys, or values, with a tile of rows, [R, M]."""
    SHAPE: gl.constexpr = [own.type.shape[0], other.type.shape[0]]
    zeros = gl.zeros(SHAPE, gl.float32, products_layout(other.type.shape[0]))
    return warpgroup_mma(own, other.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _numbers(rings, n, WHICH: gl.constexpr):
    """shift (0) or delta (1) of the n-th tile's rows, [1, M]."""
    tile = tile_of(rings.numbers, n)
    layout: gl.constexpr = products_layout(tile.type.shape[1])
    return tile.slice(WHICH, 1, 0).load(layout)


@gluon.jit
def _weights(
    products, item, matrix, first_row, rings, n, task, ME: gl.constexpr, PARTIAL: gl.constexpr
):
    """The weights of a tile, [R, M], and the softcap's tanh."""
    layout: gl.constexpr = products.type.layout
    rows = gl.arange(0, task.cut.rows, gl.SliceLayout(0, layout))[None, :]
    keys = gl.arange(0, task.cut.own_keys, gl.SliceLayout(1, layout))[:, None]
    first_key = item.first_key + ME * task.cut.own_keys
    at = place_offsets(
        matrix, 0, first_row, first_key, first_key - first_row, rows, keys,
        task.cut.rows, task.cut.own_keys,
    )  # fmt: skip
    scores, saturation = scores_of(
        products, at, task.masks, task.biases, task.numbers, task.options, PARTIAL
    )
    if PARTIAL:
        scores = hide_past_end(scores, at.k_pos, matrix.kv_len)
    shift = _numbers(rings, n, 0)
    return weights_of(scores, shift, task.numbers, task.options), saturation


@gluon.jit
def _d_query(rings, n, k_tile, task, ME: gl.constexpr):
    """Starts this consumer's part of d_query: d_scores of all keys, by all keys."""
    WIDTH: gl.constexpr = _part_width(task.cut.head_dim, task.cut.rows)
    d_scores = tile_of(rings.d_scores, n).permute((1, 0))
    zeros = gl.zeros([64, WIDTH], gl.float32, products_layout(WIDTH))
    if task.cut.rows == 128:
        d_scores = d_scores.slice(ME * 64, 64, 0)
        d_query = warpgroup_mma(d_scores, k_tile, zeros, use_acc=False, is_async=True)
    else:
        columns = k_tile.slice(ME * WIDTH, WIDTH, 1)
        d_query = warpgroup_mma(d_scores, columns, zeros, use_acc=False, is_async=True)
    return d_query


@gluon.jit
def _add_out(d_query, target, item, before, wanted, task, ME: gl.constexpr):
    """Has the copy engine add this consumer's part of d_query to what others made of it."""
    WIDTH: gl.constexpr = _part_width(task.cut.head_dim, task.cut.rows)
    SHAPE: gl.constexpr = [64, WIDTH]
    tma.store_wait(pendings=0)
    target.place.reshape(SHAPE).store(d_query)
    fence_async_shared()
    row, column = before.first_row, 0
    if task.cut.rows == 128:
        row += ME * 64
    else:
        column += ME * WIDTH
    if wanted:
        add_out(target.sums, [item.batch, before.head, row, column], target.place)


@gluon.jit
def _store(tensor, strides, item, first_row, tile, length, DIM: gl.constexpr):
    """This consumer's rows of a gradient; nothing where it is not wanted."""
    layout: gl.constexpr = tile.type.layout
    offset = gl.arange(0, tile.type.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, tile.type.shape[1], gl.SliceLayout(0, layout))
    first = head_of(tensor, strides, item.batch, item.kv_head)
    first += first_row.to(gl.int64) * strides.row
    places = first + offset[:, None] * strides.row + column[None, :]
    inside = (first_row + offset < length)[:, None] & (column < DIM)[None, :]
    gl.store(places, tile.to(tensor.dtype.element_ty), mask=inside & is_given(tensor))


_STRIPE = gl.constexpr(32)


@gluon.jit
def _zero_hidden(k_tile, item, task):
    """Keys that no query sees become zero: a gradient of 0 does not hide a NaN.

    Both consumers do it, and write the same bytes; what either makes of such a key is hidden.
    """
    KEYS: gl.constexpr = k_tile.type.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = item.kv_head * task.sizes.group
    matrix = matrix_of(item.batch, head, task.query_starts, task.sizes, task.numbers)
    start, _, _, stop = ranges.key_range(
        matrix.query_start, matrix.query_start + matrix.q_len, task.masks, matrix
    )
    if (item.first_key < start) | (item.first_key + KEYS > stop):
        for stripe in gl.static_range(0, KEYS, _STRIPE):
            key = item.first_key + stripe + gl.arange(0, _STRIPE, gl.SliceLayout(1, layout))
            seen = (key >= start) & (key < stop)
            part = k_tile.slice(stripe, _STRIPE, 0)
            part.store(gl.where(seen[:, None], part.load(layout), 0.0))
        fence_async_shared()
