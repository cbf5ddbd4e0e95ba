"""JAX arrays, traced ones too: a call is differentiable, and maps over batches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from limelight.adapters.base import Adapter, Arguments
from limelight.adapters.foreign import numbers_of
from limelight.adapters.jax import calls
from limelight.adapters.jax.calls import JAXPlan
from limelight.devices import CPU, Device
from limelight.errors import invalid, invalid_type
from limelight.problem import Layout

# What JAX's setting for products calls those that limelight makes in one pass of TF32.
_TF32 = ("default", "fastest", "bfloat16", "tensorfloat32", "TF32_TF32_F32")


class JAXAdapter(Adapter):
    library = "jax"
    array_type = "a JAX array"
    plan_type = JAXPlan

    def attention(self, arguments: Arguments, *, heads_last: bool = False) -> Any:
        """heads_last: query, key and value lie in memory as (B, M, H, D), where they are traced."""
        plan = self.plan(arguments)
        return calls.attention(plan, heads_last=heads_last)

    def is_array(self, value: Any) -> bool:
        return isinstance(value, jax.Array)

    def asarray(self, value: Any, like: Any, name: str) -> Any:
        if not isinstance(value, jax.Array):
            value = jnp.asarray(numbers_of(value, name, wide=like.dtype == jnp.float64))
        self._check_device(name, value, like)
        if jnp.issubdtype(value.dtype, jnp.unsignedinteger):
            # Unsigned numbers wrap around when subtracted.
            return value.astype(jax.dtypes.canonicalize_dtype("int64"))
        return value

    def _check_device(self, name: str, array: Any, like: Any) -> None:
        where, wanted = _devices(array), _devices(like)
        if where is not None and wanted is not None and where != wanted:
            raise invalid(
                name,
                found=f"an array on {_names(where)}",
                needed=f"one on {_names(wanted)}, as query is",
            )

    def prepared(self, a: Arguments) -> Arguments:
        for name in ("key", "value"):
            if self.is_array(getattr(a, name)):
                self._check_device(name, getattr(a, name), a.query)
        return super().prepared(a)

    def dtype(self, array: Any) -> str:
        return array.dtype.name

    def layout(self, array: Any) -> Layout:
        return Layout.contiguous(tuple(array.shape), array.dtype.name)

    def device(self, array: Any) -> Device:
        """For an array that is traced, JAX's default device: where it will run is not known."""
        devices = _devices(array)
        if devices is None:
            default = _setting("jax_default_device")
            found = default if isinstance(default, jax.Device) else jax.devices(default)[0]
        else:
            found = min(devices, key=lambda device: device.id)
        return _device(found)

    def version(self) -> str:
        return jax.__version__

    def allow_tf32(self) -> bool:
        return _setting("jax_default_matmul_precision") in _TF32

    def contiguous(self, array: Any) -> Any:
        return array

    def cast(self, array: Any, like: Any) -> Any:
        return array.astype(like.dtype)

    def _checked_seed(self, seed: Any, query: Any) -> Any:
        if not self.is_array(seed):
            return super()._checked_seed(seed, query)
        needed = "an integer, or an array of one integer"
        if not jnp.issubdtype(seed.dtype, jnp.integer):
            raise invalid_type("seed", found=f"dtype {seed.dtype}", needed=needed)
        if math.prod(seed.shape) != 1:
            raise invalid("seed", found=f"shape {tuple(seed.shape)}", needed=needed)
        return self.asarray(seed, query, "seed").reshape(1)

    def draw_seed(self, like: Any) -> Any:
        raise invalid(
            "seed",
            found="None, with dropout",
            needed="an integer, or an array of one, such as jax.random.randint(key, (1,), 0, "
            "2**31 - 1): JAX has no generator of its own",
        )

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return jnp.broadcast_to(array, shape)

    def placeholder(self, layout: Layout) -> Any:
        return jax.ShapeDtypeStruct(layout.shape, jnp.dtype(layout.dtype))


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _devices(array: Any) -> set[Any] | None:
    """Where an array lies; None where it is traced."""
    return None if isinstance(array, Tracer) else array.devices()


def _names(devices: set[Any]) -> str:
    return ", ".join(sorted(map(str, devices)))


def _device(found: Any) -> Device:
    if found.platform == "cpu":
        return CPU
    major, _, minor = str(getattr(found, "compute_capability", "")).partition(".")
    if found.platform != "gpu" or not (major.isdecimal() and minor.isdecimal()):
        return Device(str(found), "other")
    return Device.cuda(found.device_kind, (int(major), int(minor)), found.core_count)


ADAPTER = JAXAdapter()
