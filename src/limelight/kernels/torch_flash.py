"""The fused kernels on PyTorch tensors: allocates, and runs programs made once per problem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from limelight.call import Call, Gradients
from limelight.kernels import fused, plan
from limelight.kernels.fused import Planned, Work
from limelight.kernels.launch import Array
from limelight.kernels.program import Program, recipe
from limelight.launcher import default_cache

_prepared: OrderedDict[Hashable, _Prepared] = OrderedDict()
_PROGRAMS = 4096


class _Prepared(NamedTuple):
    """What stays from one call to the next of the same problem. made: the tensors to allocate."""

    program: Program
    made: tuple[_Made, ...]


class _Made(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def forward(call: Call, planned: Planned = plan.forward) -> tuple[Tensor, Tensor | None]:
    """out [B, H, M, E], laid out as (B, M, H, E), and the LSE [B, H, M], float32, if wanted.

    planned: which kernel, by its plan.
    """
    key = (planned, *_key(call))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _keep(key, _prepare(call, _forward_work(call, planned)))
    made = _allocated(prepared.made, call.query)
    prepared.program.run(*_where([*call.tensors(), *made]), allocate=_allocate(call.query))
    return made[0], made[1] if fused.wants_lse(call) else None


def _allocated(made: Sequence[_Made], like: Tensor) -> list[Tensor]:
    return [like.new_empty_strided(*each[:2], dtype=each.dtype) for each in made]


def _allocate(like: Tensor) -> Callable[[int], int]:
    """Memory for a launch on the current stream, which the allocator may reuse behind it."""
    return lambda size: like.new_empty(size, dtype=torch.uint8).data_ptr()


def _forward_work(call: Call, planned: Planned) -> Work:
    return fused.forward(call.with_tensors(_arrays(call.tensors())), planned)


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients, each in its input's dtype; bitwise repeatable."""
    out = _unit(out if out.dtype == call.query.dtype else out.to(call.query.dtype))
    d_out = torch.zeros_like(out) if d_out is None else _unit(d_out)
    given = [out, lse.contiguous(), d_out]
    if d_lse is not None:
        given.append(d_lse.float().contiguous())
    filled = _to_fill(call, wanted)
    tensors = [*call.tensors(), *given, *filled]

    layouts = (out.stride(), d_out.stride(), d_out.data_ptr() & 15, d_lse is None)
    key = ("backward", (*wanted[:4], *wanted.bias), layouts, *_key(call))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _keep(key, _prepare(call, _backward_work(call, given, filled, wanted)))
    prepared.program.run(*_where([*tensors, *_allocated(prepared.made, call.query)]))
    return fused.spread(filled, wanted)


def _to_fill(call: Call, wanted: Gradients) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in fused.inputs(call, wanted)]


def _backward_work(
    call: Call, given: Sequence[Tensor], filled: Sequence[Tensor], wanted: Gradients
) -> Work:
    arrays = _arrays([*call.tensors(), *given, *filled])
    own = len(arrays) - len(given) - len(filled)
    gradients = fused.spread(arrays[own + len(given) :], wanted)
    return fused.backward(call.with_tensors(arrays), arrays[own : own + len(given)], gradients)


def _prepare(call: Call, work: Work) -> _Prepared:
    device = call.query.device.index
    program = Program(work.launches, fused.target(call), device, _stream(device))
    return _Prepared(program, tuple(map(_made, work.made)))


def _made(array: Array) -> _Made:
    return _Made(array.shape, array.strides, getattr(torch, array.dtype))


def precompile(call: Call, planned: Planned = plan.forward) -> None:
    """Compiles what the forward needs, and the gradients that the problem names.

    Loads it too where the problem's device is the GPU that holds the tensors or, for tensors that
    are nowhere, torch's current one. planned: the forward's kernel, by its plan.
    """
    launches, made = _forward_work(call, planned)
    names = call.problem.gradients
    if names:
        out, lse = _allocated(list(map(_made, made[:2])), call.query)
        wanted = Gradients.named(names, call.bias)
        filled = _to_fill(call, wanted)
        # Where the caller gets the LSE, a gradient of it may arrive or not.
        for d_lse in ([], [lse]) if call.problem.return_lse else ([],):
            launches += _backward_work(call, [out, lse, out, *d_lse], filled, wanted).launches
    device = _device(call)
    for launch in launches:
        kernel = recipe(launch, fused.target(call))
        if device is None:
            default_cache().binary(kernel)
        else:
            default_cache().kernel(kernel, device=device, stream=_stream(device))


def _device(call: Call) -> int | None:
    """The index of the GPU on which the call's kernels are to be loaded."""
    if call.query.is_cuda:
        index = call.query.device.index
    elif torch.cuda.is_available():
        index = torch.cuda.current_device()
    else:
        return None
    return index if torch.cuda.get_device_capability(index) == fused.target(call) else None


def _keep(key: Hashable, prepared: _Prepared) -> _Prepared:
    if len(_prepared) >= _PROGRAMS:
        _prepared.popitem(last=False)
    _prepared[key] = prepared
    return prepared


def _key(call: Call) -> tuple[Hashable, ...]:
    """What a program depends on beside the problem: the numbers that it holds."""
    start = call.query_start if isinstance(call.query_start, int) else None
    seed = call.seed if isinstance(call.seed, int) else None
    return call.problem, start, seed


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [
        fused.array(
            slot,
            tuple(tensor.shape),
            tensor.stride(),
            str(tensor.dtype).removeprefix("torch."),
            tensor.data_ptr(),
        )
        for slot, tensor in enumerate(tensors)
    ]


def _unit(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _where(tensors: Sequence[Tensor]) -> tuple[list[int], int, int]:
    device = tensors[0].device.index
    return [tensor.data_ptr() for tensor in tensors], device, _stream(device)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)  # current_stream() takes 5 us

