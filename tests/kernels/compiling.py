"""Compiles the plan's launches for any GPU, without one, and reads what ptxas made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from limelight.kernels.launch import Array, Launch

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Resources:
    """registers per thread; stack (spills) and shared memory in bytes."""

    registers: int
    stack: int
    shared: int


def source(launch: Launch) -> ASTSource:
    return ASTSource(launch.kernel, launch.signature(), launch.compiled_in(), launch.hints())


def compiled(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source(launch), GPUTarget("cuda", capability, 32), options)


def resources(launch: Launch, capability: int) -> Resources:
    kernel = compiled(launch, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", text)}
    return Resources(found["REG"], found["STACK"], kernel.metadata.shared)


def array(shape: tuple[int, ...], dtype: str) -> Array:
    """A contiguous tensor that is nowhere."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return Array(16, shape, tuple(reversed(strides)), dtype, alignment=16)
