"""A plan that runs outside of autocast, which would round inside products of its own accord."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from limelight.adapters.base import Plan
from limelight.call import Gradients


class TorchPlan(Plan):
    def forward(self) -> tuple[Any, Any]:
        with without_autocast(self.call.query.device.type):
            return super().forward()

    def backward(self, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients) -> Gradients:
        with without_autocast(self.call.query.device.type):
            return super().backward(out, lse, d_out, d_lse, wanted)


_NOTHING = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """kind: a type of device, "cpu" or "cuda"."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
