"""Fixtures: a folder whose kernels are the stub driver's, and the C launcher built against it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from c_launcher import FOLDER_PROBLEMS, Launcher, compiled, stub_folder
from stub_driver import Stub, build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub_folder(tmp_path_factory.mktemp("exported"), FOLDER_PROBLEMS)


@pytest.fixture(scope="session", params=["CUDA 12", "CUDA 11.8"])
def launcher(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Launcher:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    flags = () if request.param == "CUDA 12" else ("-DOLD_DRIVER",)
    place = tmp_path_factory.mktemp("built")
    driver = build(place, *flags)
    return Launcher(compiled(folder, place, driver), Stub(driver), folder)
