"""The fused kernels on JAX arrays: each launch is a step of the compiled program, by jaxlib's own
call of Triton kernels.

Such a step takes arrays and makes new ones: its kernel gets the addresses of its operands, then
those of its results, in the order of its parameters; numbers are part of the step. What a launch
writes first is a result. What a later launch reads or writes again is an operand that shares its
memory with a result: so launches stay in order, and nothing is copied.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from limelight.call import Call, Gradients
from limelight.kernels import fused
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Scalar
from limelight.kernels.program import Slot, recipe
from limelight.launcher import Binary, abi, default_cache

_TESTED = "0.10.2 to 0.11.2"


def forward(call: Call) -> tuple[jax.Array, jax.Array | None]:
    """out [B, H, M, E], laid out as the query, and the LSE [B, H, M], float32, if wanted."""
    tensors = call.tensors()
    arrays = _arrays(call, tensors, rows=range(3))
    work = fused.forward(call.with_tensors(arrays), heads_first=call.problem.query.is_contiguous)
    out, *rest = _run(call, work, tensors, work.made)
    return out, rest[0] if fused.wants_lse(call) else None


def backward(
    call: Call,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array | None,
    d_lse: jax.Array | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients, each in its input's dtype; bitwise repeatable."""
    dtype = call.query.dtype
    given = [out.astype(dtype), lse, jnp.zeros_like(out) if d_out is None else d_out.astype(dtype)]
    if d_lse is not None:
        given.append(d_lse.astype(jnp.float32))
    own = len(call.tensors())
    tensors = [*call.tensors(), *given]
    inputs = fused.inputs(call, wanted)
    rows = (*range(3), own, own + 2, *range(len(tensors), len(tensors) + sum(wanted[:3])))
    arrays = _arrays(call, [*tensors, *inputs], rows)
    filled = arrays[len(tensors) :]
    gradients = fused.spread(filled, wanted)
    work = fused.backward(call.with_tensors(arrays), arrays[own : len(tensors)], gradients)
    made = _run(call, work, tensors, [*filled, *work.made])
    return fused.spread(made[: len(filled)], wanted)


def precompile(call: Call) -> None:
    """Compiles what the forward needs, and the gradients that the problem names."""
    call = replace(call, problem=replace(call.problem, return_lse=True))  # as every call has it
    own = call.tensors()
    made = jax.eval_shape(lambda *own: forward(call.with_tensors(own)), *own)
    wanted = Gradients.named(call.problem.gradients, call.bias)

    def gradients(*tensors: Any) -> list[Any]:
        *own, out, lse = tensors
        found = backward(call.with_tensors(own), out, lse, out, None, wanted)
        return [each for each in (*found[:4], *found.bias) if each is not None]

    if call.problem.gradients:
        jax.eval_shape(gradients, *own, *made)


def _arrays(call: Call, tensors: Sequence[Any], rows: Sequence[int]) -> list[Array]:
    """rows: the places of query, key, value and what is like them, which lie as the query does."""
    last = () if call.problem.query.is_contiguous else rows
    return [
        (fused.heads_last if slot in last else fused.contiguous)(
            slot, tuple(tensor.shape), tensor.dtype.name
        )
        for slot, tensor in enumerate(tensors)
    ]


def _run(
    call: Call, work: fused.Work, tensors: Sequence[jax.Array], made: Sequence[Array]
) -> list[jax.Array]:
    """What the launches make. tensors: those that they read only; the slots of `made` follow."""
    values: dict[int, Any] = dict(enumerate(tensors))
    to_make = {len(tensors) + n: each for n, each in enumerate(made)}
    for launch in work.launches:
        step = Step.of(launch, values, to_make)
        results = run_step(launch, compiled(launch, fused.target(call)), step)
        values.update(zip(step.written, results, strict=True))
    # Where there is nothing to add up, nothing is launched.
    return [
        values[slot] if slot in values else jnp.zeros(each.shape, each.dtype)
        for slot, each in to_make.items()
    ]


def compiled(launch: Launch, target: tuple[int, int]) -> Binary:
    return default_cache().binary(recipe(launch, target))


class Step(NamedTuple):
    """A launch as jaxlib takes it.

    order: the kernel's parameters, operands first, then what is new among the results, then
    numbers. written: the slots of the results. aliases: of operands, by number, the result that
    takes their memory.
    """

    order: list[int]
    operands: list[jax.Array]
    operand_layouts: list[tuple[int, ...]]
    written: list[int]
    results: list[Array]
    aliases: dict[int, int]

    @classmethod
    def of(cls, launch: Launch, values: Mapping[int, Any], to_make: Mapping[int, Array]) -> Step:
        """values: what there is, by slot. to_make: what launches make, by slot."""
        leaves = [leaf for _, leaf in launch.leaves() if isinstance(leaf, (Array, Scalar))]
        slots = [leaf.address if isinstance(leaf, Array) else None for leaf in leaves]
        operands, results, numbers = [], [], []
        for place, slot in enumerate(slots):
            if not isinstance(slot, Slot):
                numbers.append(place)
            elif slot.tensor in values:
                operands.append(place)
            else:
                results.append(place)
        written = [slots[place].tensor for place in results]
        aliases = {}
        for n, place in enumerate(operands):
            slot = slots[place].tensor
            if slot in to_make and leaves[place].shape == to_make[slot].shape:
                aliases[n] = len(written)  # behind what is new: a kernel takes each address once
                written.append(slot)
        return cls(
            [*operands, *results, *numbers],
            [_read(values[slots[place].tensor], leaves[place]) for place in operands],
            [_layout(leaves[place]) for place in operands],
            written,
            [to_make[slot] for slot in written],
            aliases,
        )


def _read(value: jax.Array, leaf: Array) -> jax.Array:
    """The array that a launch sees: the value, or a part of it to read."""
    if leaf.shape == value.shape:
        return value
    start = leaf.address.offset // ITEM_BYTES[leaf.dtype]  # type: ignore[attr-defined]
    return value.reshape(-1)[start : start + math.prod(leaf.shape)].reshape(leaf.shape)


def _layout(array: Array) -> tuple[int, ...]:
    """The axes from the outermost to the innermost in memory."""
    axes = range(len(array.shape))
    return tuple(sorted(axes, key=lambda axis: (-array.strides[axis], axis)))


def run_step(launch: Launch, binary: Binary, step: Step) -> Sequence[jax.Array]:
    triton = _interface()
    count = len(binary.parameters)
    order = [*step.order, *range(count, count + abi.SCRATCH_POINTERS)]
    values = launch.values()
    parameters = []
    for place in step.order:
        kind, value = values[place]
        if isinstance(value, Slot):
            divisor = binary.parameters[place].multiple_of
            parameters.append(triton.create_array_parameter(0, divisor))
        elif kind.startswith("*"):
            parameters.append(triton.create_scalar_parameter(0, "u64"))
        else:
            parameters.append(triton.create_scalar_parameter(value, kind))
    major, minor = binary.target
    kernel = triton.TritonKernel(
        binary.entry,
        binary.num_warps,
        binary.num_ctas,
        binary.shared,
        abi.reordered(binary.ptx, order),
        "",
        10 * major + minor,
    )
    call = triton.TritonKernelCall(kernel, launch.grid, 1, 1, parameters)
    run = jax.ffi.ffi_call(
        "triton_kernel_call_ffi",
        [jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype)) for each in step.results],
        input_layouts=step.operand_layouts,
        output_layouts=[_layout(each) for each in step.results],
        input_output_aliases=step.aliases,
    )
    return run(*step.operands, opaque=zlib.compress(call.to_proto(binary.entry, b"")))


@cache
def _interface() -> Any:
    """jaxlib's own call of Triton kernels, which is no public interface.

    Raises RuntimeError where it is not there.
    """
    from jaxlib import gpu_triton

    names = (
        "TritonKernel",
        "TritonKernelCall",
        "create_array_parameter",
        "create_scalar_parameter",
    )
    missing = [name for name in names if not hasattr(gpu_triton, name)]
    if missing:
        raise RuntimeError(
            f"jaxlib {jax.__version__} has no {', '.join(missing)}: flash needs JAX {_TESTED} with "
            'its CUDA plugin; limelight.backends("tiled") does without'
        )
    return gpu_triton
