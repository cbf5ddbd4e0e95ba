"""The cache: from memory, from a file, or compiled, whoever else is at it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stub_driver import with_stub_code

pytest.importorskip("triton")

import tuple_kernels as k

import limelight.launcher.cache as cache_module
from limelight.launcher import Cache, CaptureError, Recipe, compile_kernel

SIGNATURE = {
    "scores": "*fp32:16",
    "out": "*fp32:16",
    "biases": (k.Slope(k.add_slope, "*fp32"),),
    "length": "i32",
    "scale": "fp32",
    "extra": "*fp32",
    "BLOCK": 128,
}
RECIPE = Recipe(function=k.apply_biases, signature=SIGNATURE, target=(8, 0))


@pytest.fixture
def compilations(monkeypatch) -> list[Recipe]:
    """The recipes that were compiled."""
    seen = []

    def counted(recipe, **options):
        seen.append(recipe)
        return compile_kernel(recipe, **options)

    monkeypatch.setattr(cache_module, "compile_kernel", counted)
    return seen


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_memory_then_disk_then_compiler(tmp_path, compilations):
    first = Cache(tmp_path / "new" / "folder")
    binary = first.binary(RECIPE)
    assert first.binary(RECIPE) is binary
    assert Cache(first.folder).binary(RECIPE) == binary
    assert len(compilations) == 1
    (path,) = files(first.folder)
    assert path.name == f"apply_biases-{RECIPE.digest()}.kernel"


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_is_made_again(tmp_path, compilations, damage):
    binary = Cache(tmp_path).binary(RECIPE)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes(
        {"cut": whole[:middle], "flipped": flipped, "empty": b"", "foreign": b"hello"}[damage]
    )
    assert Cache(tmp_path).binary(RECIPE) == binary
    assert len(compilations) == 2
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, compilations):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="set LIMELIGHT_CACHE_DIR"):
        binary = cache.binary(RECIPE)
    assert cache.binary(RECIPE) is binary


def test_the_folder_follows_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("LIMELIGHT_CACHE_DIR", str(tmp_path))
    assert Cache().folder == tmp_path
    monkeypatch.delenv("LIMELIGHT_CACHE_DIR")
    assert Cache().folder == Path.home() / ".cache" / "limelight"


def test_eight_processes_fill_one_folder(tmp_path):
    program = """
import sys
sys.path.insert(0, sys.argv[2])
import test_launcher_cache as t
from dataclasses import replace
from pathlib import Path
for warps in (1, 4):
    cache = t.Cache(Path(sys.argv[1]))
    recipe = replace(t.RECIPE, num_warps=warps)
    assert cache.binary(recipe).num_warps == warps
"""
    folder, triton_folder = tmp_path / "kernels", tmp_path / "triton"
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", program, str(folder), here]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(triton_folder),
    }
    processes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(8)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
    names = [path.name for path in files(folder)]
    wanted = [replace(RECIPE, num_warps=warps).digest() for warps in (1, 4)]
    assert sorted(names) == sorted(f"apply_biases-{digest}.kernel" for digest in wanted)
    for path in files(folder):
        assert cache_module._read(path) is not None


def test_a_kernel_is_loaded_and_kept(tmp_path, stub, fake, monkeypatch):
    monkeypatch.setattr(
        cache_module, "compile_kernel", lambda recipe, **_: with_stub_code(compile_kernel(recipe))
    )
    cache = Cache(tmp_path)
    kernel = cache.kernel(RECIPE, device=0, on=fake)
    assert cache.kernel(RECIPE, device=0, on=fake) is kernel
    kernel(0, 0, (1, 1, 1), (1, 2, 3, 4, 0.5, 0))
    assert (stub.loads(), len(stub.launches)) == (1, 1)


def test_nothing_is_compiled_during_a_capture(tmp_path, stub, fake, compilations):
    stub.capture(1)
    with pytest.raises(CaptureError, match=r"compile apply_biases .* once before"):
        Cache(tmp_path).kernel(RECIPE, device=0, stream=5, on=fake)
    assert compilations == []
