"""The array namespace of an array, as masks, biases and `math` use it."""

from __future__ import annotations

from functools import cache
from typing import Any


def namespace(array: Any) -> Any:
    from array_api_compat import array_namespace

    found = array_namespace(array)
    return _of_jax() if found.__name__ == "jax.numpy" else found


@cache
def _of_jax() -> Any:
    import jax

    return _JAXNumPy(jax)


class _JAXNumPy:
    """jax.numpy, where int64 means the widest integer that JAX is told to have."""

    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jax.numpy, name)

    @property
    def int64(self) -> Any:
        return self._jax.dtypes.canonicalize_dtype("int64")
