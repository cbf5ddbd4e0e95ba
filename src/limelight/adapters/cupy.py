"""CuPy arrays. Everything runs on their device, in the caller's current stream."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from limelight.adapters.base import Adapter, Arguments, Plan
from limelight.adapters.foreign import numbers_of
from limelight.call import Gradients
from limelight.devices import Device
from limelight.errors import invalid
from limelight.problem import Layout, row_alignment

cupy: Any = import_module("cupy")  # which has no types


class CuPyPlan(Plan):
    def forward(self) -> tuple[Any, Any]:
        with self.call.query.device:
            return super().forward()

    def backward(self, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients) -> Gradients:
        with self.call.query.device:
            return super().backward(out, lse, d_out, d_lse, wanted)


class CuPyAdapter(Adapter):
    library = "cupy"
    array_type = "a CuPy array"
    plan_type = CuPyPlan

    def attention(self, arguments: Arguments) -> Any:
        out, lse = self.plan(arguments).forward()
        out = self.cast(out, arguments.query)
        return (out, lse) if arguments.return_lse else out

    def is_array(self, value: Any) -> bool:
        return isinstance(value, cupy.ndarray)

    def prepared(self, a: Arguments) -> Arguments:
        for name in ("key", "value"):
            if self.is_array(getattr(a, name)):
                self._check_device(name, getattr(a, name), a.query)
        return super().prepared(a)

    def asarray(self, value: Any, like: Any, name: str) -> Any:
        if not isinstance(value, cupy.ndarray):
            found = numbers_of(value, name, wide=like.dtype == np.float64)
            with like.device:
                value = cupy.asarray(found)
        self._check_device(name, value, like)
        if value.dtype.kind == "u":
            return value.astype(np.int64)  # unsigned numbers wrap around when subtracted
        return value

    def _check_device(self, name: str, array: Any, like: Any) -> None:
        if array.device != like.device:
            raise invalid(
                name,
                found=f"an array on device {array.device.id}",
                needed=f"one on device {like.device.id}, as query is",
            )

    def dtype(self, array: Any) -> str:
        return array.dtype.name

    def layout(self, array: Any) -> Layout:
        strides = tuple([stride // array.itemsize for stride in array.strides])
        alignment = row_alignment(array.data.ptr, array.shape, strides, array.itemsize)
        return Layout(tuple(array.shape), strides, array.dtype.name, alignment)

    def device(self, array: Any) -> Device:
        return _device(array.device.id)

    def version(self) -> str:
        return cupy.__version__

    def contiguous(self, array: Any) -> Any:
        return cupy.ascontiguousarray(array)

    def cast(self, array: Any, like: Any) -> Any:
        return array.astype(like.dtype, copy=False)

    def draw_seed(self, like: Any) -> Any:
        with like.device:
            return cupy.random.randint(0, 2**62, size=(1,), dtype=np.int64)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return cupy.broadcast_to(array, shape)


@cache
def _device(index: int) -> Device:
    found = cupy.cuda.runtime.getDeviceProperties(index)
    capability = (found["major"], found["minor"])
    return Device.cuda(found["name"].decode(), capability, found["multiProcessorCount"])


ADAPTER = CuPyAdapter()
