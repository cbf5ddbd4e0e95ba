"""What ptxas makes of the shipped configurations, for a sample of targets, and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from limelight.devices import _SHARED_MEMORY

pytest.importorskip("triton")


def program(module: str, *arguments: object) -> str:
    """What a module prints, run in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "stack"),
    [
        (61, "float16", 64, 8),
        (75, "float16", 128, 8),
        (80, "float32", 64, 8),
        (90, "float32", 64, 280),  # of dK and dV in TF32; in halves 176
        (90, "bfloat16", 64, 96),  # of the keys' gradients: the fastest spills, outside its loops
    ],
)
def test_resources_are_as_recorded(capability: int, dtype: str, dim: int, stack: int) -> None:
    found = json.loads(program("compiling", capability, dtype, dim))
    names = {"forward", "row_numbers", "key_gradients", "query_gradient"}
    if (capability, dtype) == (90, "float32"):
        names |= {"measure_peaks", "split_into_halves"}
        names |= {f"{name} in halves" for name in ("forward", "key_gradients", "query_gradient")}
    assert names == set(found)
    limit = _SHARED_MEMORY[divmod(capability, 10)]
    for name, resources in found.items():
        assert resources["stack"] <= stack, name  # bytes of a thread
        assert resources["shared"] <= limit, name


def test_an_edited_fragment_is_compiled_anew() -> None:
    before, after, again = program("fragments").split()
    assert before != after
    assert before == again


def test_importing_limelight_imports_no_triton() -> None:
    code = "import sys, limelight; assert 'triton' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
