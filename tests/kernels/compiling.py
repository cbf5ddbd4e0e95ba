"""Compiles the plan's launches for any GPU, without one, and reads what ptxas made of them.

    python -m compiling 75 float16 128

prints the resources of every kernel as JSON. A process that interprets cannot compile, and a
compiler that fails may abort its process: so whoever asks reads it from another one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from limelight.biases import DenseBias
from limelight.call import Call, Gradients
from limelight.kernels import plan
from limelight.kernels.launch import Array, Launch
from limelight.kernels.program import recipe
from limelight.launcher import Binary, compile_kernel
from limelight.masks import Causal


def compiled(launch: Launch, capability: int) -> Binary:
    return compile_kernel(recipe(launch, divmod(capability, 10)))


def array(shape: tuple[int, ...], dtype: str) -> Array:
    """A contiguous tensor that is nowhere."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return Array(16, shape, tuple(reversed(strides)), dtype, alignment=16)


def problem(dtype: str, dim: int) -> Call:
    """Causal, grouped heads, a length that is no multiple of a tile."""
    query = array((2, 16, 1000, dim), dtype)
    key = array((2, 4, 1000, dim), dtype)
    return Call(None, query, key, key, Causal(), None, None, 0, dim**-0.5, None, 0.0, None)


def biased(dtype: str, dim: int) -> Call:
    """The same with a dense bias that the batch shares."""
    return replace(problem(dtype, dim), bias=DenseBias(array((16, 1000, 1000), "float32")))


def launches(call: Call, capability: int) -> list[Launch]:
    """Every launch of a forward and a backward."""
    batch, heads, q_len, _ = call.size
    out = array(call.query.shape, call.query.dtype)
    lse = array((batch, heads, q_len), "float32")
    bias = call.bias.tensors() if call.bias is not None else []
    wanted = Gradients(call.query, call.key, call.value, call.sinks, tuple(bias))
    memory, more = (
        {name: array(shape, dtype) for name, (shape, dtype) in needed.items()}
        for needed in (
            plan.forward_scratch(call, capability),
            plan.scratch(call, wanted, capability),
        )
    )
    return plan.forward(call, out, lse, memory, capability=capability) + plan.backward(
        call, out, lse, out, None, wanted, more, capability=capability
    )


def sample(dtype: str, dim: int, capability: int) -> dict[str, Launch]:
    """One launch of each kernel, by its name."""
    plain = launches(problem(dtype, dim), capability)
    *_, dense = launches(biased(dtype, dim), capability)
    return {_name(launch): launch for launch in (*plain, dense)}


def resources(launch: Launch, capability: int) -> dict[str, Any]:
    """registers of a thread, stack (spills) of a thread and shared memory of a block in bytes."""
    binary = compiled(launch, capability)
    return {
        "registers": binary.registers,
        "stack": binary.stack,
        "shared": binary.shared,
        "tensor_cores": "mma" in binary.ptx,
    }


def _name(launch: Launch) -> str:
    options = launch.arguments.get("options")
    halves = options is not None and options.precision == "fp16x3"
    return launch.kernel.__name__ + " in halves" * halves


if __name__ == "__main__":
    capability, dtype, dim = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    found = sample(dtype, dim, capability).items()
    print(json.dumps({name: resources(launch, capability) for name, launch in found}))
