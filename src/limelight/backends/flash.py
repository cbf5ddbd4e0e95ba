"""The `flash` backend: our Triton kernels, on every NVIDIA GPU since Pascal.

One forward and one backward, written once (`kernels/`), compiled for the card at hand on first use
and kept on disk, launched through the CUDA driver.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from limelight.backends.base import Backend, Reason, fused_reasons
from limelight.call import Call, Gradients
from limelight.problem import Problem
from limelight.tuning import TileConfig

DTYPES = ("float16", "bfloat16", "float32")
# The kernels on each library's arrays: a module of `kernels/`.
_LIBRARIES = {"torch": "torch_flash", "jax": "jax_flash", "cupy": "cupy_flash"}


class Flash(Backend):
    name = "flash"
    compiles = True
    summary = "fused Triton kernels, O(L) memory, every mask and bias that has a fragment"

    def why_not(self, problem: Problem) -> list[Reason]:
        p = problem
        capability = p.device.compute_capability
        rules = (
            (
                capability is not None and capability < (6, 0),
                "needs compute capability 6.0 (Pascal) or newer",
                p.device,
                "",
            ),
            (
                p.dtype not in DTYPES,
                f"takes {', '.join(DTYPES)}",
                p.dtype,
                "cast the inputs, or stay with float64 on tiled",
            ),
            (
                p.dtype == "bfloat16" and capability is not None and capability < (8, 0),
                "needs compute capability 8.0 (Ampere) for bfloat16",
                p.device,
                "use float16",
            ),
        )
        own = [Reason(rule, str(found), lift) for against, rule, found, lift in rules if against]
        return fused_reasons(problem, tuple(_LIBRARIES)) + own

    def config(self, problem: Problem) -> TileConfig | None:
        from limelight.kernels import configs

        capability = problem.device.compute_capability
        if capability is None:
            return None
        major, minor = capability
        target, dim = major * 10 + minor, max(problem.head_dim, problem.value_dim)
        lengths = (problem.q_len, problem.kv_len)
        item = configs.item(problem.dtype)
        bias = problem.bias
        whole = bias is not None and bias.makes_products()
        if not whole and configs.in_halves(problem.dtype, target, dim, lengths, problem.allow_tf32):
            item = configs.HALVES
        table = configs.reading if bias is not None and bias.reads_query() else configs.forward
        found = table(target, item, dim)
        return TileConfig(found.rows, found.keys, found.source)

    def precompile(self, call: Call) -> None:
        _kernels(call.problem.library).precompile(call)

    def forward(self, call: Call) -> tuple[Any, Any]:
        return _kernels(call.problem.library).forward(call)

    def shortcut(self, call: Call) -> Callable[[Any, Any, Any], Any]:
        return _kernels(call.problem.library).shortcut(call)

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        kernels = _kernels(call.problem.library)
        return kernels.backward(call, out, lse, d_out, d_lse, wanted)


@cache
def _kernels(library: str) -> Any:
    return import_module(f"limelight.kernels.{_LIBRARIES[library]}")  # takes Triton along
