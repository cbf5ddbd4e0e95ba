"""Fixtures: a CUDA driver without a GPU, as of CUDA 12 and as of 11.8."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub_driver import Stub, build

from limelight.launcher import Driver


@pytest.fixture(scope="session", params=["CUDA 12", "CUDA 11.8"])
def stub_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("the stub driver needs gcc")
    flags = () if request.param == "CUDA 12" else ("-DOLD_DRIVER",)
    return build(tmp_path_factory.mktemp("stub"), *flags)


@pytest.fixture
def stub(stub_library: Path) -> Iterator[Stub]:
    stub = Stub(stub_library)
    stub.reset()
    yield stub
    stub.reset()


@pytest.fixture
def fake(stub: Stub) -> Driver:
    """A driver that talks to the stub."""
    return Driver(str(stub.path))
