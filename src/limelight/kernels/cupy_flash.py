"""The fused kernels on CuPy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from limelight.call import Call
from limelight.kernels import fused
from limelight.kernels.runner import Memory, Runner

cupy: Any = import_module("cupy")  # which has no types


class CuPyMemory(Memory):
    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            import ml_dtypes  # CuPy's own have none

            return cupy.dtype(ml_dtypes.bfloat16)
        return cupy.dtype(name)

    def empty(self, like: Any, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
        memory = cupy.cuda.alloc(math.prod(shape) * dtype.itemsize)
        steps = tuple([stride * dtype.itemsize for stride in strides])
        return cupy.ndarray(tuple(shape), dtype, memory, steps)

    def empty_like(self, tensor: Any) -> Any:
        return cupy.empty_like(tensor)

    def zeros_like(self, tensor: Any) -> Any:
        return cupy.zeros_like(tensor)

    def address(self, tensor: Any) -> int:
        return tensor.data.ptr

    def strides(self, tensor: Any) -> tuple[int, ...]:
        return tuple([stride // tensor.itemsize for stride in tensor.strides])

    def dtype_name(self, tensor: Any) -> str:
        return tensor.dtype.name

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype, copy=False)

    def contiguous(self, tensor: Any) -> Any:
        return cupy.ascontiguousarray(tensor)

    def device(self, tensor: Any) -> int:
        return tensor.device.id

    def stream(self, device: int) -> int:
        return cupy.cuda.get_current_stream().ptr  # of the current device, which is the arrays'

    def loads_on(self, call: Call) -> int | None:
        device = getattr(call.query, "device", None) or cupy.cuda.Device()
        same = device.compute_capability == "{}{}".format(*fused.target(call))
        return device.id if same else None


RUNNER = Runner(CuPyMemory())
forward, backward, precompile = RUNNER.forward, RUNNER.backward, RUNNER.precompile
