"""Compile a kernel for a target. Needs Triton; needs no GPU, no framework and no C compiler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limelight.devices import Device
from limelight.launcher import abi
from limelight.launcher.binary import Binary, Scratch, SharedMemoryError
from limelight.launcher.recipe import Recipe
from limelight.launcher.turing import compile_for_tensor_cores

_one_at_a_time = threading.Lock()


class CompileError(RuntimeError):
    """The compiler ended without a kernel."""


def compile_kernel(recipe: Recipe, *, isolated: bool = False) -> Binary:
    """The recipe's kernel, checked against its signature and its target's shared memory.

    isolated: compile in another process, since the compiler can abort its own on a kernel that is
        wrong for the target. The function, and those among the constants, must then be importable.

    Raises ValueError for a signature or option that does not fit, SharedMemoryError, AbiError, and
    CompileError where the other process failed; errors in the kernel's code are Triton's own.
    """
    if isolated:
        from limelight.launcher.isolated import compile_isolated

        return compile_isolated(recipe)

    import triton

    with _one_at_a_time, _without_line_info():
        compiled = compile_for_tensor_cores(recipe) or _compile(recipe)

    facts, ptx, cubin = compiled.metadata, compiled.asm["ptx"], compiled.asm["cubin"]
    _check_shared_memory(recipe, facts.shared)
    parameters = recipe.read_signature().parameters
    entry = abi.Entry.read(ptx)
    resources = abi.Resources.read(cubin, entry.name)
    abi.check(parameters, entry, resources)
    return Binary(
        cubin=cubin,
        ptx=ptx,
        entry=entry.name,
        target=recipe.target,
        parameters=parameters,
        threads=entry.threads,
        shared=facts.shared,
        num_ctas=facts.num_ctas,
        global_scratch=Scratch(facts.global_scratch_size, facts.global_scratch_align),
        profile_scratch=Scratch(facts.profile_scratch_size, facts.profile_scratch_align),
        registers=resources.registers,
        stack=resources.stack,
        triton_version=triton.__version__,
    )


def _compile(recipe: Recipe) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    major, minor = recipe.target
    target = GPUTarget("cuda", 10 * major + minor, 32)
    return triton.compile(recipe.source(), target=target, options=recipe.all_options())


def _check_shared_memory(recipe: Recipe, needed: int) -> None:
    device = Device.cuda("the target", recipe.target, sms=0)
    limit = device.shared_memory
    if limit is not None and needed > limit:
        raise SharedMemoryError(recipe.name, needed, limit, f"{device.architecture}")


@contextmanager
def _without_line_info() -> Iterator[None]:
    """Line info triples a cubin's size and puts this machine's paths in it."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield
