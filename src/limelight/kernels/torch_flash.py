"""The fused kernels on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from limelight.call import Call
from limelight.kernels import fused
from limelight.kernels.runner import Memory, Runner


class TorchMemory(Memory):
    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, name)

    def empty(
        self, like: Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return like.new_empty_strided(shape, strides, dtype=dtype)

    def empty_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def address(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def strides(self, tensor: Tensor) -> tuple[int, ...]:
        return tensor.stride()

    def dtype_name(self, tensor: Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor if tensor.dtype == dtype else tensor.to(dtype)

    def contiguous(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def device(self, tensor: Tensor) -> int:
        return tensor.device.index

    def stream(self, device: int) -> int:
        return torch._C._cuda_getCurrentRawStream(device)  # current_stream() takes 5 us

    def loads_on(self, call: Call) -> int | None:
        """For tensors that are nowhere, torch's current device."""
        if call.query.is_cuda:
            index = call.query.device.index
        elif torch.cuda.is_available():
            index = torch.cuda.current_device()
        else:
            return None
        return index if torch.cuda.get_device_capability(index) == fused.target(call) else None


RUNNER = Runner(TorchMemory())
forward, backward, precompile = RUNNER.forward, RUNNER.backward, RUNNER.precompile
