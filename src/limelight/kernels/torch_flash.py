"""The fused kernels on PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from limelight.call import Call
from limelight.kernels import fused, plan
from limelight.kernels.fused import Planned
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


def shortcut(
    call: Call, planned: Planned = plan.forward
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`out` of calls like this one: what is left of `forward` when nothing needs looking up."""
    program, made = RUNNER.prepared_forward(call, planned)
    device, stream = call.query.device.index, RUNNER.memory.stream

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        new = [query.new_empty_strided(*each[:2], dtype=each.dtype) for each in made]
        addresses = [tensor.data_ptr() for tensor in (query, key, value, *new)]
        program.run(addresses, device, stream(device), RUNNER.allocate(query))
        return new[0]

    return run
