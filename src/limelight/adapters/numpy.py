"""NumPy arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from limelight.adapters.base import Adapter, Arguments
from limelight.adapters.foreign import numbers_of
from limelight.devices import CPU, Device
from limelight.errors import invalid_type
from limelight.problem import Layout, row_alignment


class NumPyAdapter(Adapter):
    library = "numpy"
    array_type = "a NumPy array"

    def attention(self, arguments: Arguments) -> Any:
        out, lse = self.plan(arguments).forward()
        out = self.cast(out, arguments.query)
        return (out, lse) if arguments.return_lse else out

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def prepared(self, a: Arguments) -> Arguments:
        for name in ("query", "key", "value"):
            array = getattr(a, name)
            if isinstance(array, np.ma.MaskedArray):
                raise invalid_type(name, found="a masked array", needed="a plain NumPy array")
            if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
                a = replace(a, **{name: np.asarray(array)})
        return super().prepared(a)

    def asarray(self, value: Any, like: Any, name: str) -> Any:
        wide = isinstance(value, np.ndarray) or like.dtype == np.float64
        array = numbers_of(value, name, wide=wide)
        if array.dtype.kind == "u":
            return array.astype(np.int64)  # unsigned numbers wrap around when subtracted
        return array

    def dtype(self, array: Any) -> str:
        return array.dtype.name

    def layout(self, array: Any) -> Layout:
        strides = tuple(stride // array.itemsize for stride in array.strides)
        alignment = row_alignment(array.ctypes.data, array.shape, strides, array.itemsize)
        return Layout(array.shape, strides, array.dtype.name, alignment)

    def device(self, array: Any) -> Device:
        return CPU

    def version(self) -> str:
        return np.__version__

    def contiguous(self, array: Any) -> Any:
        return np.ascontiguousarray(array)

    def cast(self, array: Any, like: Any) -> Any:
        return array.astype(like.dtype, copy=False)

    def draw_seed(self, like: Any) -> Any:
        return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(array, shape)


ADAPTER = NumPyAdapter()
