"""Fixtures: the device, each backend in turn, poisoned memory, a fixed seed."""

from __future__ import annotations

import contextlib
import os

import pytest

torch = pytest.importorskip("torch")

from limelight import Problem, backends, explain
from limelight.backends import BACKENDS
from limelight.testing import poisoned

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # each worker has a core of its own

NAMES = [backend.name for backend in BACKENDS]


GPU_ONLY = {
    backend.name
    for backend in BACKENDS
    if any(reason.rule == "runs on NVIDIA GPUs" for reason in backend.why_not(Problem.of()))
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what would only be skipped: GPU backends, turn by turn, on the CPU."""

    def pointless(item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        on_cpu = parameters.get("device", "cpu") == "cpu"
        return on_cpu and parameters.get("backend") in GPU_ONLY

    left_out = [item for item in items if pointless(item)]
    items[:] = [item for item in items if not pointless(item)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest):
    """Allows only one backend, by turns; `backend.runs(...)` skips what it refuses."""
    with backends(request.param):
        yield _One(request.param)


class _One:
    """The only backend that is allowed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def takes(self, *args, **options) -> bool:
        choice = explain(*args, **options)
        assert choice.backend in (None, self.name)
        return choice.backend is not None

    def runs(self, *args, **options) -> None:
        """Skips the test where the backend refuses the call."""
        if not self.takes(*args, **options):
            pytest.skip(f"{self.name} refuses this problem")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def nan_memory():
    with poisoned():
        yield


@pytest.fixture
def no_deterministic_switch():
    """Puts torch's own switch back, whatever the test does to it."""
    before = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, before)
        yield
