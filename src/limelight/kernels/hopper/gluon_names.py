"""Names of Gluon that moved, or were missing, between Triton 3.6 and 3.9."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# Global to shared memory, (descriptor, coordinates, barrier, destination).
copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@builtin
def _add_out(source, coordinates, tile, _semantic: Any = None):
    where = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, source.handle, where, tile.handle)


# Shared to global memory, adding, (descriptor, coordinates, tile).
add_out = getattr(tma, "async_atomic_add", None) or _add_out
