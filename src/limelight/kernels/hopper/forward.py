"""The forward on Hopper: one producer warp copies tiles, two or three warpgroups compute.

After FlashAttention-3 (arXiv:2407.08608). docs/hopper.md draws the pipeline. Axes: M queries of a
tile, of which each consumer has R; N keys of a tile, D head_dim, E value_dim, both padded.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from limelight.kernels import ranges
from limelight.kernels.hopper.items import place_of
from limelight.kernels.hopper.layouts import operand, products_layout, rounded
from limelight.kernels.hopper.rings import (
    await_tile,
    descriptor,
    empty,
    fill,
    padded,
    ring,
    tile_of,
)
from limelight.kernels.hopper.turns import pass_turn, wait_turn
from limelight.kernels.scores import (
    LN2,
    LOG2E,
    exponent_factor,
    hide_past_end,
    matrix_of,
    place_offsets,
    scores_of,
)
from limelight.kernels.tiles import head_of, is_given, load_or


class Rings(NamedTuple):
    query: Any  # a tile for each consumer
    key: Any
    value: Any


class Item(NamedTuple):
    """What one pass computes: a tile of queries of one matrix, and the tiles of keys it visits."""

    first_row: Any
    matrix: Any
    walk: Any
    count: Any  # at least one tile is visited, so that no sum is left out


class Softmax(NamedTuple):
    """As softmax.py's, but without the sums of values, which wait for a product."""

    row_max: Any  # [R]
    row_sums: Any  # [R, 8], not yet added up


@gluon.jit
def forward(query, key, value, out, lse, strides, task):
    """out [B, H, M, E] in its own dtype, lse [B, H, M] float32, contiguous, or null.

    Grid: any number of programs; together they take all items. strides: see arguments.py; task:
    see plan.py.
    """
    sizes = task.sizes
    batches, kv_heads = task.order.batches, sizes.q_heads // sizes.group
    q_source = descriptor(
        query,
        strides.query,
        batches,
        sizes.q_heads,
        sizes.q_len,
        task.cut.head_dim,
        task.cut.own_rows,
    )
    k_source = descriptor(
        key, strides.key, batches, kv_heads, sizes.kv_len, task.cut.head_dim, task.cut.keys
    )
    v_source = descriptor(
        value, strides.value, batches, kv_heads, sizes.kv_len, task.cut.value_dim, task.cut.keys
    )
    rings = Rings(
        ring(q_source, task.cut.consumers, 1),
        ring(k_source, task.cut.stages, task.cut.consumers),
        ring(v_source, task.cut.stages, task.cut.consumers),
    )
    if task.cut.consumers == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, rings, out, lse, strides.out, task)),
                (_consumer, (1, rings, out, lse, strides.out, task)),
                (_producer, (q_source, k_source, v_source, rings, task)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, rings, out, lse, strides.out, task)),
                (_consumer, (1, rings, out, lse, strides.out, task)),
                (_consumer, (2, rings, out, lse, strides.out, task)),
                (_producer, (q_source, k_source, v_source, rings, task)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _item(index, task):
    """The item at this index. Last tiles first: under a causal mask they have the most work."""
    sizes = task.sizes
    tiles = (sizes.q_len + task.cut.rows - 1) // task.cut.rows
    tile, number = place_of(index, tiles, sizes.q_heads, task.order)
    matrix = matrix_of(
        number // sizes.q_heads, number % sizes.q_heads, task.query_starts, sizes, task.numbers
    )
    first_row = (tiles - 1 - tile) * task.cut.rows
    stop_row = min(first_row + task.cut.rows, sizes.q_len)
    walk = ranges.keys_of(
        matrix.query_start + first_row, matrix.query_start + stop_row, task.masks, matrix,
        task.cut.keys, task.options.hides,
    )  # fmt: skip
    count = max(walk.partial_count + walk.full_last - walk.full_first, 1)
    return Item(first_row, matrix, walk, count)


@gluon.jit
def _first_key(item, i, task):
    """Where the i-th tile of keys begins that is visited: partial ones first, then full ones."""
    walk = item.walk
    full = walk.full_first + i - walk.partial_count
    is_full = (i >= walk.partial_count) & (walk.full_first < walk.full_last)
    return gl.where(is_full, full, ranges.partial_tile(walk, i)) * task.cut.keys


@gluon.jit
def _producer(q_source, k_source, v_source, rings, task):
    n = 0
    items = 0
    for index in range(gl.program_id(0), task.order.items, gl.num_programs(0)):
        item = _item(index, task)
        batch, head = item.matrix.batch, item.matrix.head
        for consumer in gl.static_range(task.cut.consumers):
            row = item.first_row + consumer * task.cut.own_rows
            fill(rings.query, items * task.cut.consumers + consumer, q_source, batch, head, row)
        kv_head = head // task.sizes.group
        # Values lag a tile behind keys, as their use does.
        fill(rings.key, n, k_source, batch, kv_head, _first_key(item, 0, task))
        for i in range(1, item.count):
            fill(rings.key, n + i, k_source, batch, kv_head, _first_key(item, i, task))
            fill(rings.value, n + i - 1, v_source, batch, kv_head, _first_key(item, i - 1, task))
        last = item.count - 1
        fill(rings.value, n + last, v_source, batch, kv_head, _first_key(item, last, task))
        n += item.count
        items = items + 1


@gluon.jit
def _consumer(ME: gl.constexpr, rings, out, lse, out_strides, task):
    ROWS: gl.constexpr = task.cut.own_rows
    VALUE_DIM: gl.constexpr = padded(task.cut.value_dim)
    s_layout: gl.constexpr = products_layout(task.cut.keys)
    acc_layout: gl.constexpr = products_layout(VALUE_DIM)
    start = Softmax(
        gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout)),
        _partial_sums(gl.zeros([ROWS, task.cut.keys], gl.float32, s_layout)),
    )
    if task.cut.turns and ME == task.cut.consumers - 1:
        pass_turn(0)
    n = 0
    items = 0
    for index in range(gl.program_id(0), task.order.items, gl.num_programs(0)):
        item = _item(index, task)
        q_tile = await_tile(rings.query, items * task.cut.consumers + ME)
        state, weights = _first_step(start, item, q_tile, rings, n, task, ME)
        acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, acc_layout)
        full_from = max(item.walk.partial_count, 1)
        for i in range(1, full_from):
            state, acc, weights = _step(
                state, acc, weights, item, i, q_tile, rings, n + i, task, ME, PARTIAL=True
            )
        for i in range(full_from, item.count):
            state, acc, weights = _step(
                state, acc, weights, item, i, q_tile, rings, n + i, task, ME, PARTIAL=False
            )
        empty(rings.query, items * task.cut.consumers + ME)
        n += item.count
        items = items + 1
        acc = warpgroup_mma(weights, tile_of(rings.value, n - 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        empty(rings.value, n - 1)
        _store(out, lse, out_strides, state, acc, item, task, ME)
    if task.cut.turns and ME == 0:
        wait_turn(0)  # the last to pass it on passed it to nobody


@gluon.jit
def _first_step(state, item, q_tile, rings, n, task, ME: gl.constexpr):
    """An item's first tile of keys, for which no values wait yet. It is taken for a partial one."""
    k_tile = await_tile(rings.key, n)
    if task.cut.turns:
        wait_turn(ME)
    products = _scores(q_tile, k_tile)
    if task.cut.turns:
        pass_turn((ME + 1) % task.cut.consumers)
    products = warpgroup_mma_wait(0, deps=(products,))
    empty(rings.key, n)
    state, _, weights = _weigh(state, products, item, 0, rings.value, n, task, ME, PARTIAL=True)
    await_tile(rings.value, n)
    return state, _operand(weights, rings.value, task)


@gluon.jit
def _step(
    state, acc, weights, item, i, q_tile, rings, n, task,
    ME: gl.constexpr, PARTIAL: gl.constexpr,
):  # fmt: skip
    """One more tile of keys, the item's i-th, and the product with values that the last one left.

    Both products are issued at once; the softmax runs beside the second. n counts the tiles of all
    items.
    """
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    k_tile = await_tile(rings.key, n)
    if task.cut.turns:
        wait_turn(ME)
    products = _scores(q_tile, k_tile)
    acc = warpgroup_mma(weights, tile_of(rings.value, n - 1), acc, is_async=True)
    if task.cut.turns:
        pass_turn((ME + 1) % task.cut.consumers)
    products = warpgroup_mma_wait(1, deps=(products,))
    empty(rings.key, n)
    state, rescale, weights = _weigh(state, products, item, i, rings.value, n, task, ME, PARTIAL)
    # The next step's values. Without a loop here, ptxas moves the wait below before the softmax.
    await_tile(rings.value, n)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    empty(rings.value, n - 1)
    acc = acc * gl.convert_layout(rescale, rows)[:, None]
    return state, acc, _operand(weights, rings.value, task)


@gluon.jit
def _scores(q_tile, k_tile):
    """Starts the products of queries and keys."""
    SHAPE: gl.constexpr = [q_tile.type.shape[0], k_tile.type.shape[0]]
    zeros = gl.zeros(SHAPE, gl.float32, products_layout(k_tile.type.shape[0]))
    return warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _operand(weights, values, task):
    """The weights as the product with values takes them."""
    return operand(rounded(weights, values.tiles), padded(task.cut.value_dim))


@gluon.jit
def _weigh(state, products, item, i, values, n, task, ME: gl.constexpr, PARTIAL: gl.constexpr):
    """The softmax's state after one more tile, the factor of all before, and the tile's weights."""
    layout: gl.constexpr = products.type.layout
    rows = gl.arange(0, task.cut.own_rows, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, task.cut.keys, gl.SliceLayout(0, layout))[None, :]
    first_row = item.first_row + ME * task.cut.own_rows
    first_key = _first_key(item, i, task)
    at = place_offsets(
        item.matrix,
        0,
        first_row,
        first_key,
        first_key - first_row,
        rows,
        columns,
        task.cut.own_rows,
        task.cut.keys,
    )
    scores, _ = scores_of(
        products, at, task.masks, task.biases, task.numbers, task.options, PARTIAL
    )
    if PARTIAL:
        scores = hide_past_end(scores, at.k_pos, item.matrix.kv_len)
        _zero_hidden(values, n, first_key, item.walk)
    factor = exponent_factor(task.numbers, task.options)
    row_max = gl.maximum(state.row_max, gl.max(scores, 1) * factor)
    shift = row_max
    if PARTIAL:
        shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    weights = gl.exp2(scores * factor - shift[:, None])
    rescale = gl.exp2(state.row_max - shift)
    sums_layout: gl.constexpr = gl.SliceLayout(1, state.row_sums.type.layout)
    row_sums = state.row_sums * gl.convert_layout(rescale, sums_layout)[:, None]
    return Softmax(row_max, row_sums + _partial_sums(weights)), rescale, weights


@gluon.jit
def _partial_sums(weights):
    """[R, 8], the sums that a thread can make alone: one of every eight neighbours is its own."""
    SHAPE: gl.constexpr = [weights.type.shape[0], weights.type.shape[1] // 8, 8]
    return gl.sum(gl.reshape(weights, SHAPE), 1)


_STRIPE = gl.constexpr(32)


@gluon.jit
def _zero_hidden(values, n, first_key, walk):
    """Values outside the walk's range become zero: a weight of 0 does not hide a NaN.

    Every consumer does it before its own product, and all write the same bytes.
    """
    KEYS: gl.constexpr = values.tiles.type.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if (first_key < walk.low) | (first_key + KEYS > walk.high):
        v_tile = await_tile(values, n)
        for start in gl.static_range(0, KEYS, _STRIPE):
            low, high = walk.low - first_key - start, walk.high - first_key - start
            if (low > 0) | (high < _STRIPE):
                key = gl.arange(0, _STRIPE, gl.SliceLayout(1, layout))
                seen = (key >= low) & (key < high)
                stripe = v_tile.slice(start, _STRIPE, 0)
                stripe.store(gl.where(seen[:, None], stripe.load(layout), 0.0))
        fence_async_shared()


@gluon.jit
def _finish(state, sink):
    """What each row's sum of values is multiplied by, and its log-sum-exp; see softmax.finish."""
    sink = sink.to(gl.float32) * LOG2E
    row_max = gl.maximum(state.row_max, sink)
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    rescale = gl.exp2(state.row_max - shift)
    row_sum = gl.convert_layout(gl.sum(state.row_sums, 1), row_max.type.layout)
    row_sum = row_sum * rescale + gl.exp2(sink - shift)
    empty = row_sum == 0
    total = gl.where(empty, 1.0, row_sum)
    log_sum_exp = gl.where(empty, float("-inf"), (row_max + gl.log2(total)) * LN2)
    return rescale / total, log_sum_exp


@gluon.jit
def _store(out, lse, strides, state, acc, item, task, ME: gl.constexpr):
    """This consumer's rows of the output and their log-sum-exp."""
    matrix, sizes = item.matrix, task.sizes
    layout: gl.constexpr = acc.type.layout
    first_row = item.first_row + ME * task.cut.own_rows
    share, log_sum_exp = _finish(state, load_or(task.sinks, matrix.head, float("-inf")))
    out_tile = acc * gl.convert_layout(share, gl.SliceLayout(1, layout))[:, None]

    offset = gl.arange(0, acc.type.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
    first = head_of(out, strides, matrix.batch, matrix.head)
    first += first_row.to(gl.int64) * strides.row
    places = first + offset[:, None] * strides.row + column[None, :]
    inside = (first_row + offset < sizes.q_len)[:, None]
    inside = inside & (column < task.cut.value_dim)[None, :]
    gl.store(places, out_tile.to(out.dtype.element_ty), mask=inside)

    row = first_row + gl.arange(0, acc.type.shape[0], log_sum_exp.type.layout)
    head = matrix.batch.to(gl.int64) * sizes.q_heads + matrix.head
    inside = (row < sizes.q_len) & is_given(lse)
    gl.store(lse + head * sizes.q_len + row, log_sum_exp, mask=inside)
