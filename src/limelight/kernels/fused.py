"""What the fused kernels do for a call, whoever holds its tensors: launches, and memory for them.

Tensors are `Array`s whose addresses are slots, numbered in the order in which a launch finds the
tensors: the call's own, as `Call.tensors()` has them, then those given beside it, then those made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape
from limelight.kernels.program import Slot
from limelight.problem import Layout, row_alignment

Planned = Callable[..., list[Launch]]


class Work(NamedTuple):
    """launches: in order. made: the tensors to allocate, results first and then scratch."""

    launches: list[Launch]
    made: list[Array]


def forward(call: Call, planned: Planned = plan.forward, *, heads_first: bool = False) -> Work:
    """Makes out [B, H, M, E], the LSE [B, H, M] if it is wanted, and scratch.

    call: on arrays. planned: which kernel, by its plan. heads_first: out is contiguous; else it
    lies as (B, M, H, E), so that joining the heads again needs no copy.
    """
    own = len(call.tensors())
    batch, heads, q_len, _ = call.query.shape
    shape = (batch, heads, q_len, call.value.shape[3])
    results = [(contiguous if heads_first else heads_last)(own, shape, call.query.dtype)]
    if wants_lse(call):
        results.append(contiguous(own + 1, shape[:3], "float32"))
    needed = plan.forward_scratch(call, **_switches(call))
    memory = _scratch(own + len(results), needed)
    lse = results[1] if len(results) > 1 else None
    launches = planned(call, results[0], lse, memory, **_switches(call))
    return Work(launches, [*results, *memory.values()])


def wants_lse(call: Call) -> bool:
    return call.problem.return_lse or bool(call.problem.gradients)


def backward(call: Call, given: Sequence[Array], filled: Gradients, planned: Any = plan) -> Work:
    """Makes scratch. planned: the module that plans it.

    given: out, the LSE, d_out and perhaps d_lse. filled: the gradients to fill, which were
    allocated behind those; None where a gradient is not wanted.
    """
    gradients = [each for each in (*filled[:4], *filled.bias) if each is not None]
    needed = planned.scratch(call, filled, **_switches(call))
    memory = _scratch(len(call.tensors()) + len(given) + len(gradients), needed)
    out, lse, d_out, *d_lse = given
    launches = planned.backward(
        call, out, lse, d_out, d_lse[0] if d_lse else None, filled, memory, **_switches(call)
    )
    return Work(launches, list(memory.values()))


def inputs(call: Call, wanted: Gradients) -> list[Any]:
    """The tensors of which gradients are wanted."""
    parameters = call.bias.tensors() if call.bias is not None else ()
    every = (call.query, call.key, call.value, call.sinks, *parameters)
    return list(compress(every, (*wanted[:4], *wanted.bias)))


def spread(gradients: Sequence[Any], wanted: Gradients) -> Gradients:
    """The gradients of `inputs` in their places."""
    rest = iter(gradients)
    query, key, value, sinks, *bias = (
        next(rest) if want else None for want in (*wanted[:4], *wanted.bias)
    )
    return Gradients(query, key, value, sinks, tuple(bias))


def array(
    slot: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, address: int = 0
) -> Array:
    """address: where the tensor lies now, modulo 16."""
    alignment = row_alignment(address, shape, strides, ITEM_BYTES[dtype])
    return Array(Slot(slot), shape, strides, dtype, alignment)  # type: ignore[arg-type]


def contiguous(slot: int, shape: tuple[int, ...], dtype: str) -> Array:
    return array(slot, shape, Layout.contiguous(shape, dtype).strides[: len(shape)], dtype)


def heads_last(slot: int, shape: tuple[int, ...], dtype: str) -> Array:
    return array(slot, shape, Layout.heads_last(shape, dtype).strides, dtype)


def target(call: Call) -> tuple[int, int]:
    """The compute capability that the call is for."""
    found = call.problem.device.compute_capability
    assert found is not None  # why_not refuses the CPU
    return found


def capability(call: Call) -> int:
    """What the kernels are cut for: 90 for sm_90."""
    major, minor = target(call)
    return major * 10 + minor


def _switches(call: Call) -> dict[str, Any]:
    return {"capability": capability(call), "allow_tf32": call.problem.allow_tf32}


def _scratch(first: int, needed: dict[str, Shape]) -> dict[str, Array]:
    return {name: contiguous(first + n, *each) for n, (name, each) in enumerate(needed.items())}
