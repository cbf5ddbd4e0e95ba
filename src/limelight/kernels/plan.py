"""From a call to launches: which kernels run, with which grids, tiles and arguments.

No array library is needed: the call's tensors are `Array`s, and so are the outputs and the scratch
memory, which the caller allocates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import arguments as args
from limelight.kernels import bias_plan, configs, variants
from limelight.kernels.backward import SLOPE_ROWS, key_gradients, query_gradient
from limelight.kernels.configs import Config
from limelight.kernels.cut import (
    config_of,
    dim_of,
    dims_of,
    launches_of,
    parameters_of,
    tiled_launches,
    tiles_of,
)
from limelight.kernels.forward import forward as forward_kernel
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape, i32, null
from limelight.kernels.partial_sums import add_partial_sums
from limelight.kernels.row_numbers import ROW_NUMBERS, row_numbers
from limelight.kernels.variants import Variant


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
        cut = config or config_of(call, configs.forward, capability, variant.item)
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
        grid = tiles_of(size.q_len, cut.rows) * size.q_heads * size.batch
        launches += tiled_launches(forward_kernel, grid, arguments, dims_of(call), cut)
    return launches


def scratch(
    call: Call, wanted: Gradients, capability: int, allow_tf32: bool = False
) -> dict[str, Shape]:
    """The memory that `backward` needs beside its outputs.

    wanted: of each gradient, whether it is wanted (anything true).
    """
    batch, heads, q_len, _ = call.size
    needed = {"row_numbers": Shape((batch, heads, q_len, ROW_NUMBERS.value), "float32")}
    if wanted.sinks:
        rows = configs.row_numbers(capability, configs.item(call.query.dtype), dim_of(call)).rows
        needed["sink_sums"] = Shape((batch, heads, tiles_of(q_len, rows)), "float32")
    adding = _adding(call, wanted)
    if any(adding.head):
        parts = tiles_of(q_len, SLOPE_ROWS.value)
        needed["slope_sums"] = Shape((len(adding.head), batch, heads, parts), "float32")
    if variants.are_halves(call, capability, allow_tf32):
        needed |= variants.scratch(call, with_d_out=True)
    needed |= bias_plan.scratch(call, wanted, capability)
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
    config = configs.row_numbers(capability, configs.item(call.query.dtype), dim_of(call))
    launches = of_rows(
        row_numbers, call, out, lse, d_out, d_lse, gradients, memory, config,
        strides=args.tensor_strides(call, out=out, d_out=d_out),
    )  # fmt: skip
    launches += variants.splitting(call, d_out, memory)
    found = variants.of(call, d_out, memory, capability, allow_tf32)
    kinds = {child.gradient for child in args.bias_children(call.bias)}
    of_queries = configs.query_gradient
    if "rows" in kinds:
        of_queries = configs.query_gradient_of_rows
    elif "offset" in kinds:
        of_queries = configs.query_gradient_of_offsets
    for variant in found:
        shared = {**_shared(call, variant, memory), "units": variant.units}
        scalars = _scalars(call, variant, written)
        if gradients.key is not None or gradients.value is not None:
            config = config_of(call, configs.key_gradients, capability, variant.item)
            launches += _key_gradients(call, gradients, shared, scalars, config)
        if gradients.query is not None or any(adding.head + adding.rows):
            config = config_of(call, of_queries, capability, variant.item)
            if any(adding.rows):  # their sums need registers
                config = replace(config, max_registers=None)
            launches += _query_gradient(call, gradients, sums, adding, shared, scalars, config)
    launches += _slopes(call, gradients, sums, adding)
    plain = found[-1]
    shared, scalars = _shared(call, plain, memory), _scalars(call, plain, written)
    launches += bias_plan.backward(call, gradients, memory, shared, scalars, capability)
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


def of_rows(
    kernel: Any,
    call: Call,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
    gradients: Gradients,
    memory: dict[str, Array],
    config: Config,
    *,
    strides: args.TensorStrides,
    scratch: Sequence[str] = (),
    constants: Mapping[str, int] | None = None,
) -> list[Launch]:
    """What runs on every row before a backward, and the sinks' gradient, which comes of it.

    scratch: the names of what the kernel takes of `memory` beside row_numbers and sink_sums.
    """
    batch, heads, q_len, _ = call.size
    tiles = tiles_of(q_len, config.rows)
    sums = memory.get("sink_sums", null("float32"))
    arguments = {
        "out": out,
        "d_out": d_out,
        "lse": lse,
        "d_lse": null("float32") if d_lse is None else d_lse,
        "sinks": _sinks(call),
        "numbers": memory["row_numbers"],
        "sink_sums": sums,
        **{name: memory[name] for name in scratch},
        "strides": strides,
        "sizes": args.sizes(call),
    }
    cut = {"VALUE_DIM": call.value.shape[3], **(constants or {}), "TILE_M": config.rows}
    launches = launches_of(kernel, tiles * heads * batch, arguments, cut, config)
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
    grid = tiles_of(kv_len, config.keys) * kv_heads * batch
    return tiled_launches(key_gradients, grid, arguments, dims_of(call), config)


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
    grid = tiles_of(size.q_len, config.rows) * size.q_heads * size.batch
    return tiled_launches(query_gradient, grid, arguments, dims_of(call), config)


def _slopes(call: Call, gradients: Gradients, sums: Array, adding: Adding) -> list[Launch]:
    launches = []
    for n, (_, gradient) in enumerate(parameters_of(call, gradients)):
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
    return launches_of(add_partial_sums, grid, arguments, {"BLOCK": config.keys}, config)


class Adding(NamedTuple):
    """Of each bias, whether its gradient is added up while dQ is made: its kind."""

    head: tuple[bool, ...]
    rows: tuple[bool, ...]


def _adding(call: Call, gradients: Gradients) -> Adding:
    wanted = [
        child.gradient if gradient else "" for child, gradient in parameters_of(call, gradients)
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
        for child, gradient in parameters_of(call, gradients)
    )


def _sinks(call: Call) -> Array:
    return null(call.query.dtype) if call.sinks is None else call.sinks
