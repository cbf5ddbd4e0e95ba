"""From a call to the launch of the Hopper forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from limelight.call import Call
from limelight.kernels import arguments as args
from limelight.kernels.cut import dim_of, tiles_of
from limelight.kernels.hopper import configs
from limelight.kernels.hopper.configs import Config
from limelight.kernels.hopper.forward import forward as kernel
from limelight.kernels.launch import Array, Launch, Scalar, i32, null

_BESIDE = 4  # tiles that share keys, where they differ in work: more of them balance worse


class Order(NamedTuple):
    """items: a tile of queries of one matrix each. beside: how many of a matrix follow another."""

    items: Scalar
    batches: Scalar
    beside: Scalar


class Cut(NamedTuple):
    """What is compiled in. own_rows: of a consumer."""

    head_dim: int
    value_dim: int
    rows: int
    own_rows: int
    keys: int
    stages: int
    consumers: int
    turns: bool


class Task(NamedTuple):
    """All that decides the scores and how they are walked; see arguments.py."""

    sinks: Array
    query_starts: Array
    masks: tuple[Any, ...]
    biases: tuple[Any, ...]
    sizes: Any
    numbers: Any
    options: Any
    order: Order
    cut: Cut


def forward(
    call: Call,
    out: Array,
    lse: Array | None,
    memory: dict[str, Array],
    *,
    capability: int,
    allow_tf32: bool = False,
    config: Config | None = None,
    programs: int | None = None,
) -> list[Launch]:
    """As plan.forward; no memory is used. programs: instead of the device's multiprocessors."""
    size = call.size
    config = config or configs.forward(dim_of(call), is_plain(call))
    tiles = tiles_of(size.q_len, config.rows)
    items = tiles * size.q_heads * size.batch
    terms = args.terms(call, "")
    terms.pop("seeds")
    task = Task(
        sinks=null(call.query.dtype) if call.sinks is None else call.sinks,
        **terms,
        **args.numbers_and_options(call, args.precision(call.query.dtype, capability, allow_tf32)),
        order=Order(i32(items), i32(size.batch), i32(beside(call, tiles))),
        cut=Cut(
            head_dim=call.query.shape[3],
            value_dim=call.value.shape[3],
            rows=config.rows,
            own_rows=config.rows // config.consumers,
            keys=config.keys,
            stages=config.stages,
            consumers=config.consumers,
            turns=config.turns,
        ),
    )
    arguments = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "out": out,
        "lse": lse or null("float32"),
        "strides": args.tensor_strides(call, out=out),
        "task": task,
    }
    grid = min(items, programs or call.problem.device.sms or items)
    launch = Launch(kernel, grid, arguments, {}, 4, 1, config.max_registers)
    return [launch] if grid else []


def is_plain(call: Call) -> bool:
    """Whether scores are scaled and masked, and nothing else."""
    return call.bias is None and call.softcap is None


def beside(call: Call, tiles: int) -> int:
    """How many tiles of one matrix follow another."""
    return tiles if call.mask is None else min(tiles, _BESIDE)
