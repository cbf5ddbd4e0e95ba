"""Random inputs of a call, by their sizes."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def qkv(
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 9,
    kv_len: int | None = None,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, normally distributed; keys are as many as queries unless given."""
    kv_heads = heads if kv_heads is None else kv_heads
    kv_len = q_len if kv_len is None else kv_len
    value_dim = head_dim if value_dim is None else value_dim
    return (
        normal(batch, heads, q_len, head_dim, dtype=dtype, device=device, grad=grad),
        normal(batch, kv_heads, kv_len, head_dim, dtype=dtype, device=device, grad=grad),
        normal(batch, kv_heads, kv_len, value_dim, dtype=dtype, device=device, grad=grad),
    )


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = True
) -> Tensor:
    drawn = torch.randn(*shape, dtype=torch.float64).to(device, dtype)
    return drawn.requires_grad_(grad)
