"""The `tiled` backend: FlashAttention's algorithm in PyTorch operations, on any device.

Memory grows with the length, not with its square. The work is in `kernels/tiled.py`.
"""

from __future__ import annotations

from typing import Any

from limelight.backends.base import Backend, Reason, TileConfig
from limelight.call import Call, Gradients
from limelight.problem import Problem

# Large enough for the matrix products and for the cost of a dozen PyTorch calls a tile, small
# enough for a tile of several heads to stay in the last-level cache.
TILES = TileConfig(rows=256, keys=512, source="measured on a 2-core x86-64 CPU")


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
        return TILES

    def forward(self, call: Call) -> tuple[Any, Any]:
        from limelight.kernels import tiled

        return tiled.forward(call, TILES)

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        from limelight.kernels import tiled

        return tiled.backward(call, TILES, out, lse, d_out, d_lse, wanted)
