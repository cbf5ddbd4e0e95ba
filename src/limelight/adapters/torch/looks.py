"""What a call looks like: all that preparing, describing and choosing look at, as a key.

Every call makes one, so they are flat tuples: each tuple within another, each star and each
property of a tensor costs a tenth of a microsecond. Numbers stand with their types, as True equals
1 and is refused where 1 is not. Where something stands that is no tensor or no number, making or
hashing a key raises one of `MISFITS`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[import]
from torch.autograd import forward_ad

from limelight.adapters.base import Arguments

MISFITS = (AttributeError, RuntimeError, TypeError, ValueError)  # ValueError: NumPy's `==`
Restriction = tuple[str, ...] | None


def of_call(a: Arguments, restriction: Restriction) -> Hashable:
    start = a.query_start
    tensors = [each for each in (a.sinks, start) if isinstance(each, Tensor)]
    for term in (a.mask, a.bias):
        tensors += () if term is None else term.tensors()
    key = (
        of_tensors(a.query, a.key, a.value, restriction),
        of_numbers(a),
        None if a.bias is None else a.bias.spec(),
        a.sinks is None,
    )
    if not tensors:
        return key
    grad, rest = torch.is_grad_enabled(), []
    for t in tensors:
        rest += (type(t), t.device, t.dtype, t.shape, t.stride(), t.data_ptr() & 15)
        rest.append(grad and t.requires_grad)
    return (*key, *rest)


def of_numbers(a: Arguments) -> Hashable:
    """All but the tensors and the bias, which has some."""
    start = a.query_start
    return (
        None if a.mask is None else a.mask.spec(),
        a.scale,
        type(a.scale),
        a.softcap,
        type(a.softcap),
        a.dropout_p,
        type(a.dropout_p),
        a.return_lse,
        type(a.return_lse),
        a.deterministic,
        type(a.deterministic),
        None if isinstance(start, Tensor) else start,
        type(start),
        a.gradients,
    )


def of_tensors(q: Tensor, k: Tensor, v: Tensor, restriction: Restriction) -> Hashable:
    """Query, key and value, and what the process is set to."""
    dtype, is_cuda = q.dtype, q.is_cuda
    kind = "cuda" if is_cuda else q.device.type  # the latter takes ten times as long
    return (
        restriction,
        q.device,
        k.device,
        v.device,
        dtype,
        k.dtype,
        v.dtype,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        alignments(q, k, v),
        torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad),
        type(q),
        type(k),
        type(v),
        torch.are_deterministic_algorithms_enabled(),
        _len_torch_dispatch_stack(),
        forward_ad._current_level,
        is_cuda and dtype is torch.float32 and allows_tf32(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
    )


def alignments(q: Tensor, k: Tensor, v: Tensor) -> int:
    """How far each address is from a multiple of 16, in one number."""
    return q.data_ptr() & 15 | (k.data_ptr() & 15) << 4 | (v.data_ptr() & 15) << 8


def allows_tf32() -> bool:
    # What torch.backends.cuda.matmul.fp32_precision and torch.backends.fp32_precision read, slowly;
    # `allow_tf32` raises once the newer switch was used.
    setting = torch._C._get_fp32_precision_getter("cuda", "matmul")
    if setting == "none":
        setting = torch._C._get_fp32_precision_getter("generic", "all")
    return setting == "tf32"
