"""Backends that are operators of PyTorch's own: autograd follows them, at no cost of ours.

What it does not do as limelight promises is put right by hooks on the operator's node: an odd
layout of the gradient that arrives, and the second derivative, which PyTorch has none of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from limelight.adapters.torch.eager import connected_gradients
from limelight.adapters.torch.gradients import spread
from limelight.call import Call
from limelight.dispatch import KNOWN, Choice, note
from limelight.kernels.torch_operators import regular

Gradients = tuple[Tensor | None, ...]


def follower(shell: Call, choice: Choice) -> Callable[[Tensor], None]:
    """Watches the backward of an output that the backend's forward has just made.

    shell: the call, with `...` where its tensors were, so that autograd alone holds them.
    """
    hook = partial(_before, shell, choice)

    def follow(out: Tensor) -> None:
        node: Any = out.grad_fn
        while not hasattr(type(node), "_saved_query"):  # a slice, where head_dim was padded
            node = node.next_functions[0][0]
        node.register_prehook(hook)

    return follow


def _before(shell: Call, choice: Choice, arrived: Gradients) -> Gradients:
    d_out = arrived[0]
    d_out = None if d_out is None else regular(d_out)
    if torch.is_grad_enabled():  # a second derivative may follow
        _connect(torch._C._current_autograd_node(), shell, choice, d_out)
    else:
        note(choice, "backward")
    return (d_out, *arrived[1:])


def _connect(node: Any, shell: Call, choice: Choice, d_out: Tensor | None) -> None:
    """Has this run of the node give gradients that have a derivative themselves."""

    def after(found: Gradients, _: Gradients) -> Gradients:
        once.remove()
        tensors = [node._saved_query, node._saved_key, node._saved_value]
        needs = [gradient is not None for gradient in found[:3]]
        with torch.no_grad():
            out, lse = KNOWN[choice.backend].forward(shell.with_tensors(tensors))  # type: ignore[index]
        gradients = connected_gradients(shell, choice, needs, d_out, None, out, lse, tensors)
        return (*spread(gradients, needs), *found[3:])

    once = node.register_hook(after)
