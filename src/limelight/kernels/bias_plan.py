"""From a call to launches: the gradients of biases that are not made on the way to dQ.

shared and scalars, here: what plan.py gives every kernel of the backward that makes scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import arguments as args
from limelight.kernels import configs
from limelight.kernels.bias_gradient import (
    dense_gradient,
    fold_offsets,
    fold_pairs,
    key_ranges,
    offset_gradient,
)
from limelight.kernels.configs import Config
from limelight.kernels.cut import (
    config_of,
    dim_of,
    dims_of,
    larger,
    launches_of,
    parameters_of,
    smaller,
    tiled_launches,
    tiles_of,
)
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape, i32
from limelight.kernels.vector_gradient import band_gradients, fold_bands


def scratch(call: Call, wanted: Gradients, capability: int) -> dict[str, Shape]:
    """The memory that `backward` needs beside its outputs. wanted: as in plan.py."""
    batch, heads, q_len, kv_len = call.size
    needed: dict[str, Shape] = {}
    kinds, item = _kinds(call, wanted), ITEM_BYTES[call.query.dtype]
    if "offset" in kinds:
        config = _offset_config(call, capability, item)
        along = _diagonals(call, config)
        shape = (along.parts.value, heads, along.count.value, 2, config.keys)
        needed["windows"] = Shape(shape, "float32")
        needed["key_ranges"] = Shape((batch, tiles_of(q_len, config.rows), 4), "int32")
    if "pair" in kinds:
        parts = _pair_parts(call, config_of(call, configs.dense_gradient, capability, item))
        needed["pair_sums"] = Shape((parts.count.value, heads, q_len, kv_len), "float32")
    if "vectors" in kinds:
        config = configs.reading(capability, item, dim_of(call))
        along = _diagonals(call, config)
        rows = (along.parts.value, heads, along.count.value, 2 * config.keys + 2)
        # Biases take turns in the same memory.
        needed["bands"] = Shape((*rows, call.query.shape[3]), "float32")
        needed["numbers_bands"] = Shape((*rows, 1), "float32")
    return needed


def backward(
    call: Call,
    gradients: Gradients,
    memory: dict[str, Array],
    shared: dict[str, Any],
    scalars: dict[str, Any],
    capability: int,
) -> list[Launch]:
    """memory: what `scratch` asked for."""
    launches: list[Launch] = []
    item = ITEM_BYTES[call.query.dtype]
    dense = config_of(call, configs.dense_gradient, capability, item)
    for child, gradient in parameters_of(call, gradients):
        if gradient is not None and child.gradient == "dense":
            launches += _dense_gradient(call, gradient, shared, scalars, dense)
        elif gradient is not None and child.gradient == "vectors":
            config = configs.reading(capability, item, dim_of(call))
            launches += _vector_gradients(call, child, gradient, memory, shared, scalars, config)
    kinds = _kinds(call, gradients)
    if "offset" in kinds:
        config = _offset_config(call, capability, item)
        launches += _offset_gradients(call, gradients, memory, shared, scalars, config)
    if "pair" in kinds:
        launches += _pair_gradients(call, gradients, memory, shared, scalars, dense)
    return launches


def _kinds(call: Call, wanted: Gradients) -> set[str]:
    """How the gradients that are wanted of biases are made."""
    return {child.gradient for child, gradient in parameters_of(call, wanted) if gradient}


class Own(NamedTuple):
    batches: Any
    heads: Any
    row_tiles: Any
    key_tiles: Any


class Orbit(NamedTuple):
    batches: Any
    heads: Any
    row_tiles: Any
    key_tiles: Any
    shares_rows: bool
    shares_keys: bool
    all_batches: Any


def _dense_gradient(
    call: Call,
    gradient: Array,
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
    batches: int = 0,
) -> list[Launch]:
    """batches: how many share an entry of a partial gradient; else as many as its shape says."""
    size = call.size
    shape = (*([1] * (4 - len(gradient.shape))), *gradient.shape)
    tiles = (1, 1, config.rows, config.keys)
    # A dimension of the bias that is 1 is walked; the others are spread over programs.
    counts = [tiles_of(full, tile) for full, tile in zip(size, tiles, strict=True)]
    own = [1 if entries == 1 else count for entries, count in zip(shape, counts, strict=True)]
    orbit = [count if entries == 1 else 1 for entries, count in zip(shape, counts, strict=True)]
    if batches:
        own[0], orbit[0] = shape[0], batches
    arguments = {
        **shared,
        "gradient": gradient,
        "strides": scalars["strides"],
        "gradient_strides": args.dense_strides(gradient),
        "sizes": scalars["sizes"],
        "numbers": scalars["numbers"],
        "options": scalars["options"],
        "own": Own(*map(i32, own)),
        "orbit": Orbit(*map(i32, orbit), shape[2] == 1, shape[3] == 1, i32(size.batch)),  # type: ignore[call-arg]
    }
    return tiled_launches(dense_gradient, math.prod(own), arguments, dims_of(call), config)


class Parts(NamedTuple):
    """Groups of batch elements, whose partial gradients are added up at the end."""

    count: Any
    batches: Any  # of a part


class Diagonals(NamedTuple):
    first: Any  # in tiles of keys from the main one
    count: Any
    parts: Any
    batches: Any  # of a part
    all_batches: Any


class Entries(NamedTuple):
    entries: Any
    heads: Any  # that share one
    parts: Any  # that have the same positions


def _parts(call: Call, programs: int) -> tuple[int, int]:
    """How many parts, and the batch elements of each, for a grid with so many programs of a part.

    Where queries start differently in each batch element, so do the entries of a bias.
    """
    batch = larger(call.size.batch, 1)
    each = 1
    if isinstance(call.query_start, int):
        each = tiles_of(batch, smaller(batch, tiles_of(configs.MANY_PROGRAMS, programs)))
    return tiles_of(batch, each), each


def _diagonals(call: Call, config: Config) -> Diagonals:
    size = call.size
    last_row = larger(tiles_of(size.q_len, config.rows) - 1, 0) * config.rows
    before = tiles_of(last_row, config.keys)
    count = larger(before + tiles_of(size.kv_len, config.keys), 1)
    parts, batches = _parts(call, count * size.q_heads)
    return Diagonals(*map(i32, (-before, count, parts, batches, size.batch)))


def _offset_gradients(
    call: Call,
    gradients: Gradients,
    memory: dict[str, Array],
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
) -> list[Launch]:
    """One walk for all biases of offsets, then each bias's own fold."""
    size = call.size
    along = _diagonals(call, config)
    ranges = {
        "query_starts": shared["query_starts"],
        "masks": shared["masks"],
        "found": memory["key_ranges"],
        "sizes": scalars["sizes"],
        "numbers": scalars["numbers"],
        "options": scalars["options"],
    }
    tiles = tiles_of(size.q_len, config.rows) * size.batch
    launches = launches_of(key_ranges, tiles, ranges, {"TILE_M": config.rows}, configs.KEY_RANGES)
    biases = list(zip(args.bias_children(call.bias), shared["biases"], strict=True))
    arguments = {
        **shared,
        "constant": tuple(bias for child, bias in biases if child.gradient == "offset"),
        "varying": tuple(bias for child, bias in biases if child.gradient != "offset"),
        "seen": memory["key_ranges"],
        "windows": memory["windows"],
        **scalars,
        "diagonals": along,
    }
    grid = along.parts.value * size.q_heads * along.count.value
    launches += tiled_launches(offset_gradient, grid, arguments, dims_of(call), config)
    first = {"windows": memory["windows"], "query_starts": shared["query_starts"]}
    last = {"diagonals": along}
    fold = (fold_offsets, "offset", {"TILE_N": config.keys})
    return launches + _folds(call, gradients, fold, first, last, scalars, along.parts.value)


def _pair_parts(call: Call, config: Config) -> Parts:
    size = call.size
    tiles = tiles_of(size.q_len, config.rows) * tiles_of(size.kv_len, config.keys)
    return Parts(*map(i32, _parts(call, larger(tiles * size.q_heads, 1))))


def _pair_gradients(
    call: Call,
    gradients: Gradients,
    memory: dict[str, Array],
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
) -> list[Launch]:
    """As for a dense bias, in parts of the batch, then each bias's own fold."""
    sums = memory["pair_sums"]
    parts = _pair_parts(call, config)
    launches = _dense_gradient(call, sums, shared, scalars, config, parts.batches.value)
    first = {"sums": sums, "query_starts": shared["query_starts"]}
    fold = (fold_pairs, "pair", {"BLOCK": configs.FOLD.keys})
    last = {"parts": parts}
    return launches + _folds(call, gradients, fold, first, last, scalars, parts.count.value)


def _folds(
    call: Call,
    gradients: Gradients,
    fold: tuple[Any, str, dict[str, int]],
    first: dict[str, Any],
    last: dict[str, Any],
    scalars: dict[str, Any],
    parts: int,
) -> list[Launch]:
    """fold: the kernel, the kind of gradient, its constant."""
    kernel, kind, constants = fold
    launches = []
    config = configs.FOLD
    alike = parts if isinstance(call.query_start, int) else 1
    for child, gradient in parameters_of(call, gradients):
        if gradient is None or child.gradient != kind:
            continue
        heads, entries, strides = args.entry_strides(gradient, child.heads_last)
        arguments = {
            **first,
            "bias": (args.on_device(child.on_device()),),
            "gradient": gradient,
            "gradient_strides": strides,
            "sizes": scalars["sizes"],
            "numbers": scalars["numbers"],
            **last,
            "orbit": Entries(i32(entries), i32(call.size.q_heads // heads), i32(alike)),
        }
        grid = tiles_of(entries, config.rows) * heads
        launches += launches_of(
            kernel, grid, arguments, {"ENTRIES": config.rows, **constants}, config
        )
    return launches


class VectorStrides(NamedTuple):
    head: Any
    entry: Any
    dim: Any


def _vector_gradients(
    call: Call,
    child: Any,
    gradient: Any,
    memory: dict[str, Array],
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
) -> list[Launch]:
    along = _diagonals(call, config)
    bias = (args.on_device(child.on_device()),)
    arguments = {
        **shared,
        "bias": bias,
        "bands": memory["bands"],
        "numbers_bands": memory["numbers_bands"],
        **scalars,
        "diagonals": along,
    }
    grid = along.parts.value * call.size.q_heads * along.count.value
    launches = tiled_launches(band_gradients, grid, arguments, dims_of(call), config)
    vectors, numbers = (*gradient, None)[:2] if isinstance(gradient, tuple) else (gradient, None)
    for total, bands in ((vectors, memory["bands"]), (numbers, memory["numbers_bands"])):
        if total is None:
            continue
        dim = bands.shape[4]
        heads = total.shape[0] if len(total.shape) == (3 if total is vectors else 2) else 1
        strides = total.strides if total is vectors else (*total.strides, 1)
        strides = (*([0] * (3 - len(strides))), *strides)
        arguments = {
            "bands": bands,
            "query_starts": shared["query_starts"],
            "bias": bias,
            "gradient": total,
            "strides": VectorStrides(*map(args.stride, strides)),
            "sizes": scalars["sizes"],
            "numbers": scalars["numbers"],
            "diagonals": along,
            "shared": i32(call.size.q_heads // heads),
        }
        constants = {"DIM": dim, "TILE_N": config.keys, "BLOCK": configs.FOLD_BANDS.rows}
        grid = heads * bias[0].entries.value
        launches += launches_of(fold_bands, grid, arguments, constants, configs.FOLD_BANDS)
    return launches


def _offset_config(call: Call, capability: int, item: int) -> Config:
    # Along a diagonal of square tiles, each begins at a multiple of its keys, as products need.
    square = call.bias is not None and call.bias.makes_products()
    table = configs.reading if square else configs.offset_gradient
    return table(capability, item, dim_of(call))
