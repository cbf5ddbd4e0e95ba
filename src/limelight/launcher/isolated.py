"""Compile in a process of its own, so that a compiler that aborts takes only that one with it."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
from typing import Any

from limelight._jit import DeviceFunction, ready
from limelight.launcher.binary import Binary
from limelight.launcher.compile import CompileError, compile_kernel
from limelight.launcher.recipe import Recipe


def compile_isolated(recipe: Recipe) -> Binary:
    """As `compile_kernel(recipe)`. Raises CompileError with the process's last words, if it fails.

    Raises ValueError for a function that another process cannot import.
    """
    parcel = io.BytesIO()
    _Pickler(parcel).dump(recipe)
    result = subprocess.run(
        [sys.executable, "-m", __name__],
        input=parcel.getvalue(),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    if result.returncode:
        words = result.stderr.decode(errors="replace").strip()[-2000:]
        raise CompileError(f"compiling {recipe.name} ended with {result.returncode}:\n{words}")
    return Binary.from_bytes(result.stdout)


class _Pickler(pickle.Pickler):
    """Sends jit functions by where they are defined; their own state cannot travel."""

    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if not hasattr(value, "cache_key"):
            return None
        module, name = value.fn.__module__, value.fn.__qualname__
        if module == "__main__" or "<locals>" in name:
            raise ValueError(f"{module}.{name}: an isolated compilation needs importable functions")
        return module, name


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, place: tuple[str, str]) -> Any:
        module, name = place
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return ready(value) if isinstance(value, DeviceFunction) else value


def _main() -> None:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the compiler prints is not the answer
    recipe = _Unpickler(sys.stdin.buffer).load()
    answer.write(compile_kernel(recipe).to_bytes())
    answer.close()


if __name__ == "__main__":
    _main()
