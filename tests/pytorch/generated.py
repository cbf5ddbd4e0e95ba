"""Calls of every kind, drawn from a seed, and the tensors that they describe."""

from __future__ import annotations

import math
import random

from limelight.problem import ITEM_BYTES, Layout, row_alignment
from limelight.pytorch import SDPA, Operand

DIMS = (1, 2, 4, 8, 12, 16, 36, 40, 64, 64, 64, 72, 96, 128, 128, 136, 160, 192, 200, 224, 256, 264)
LENGTHS = (1, 2, 7, 16, 63, 64, 100, 128, 128, 192, 200, 256)
DTYPES = ("float16", "float16", "bfloat16", "bfloat16", "float32", "float64")


def draw(rng: random.Random) -> SDPA:
    """One call. Most are ordinary in most ways, so that single oddities show."""

    def odd(share: float) -> bool:
        return rng.random() < share

    dtype = rng.choice(DTYPES)
    batch, heads = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 6, 8))
    q_len = 0 if odd(0.02) else rng.choice(LENGTHS)
    kv_len = q_len if odd(0.6) else 0 if odd(0.02) else rng.choice(LENGTHS)
    dim = rng.choice(DIMS)
    value_dim = dim if odd(0.85) else rng.choice((dim, *DIMS))
    if odd(0.02):
        dim, value_dim = 192, 128
    kv_heads = heads if odd(0.7) else rng.choice((1, 2, 3, 4))
    value_heads = kv_heads if odd(0.95) else rng.choice((1, 2, 4))
    kv_batch = batch if odd(0.96) else 1
    learns = odd(0.4)
    shapes = (
        (batch, heads, q_len, dim),
        (kv_batch, kv_heads, kv_len, dim),
        (kv_batch, value_heads, kv_len, value_dim),
    )
    drop = rng.choice((0, 0, 0, 0, 0, 0, 1, 2)) if odd(0.04) else 0
    if drop:  # fewer dimensions, in all three alike
        shapes = tuple(shape[drop:] for shape in shapes)
    arrangement = rng.choice(("plain", "plain", "plain", "heads last", "sliced", "spread"))
    operands = [
        _operand(
            rng,
            shape,
            "bfloat16" if odd(0.005) else dtype,
            arrangement if odd(0.7) else "plain",
            learns,
        )
        for shape in shapes
    ]
    mask = None
    if odd(0.35):
        mask = _mask(rng, shapes[0], kv_len, dtype)
    return SDPA(
        *operands,
        attn_mask=mask,
        dropout_p=rng.choice((0.1, 0.125, 0.25, 0.5)) if odd(0.15) else 0.0,
        is_causal=odd(0.25 if mask is None else 0.03),
        enable_gqa=odd(0.7) if (heads != kv_heads or kv_heads != value_heads) else odd(0.05),
        grad_mode=odd(0.85),
    )


def _operand(rng, shape, dtype, arrangement, learns) -> Operand:
    item = ITEM_BYTES[dtype]
    offset = 0
    if arrangement == "heads last" and len(shape) == 4:
        _, heads, length, dim = shape
        strides = (length * heads * dim, dim, heads * dim, 1)
    elif arrangement == "sliced":  # a part of wider rows
        before, after = rng.choice((0, 1, 2, 4, 8, 16)), rng.choice((0, 4, 8))
        wide = _contiguous((*shape[:-1], shape[-1] + before + after))
        strides, offset = wide, before
    elif arrangement == "spread":  # every other element
        wide = _contiguous((*shape[:-1], 2 * shape[-1]))
        strides = (*wide[:-1], 2)
    else:
        strides = _contiguous(shape)
    alignment = row_alignment(offset * item, shape, strides, item)
    return Operand(Layout(tuple(shape), tuple(strides), dtype, alignment), offset, learns)


def _contiguous(shape):
    return tuple(math.prod(max(size, 1) for size in shape[n + 1 :]) for n in range(len(shape)))


def _mask(rng, query, kv_len, dtype) -> Operand:
    kind = rng.choice(("bool", "bool", dtype, dtype, "float32" if dtype != "float64" else dtype))
    full = (*query[:-1], kv_len)
    dims = rng.choice((2, 2, 3, 4, 4, 4))
    shape = [size if rng.random() < 0.7 else 1 for size in full[-dims:]]
    if rng.random() < 0.05:
        shape[-1] += 1
    learns = kind != "bool" and rng.random() < 0.15
    arrangement = "spread" if rng.random() < 0.1 else "plain"
    item = ITEM_BYTES.get(kind, 1)
    strides = _contiguous(shape)
    if arrangement == "spread":
        strides = (*_contiguous((*shape[:-1], 2 * shape[-1]))[:-1], 2)
    alignment = row_alignment(0, shape, strides, item)
    return Operand(Layout(tuple(shape), strides, kind, alignment), 0, learns)


def calls(seed: int, count: int) -> list[SDPA]:
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


def tensors(sdpa: SDPA, device: str):
    """query, key, value and attn_mask as torch tensors, of zeros."""
    import torch

    def tensor(operand: Operand | None):
        if operand is None:
            return None
        layout = operand.layout
        spans = ((size - 1) * step for size, step in zip(layout.shape, layout.strides, strict=True))
        length = operand.storage_offset + 1 + sum(span for span in spans if span > 0)
        storage = torch.zeros(length, dtype=getattr(torch, layout.dtype), device=device)
        made = storage.as_strided(layout.shape, layout.strides, operand.storage_offset)
        return made.requires_grad_(operand.requires_grad)

    return tuple(map(tensor, (sdpa.query, sdpa.key, sdpa.value, sdpa.attn_mask)))
