"""The fused kernels on JAX arrays: each launch is a step of the compiled program, by jaxlib's own
call of Triton kernels.

Such a call takes arrays and makes new ones: a kernel gets the addresses of its operands, then those
of its results, in the order of its parameters; numbers are part of the call. What a launch writes
is a result. What a later launch writes again, or reads, is an operand that shares its memory with a
result, so the launches stay in order and nothing is copied.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from limelight.call import Call, Gradients
from limelight.kernels import fused
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Scalar
from limelight.kernels.program import Slot, recipe
from limelight.launcher import Binary, abi, default_cache

_TESTED = "0.10.2 to 0.11.2"


def forward(call: Call) -> tuple[jax.Array, jax.Array | None]:
    """out [B, H, M, E] and the LSE [B, H, M], float32, if wanted."""
    tensors = call.tensors()
    work = fused.forward(call.with_tensors(_arrays(tensors)), heads_first=True)
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
    tensors = [*call.tensors(), *given]
    inputs = fused.inputs(call, wanted)
    arrays = _arrays([*tensors, *inputs])
    own = len(arrays) - len(given) - len(inputs)
    filled = arrays[len(tensors) :]
    work = fused.backward(
        call.with_tensors(arrays), arrays[own : len(tensors)], fused.spread(filled, wanted)
    )
    made = _run(call, work, tensors, [*filled, *work.made])
    return fused.spread(made[: len(filled)], wanted)


def _arrays(tensors: Sequence[Any]) -> list[Array]:
    return [
        fused.contiguous(slot, tuple(tensor.shape), tensor.dtype.name)
        for slot, tensor in enumerate(tensors)
    ]


def _run(
    call: Call, work: fused.Work, tensors: Sequence[jax.Array], made: Sequence[Array]
) -> list[jax.Array]:
    """What the launches make. tensors: those that they read only; the slots of `made` follow."""
    values: dict[int, Any] = dict(enumerate(tensors))
    shapes = {len(tensors) + n: _shape(each) for n, each in enumerate(made)}
    for launch in work.launches:
        _launch(launch, fused.target(call), values, shapes)
    # What no launch writes, as there is nothing to add up, is zero.
    return [values.get(slot, jnp.zeros(shape.shape, shape.dtype)) for slot, shape in shapes.items()]


def _shape(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype))


def _launch(
    launch: Launch,
    target: tuple[int, int],
    values: dict[int, Any],
    shapes: dict[int, jax.ShapeDtypeStruct],
) -> None:
    """Puts what the launch writes into `values`. shapes: of what is made, by its slot."""
    leaves = [leaf for _, leaf in launch.leaves() if isinstance(leaf, (Array, Scalar))]
    operands, results, numbers = [], [], []  # places of parameters
    arguments, written, aliases = [], [], {}
    for place, leaf in enumerate(leaves):
        slot = leaf.address if isinstance(leaf, Array) else None
        if not isinstance(slot, Slot):
            numbers.append(place)
        elif slot.tensor in shapes and slot.tensor not in values:
            results.append(place)
            written.append(slot.tensor)
        else:
            operands.append(place)
            arguments.append(_read(values[slot.tensor], leaf, slot))
    # Behind the new results, as a kernel takes the address of memory that is shared but once.
    for n, place in enumerate(operands):
        slot = leaves[place].address
        if slot.tensor in shapes and not slot.offset:
            aliases[n] = len(written)
            written.append(slot.tensor)
    order = [*operands, *results, *numbers]
    binary = default_cache().binary(recipe(launch, target))
    made = call_kernel(
        launch,
        binary,
        order,
        arguments,
        tuple(shapes[slot] for slot in written),
        aliases,
    )
    values.update(zip(written, made, strict=True))


def _read(value: jax.Array, leaf: Array, slot: Slot) -> jax.Array:
    if not slot.offset:
        return value
    start = slot.offset // ITEM_BYTES[leaf.dtype]
    return value.reshape(-1)[start : start + math.prod(leaf.shape)]


def call_kernel(
    launch: Launch,
    binary: Binary,
    order: Sequence[int],
    operands: Sequence[jax.Array],
    results: tuple[jax.ShapeDtypeStruct, ...],
    aliases: dict[int, int],
) -> Sequence[jax.Array]:
    """One launch. order: the kernel's parameters as the call has them, operands and new results
    first. aliases: operands, by number, with the result that takes their memory."""
    triton = _interface()
    count = len(binary.parameters)
    ptx = abi.reordered(binary.ptx, [*order, *range(count, count + abi.SCRATCH_POINTERS)])
    leaves = launch.values()
    parameters = []
    for place in order:
        kind, value = leaves[place]
        if isinstance(value, Slot):
            parameters.append(triton.create_array_parameter(0, binary.parameters[place].multiple_of))
        elif kind.startswith("*"):
            parameters.append(triton.create_scalar_parameter(0, "u64"))
        else:
            parameters.append(triton.create_scalar_parameter(value, kind))
    major, minor = binary.target
    kernel = triton.TritonKernel(
        binary.entry, binary.num_warps, binary.num_ctas, binary.shared, ptx, "", 10 * major + minor
    )
    step = triton.TritonKernelCall(kernel, launch.grid, 1, 1, parameters)
    opaque = zlib.compress(step.to_proto(binary.entry, b""))
    run = jax.ffi.ffi_call("triton_kernel_call_ffi", results, input_output_aliases=aliases)
    return run(*operands, opaque=opaque)


@cache
def _interface() -> Any:
    """jaxlib's Triton calls, which are not a public interface.

    Raises RuntimeError where they are not there, or not as they were.
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
            f"jaxlib {jax.lib.__version__} has no {', '.join(missing)} for this GPU: limelight's "
            f'"flash" needs JAX {_TESTED} with its CUDA plugin; limelight.backends("tiled") runs '
            "without"
        )
    return gpu_triton
