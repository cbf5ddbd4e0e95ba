"""Device functions in files that import without Triton: `jit` and `tl`, inert until needed.

A mask or bias writes its fragment as for Triton. `ready` turns it into a real `triton.jit`
function, and with it every other one of its module, whose `tl` becomes the real `triton.language`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class _Language:
    """Stands in for `triton.language` until `ready` puts that in its place."""

    def __repr__(self) -> str:
        return "triton.language, not imported yet"


tl: Any = _Language()

__all__ = ["DeviceFunction", "Fixed", "jit", "ready", "tl"]

_inert_tl = tl
_lock = threading.RLock()


class Fixed(int):
    """A number of a mask or bias that is compiled into the kernel instead of passed to it."""


class DeviceFunction:
    """A function for the device, before its first use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Any = None
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: object) -> None:
        raise TypeError(f"{self.__name__} runs inside a kernel only")

    def __repr__(self) -> str:
        return f"<device function {self.function.__module__}.{self.__name__}>"


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, put off: Triton is imported by `ready`, not here."""
    return DeviceFunction(function)


def ready(function: DeviceFunction) -> Any:
    """The real `triton.jit` function."""
    with _lock:
        if function.compiled is None:
            import triton

            function.compiled = triton.jit(function.function)
            _make_ready(function.function.__globals__)
        return function.compiled


def _make_ready(namespace: dict[str, Any]) -> None:
    """Puts the real thing in the place of every inert name: Triton looks names up there."""
    import triton.language

    for name, value in list(namespace.items()):
        if value is _inert_tl:
            namespace[name] = triton.language
        elif isinstance(value, DeviceFunction):
            namespace[name] = ready(value)
