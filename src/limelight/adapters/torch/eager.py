"""Eager calls: autograd.Function, twice, so that the backward has a derivative too.

A call travels as a shell, with `...` where its tensors were, so that autograd alone holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from limelight.adapters.base import Plan
from limelight.adapters.torch.gradients import double_backward, spread
from limelight.adapters.torch.plan import TorchPlan, rounded
from limelight.call import Call, Gradients
from limelight.dispatch import Choice, note


def attention(plan: Plan) -> tuple[Tensor, Tensor | None]:
    """out, and the LSE where the problem asks for it, connected to autograd."""
    tensors = plan.call.tensors()
    shell = plan.call.with_tensors([...] * len(tensors))
    found = _Attention.apply(shell, plan.choice, plan, *tensors)
    return found if plan.choice.problem.return_lse else (found, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shell: Call, choice: Choice, plan: Plan, *tensors: Any) -> Any:
        # `plan` holds the tensors, so it is used and let go.
        wide, lse = plan.forward()
        ctx.save_for_backward(wide, lse, *tensors)
        ctx.shell, ctx.choice = shell, choice
        ctx.set_materialize_grads(False)
        out = rounded(wide, plan.call.query)
        return (out, lse) if choice.problem.return_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> Any:  # type: ignore[override]
        out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # a second derivative may follow
            gradients = connected_gradients(
                ctx.shell, ctx.choice, needs, d_out, d_lse, out, lse, tensors
            )
            return None, None, None, *spread(gradients, needs)
        each = _gradients(ctx.shell, ctx.choice, needs, d_out, d_lse, out, lse, tensors)
        return None, None, None, *each, *[None] * (len(tensors) - len(each))


def connected_gradients(
    shell: Call,
    choice: Choice,
    needs: Sequence[bool],
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The needed gradients, connected to autograd: they have derivatives, by `math`."""
    return _AttentionBackward.apply(  # type: ignore[return-value]
        shell, choice, needs, d_out, d_lse, out, lse, *tensors
    )


def _gradients(
    shell: Call,
    choice: Choice,
    needs: Sequence[bool],
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of the tensors that can have one, which come first; None where unneeded."""
    call = shell.with_tensors(tensors)
    first = 3 if call.sinks is None else 4
    parameters = 0 if call.bias is None else len(call.bias.tensors())
    wanted = Gradients(
        query=needs[0],
        key=needs[1],
        value=needs[2],
        sinks=call.sinks is not None and needs[3],
        bias=tuple(needs[first : first + parameters]),
    )
    found = TorchPlan(call, choice).backward(out, lse, d_out, d_lse, wanted)
    sinks = () if call.sinks is None else (found.sinks,)
    return [found.query, found.key, found.value, *sinks, *found.bias]


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shell: Call,
        choice: Choice,
        needs: tuple[bool, ...],
        d_out: Tensor | None,
        d_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        each = _gradients(shell, choice, needs, d_out, d_lse, out, lse, tensors)
        ctx.save_for_backward(d_out, d_lse, *tensors)
        ctx.shell, ctx.choice, ctx.needs = shell, choice, needs
        ctx.set_materialize_grads(False)
        return tuple([gradient for gradient in each if gradient is not None])

    @staticmethod
    def backward(ctx: Any, *d_gradients: Tensor | None) -> Any:
        d_out, d_lse, *tensors = ctx.saved_tensors
        note(ctx.choice, "double backward")
        d_d_out, d_d_lse, second = double_backward(
            ctx.shell.with_tensors, tensors, ctx.needs, d_out, d_lse, d_gradients
        )
        return None, None, None, d_d_out, d_d_lse, None, None, *second
