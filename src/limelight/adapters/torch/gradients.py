"""The second derivative, shared by eager and compiled calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from limelight.adapters.torch.plan import without_autocast
from limelight.backends.math import Math
from limelight.call import Call, Gradients


def present(gradients: Gradients) -> tuple[Tensor, ...]:
    """The gradients that were wanted, in the order of `Call.tensors()`."""
    each = (*gradients[:4], *gradients.bias)
    return tuple([gradient for gradient in each if gradient is not None])


def spread(gradients: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients at the places of the tensors that need one, None elsewhere."""
    rest = iter(gradients)
    return [next(rest) if need else None for need in needs]


def double_backward(
    call_of: Callable[[list[Tensor | None]], Call],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    d_out: Tensor | None,
    d_lse: Tensor | None,
    d_gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """The derivative of the backward, by differentiating `math` twice.

    call_of makes the call out of `tensors`; `needs` says which of them the backward gave gradients
    for, and d_gradients holds what arrived for each of those. Returns the gradients of d_out, of
    d_lse and of each of the tensors.
    """
    again = torch.is_grad_enabled()  # whether a third derivative may follow

    def leaf(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point():
            return tensor
        if again and tensor.requires_grad:
            # A view: the derivative by one input must not run through another's history.
            return tensor.view_as(tensor)
        return tensor.detach().requires_grad_()

    inputs = [leaf(tensor) for tensor in (d_out, d_lse, *tensors)]
    d_out, d_lse, *tensors = inputs
    kind = next(t.device.type for t in tensors if t is not None)
    with torch.enable_grad(), without_autocast(kind):
        results = zip(Math().forward(call_of(list(tensors))), (d_out, d_lse), strict=True)
        arrived = [(result, gradient) for result, gradient in results if gradient is not None]
        first = torch.autograd.grad(
            [result for result, _ in arrived],
            list(compress(tensors, needs)),  # type: ignore[arg-type]
            [gradient for _, gradient in arrived],
            create_graph=True,
            materialize_grads=True,
        )
        paired = zip(first, d_gradients, strict=True)
        pairs = [(g, d) for g, d in paired if d is not None and g.requires_grad]
        if not pairs:
            return None, None, [None] * len(tensors)
        targets = [t is not None and t.requires_grad for t in inputs]
        second = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            list(compress(inputs, targets)),  # type: ignore[arg-type]
            [d_gradient for _, d_gradient in pairs],
            create_graph=again,
            allow_unused=True,
        )
    d_d_out, d_d_lse, *rest = spread(second, targets)  # type: ignore[arg-type]
    return d_d_out, d_d_lse, rest
