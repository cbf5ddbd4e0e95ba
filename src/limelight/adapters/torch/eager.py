"""Eager calls: autograd.Function, twice, so that the backward has a derivative too.

A call travels as a shell, with `...` where its tensors were, so that autograd alone holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from limelight.adapters.base import Plan
from limelight.adapters.torch.gradients import double_backward, present, spread
from limelight.adapters.torch.plan import TorchPlan
from limelight.call import Call, Gradients
from limelight.dispatch import Choice, note


def attention(plan: Plan) -> tuple[Tensor, Tensor]:
    """out and LSE, connected to autograd."""
    tensors = plan.call.tensors()
    shell = plan.call.with_tensors([None if tensor is None else ... for tensor in tensors])
    return _Attention.apply(shell, plan.choice, plan, *tensors)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shell: Call, choice: Choice, plan: Plan, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        # `plan` holds the tensors, so it is used and let go.
        wide, lse = plan.forward()
        ctx.save_for_backward(wide, lse, *tensors)
        ctx.shell, ctx.choice = shell, choice
        ctx.set_materialize_grads(False)
        return wide.to(plan.call.query.dtype), lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> Any:  # type: ignore[override]
        out, lse, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # a second derivative may follow
            gradients = _AttentionBackward.apply(
                ctx.shell, ctx.choice, needs, d_out, d_lse, out, lse, *tensors
            )
        else:
            gradients = _gradients(ctx.shell, ctx.choice, needs, d_out, d_lse, out, lse, tensors)
        return None, None, None, *spread(gradients, needs)


def _gradients(
    shell: Call,
    choice: Choice,
    needs: Sequence[bool],
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The gradients that are needed, in the order of `Call.tensors()`."""
    call = shell.with_tensors(list(tensors))
    parameters = len(call.bias.tensors()) if call.bias is not None else 0
    query, key, value, sinks, *rest = needs
    wanted = Gradients(query, key, value, sinks, tuple(rest[:parameters]))
    return present(TorchPlan(call, choice).backward(out, lse, d_out, d_lse, wanted))


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
        gradients = _gradients(shell, choice, needs, d_out, d_lse, out, lse, tensors)
        ctx.save_for_backward(d_out, d_lse, *tensors)
        ctx.shell, ctx.choice, ctx.needs = shell, choice, needs
        ctx.set_materialize_grads(False)
        return gradients

    @staticmethod
    def backward(ctx: Any, *d_gradients: Tensor | None) -> Any:
        d_out, d_lse, *tensors = ctx.saved_tensors
        note(ctx.choice, "double backward")
        d_d_out, d_d_lse, second = double_backward(
            ctx.shell.with_tensors, tensors, ctx.needs, d_out, d_lse, d_gradients
        )
        return None, None, None, d_d_out, d_d_lse, None, None, *second
