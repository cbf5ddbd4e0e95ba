"""SDPA: the arguments of `torch.nn.functional.scaled_dot_product_attention`, without data.

Unlike a `Problem` it may hold what PyTorch takes and limelight does not: any number of dimensions,
head_dim over 256, dtypes that differ, batches that broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from limelight.biases import ALiBi, DenseBias
from limelight.errors import invalid
from limelight.masks import (
    Causal,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    PrefixLM,
    SlidingWindow,
)
from limelight.problem import Layout, Problem


@dataclass(frozen=True)
class Operand:
    """One tensor argument. storage_offset: in elements, as `torch.Tensor.storage_offset` gives."""

    layout: Layout
    storage_offset: int = 0
    requires_grad: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def dims(self) -> int:
        return len(self.layout.shape)


@dataclass(frozen=True)
class SDPA:
    """One call of PyTorch's function.

    grad_mode: whether autograd records. nested: whether an input is a nested (ragged) tensor; its
    layout then has the longest length.
    """

    query: Operand
    key: Operand
    value: Operand
    attn_mask: Operand | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    grad_mode: bool = True
    nested: bool = False

    @classmethod
    def of(
        cls,
        query: Sequence[int],
        key: Sequence[int] | None = None,
        value: Sequence[int] | None = None,
        *,
        dtype: str = "float16",
        requires_grad: bool = False,
        attn_mask: Operand | None = None,
        **options: Any,
    ) -> SDPA:
        """Contiguous tensors of these shapes; key is shaped as query, value as key, by default.

        >>> SDPA.of((2, 8, 128, 64), dtype="bfloat16").query.layout
        bfloat16[2, 8, 128, 64]
        """
        key = query if key is None else key
        value = key if value is None else value

        def operand(shape: Sequence[int]) -> Operand:
            return Operand(Layout.contiguous(tuple(shape), dtype), requires_grad=requires_grad)

        return cls(operand(query), operand(key), operand(value), attn_mask, **options)

    @classmethod
    def from_problem(cls, problem: Problem) -> SDPA:
        """The problem as a user of PyTorch writes it: `is_causal` alone, or a dense `attn_mask`.

        Raises ValueError for what PyTorch's function has no argument for.
        """
        for name in ("softcap", "sinks"):
            if getattr(problem, name) is not None:
                raise invalid(
                    name, found=getattr(problem, name), needed="None: PyTorch's function has none"
                )
        causal = is_causal(problem)

        def operand(name: str) -> Operand:
            return Operand(getattr(problem, name), requires_grad=name in problem.gradients)

        return cls(
            query=operand("query"),
            key=operand("key"),
            value=operand("value"),
            attn_mask=None if causal else _dense(problem),
            dropout_p=problem.dropout_p,
            is_causal=causal,
            scale=problem.scale,
            enable_gqa=problem.group > 1,
        )

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        return self.query, self.key, self.value

    @property
    def training(self) -> bool:
        """Whether a backward may follow: what PyTorch's rules ask, which leave the mask out."""
        return self.grad_mode and any(operand.requires_grad for operand in self.operands)

    @property
    def four_dimensional(self) -> bool:
        return all(operand.dims == 4 for operand in self.operands)

    @property
    def empty(self) -> bool:
        return any(0 in operand.shape for operand in self.operands)

    def batched(self) -> SDPA:
        """Inputs of three dimensions with a batch of one in front: how torch 2.14 sees them."""
        if any(operand.dims != 3 for operand in self.operands):
            return self

        def wide(operand: Operand) -> Operand:
            layout = operand.layout
            strides = (layout.shape[0] * layout.strides[0], *layout.strides)
            return replace(
                operand, layout=replace(layout, shape=(1, *layout.shape), strides=strides)
            )

        mask = self.attn_mask
        return replace(
            self,
            query=wide(self.query),
            key=wide(self.key),
            value=wide(self.value),
            attn_mask=wide(mask) if mask is not None and mask.dims == 3 else mask,
        )


def is_causal(problem: Problem) -> bool:
    """Whether mask and bias are what PyTorch's `is_causal` says: aligned to the top left."""
    return isinstance(problem.mask, Causal) and problem.bias is None and problem.start == 0


def _dense(problem: Problem) -> Operand | None:
    """`attn_mask`: boolean for a mask alone, in the query's dtype where there is a bias."""
    mask, bias = problem.mask, problem.bias
    sees_all = problem.q_len == 1 and problem.start == problem.kv_len - 1
    if sees_all and isinstance(mask, Causal):
        mask = None
    parts = [*(mask.parts() if mask else ()), *(bias.parts() if bias else ())]
    if not parts:
        return None
    dtype = "bool" if bias is None else problem.dtype
    wanted = any(name.startswith("bias.") for name in problem.gradients)
    if len(parts) == 1 and isinstance(parts[0], (DenseMask, DenseBias)):
        return Operand(parts[0].tensor, requires_grad=wanted)
    shape = reduce(_broadcast, (_extent(part, problem) for part in parts))
    return Operand(Layout.contiguous(shape, dtype), requires_grad=wanted)


def _extent(part: Any, problem: Problem) -> tuple[int, ...]:
    """The dimensions along which a term's values differ; the others are 1."""
    batch, heads, q_len, kv_len = problem.size
    if isinstance(part, (DenseMask, DenseBias)):
        shape = tuple(part.tensor.shape)
        return (*([1] * (4 - len(shape))), *shape)
    if isinstance(part, KeyLengths):
        return (batch, 1, 1, kv_len)
    if isinstance(part, ALiBi):
        per_batch = part.slopes is not None and len(part.slopes.shape) == 2
        return (batch if per_batch else 1, heads, q_len, kv_len)
    if not isinstance(part, (Causal, SlidingWindow, Documents, Packed, PrefixLM)):
        return (batch, heads, q_len, kv_len)  # nobody says along what it varies
    per_batch = problem.start is None or any(
        tensor.shape and tensor.shape[0] == batch > 1 for tensor in part.tensors()
    )
    return (batch if per_batch else 1, 1, q_len, kv_len)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(pair) if 0 not in pair else 0 for pair in zip(first, second, strict=True))


def mask_bytes(operand: Operand) -> int:
    return math.prod(operand.shape) * {"bool": 1, "float32": 4, "float64": 8}.get(operand.dtype, 2)
