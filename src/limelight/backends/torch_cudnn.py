"""The `torch_cudnn` backend: cuDNN's attention, as PyTorch carries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from limelight.backends.base import Backend, Reason
from limelight.call import Call, Gradients
from limelight.problem import Problem


class TorchCuDNN(Backend):
    name = "torch_cudnn"
    summary = "cuDNN's attention through PyTorch, O(L) memory"
    native = True

    def why_not(self, problem: Problem) -> list[Reason]:
        from limelight.pytorch import handover  # 25 ms to import

        return handover.why_not("cudnn", problem)

    def forward(self, call: Call) -> tuple[Any, Any]:
        from limelight.kernels import torch_operators

        return torch_operators.forward("cudnn", call)

    def shortcut(self, call: Call) -> Callable[[Any, Any, Any], Any]:
        from limelight.kernels import torch_operators

        return torch_operators.shortcut("cudnn", call)

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        from limelight.kernels import torch_operators

        return torch_operators.backward("cudnn", call, out, lse, d_out, d_lse, wanted)
