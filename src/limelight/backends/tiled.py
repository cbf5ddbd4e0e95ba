"""The `tiled` backend: FlashAttention's algorithm in PyTorch's or JAX's operations, on any device.

Memory grows with the length, not with its square. The work is in `kernels/tiled.py` and
`kernels/jax_tiled.py`.
"""

from __future__ import annotations

from typing import Any

from limelight.backends.base import Backend, Reason
from limelight.call import Call, Gradients
from limelight.problem import Problem
from limelight.tuning import TILED, TileConfig, tiled_jax


class Tiled(Backend):
    name = "tiled"
    summary = "array operations tile by tile, O(L) memory, every mask and bias, any device"

    def why_not(self, problem: Problem) -> list[Reason]:
        if problem.library in ("torch", "jax"):
            return []
        return [
            Reason(
                "runs on PyTorch tensors and JAX arrays",
                f"{problem.library} arrays",
                "pass torch tensors or JAX arrays",
            )
        ]

    def config(self, problem: Problem) -> TileConfig:
        return TILED if problem.library == "torch" else tiled_jax(problem.size)

    def forward(self, call: Call) -> tuple[Any, Any]:
        return _kernels(call).forward(call, self.config(call.problem))

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        tiles = self.config(call.problem)
        return _kernels(call).backward(call, tiles, out, lse, d_out, d_lse, wanted)


def _kernels(call: Call) -> Any:
    if call.problem.library == "torch":
        from limelight.kernels import tiled

        return tiled
    from limelight.kernels import jax_tiled

    return jax_tiled
