"""What plans share: how a call is cut into launches, and its biases with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from limelight.call import Call, Gradients
from limelight.kernels import arguments as args
from limelight.kernels import configs
from limelight.kernels.configs import Config
from limelight.kernels.launch import Launch


def parameters_of(call: Call, gradients: Gradients) -> list[tuple[Any, Any]]:
    """The biases, each with the entry of its tensor; of several, a tuple, None where all are."""
    entries = iter(gradients.bias)
    found = []
    for child in args.bias_children(call.bias):
        own = tuple(islice(entries, len(child.tensors())))
        found.append((child, own[0] if len(own) == 1 else own if any(own) else None))
    return found


def dim_of(call: Call) -> int:
    return max(call.query.shape[3], call.value.shape[3])


def config_of(
    call: Call, table: Callable[[int, int, int], Config], capability: int, item: int
) -> Config:
    """The line of a table of `configs`, or that of every kernel where a bias reads the query."""
    if call.bias is not None and call.bias.reads_query():
        table = configs.reading
    return table(capability, item, dim_of(call))


def dims_of(call: Call) -> dict[str, int]:
    return {"HEAD_DIM": call.query.shape[3], "VALUE_DIM": call.value.shape[3]}


def smaller(a: int, b: int) -> int:
    """min(a, b), of a number that may not be known yet (export/traced.py) an expression."""
    return a.smaller(b) if hasattr(a, "smaller") else min(a, b)  # type: ignore[attr-defined]


def larger(a: int, b: int) -> int:
    """max(a, b), as above."""
    return a.larger(b) if hasattr(a, "larger") else max(a, b)  # type: ignore[attr-defined]


def tiles_of(length: int, tile: int) -> int:
    return -(-length // tile)


def tiled_launches(
    kernel: Any, grid: int, arguments: dict[str, Any], dims: dict[str, int], config: Config
) -> list[Launch]:
    constants = {**dims, "TILE_M": config.rows, "TILE_N": config.keys}
    return launches_of(kernel, grid, arguments, constants, config)


def launches_of(
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
