"""The fused kernels on PyTorch tensors: allocates, and runs programs made once per problem."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import ITEM_BYTES, Array
from limelight.kernels.program import Program, Slot

_programs: OrderedDict[Hashable, Program] = OrderedDict()
_PROGRAMS = 4096


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E], laid out as (B, M, H, E), and the LSE [B, H, M], float32."""
    batch, heads, q_len, _ = call.query.shape
    out = call.query.new_empty((batch, q_len, heads, call.value.shape[3])).transpose(1, 2)
    lse = call.query.new_empty((batch, heads, q_len), dtype=torch.float32)
    inputs = _present(call)
    tensors = [*inputs, out, lse]

    def build() -> Program:
        described = _described(call, tensors)
        arrays = _arrays(tensors)
        launches = plan.forward(
            described, arrays[-2], arrays[-1], capability=_capability(call), **_switches(call)
        )
        return Program(launches, _target(call))

    _program(("forward", *_key(call)), build).run(*_where(tensors))
    return out, lse


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients, each in its input's dtype; bitwise repeatable."""
    out = _unit(out.to(call.query.dtype))
    d_out = torch.zeros_like(out) if d_out is None else _unit(d_out)
    lse = lse.contiguous()
    given = [out, lse, d_out, *([] if d_lse is None else [d_lse.float().contiguous()])]
    inputs = _present(call)
    parameters = call.bias.tensors() if call.bias is not None else []
    every = [call.query, call.key, call.value, call.sinks, *parameters]
    flags = [*wanted[:4], *wanted.bias]
    outputs = [
        torch.empty_like(tensor) if flag else None
        for tensor, flag in zip(every, flags, strict=True)
    ]
    capability = _capability(call)
    described = _described(call, inputs)
    needed = plan.scratch(described, wanted, capability)
    memory = [
        call.query.new_empty(shape.shape, dtype=getattr(torch, shape.dtype))
        for shape in needed.values()
    ]
    made = [tensor for tensor in outputs if tensor is not None]
    tensors = [*inputs, *given, *made, *memory]

    def build() -> Program:
        arrays = iter(_arrays(tensors))
        for _ in inputs:
            next(arrays)
        some = [next(arrays) for _ in given]
        filled = [None if tensor is None else next(arrays) for tensor in outputs]
        gradients = Gradients(filled[0], filled[1], filled[2], filled[3], tuple(filled[4:]))
        launches = plan.backward(
            described,
            some[0],
            some[1],
            some[2],
            some[3] if len(some) > 3 else None,
            gradients,
            dict(zip(needed, arrays, strict=True)),
            capability=capability,
            **_switches(call),
        )
        return Program(launches, _target(call))

    layouts = (out.stride(), d_out.stride(), d_out.data_ptr() & 15, d_lse is None)
    _program(("backward", tuple(flags), layouts, *_key(call)), build).run(*_where(tensors))
    return Gradients(outputs[0], outputs[1], outputs[2], outputs[3], tuple(outputs[4:]))


def _program(key: Hashable, build: Callable[[], Program]) -> Program:
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = build()
        if len(_programs) > _PROGRAMS:
            _programs.popitem(last=False)
    return program


def _key(call: Call) -> tuple[Hashable, ...]:
    """What a program depends on beside the problem: the numbers that it holds."""
    start = call.query_start if isinstance(call.query_start, int) else None
    seed = call.seed if isinstance(call.seed, int) else None
    return call.problem, start, seed


def _present(call: Call) -> list[Tensor]:
    return [tensor for tensor in call.tensors() if tensor is not None]


def _described(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The call with arrays, whose addresses are slots, in the place of its tensors."""
    arrays = iter(_arrays(tensors))
    return call.with_tensors([None if t is None else next(arrays) for t in call.tensors()])


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [_array(tensor, Slot(n)) for n, tensor in enumerate(tensors)]


def _array(tensor: Tensor, address: Any) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, strides = tuple(tensor.shape), tensor.stride()
    item = ITEM_BYTES.get(dtype, tensor.element_size())
    rows = [stride for stride, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    alignment = math.gcd(16, tensor.data_ptr(), *(item * stride for stride in rows))
    return Array(address, shape, strides, dtype, alignment)


def _unit(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _where(tensors: Sequence[Tensor]) -> tuple[list[int], int, int]:
    device = tensors[0].device.index
    stream = torch.cuda.current_stream(device).cuda_stream
    return [tensor.data_ptr() for tensor in tensors], device, stream


def _target(call: Call) -> tuple[int, int]:
    target = call.problem.device.compute_capability
    assert target is not None  # why_not refuses the CPU
    return target


def _capability(call: Call) -> int:
    major, minor = _target(call)
    return major * 10 + minor


def _switches(call: Call) -> dict[str, bool]:
    return {"allow_tf32": call.problem.allow_tf32}
