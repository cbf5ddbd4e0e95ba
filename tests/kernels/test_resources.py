"""What ptxas makes of the shipped configurations, for a sample of targets, and no GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from compile_matrix import RECORD, SAMPLE, Case, Report, cases, compiled, complaints, config_of, run

from limelight.devices import SHARED_MEMORY
from limelight.kernels import configs


def recorded() -> dict[str, Report]:
    return json.loads(RECORD.read_text())["cases"]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_resources_are_as_recorded(case: Case) -> None:
    assert complaints(case, compiled(case), recorded()[str(case)]) == []


@pytest.mark.parametrize(
    ("dtype", "stack"),
    [
        ("float32", 280),  # of dK and dV in TF32; in halves 176
        ("bfloat16", 496),  # of the dense bias's gradient, whose fastest spills
    ],
)
def test_hopper_spills_little(dtype: str, stack: int) -> None:
    found = json.loads(run("compiling", 90, dtype, 64).stdout)
    halves = {name for name in found if "halves" in name}
    assert bool(halves) == (dtype == "float32")
    assert max(resources["stack"] for resources in found.values()) <= stack


def test_the_record_is_of_these_configurations_and_within_limits() -> None:
    """`make compile-matrix RECORD=1` follows an edit of them."""
    record = recorded()
    assert set(record) == {str(case) for case in cases()}
    for case in cases():
        for kernel, resources in record[str(case)].items():
            assert resources["config"] == config_of(kernel, case)["config"], f"{case} {kernel}"
            limit = SHARED_MEMORY[divmod(case.capability, 10)]
            assert resources["shared"] <= limit, f"{case} {kernel}"


def test_every_gpu_has_a_configuration() -> None:
    for capability, item_bytes, dim in itertools.product(range(60, 130), (2, 4), (1, 80, 256)):
        for kernel in ("forward", "key_gradients", "query_gradient", "dense_gradient"):
            config = getattr(configs, kernel)(capability, item_bytes, dim)
            assert config.num_stages == 1 or capability >= 80  # no asynchronous copies before


def test_a_complaint_can_be_made() -> None:
    case = Case(75, "float16", 64)
    good = {"stack": 0, "tensor_cores": True}
    assert complaints(case, {"forward": good}, {"forward": good}) == []
    spilling = {"forward": good | {"stack": 65}}
    assert "65 bytes of stack" in complaints(case, spilling, {"forward": good})[0]
    slow = {"forward": good | {"tensor_cores": False}}
    assert "no tensor cores" in complaints(case, slow, {"forward": good})[0]
    assert complaints(case, "the compiler ended", None) == [f"{case}: the compiler ended"]
    assert "not in resources.json" in complaints(case, {"forward": good}, None)[0]


def test_an_edited_fragment_is_compiled_anew() -> None:
    before, after, again = run("fragments").stdout.split()
    assert before != after
    assert before == again


def test_importing_limelight_imports_no_triton() -> None:
    code = "import sys, limelight; assert 'triton' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
