"""The `tiled` backend: FlashAttention's algorithm in PyTorch operations, on any device.

Memory grows with the length, not with its square. The work is in `kernels/tiled.py`.
"""

from __future__ import annotations

from typing import Any

from limelight.backends.base import Backend, Reason
from limelight.call import Call, Gradients
from limelight.problem import Problem
from limelight.tuning import TILED, TileConfig


class Tiled(Backend):
    name = "tiled"
    summary = "PyTorch operations tile by tile, O(L) memory, every mask and bias, any device"

    def why_not(self, problem: Problem) -> list[Reason]:
        if problem.library == "torch":
            return []
        return [
            Reason("runs on PyTorch tensors", f"{problem.library} arrays", "pass torch tensors")
        ]

    def config(self, problem: Problem) -> TileConfig:
        return TILED

    def forward(self, call: Call) -> tuple[Any, Any]:
        from limelight.kernels import tiled

        return tiled.forward(call, TILED)

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        from limelight.kernels import tiled

        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
