"""What a prediction of PyTorch's choice asks of tensors, of this build and of this process."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from torch import Tensor

from limelight.adapters.torch.adapter import ADAPTER
from limelight.devices import Device
from limelight.errors import invalid_type
from limelight.pytorch import SDPA, Build, Operand, Switches
from limelight.pytorch.builds import parsed

_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def described(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> SDPA:
    """The call without its data. Raises TypeError for what is no strided tensor."""
    return SDPA(
        _operand("query", query),
        _operand("key", key),
        _operand("value", value),
        None if attn_mask is None else _operand("attn_mask", attn_mask),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        grad_mode=torch.is_grad_enabled(),
    )


def _operand(name: str, tensor: Any) -> Operand:
    if not isinstance(tensor, Tensor):
        raise invalid_type(name, found=type(tensor).__name__, needed="a torch tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise invalid_type(
            name,
            found="a nested tensor" if tensor.is_nested else f"layout {tensor.layout}",
            needed="a strided tensor, or a limelight.pytorch.SDPA(nested=True) written by hand",
        )
    return Operand(ADAPTER.layout(tensor), int(tensor.storage_offset()), tensor.requires_grad)


def build_here() -> Build:
    """The PyTorch of this process."""
    toolkit = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "0.0")
    assert toolkit is not None
    with_cuda = torch.backends.cuda.is_built()
    return Build(
        version=parsed(torch.__version__),
        cuda=(int(toolkit[1]), int(toolkit[2])),
        cudnn=(torch.backends.cudnn.version() or 0) if torch.cuda.is_available() else 0,
        architectures=tuple((torch._C._cuda_getArchFlags() or "").split()) if with_cuda else (),
        flash=torch.backends.cuda.is_flash_attention_available() if with_cuda else True,
        source="in this process",
    )


def switches_here(device: Device) -> Switches:
    """How this process and its environment are set."""
    cuda = torch.backends.cuda
    return Switches(
        flash=cuda.flash_sdp_enabled(),
        efficient=cuda.mem_efficient_sdp_enabled(),
        math=cuda.math_sdp_enabled(),
        cudnn=cuda.cudnn_sdp_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
        order=_order() if device.kind == "cuda" else None,
        cudnn_deprioritized=_set("TORCH_CUDNN_SDPA_DEPRIORITIZED"),
        cudnn_nested=_set("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED"),
    )


def _order() -> tuple[str, ...]:
    one = torch.empty(1, 1, 8, 8, device="cuda", dtype=torch.float16)
    # The order is fixed at a process's first choice.
    torch._fused_sdp_choice(one, one, one)  # type: ignore[attr-defined]
    order = torch._C._get_sdp_priority_order()
    return tuple(_BACKENDS[number] for number in order if number in _BACKENDS)


def _set(variable: str) -> bool:
    return os.environ.get(variable) == "1"
