"""A plan that runs outside of autocast, which would round inside products of its own accord."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from limelight.adapters.base import Plan
from limelight.call import Gradients


class TorchPlan(Plan):
    def forward(self) -> tuple[Any, Any]:
        with without_autocast(kind_of(self.call.query)):
            return super().forward()

    def backward(self, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients) -> Gradients:
        with without_autocast(kind_of(self.call.query)):
            return super().backward(out, lse, d_out, d_lse, wanted)


_NOTHING = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """kind: a type of device, "cpu" or "cuda"."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def rounded(wide: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A backend's output in the query's dtype."""
    return wide if wide.dtype == query.dtype else wide.to(query.dtype)


def kind_of(tensor: torch.Tensor) -> str:
    """The type of its device: "cpu", "cuda", ..."""
    return "cuda" if tensor.is_cuda else tensor.device.type  # which takes ten times as long


def autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
