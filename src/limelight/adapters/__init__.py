"""Array libraries, one file each, imported only if the program has imported the library itself."""

from __future__ import annotations

import sys
from typing import Any

from limelight.adapters.base import Adapter
from limelight.errors import invalid_type

_SUPPORTED = "a torch tensor, a JAX, CuPy or NumPy array"


def adapter_for(library: str) -> Adapter:
    """The adapter for a problem's library. Raises ModuleNotFoundError without the library."""
    if library == "torch":
        from limelight.adapters.torch.adapter import ADAPTER
    elif library == "jax":
        from limelight.adapters.jax.adapter import ADAPTER
    elif library == "cupy":
        from limelight.adapters.cupy import ADAPTER
    else:
        from limelight.adapters.numpy import ADAPTER

    return ADAPTER


_by_type: dict[type, Adapter] = {}


def adapter_of(query: Any) -> Adapter:
    """The adapter for an array's library. Raises TypeError for what no adapter knows."""
    adapter = _by_type.get(type(query))
    if adapter is None:
        adapter = _by_type[type(query)] = _adapter_of(query)
    return adapter


def _adapter_of(query: Any) -> Adapter:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(query, torch.Tensor):
        from limelight.adapters.torch.adapter import ADAPTER

        return ADAPTER
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(query, jax.Array):
        from limelight.adapters.jax.adapter import ADAPTER

        return ADAPTER
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(query, cupy.ndarray):
        from limelight.adapters.cupy import ADAPTER

        return ADAPTER
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(query, numpy.ndarray):
        from limelight.adapters.numpy import ADAPTER

        return ADAPTER
    raise invalid_type("query", found=type(query).__name__, needed=_SUPPORTED)
