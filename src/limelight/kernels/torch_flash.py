"""The fused kernels on PyTorch tensors: allocates, and runs programs made once per problem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import Array, Launch, Shape
from limelight.kernels.program import Program, Slot, recipe
from limelight.launcher import default_cache
from limelight.problem import row_alignment

_prepared: OrderedDict[Hashable, _Prepared] = OrderedDict()
_PROGRAMS = 4096
Planned = Callable[..., list[Launch]]


class _Prepared(NamedTuple):
    """What stays from one call to the next of the same problem. made: the tensors to allocate."""

    program: Program
    made: tuple[_Made, ...]

    def allocate(self, like: Tensor) -> list[Tensor]:
        return [like.new_empty_strided(*made[:2], dtype=made.dtype) for made in self.made]


class _Made(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def forward(call: Call, planned: Planned = plan.forward) -> tuple[Tensor, Tensor | None]:
    """out [B, H, M, E], laid out as (B, M, H, E), and the LSE [B, H, M], float32, if wanted.

    planned: which kernel, by its plan.
    """
    prepared = _prepared_forward(call, planned)
    made = prepared.allocate(call.query)
    prepared.program.run(*_where([*call.tensors(), *made]), allocate=_allocate(call.query))
    return made[0], made[1] if _wants_lse(call) else None


def shortcut(
    call: Call, planned: Planned = plan.forward
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`out` of calls like this one: what is left of `forward` when nothing needs looking up."""
    program, made = _prepared_forward(call, planned)
    device = call.query.device.index

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        new = [query.new_empty_strided(*each[:2], dtype=each.dtype) for each in made]
        addresses = [tensor.data_ptr() for tensor in (query, key, value, *new)]
        program.run(addresses, device, _stream(device), _allocate(query))
        return new[0]

    return run


def _prepared_forward(call: Call, planned: Planned) -> _Prepared:
    key = (planned, *_key(call))
    return _prepared.get(key) or _keep(key, _prepare(call, *_forward_launches(call, planned)))


def _allocate(like: Tensor) -> Callable[[int], int]:
    """Memory for a launch on the current stream, which the allocator may reuse behind it."""
    return lambda size: like.new_empty(size, dtype=torch.uint8).data_ptr()


def _forward_launches(
    call: Call, planned: Planned = plan.forward
) -> tuple[list[Launch], list[Tensor]]:
    """The launches, and the tensors to allocate for each: out, the LSE if wanted, scratch."""
    batch, heads, q_len, _ = call.query.shape
    made = [call.query.new_empty((batch, q_len, heads, call.value.shape[3])).transpose(1, 2)]
    if _wants_lse(call):
        made.append(call.query.new_empty((batch, heads, q_len), dtype=torch.float32))
    tensors = [*call.tensors(), *made]
    described = _described(call, tensors)
    needed = plan.forward_scratch(described, **_switches(call))
    memory = _scratch(call, needed)
    arrays = _arrays([*tensors, *memory])
    out, *lse = arrays[len(call.tensors()) : len(tensors)]
    launches = planned(
        described,
        out,
        lse[0] if lse else None,
        dict(zip(needed, arrays[len(tensors) :], strict=True)),
        **_switches(call),
    )
    return launches, [*made, *memory]


def _wants_lse(call: Call) -> bool:
    return call.problem.return_lse or bool(call.problem.gradients)


def backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
    planned: Any = plan,
) -> Gradients:
    """The wanted gradients, each in its input's dtype. planned: the module that plans them."""
    out = _unit(out if out.dtype == call.query.dtype else out.to(call.query.dtype))
    d_out = torch.zeros_like(out) if d_out is None else _unit(d_out)
    given = [out, lse.contiguous(), d_out]
    if d_lse is not None:
        given.append(d_lse.float().contiguous())
    flags, made = _to_fill(call, wanted)
    tensors = [*call.tensors(), *given, *made]

    layouts = (out.stride(), d_out.stride(), d_out.data_ptr() & 15, d_lse is None)
    key = (planned.__name__, flags, layouts, *_key(call))
    prepared = _prepared.get(key)
    if prepared is None:
        launches = _backward_launches(call, tensors, len(given), wanted, planned)
        prepared = _keep(key, _prepare(call, *launches))
    memory = prepared.allocate(call.query)  # held, as the launches allocate more
    prepared.program.run(*_where([*tensors, *memory]), allocate=_allocate(call.query))
    return _gradients(flags, made)


def contiguous_copy(tensor: Tensor) -> Tensor:
    """A copy even of a contiguous one, whose rows may begin anywhere."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _to_fill(call: Call, wanted: Gradients) -> tuple[tuple[bool, ...], list[Tensor]]:
    """Of each input whether its gradient is wanted, and a tensor for each that is."""
    parameters = call.bias.tensors() if call.bias is not None else ()
    every = (call.query, call.key, call.value, call.sinks, *parameters)
    flags = (*wanted[:4], *wanted.bias)
    return flags, [torch.empty_like(tensor) for tensor in compress(every, flags)]


def _backward_launches(
    call: Call, tensors: list[Tensor], given: int, wanted: Gradients, planned: Any = plan
) -> tuple[list[Launch], list[Tensor]]:
    """The launches, and the scratch to allocate for each.

    tensors: the call's own, then `given` that arrive (out, LSE, d_out, perhaps d_lse), then the
    gradients to fill.
    """
    described = _described(call, tensors)
    needed = planned.scratch(described, wanted, **_switches(call))
    memory = _scratch(call, needed)
    arrays = _arrays([*tensors, *memory])
    own = len(call.tensors())
    out, lse, d_out, *rest = arrays[own : own + given]
    launches = planned.backward(
        described,
        out,
        lse,
        d_out,
        rest[0] if rest else None,
        _gradients((*wanted[:4], *wanted.bias), arrays[own + given : len(tensors)]),
        dict(zip(needed, arrays[len(tensors) :], strict=True)),
        **_switches(call),
    )
    return launches, memory


def _prepare(call: Call, launches: Sequence[Launch], made: Sequence[Tensor]) -> _Prepared:
    device = call.query.device.index
    return _Prepared(
        Program(launches, _target(call), device, _stream(device)),
        tuple(_Made(tuple(each.shape), each.stride(), each.dtype) for each in made),
    )


def precompile(call: Call, planned: Planned = plan.forward, backward_planned: Any = plan) -> None:
    """Compiles what the forward needs, and the gradients that the problem names.

    Loads it too where the problem's device is the GPU that holds the tensors or, for tensors that
    are nowhere, torch's current one. planned, backward_planned: as the forward and the backward
    take them.
    """
    launches, made = _forward_launches(call, planned)
    names = call.problem.gradients
    if names:
        out, lse = made[:2]
        wanted = Gradients.named(names, call.bias)
        _, to_fill = _to_fill(call, wanted)
        # Where the caller gets the LSE, a gradient of it may arrive or not.
        for d_lse in ([], [lse]) if call.problem.return_lse else ([],):
            given = [out, lse, out, *d_lse]
            tensors = [*call.tensors(), *given, *to_fill]
            launches += _backward_launches(call, tensors, len(given), wanted, backward_planned)[0]
    device = _device(call)
    for launch in launches:
        kernel = recipe(launch, _target(call))
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
    return index if torch.cuda.get_device_capability(index) == _target(call) else None


def _switches(call: Call) -> dict[str, Any]:
    return {"capability": _capability(call), "allow_tf32": call.problem.allow_tf32}


def _scratch(call: Call, needed: dict[str, Shape]) -> list[Tensor]:
    return [
        call.query.new_empty(each.shape, dtype=getattr(torch, each.dtype))
        for each in needed.values()
    ]


def _gradients(flags: Sequence[bool], made: Sequence[Any]) -> Gradients:
    rest = iter(made)
    query, key, value, sinks, *bias = (next(rest) if flag else None for flag in flags)
    return Gradients(query, key, value, sinks, tuple(bias))


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


def _described(call: Call, tensors: Sequence[Tensor]) -> Call:
    """The call with arrays, whose addresses are slots, in the place of its tensors."""
    return call.with_tensors(_arrays(tensors))


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [_array(tensor, Slot(n)) for n, tensor in enumerate(tensors)]


def _array(tensor: Tensor, address: Any) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape, strides = tuple(tensor.shape), tensor.stride()
    alignment = row_alignment(tensor.data_ptr(), shape, strides, tensor.element_size())
    return Array(address, shape, strides, dtype, alignment)


def _unit(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _where(tensors: Sequence[Tensor]) -> tuple[list[int], int, int]:
    device = tensors[0].device.index
    return [tensor.data_ptr() for tensor in tensors], device, _stream(device)


def _stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)  # current_stream() takes 5 us


def _target(call: Call) -> tuple[int, int]:
    target = call.problem.device.compute_capability
    assert target is not None  # why_not refuses the CPU
    return target


def _capability(call: Call) -> int:
    major, minor = _target(call)
    return major * 10 + minor
