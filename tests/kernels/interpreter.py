"""Runs the plan's launches in Triton's interpreter, on torch tensors of the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, _patch_lang

from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import Array, Launch, Scalar, Shape

_patched: set[int] = set()


def _call(function: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
    namespace = function.fn.__globals__
    if id(namespace) not in _patched:
        _patched.add(id(namespace))
        _patch_lang(function.fn)
    return function.rewrite()(*arguments, **named)


# The interpreter patches the language anew at each call of a device function, which takes nearly
# all of its time; once a kernel and module is enough.
InterpretedFunction.__call__ = _call

_DTYPES = {torch.float16: "float16", torch.float32: "float32", torch.int32: "int32"}
_DTYPES |= {torch.int64: "int64", torch.bool: "bool", torch.float64: "float64"}


class _Pointer:
    """What the interpreter asks of a tensor, over memory that it may use as it is."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> _Pointer:
        return self

    def cpu(self) -> _Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Pointer:
        return self

    def set_(self, *_: Any) -> None: ...

    def copy_(self, *_: Any) -> None: ...

    def storage_offset(self) -> None: ...

    def size(self) -> None: ...

    def stride(self) -> None: ...


def array(tensor: torch.Tensor) -> Array:
    return Array(
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), _DTYPES[tensor.dtype], alignment=1
    )


def run(launches: list[Launch]) -> None:
    for launch in launches:
        arguments = {name: _interpreted(node) for name, node in launch.arguments.items()}
        _patched.clear()
        launch.kernel[(launch.grid,)](**arguments, **launch.constants)


def _interpreted(node: Any, name: str = "") -> Any:
    if isinstance(node, tuple):
        names = getattr(node, "_fields", ("",) * len(node))
        parts = [_interpreted(part, each) for part, each in zip(node, names, strict=True)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if isinstance(node, Array):
        return _Pointer(node.address, node.dtype)
    if isinstance(node, bool):
        return np.bool_(node)  # a plain one would become a tensor, and fail
    if isinstance(node, int) and name.isupper():
        return tl.constexpr(node)
    return node.value if isinstance(node, Scalar) else node


def on_device(call: Call) -> Call:
    """The call with an Array in the place of every tensor."""
    return call.with_tensors(map(array, call.tensors()))


def forward(call: Call, capability: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, q_len, _ = call.size
    out = torch.full((batch, q_len, heads, call.value.shape[3]), math.nan, dtype=call.query.dtype)
    out = out.transpose(1, 2)
    lse = torch.full((batch, heads, q_len), math.nan)
    described = on_device(call)
    memory = _scratch(plan.forward_scratch(described, capability))
    arrays = {name: array(tensor) for name, tensor in memory.items()}
    run(plan.forward(described, array(out), array(lse), arrays, capability=capability))
    return out, lse


def backward(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    wanted: Gradients,
    capability: int = 80,
) -> Gradients:
    """The wanted gradients, in their inputs' dtypes."""
    parameters = call.bias.tensors() if call.bias is not None else []
    inputs = (call.query, call.key, call.value, call.sinks)
    outputs = Gradients(
        *map(_poisoned, inputs, wanted[:4]), tuple(map(_poisoned, parameters, wanted.bias))
    )
    described = on_device(call)
    memory = _scratch(plan.scratch(described, wanted, capability))
    launches = plan.backward(
        described,
        array(out),
        array(lse),
        array(d_out),
        None if d_lse is None else array(d_lse),
        Gradients(*map(_described, outputs[:4]), tuple(map(_described, outputs.bias))),
        {name: array(tensor) for name, tensor in memory.items()},
        capability=capability,
    )
    run(launches)
    return outputs


def _scratch(needed: dict[str, Shape]) -> dict[str, torch.Tensor]:
    """Memory that holds nothing of use."""
    found = {}
    for name, (shape, dtype) in needed.items():
        made = torch.empty(shape, dtype=getattr(torch, dtype))
        found[name] = made.fill_(math.nan if made.is_floating_point() else -(2**31))
    return found


def _poisoned(tensor: torch.Tensor | None, wanted: object) -> torch.Tensor | None:
    return torch.full_like(tensor, math.nan) if wanted and tensor is not None else None


def _described(tensor: torch.Tensor | None) -> Array | None:
    return None if tensor is None else array(tensor)
