"""From a call to the launches of the Hopper backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import arguments as args
from limelight.kernels.cut import dim_of, launches_of, tiles_of
from limelight.kernels.hopper import configs
from limelight.kernels.hopper.backward import backward as kernel
from limelight.kernels.hopper.configs import BackwardConfig
from limelight.kernels.hopper.ends import finish, prepare
from limelight.kernels.hopper.plan import Order, beside, is_plain
from limelight.kernels.launch import Array, Launch, Shape, i32, null
from limelight.kernels.plan import of_rows


class Cut(NamedTuple):
    """What is compiled in. own_keys: of a consumer."""

    head_dim: int
    value_dim: int
    rows: int
    keys: int
    own_keys: int
    stages: int


class Task(NamedTuple):
    """All that decides the scores and how they are walked; see arguments.py."""

    query_starts: Array
    masks: tuple[Any, ...]
    biases: tuple[Any, ...]
    sizes: Any
    numbers: Any
    options: Any
    order: Order
    cut: Cut


def scratch(
    call: Call, wanted: Gradients, capability: int, allow_tf32: bool = False
) -> dict[str, Shape]:
    """The memory that `backward` needs beside its outputs, as plan.scratch says it."""
    batch, heads, q_len, head_dim = call.query.shape
    tiles = tiles_of(q_len, configs.ENDS.rows)
    needed = {
        "row_numbers": Shape((batch, heads, 2, tiles * configs.ENDS.rows), "float32"),
        "d_query_sums": Shape((batch, heads, q_len, _sums_dim(head_dim)), "float32"),
    }
    if wanted.sinks:
        needed["sink_sums"] = Shape((batch, heads, tiles), "float32")
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
    config: BackwardConfig | None = None,
    programs: int | None = None,
) -> list[Launch]:
    """As plan.backward, for gradients of no bias; d_query is added up in an order that varies.

    config: instead of the table's. programs: instead of the device's multiprocessors.
    """
    strides = args.tensor_strides(
        call, out=out, d_out=d_out, d_query=gradients.query, d_key=gradients.key,
        d_value=gradients.value,
    )  # fmt: skip
    config = config or configs.backward(dim_of(call), plain=is_plain(call))
    launches = of_rows(
        prepare, call, out, lse, d_out, d_lse, gradients, memory, configs.ENDS,
        strides=strides, scratch=["d_query_sums"],
        constants={"SUMS_DIM": _sums_dim(call.query.shape[3])},
    )  # fmt: skip
    launches += _main(call, d_out, gradients, memory, strides, capability, config, programs)
    if gradients.query is not None:
        launches += _finish(call, gradients.query, memory["d_query_sums"], strides)
    return launches


def _main(
    call: Call,
    d_out: Array,
    gradients: Gradients,
    memory: dict[str, Array],
    strides: args.TensorStrides,
    capability: int,
    config: BackwardConfig,
    programs: int | None,
) -> list[Launch]:
    batch, kv_heads, kv_len, _ = call.key.shape
    tiles = tiles_of(kv_len, config.keys)
    items = tiles * kv_heads * batch
    terms = args.terms(call, "")
    terms.pop("seeds")
    task = Task(
        **terms,
        **args.numbers_and_options(call, args.precision(call.query.dtype, capability, False)),
        order=Order(i32(items), i32(batch), i32(beside(call, tiles))),
        cut=Cut(
            head_dim=call.query.shape[3],
            value_dim=call.value.shape[3],
            rows=config.rows,
            keys=config.keys,
            own_keys=config.keys // 2,
            stages=config.stages,
        ),
    )
    arguments = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "d_out": d_out,
        "numbers": memory["row_numbers"],
        "d_query": memory["d_query_sums"],
        "d_key": gradients.key or null(call.key.dtype),
        "d_value": gradients.value or null(call.value.dtype),
        "strides": strides,
        "task": task,
    }
    grid = min(items, programs or call.problem.device.sms or items)
    launch = Launch(kernel, grid, arguments, {}, 4, 1, config.max_registers)
    return [launch] if grid else []


def _finish(call: Call, d_query: Array, sums: Array, strides: args.TensorStrides) -> list[Launch]:
    batch, heads, q_len, head_dim = call.query.shape
    arguments = {
        "d_query_sums": sums,
        "d_query": d_query,
        "strides": strides,
        "sizes": args.sizes(call),
        "numbers": args.numbers_and_options(call, "")["numbers"],
    }
    constants = {
        "HEAD_DIM": head_dim,
        "SUMS_DIM": _sums_dim(head_dim),
        "TILE_M": configs.ENDS.rows,
    }
    grid = tiles_of(q_len, configs.ENDS.rows) * heads * batch
    return launches_of(finish, grid, arguments, constants, configs.ENDS)


def _sums_dim(head_dim: int) -> int:
    """The kernel's `padded`."""
    return max(64, 1 << (head_dim - 1).bit_length())
