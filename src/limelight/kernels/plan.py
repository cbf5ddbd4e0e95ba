"""From a call to launches: which kernels run, with which grids, tiles and arguments.

No array library is needed: the call's tensors are `Array`s, and so are the outputs and the scratch
memory, which the caller allocates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import arguments as args
from limelight.kernels import configs, variants
from limelight.kernels.backward import SLOPE_ROWS, key_gradients, query_gradient
from limelight.kernels.bias_gradient import (
    dense_gradient,
    fold_offsets,
    fold_pairs,
    key_ranges,
    offset_gradient,
)
from limelight.kernels.configs import Config
from limelight.kernels.forward import forward as forward_kernel
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape, i32, null
from limelight.kernels.partial_sums import add_partial_sums
from limelight.kernels.row_numbers import ROW_NUMBERS, row_numbers
from limelight.kernels.variants import Variant
from limelight.kernels.vector_gradient import band_gradients, fold_bands


def forward_scratch(call: Call, capability: int, allow_tf32: bool = False) -> dict[str, Shape]:
    """The memory that `forward` needs beside its outputs."""
    if variants.are_halves(call, capability, allow_tf32):
        return variants.scratch(call, with_d_out=False)
    return {}


def forward(
    call: Call,
    out: Array,
    lse: Array | None,
    memory: dict[str, Array],
    *,
    capability: int,
    allow_tf32: bool = False,
    config: Config | None = None,
) -> list[Launch]:
    """out [B, H, M, E], any strides but the last; lse [B, H, M] float32, contiguous, or None.

    memory: what `forward_scratch` asked for. capability: of the device, 90 for sm_90. allow_tf32:
    one-pass TF32 is good enough for float32. config: instead of the table's.
    """
    size = call.size
    launches = variants.splitting(call, None, memory)
    for variant in variants.of(call, None, memory, capability, allow_tf32):
        cut = config or _config(call, configs.forward, capability, variant)
        arguments = {
            "query": variant.query,
            "key": variant.key,
            "value": variant.value,
            "sinks": _sinks(call),
            **args.terms(call, variant.precision),
            "units": variant.units,
            "out": out,
            "lse": lse or null("float32"),
            **_scalars(call, variant, {"out": out}),
        }
        grid = _tiles(size.q_len, cut.rows) * size.q_heads * size.batch
        launches += _launches(forward_kernel, grid, arguments, _dims(call), cut)
    return launches


def scratch(
    call: Call, wanted: Gradients, capability: int, allow_tf32: bool = False
) -> dict[str, Shape]:
    """The memory that `backward` needs beside its outputs.

    wanted: of each gradient, whether it is wanted (anything true).
    """
    batch, heads, q_len, kv_len = call.size
    needed = {"row_numbers": Shape((batch, heads, q_len, ROW_NUMBERS.value), "float32")}
    if wanted.sinks:
        rows = configs.row_numbers(capability, configs.item(call.query.dtype), _dim(call)).rows
        needed["sink_sums"] = Shape((batch, heads, _tiles(q_len, rows)), "float32")
    adding = _adding(call, wanted)
    if any(adding.head):
        parts = _tiles(q_len, SLOPE_ROWS.value)
        needed["slope_sums"] = Shape((len(adding.head), batch, heads, parts), "float32")
    if variants.are_halves(call, capability, allow_tf32):
        needed |= variants.scratch(call, with_d_out=True)
    kinds, item = _kinds(call, wanted), ITEM_BYTES[call.query.dtype]
    if "offset" in kinds:
        config = _offset_config(call, capability, item)
        along = _diagonals(call, config)
        shape = (along.parts.value, heads, along.count.value, 2, config.keys)
        needed["windows"] = Shape(shape, "float32")
        needed["key_ranges"] = Shape((batch, _tiles(q_len, config.rows), 4), "int32")
    if "pair" in kinds:
        parts = _pair_parts(call, _dense_config(call, capability, item))
        needed["pair_sums"] = Shape((parts.count.value, heads, q_len, kv_len), "float32")
    if "vectors" in kinds:
        config = configs.reading(capability, item, _dim(call))
        along = _diagonals(call, config)
        rows = (along.parts.value, heads, along.count.value, 2 * config.keys + 2)
        # Biases take turns in the same memory.
        needed["bands"] = Shape((*rows, call.query.shape[3]), "float32")
        needed["numbers_bands"] = Shape((*rows, 1), "float32")
    return needed


def backward(
    call: Call,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    gradients: Gradients,
    memory: dict[str, Array],
    *,
    capability: int,
    allow_tf32: bool = False,
) -> list[Launch]:
    """The launches, in order, that fill `gradients`, whose arrays are of their inputs' shapes.

    gradients: an Array for each that is wanted, None for the others. memory: what `scratch` asked
    for. lse and d_lse are contiguous. Every output is written once and repeats bit for bit.
    """
    written = {
        "out": out,
        "d_query": gradients.query,
        "d_key": gradients.key,
        "d_value": gradients.value,
    }
    sums = memory.get("slope_sums", null("float32"))
    adding = _adding(call, gradients)
    config = configs.row_numbers(capability, configs.item(call.query.dtype), _dim(call))
    launches = _row_numbers(call, out, lse, d_out, d_lse, gradients, memory, config)
    launches += variants.splitting(call, d_out, memory)
    found = variants.of(call, d_out, memory, capability, allow_tf32)
    offsets = any(child.gradient == "offset" for child in args.bias_children(call.bias))
    for variant in found:
        shared = {**_shared(call, variant, memory), "units": variant.units}
        scalars = _scalars(call, variant, written)
        if gradients.key is not None or gradients.value is not None:
            config = _config(call, configs.key_gradients, capability, variant)
            launches += _key_gradients(call, gradients, shared, scalars, config)
        if gradients.query is not None or any(adding.head + adding.rows):
            config = _config(
                call, lambda a, b, c: configs.query_gradient(a, b, c, offsets), capability, variant
            )
            if any(adding.rows):  # their sums need registers
                config = replace(config, max_registers=None)
            launches += _query_gradient(call, gradients, sums, adding, shared, scalars, config)
    launches += _slopes(call, gradients, sums, adding)
    plain = found[-1]
    shared, scalars = _shared(call, plain, memory), _scalars(call, plain, written)
    dense = _config(call, configs.dense_gradient, capability, plain)
    for child, gradient in _parameters(call, gradients):
        if gradient is not None and child.gradient == "dense":
            launches += _dense_gradient(call, gradient, shared, scalars, dense)
        elif gradient is not None and child.gradient == "vectors":
            config = configs.reading(capability, plain.item, _dim(call))
            launches += _vector_gradients(call, child, gradient, memory, shared, scalars, config)
    kinds = _kinds(call, gradients)
    if "offset" in kinds:
        config = _offset_config(call, capability, plain.item)
        launches += _offset_gradients(call, gradients, memory, shared, scalars, config)
    if "pair" in kinds:
        launches += _pair_gradients(call, gradients, memory, shared, scalars, dense)
    return launches


def _shared(call: Call, variant: Variant, memory: dict[str, Array]) -> dict[str, Any]:
    """The inputs of every kernel of the backward that makes scores."""
    return {
        "query": variant.query,
        "key": variant.key,
        "value": variant.value,
        **args.terms(call, variant.precision),
        "d_out": variant.d_out,
        "row_numbers": memory["row_numbers"],
    }


def _scalars(call: Call, variant: Variant, written: dict[str, Array | None]) -> dict[str, Any]:
    return {
        "strides": args.tensor_strides(call, **variant.tensors(), **written),
        **args.numbers_and_options(call, variant.precision),
    }


def _row_numbers(
    call: Call,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    gradients: Gradients,
    memory: dict[str, Array],
    config: Config,
) -> list[Launch]:
    batch, heads, q_len, _ = call.size
    tiles = _tiles(q_len, config.rows)
    sums = memory.get("sink_sums", null("float32"))
    arguments = {
        "out": out,
        "d_out": d_out,
        "lse": lse,
        "d_lse": null("float32") if d_lse is None else d_lse,
        "sinks": _sinks(call),
        "numbers": memory["row_numbers"],
        "sink_sums": sums,
        "strides": args.tensor_strides(call, out=out, d_out=d_out),
        "sizes": args.sizes(call),
    }
    constants = {"VALUE_DIM": call.value.shape[3], "TILE_M": config.rows}
    launches = _launch(row_numbers, tiles * heads * batch, arguments, constants, config)
    if gradients.sinks is not None:
        launches += _add_up(sums, gradients.sinks, tiles, batches=batch, heads=heads)
    return launches


def _key_gradients(
    call: Call,
    gradients: Gradients,
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
) -> list[Launch]:
    batch, kv_heads, kv_len, _ = call.key.shape
    arguments = {
        **shared,
        "d_key": gradients.key or null(call.key.dtype),
        "d_value": gradients.value or null(call.value.dtype),
        **scalars,
    }
    grid = _tiles(kv_len, config.keys) * kv_heads * batch
    return _launches(key_gradients, grid, arguments, _dims(call), config)


def _query_gradient(
    call: Call,
    gradients: Gradients,
    slope_sums: Array,
    adding: Adding,
    shared: dict[str, Any],
    scalars: dict[str, Any],
    config: Config,
) -> list[Launch]:
    size = call.size
    arguments = {
        **shared,
        "d_query": gradients.query or null(call.query.dtype),
        "slope_sums": slope_sums,
        "d_biases": _row_gradients(call, gradients),
        **scalars,
        "adding": adding,
    }
    grid = _tiles(size.q_len, config.rows) * size.q_heads * size.batch
    return _launches(query_gradient, grid, arguments, _dims(call), config)


def _slopes(call: Call, gradients: Gradients, sums: Array, adding: Adding) -> list[Launch]:
    launches = []
    for n, (_, gradient) in enumerate(_parameters(call, gradients)):
        if adding.head[n]:
            _, batch, heads, tiles = sums.shape
            part = sums.address + n * batch * heads * tiles * ITEM_BYTES["float32"]
            own = Array(part, sums.shape[1:], sums.strides[1:], "float32")
            launches += _add_up(own, gradient, tiles, batches=batch, heads=heads)
    return launches


def _add_up(sums: Array, total: Array, tiles: int, *, batches: int, heads: int) -> list[Launch]:
    """total [heads] or [batches, heads] from sums [batches, heads, tiles]."""
    per_batch = len(total.shape) == 2
    arguments = {
        "sums": sums,
        "total": total,
        "strides": args.head_strides(total),
        "heads": i32(heads),
        "batches": i32(1 if per_batch else batches),
        "tiles": i32(tiles),
    }
    config = configs.PARTIAL_SUMS
    grid = math.prod(total.shape)
    return _launch(add_partial_sums, grid, arguments, {"BLOCK": config.keys}, config)


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
    counts = [_tiles(full, tile) for full, tile in zip(size, tiles, strict=True)]
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
    return _launches(dense_gradient, math.prod(own), arguments, _dims(call), config)


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
    batch = max(call.size.batch, 1)
    each = 1
    if isinstance(call.query_start, int):
        each = _tiles(batch, min(batch, _tiles(configs.MANY_PROGRAMS, programs)))
    return _tiles(batch, each), each


def _diagonals(call: Call, config: Config) -> Diagonals:
    size = call.size
    last_row = max(_tiles(size.q_len, config.rows) - 1, 0) * config.rows
    before = _tiles(last_row, config.keys)
    count = max(before + _tiles(size.kv_len, config.keys), 1)
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
    tiles = _tiles(size.q_len, config.rows) * size.batch
    launches = _launch(key_ranges, tiles, ranges, {"TILE_M": config.rows}, configs.KEY_RANGES)
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
    launches += _launches(offset_gradient, grid, arguments, _dims(call), config)
    first = {"windows": memory["windows"], "query_starts": shared["query_starts"]}
    last = {"diagonals": along}
    fold = (fold_offsets, "offset", {"TILE_N": config.keys})
    return launches + _folds(call, gradients, fold, first, last, scalars, along.parts.value)


def _pair_parts(call: Call, config: Config) -> Parts:
    size = call.size
    tiles = _tiles(size.q_len, config.rows) * _tiles(size.kv_len, config.keys)
    return Parts(*map(i32, _parts(call, max(tiles * size.q_heads, 1))))


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
    for child, gradient in _parameters(call, gradients):
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
        grid = _tiles(entries, config.rows) * heads
        launches += _launch(kernel, grid, arguments, {"ENTRIES": config.rows, **constants}, config)
    return launches


def _kinds(call: Call, wanted: Gradients) -> set[str]:
    """How the gradients that are wanted of biases are made."""
    return {child.gradient for child, gradient in _parameters(call, wanted) if gradient}


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
    launches = _launches(band_gradients, grid, arguments, _dims(call), config)
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
        launches += _launch(fold_bands, grid, arguments, constants, configs.FOLD_BANDS)
    return launches


class Adding(NamedTuple):
    """Of each bias, whether its gradient is added up while dQ is made: its kind."""

    head: tuple[bool, ...]
    rows: tuple[bool, ...]


def _adding(call: Call, gradients: Gradients) -> Adding:
    wanted = [
        child.gradient if gradient else "" for child, gradient in _parameters(call, gradients)
    ]
    return Adding(*(tuple(kind == field for kind in wanted) for field in Adding._fields))


def _row_gradients(call: Call, gradients: Gradients) -> tuple[Any, ...]:
    """Of each bias of rows that wants a gradient, the same around its gradients."""

    def around(child: Any, wanted: Any) -> Any:
        pairs = zip(child.tensors(), wanted, strict=True)
        own = [replace(tensor, address=0) if given is None else given for tensor, given in pairs]
        return args.with_fragment(child.with_tensors(iter(own)).on_device(), "")

    return tuple(
        around(child, gradient) if gradient and child.gradient == "rows" else ()
        for child, gradient in _parameters(call, gradients)
    )


def _parameters(call: Call, gradients: Gradients) -> list[tuple[Any, Any]]:
    """The biases, each with the entry of its tensor; of several, a tuple, None where all are."""
    entries = iter(gradients.bias)
    found = []
    for child in args.bias_children(call.bias):
        own = tuple(islice(entries, len(child.tensors())))
        found.append((child, own[0] if len(own) == 1 else own if any(own) else None))
    return found


def _sinks(call: Call) -> Array:
    return null(call.query.dtype) if call.sinks is None else call.sinks


def _dim(call: Call) -> int:
    return max(call.query.shape[3], call.value.shape[3])


def _config(call: Call, table: Any, capability: int, variant: Variant) -> Config:
    """table: one of those of `configs`."""
    reading = call.bias is not None and call.bias.reads_query()
    return (configs.reading if reading else table)(capability, variant.item, _dim(call))


def _dense_config(call: Call, capability: int, item: int) -> Config:
    reading = call.bias is not None and call.bias.reads_query()
    return (configs.reading if reading else configs.dense_gradient)(capability, item, _dim(call))


def _offset_config(call: Call, capability: int, item: int) -> Config:
    # Along a diagonal of square tiles, each begins at a multiple of its keys, as products need.
    square = call.bias is not None and call.bias.makes_products()
    table = configs.reading if square else configs.offset_gradient
    return table(capability, item, _dim(call))


def _dims(call: Call) -> dict[str, int]:
    return {"HEAD_DIM": call.query.shape[3], "VALUE_DIM": call.value.shape[3]}


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _launches(
    kernel: Any, grid: int, arguments: dict[str, Any], dims: dict[str, int], config: Config
) -> list[Launch]:
    constants = {**dims, "TILE_M": config.rows, "TILE_N": config.keys}
    return _launch(kernel, grid, arguments, constants, config)


def _launch(
    kernel: Any, grid: int, arguments: dict[str, Any], constants: dict[str, int], config: Config
) -> list[Launch]:
    """Nothing where there is nothing to write."""
    launch = Launch(
        kernel,
        grid,
        arguments,
        constants,
        config.num_warps,
        config.num_stages,
        config.max_registers,
    )
    return [launch] if grid else []
