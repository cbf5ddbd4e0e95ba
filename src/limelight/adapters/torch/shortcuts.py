"""Calls of a kind seen before, straight to what ran them.

Only calls that depend on query, key and value alone, and on numbers. A model asks the same few
things over and over, so the last few are recognised by the guards of torch.compile: they compare
tensors with those of before in C++ (dtype, device, sizes, strides, need of a gradient, autocast and
modes of dispatch) in half a microsecond, where making a key takes three.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[import]
from torch.autograd import forward_ad

from limelight.adapters.base import Plan
from limelight.adapters.torch import looks, native
from limelight.call import Call
from limelight.dispatch import KNOWN, note

try:
    from torch._C._dynamo import guards as _dynamo
except ImportError:  # private, so it may go: calls then take a little longer
    _dynamo = None
_TensorGuards: Any = getattr(_dynamo, "TensorGuards", None)

Shortcut = Callable[[Tensor, Tensor, Tensor], Tensor]
_MOST = 4096
_RECENT = 6


class _Call(NamedTuple):
    tensors: Any  # the guards
    rest: tuple[Hashable, ...]
    run: Shortcut


class Shortcuts:
    """By what a call looks like. options: all of its arguments that are no tensor."""

    def __init__(self) -> None:
        self._by_looks: dict[Hashable, Shortcut] = {}
        self._recent: tuple[_Call, ...] = ()  # replaced, never changed: threads read it

    def find(
        self, q: Any, k: Any, v: Any, options: Hashable, restriction: looks.Restriction
    ) -> Shortcut | None:
        """What ran a call that looked like this one."""
        if torch.compiler.is_compiling() or not self._by_looks:
            return None
        try:
            rest = _rest(q, k, v, options, restriction)
            for call in self._recent:
                if call.rest == rest and call.tensors.check(q, k, v):
                    return call.run
            run = self._by_looks.get((looks.of_tensors(q, k, v, restriction), options))
        except looks.MISFITS:
            return None  # checks will say which
        if run is not None:
            self._remember(q, k, v, rest, run)
        return run

    def keep(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Hashable,
        run: Shortcut,
        restriction: looks.Restriction,
    ) -> None:
        if len(self._by_looks) >= _MOST:
            self._by_looks.clear()
        self._by_looks[looks.of_tensors(q, k, v, restriction), options] = run

    def _remember(
        self, q: Tensor, k: Tensor, v: Tensor, rest: tuple[Hashable, ...], run: Shortcut
    ) -> None:
        if _TensorGuards is None or torch.is_autocast_enabled(q.device.type):
            return  # guards compare whether it is enabled, and not its dtype
        if q is k or k is v or q is v:
            return  # guards take a tensor only once
        guards = _TensorGuards(q, k, v, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        self._recent = (_Call(guards, rest, run), *self._recent[: _RECENT - 1])


def _rest(
    q: Tensor, k: Tensor, v: Tensor, options: Hashable, restriction: looks.Restriction
) -> tuple[Hashable, ...]:
    """What the guards do not compare."""
    return (
        options,
        restriction,
        looks.alignments(q, k, v),
        torch.is_grad_enabled(),
        _len_torch_dispatch_stack(),
        q.is_nested or k.is_nested or v.is_nested,  # guards would end the process
        torch.are_deterministic_algorithms_enabled(),
        forward_ad._current_level,
        q.dtype is torch.float32 and looks.allows_tf32(),
    )


def made(plan: Plan) -> Shortcut | None:
    """The plan's call as a function of query, key and value, where it depends on nothing else."""
    call, choice = plan
    problem, backend = choice.problem, KNOWN[choice.backend]  # type: ignore[index]
    learns = bool(problem.gradients)
    bare = len(call.tensors()) == 3 and not problem.copies and not problem.dropout_p
    run = None
    if bare and not problem.return_lse and (backend.native or not learns):
        run = backend.shortcut(call)
    if run is None:
        return None
    follow = native.follower(shell(call), choice) if learns else None

    def shortcut(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        note(choice, "forward")
        out = run(query, key, value)
        if follow is not None:
            follow(out)
        return out

    return shortcut


def shell(call: Call) -> Call:
    """The call with `...` where its tensors were, so that autograd alone holds them."""
    return call.with_tensors([...] * len(call.tensors()))
