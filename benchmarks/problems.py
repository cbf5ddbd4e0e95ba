"""Named problems, for benchmarks and tuning: what is asked, and how PyTorch's users ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import limelight as ll


@dataclass(frozen=True)
class Case:
    """One problem. masks, bias and options make what limelight's call gets; `peer` is the same in
    plain PyTorch, the way its users write it today."""

    name: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    call: Callable[[Inputs], Tensor]
    peer: Callable[[Inputs], Tensor]
    backward: bool = True
    parameters: bool = False  # whether the bias's parameters get gradients


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor  # (heads,)
    lengths: Tensor  # (batch,)
    bias: Tensor | None  # (heads, length, length), where the case uses a dense one

    def gradients(self, parameters: bool) -> list[Tensor]:
        wanted = [self.query, self.key, self.value]
        if parameters:
            wanted.append(self.slopes)
        return wanted


def make(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    shape = (case.batch, case.heads, case.length, case.head_dim)
    query, key, value = (normal(*shape).requires_grad_() for _ in range(3))
    slopes = torch.tensor(ll.ALiBi.paper_slopes(case.heads), device=device)
    lengths = torch.linspace(case.length // 4, case.length, case.batch, device=device).long()
    dense = normal(case.heads, case.length, case.length) if "dense" in case.name else None
    return Inputs(query, key, value, slopes.requires_grad_(case.parameters), lengths, dense)


def _sdpa(**options: Any) -> Callable[[Inputs], Tensor]:
    return lambda i: F.scaled_dot_product_attention(i.query, i.key, i.value, **options)


def _limelight(**options: Any) -> Callable[[Inputs], Tensor]:
    return lambda i: ll.attention(i.query, i.key, i.value, **options)


def _distances(i: Inputs) -> Tensor:
    """|i - j| as (length, length)."""
    positions = torch.arange(i.query.shape[2], device=i.query.device)
    return (positions[:, None] - positions).abs()


def _alibi_peer(i: Inputs) -> Tensor:
    distances = _distances(i)
    bias = -i.slopes[:, None, None] * distances
    above = torch.ones_like(distances, dtype=torch.bool).triu(1)
    bias = bias.masked_fill(above, float("-inf"))[None].to(i.query.dtype)
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=bias)


def _window_peer(i: Inputs) -> Tensor:
    positions = torch.arange(i.query.shape[2], device=i.query.device)
    offset = positions[:, None] - positions
    seen = (offset >= 0) & (offset <= 512)
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=seen)


def _padding_peer(i: Inputs) -> Tensor:
    seen = torch.arange(i.key.shape[2], device=i.key.device) < i.lengths[:, None]
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=seen[:, None, None])


def _packed_mask(i: Inputs) -> ll.Mask:
    """Eight documents of the same length in one row."""
    length = i.query.shape[2]
    bounds = torch.arange(0, length + 1, length // 8, device=i.query.device)
    return ll.Causal() & ll.Packed(bounds)


def _packed_peer(i: Inputs) -> Tensor:
    positions = torch.arange(i.query.shape[2], device=i.query.device)
    ids = positions // (len(positions) // 8)
    seen = (positions[:, None] >= positions) & (ids[:, None] == ids)
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=seen)


def _blocks(i: Inputs) -> Tensor:
    """One block of 128 x 128 in ten, and the diagonal."""
    count = i.query.shape[2] // 128
    generator = torch.Generator(i.query.device).manual_seed(1)
    chosen = torch.rand(count, count, generator=generator, device=i.query.device) < 0.1
    return chosen | torch.eye(count, dtype=torch.bool, device=i.query.device)


def _blocks_peer(i: Inputs) -> Tensor:
    seen = _blocks(i).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=seen)


def _prefix_peer(i: Inputs) -> Tensor:
    positions = torch.arange(i.query.shape[2], device=i.query.device)
    seen = (positions[:, None] >= positions) | (positions < 512)
    return F.scaled_dot_product_attention(i.query, i.key, i.value, attn_mask=seen)


def cpu_cases() -> list[Case]:
    f32, bf16 = torch.float32, torch.bfloat16
    alibi = lambda i: ll.attention(  # noqa: E731
        i.query, i.key, i.value, mask=ll.Causal(), bias=ll.ALiBi(i.slopes)
    )
    window = ll.Causal() & ll.SlidingWindow(512)
    padded = lambda i: ll.attention(  # noqa: E731
        i.query, i.key, i.value, mask=ll.KeyLengths(i.lengths)
    )
    packed = lambda i: ll.attention(  # noqa: E731
        i.query, i.key, i.value, mask=_packed_mask(i)
    )
    blocks = lambda i: ll.attention(  # noqa: E731
        i.query, i.key, i.value, mask=ll.BlockSparse(_blocks(i))
    )
    prefix = _limelight(mask=ll.PrefixLM(512))
    dense = lambda i: ll.scaled_dot_product_attention(  # noqa: E731
        i.query, i.key, i.value, attn_mask=i.bias
    )
    dense_peer = lambda i: F.scaled_dot_product_attention(  # noqa: E731
        i.query, i.key, i.value, attn_mask=i.bias
    )
    return [
        Case("plain 128", 1, 8, 128, 64, f32, _limelight(), _sdpa()),
        Case("plain 2048", 1, 8, 2048, 64, f32, _limelight(), _sdpa()),
        Case(
            "causal 2048", 1, 8, 2048, 64, f32, _limelight(mask=ll.Causal()), _sdpa(is_causal=True)
        ),
        Case("plain 2048 bf16", 1, 8, 2048, 64, bf16, _limelight(), _sdpa()),
        Case("dense bias 2048", 1, 8, 2048, 64, f32, dense, dense_peer),
        Case("dropout 2048", 1, 8, 2048, 64, f32, _limelight(dropout_p=0.1), _sdpa(dropout_p=0.1)),
        Case("padding 8 x 512", 8, 8, 512, 64, f32, padded, _padding_peer),
        Case("window 512 causal 4096", 1, 8, 4096, 64, f32, _limelight(mask=window), _window_peer),
        Case("prefix 512 of 2048", 1, 8, 2048, 64, f32, prefix, _prefix_peer),
        Case("packed 8 x 512, causal", 1, 8, 4096, 64, f32, packed, _packed_peer),
        Case("one block in ten, 2048", 1, 8, 2048, 64, f32, blocks, _blocks_peer),
        Case("ALiBi causal 2048", 1, 8, 2048, 64, f32, alibi, _alibi_peer),
        Case("ALiBi causal 8192", 1, 8, 8192, 64, f32, alibi, _alibi_peer),
        Case(
            "ALiBi causal, slopes learned, 2048",
            1,
            8,
            2048,
            64,
            f32,
            alibi,
            _alibi_peer,
            parameters=True,
        ),
    ]
