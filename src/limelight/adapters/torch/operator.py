"""Compiled and exported calls: the operator `limelight::attention` and its backward.

A graph can hold tensors, numbers and text, so that is what the operators take: the tensors of the
call; `spec`, as canonical JSON, the names of those tensors, mask, bias and what else is text or
switch; and the numbers `start` (the position of the first query), `scale`, `softcap` and
`dropout_p`, which tracing may hold as symbols. Dispatch happens inside, when the graph runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from limelight.adapters.base import Arguments, Plan
from limelight.adapters.torch.gradients import double_backward, present, spread
from limelight.call import Call, Gradients
from limelight.dispatch import allowed, note
from limelight.kernels.tiled import compute_dtype
from limelight.terms import Term, from_spec

if TYPE_CHECKING:
    from limelight.adapters.torch.adapter import TorchAdapter


def attention(adapter: TorchAdapter, a: Arguments) -> tuple[Tensor, Tensor]:
    """Records a prepared call in the graph that is being traced."""
    named = {"query": a.query, "key": a.key, "value": a.value}
    if a.sinks is not None:
        named["sinks"] = a.sinks
    for kind, term in (("bias", a.bias), ("mask", a.mask)):
        for n, tensor in enumerate(term.tensors() if isinstance(term, Term) else ()):
            named[f"{kind}.{n}"] = tensor
    start = a.query_start
    if isinstance(start, Tensor):
        named["query_start"] = start
    if a.dropout_p > 0:
        seed = adapter.draw_seed(a.query) if a.seed is None else a.seed
        if not isinstance(seed, Tensor):
            seed = torch.full((1,), seed, dtype=torch.int64, device=a.query.device)
        named["seed"] = seed
    restriction = allowed()
    # Formatted by hand: torch.compile traces this, and cannot trace the json module.
    fields = {
        "tensors": _names(list(named)),
        "bias": "null" if a.bias is None else a.bias.spec(),
        "mask": "null" if a.mask is None else a.mask.spec(),
        "from_end": _truth(isinstance(start, str)),
        "return_lse": _truth(a.return_lse),
        "deterministic": _truth(a.deterministic),
        "gradients": _names(adapter.gradients(a)),
        "allowed": "null" if restriction is None else _names(restriction),
    }
    spec = "{" + ",".join([f'"{name}":{text}' for name, text in fields.items()]) + "}"
    number = None if isinstance(start, (Tensor, str)) else start
    numbers = (number, a.scale, a.softcap, a.dropout_p)
    out, lse, _ = torch.ops.limelight.attention(list(named.values()), spec, *numbers)
    return out, lse


def _names(names: Sequence[str]) -> str:
    return "[" + ",".join([f'"{name}"' for name in names]) + "]"


def _truth(value: bool | None) -> str:
    return "null" if value is None else "true" if value else "false"


@lru_cache(maxsize=4096)
def _parsed(spec: str) -> dict[str, Any]:
    fields = json.loads(spec)
    for name in ("bias", "mask"):
        fields[name] = None if fields[name] is None else json.dumps(fields[name])
    for name in ("gradients", "allowed"):
        fields[name] = None if fields[name] is None else tuple(fields[name])
    return fields


def _arguments(tensors: Sequence[Tensor | None], spec: str, *numbers: Any) -> Arguments:
    start, scale, softcap, dropout_p = numbers
    fields = _parsed(spec)
    named = dict(zip(fields["tensors"], tensors, strict=True))

    def term(kind: str) -> Any:
        if fields[kind] is None:
            return None
        own = [tensor for name, tensor in named.items() if name.startswith(f"{kind}.")]
        return from_spec(fields[kind], iter(own))

    return Arguments(
        named["query"],
        named["key"],
        named["value"],
        mask=term("mask"),
        bias=term("bias"),
        query_start="end" if fields["from_end"] else named.get("query_start", start),
        scale=scale,
        softcap=softcap,
        sinks=named.get("sinks"),
        dropout_p=dropout_p,
        seed=named.get("seed"),
        return_lse=fields["return_lse"],
        deterministic=fields["deterministic"],
        gradients=fields["gradients"],
    )


def _plan(tensors: Sequence[Tensor | None], spec: str, *numbers: Any) -> Plan:
    from limelight.adapters.torch.adapter import ADAPTER

    return ADAPTER.planned(_arguments(tensors, spec, *numbers), _parsed(spec)["allowed"])


def _empty_out(query: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Laid out as (batch, length, heads, dim), so that joining the heads again needs no copy."""
    batch, heads, q_len, _ = query.shape
    return query.new_empty((batch, q_len, heads, value.shape[3]), dtype=dtype).transpose(1, 2)


def _as_promised(value: Tensor, promise: Tensor) -> Tensor:
    """The value with the strides that the fake promised: a compiled graph relies on them."""
    return value if value.stride() == promise.stride() else promise.copy_(value)


@torch.library.custom_op("limelight::attention", mutates_args=())
def _attention(
    tensors: Sequence[Tensor],
    spec: str,
    start: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, LSE, and for the backward the output before it was rounded, where there is one."""
    query, _, value = tensors[:3]
    wide, lse = _plan(tensors, spec, start, scale, softcap, dropout_p).forward()
    out = _as_promised(wide.to(query.dtype), _empty_out(query, value))
    wide = (
        _as_promised(wide, _empty_out(query, value, compute_dtype(query)))
        if _rounds(query)
        else None
    )
    if lse is None:  # nobody reads it, but the operator has promised one
        lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    return out, lse.contiguous(), query.new_empty(0) if wide is None else wide


def _rounds(query: Tensor) -> bool:
    """Whether backends give a wider output than the caller gets: on the CPU, in half precision."""
    return query.device.type == "cpu" and query.dtype in (torch.float16, torch.bfloat16)


@_attention.register_fake
def _(tensors: Sequence[Tensor], spec: str, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    from limelight.adapters.torch.adapter import ADAPTER

    # Raises what an eager call would. A symbol's number is checked when the graph runs.
    start, scale, softcap, dropout_p = (
        number if isinstance(number, (int, float, NoneType)) else stand_in
        for number, stand_in in zip(numbers, (0, None, None, 0.0), strict=True)
    )
    ADAPTER.describe(_arguments(tensors, spec, start, scale, softcap, dropout_p))
    query, _, value = tensors[:3]
    wide = _empty_out(query, value, compute_dtype(query)) if _rounds(query) else query.new_empty(0)
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query))
    return _empty_out(query, value), lse, wide


@torch.library.custom_op("limelight::attention_backward", mutates_args=())
def _attention_backward(
    tensors: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    spec: str,
    start: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    needs: Sequence[bool],
) -> list[Tensor]:
    plan = _plan(tensors, spec, start, scale, softcap, dropout_p)
    names = {name for name, need in zip(_parsed(spec)["tensors"], needs, strict=True) if need}
    wanted = Gradients.named(names, plan.call.bias)
    if not _parsed(spec)["return_lse"]:
        d_lse = None  # zeros that autograd made for an output that nobody has
    gradients = plan.backward(out, lse, d_out, d_lse, wanted)
    promises = [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need]
    return [
        _as_promised(g, promise) for g, promise in zip(present(gradients), promises, strict=True)
    ]


@_attention_backward.register_fake
def _(tensors: Sequence[Tensor], *others: Any) -> list[Tensor]:
    needs = others[-1]
    return [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need]


def _keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.spec, *ctx.numbers = inputs
    out, lse, wide = output
    ctx.save_for_backward(*tensors, wide if _rounds(tensors[0]) else out, lse)
    ctx.needs = [tensor.requires_grad for tensor in tensors]


def _backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: object) -> Any:
    *tensors, out, lse = ctx.saved_tensors
    gradients = torch.ops.limelight.attention_backward(
        tensors, out, lse, d_out, d_lse, ctx.spec, *ctx.numbers, ctx.needs
    )
    return spread(gradients, ctx.needs), None, *[None] * len(ctx.numbers)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, _, _, d_out, d_lse, ctx.spec, *ctx.numbers, ctx.needs = inputs
    ctx.save_for_backward(d_out, d_lse, *tensors)


def _double_backward(ctx: Any, d_gradients: Sequence[Tensor | None]) -> Any:
    d_out, d_lse, *tensors = ctx.saved_tensors

    def call_of(tensors: list[Tensor | None]) -> Call:
        plan = _plan(tensors, ctx.spec, *ctx.numbers)
        note(plan.choice, "double backward")
        return plan.call

    d_d_out, d_d_lse, second = double_backward(
        call_of, tensors, ctx.needs, d_out, d_lse, d_gradients
    )
    return second, None, None, d_d_out, d_d_lse, None, *[None] * len(ctx.numbers), None


_attention.register_autograd(_backward, setup_context=_keep_forward)
_attention_backward.register_autograd(_double_backward, setup_context=_keep_backward)
