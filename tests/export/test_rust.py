"""The exported crate: it builds by itself, and launches what the plan and the C launcher do.

Behind rust/src/lib.rs it has the C launcher's functions, so the C launcher's tests are run on it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import test_c_launcher
from c_launcher import BACKWARD, FORWARD, Launcher
from stub_driver import Stub, build
from test_c_launcher import (
    made,
    stub,  # noqa: F401  # fixture
    test_a_table_has_as_many_entries_as_the_caller_says,  # noqa: F401
    test_absent_gradients_are_left_out,  # noqa: F401
    test_an_architecture_without_code,  # noqa: F401
    test_an_empty_problem,  # noqa: F401
    test_another_gpu_s_kernels_on_request,  # noqa: F401
    test_capture,  # noqa: F401
    test_code_that_needs_too_much_shared_memory_is_not_chosen,  # noqa: F401
    test_launches_are_the_plan_s,  # noqa: F401
    test_no_context,  # noqa: F401
    test_nothing_is_loaded_twice,  # noqa: F401
    test_strides_of_what_is_one_long_do_not_matter,  # noqa: F401
    test_the_best_code_for_a_gpu,  # noqa: F401
    test_what_the_driver_says,  # noqa: F401
    test_workspace_is_what_a_launch_asks_for,  # noqa: F401
)

from limelight.export.rust_source import _spelled

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).with_name("rust")
# What Rust's types do not let happen, and what they call otherwise.
UNSAYABLE = {
    "struct_size: found 8",
    "batch: found -1, needed 0 to 2147483647",
    "out.stride.2 >= 0",
}
OTHERWISE = {
    "dtype 2": "bfloat16",
    "scale: found 1e+39, which does not fit a float": "scale: found 1e39, which does not fit",
}
WRONG = [
    (status, spoil, OTHERWISE.get(says, says))
    for status, spoil, says in test_c_launcher.WRONG
    if says not in UNSAYABLE
]


def cargo(*arguments: str, folder: Path) -> None:
    done = subprocess.run(
        ["cargo", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "CARGO_TARGET_DIR": str(folder / "target"),
            "CARGO_NET_OFFLINE": "true",
            "RUSTDOCFLAGS": "-D warnings",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def crate(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the exported folder, beside which others find it."""
    if shutil.which("cargo") is None:
        pytest.skip("needs cargo")
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("crates") / "exported"))


@pytest.fixture(scope="session")
def as_c(crate: Path) -> Path:
    place = Path(shutil.copytree(HERE, crate.with_name("as_c")))
    cargo("build", folder=place)
    return place / "target" / "debug" / "liblimelight_as_c.so"


def opened(as_c: Path, place: Path, driver: Path, folder: Path) -> Launcher:
    """A library of its own, which has opened the driver, if there is one."""
    library = shutil.copy(as_c, place / "liblimelight_as_c.so")
    launcher = Launcher(library, Stub(driver) if driver.exists() else None, folder)
    attention, _ = made()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIMELIGHT_DRIVER", str(driver))
        launcher.launch(FORWARD, attention)
    return launcher


@pytest.fixture(scope="session", params=["CUDA 12", "CUDA 11.8"])
def launcher(request, as_c, folder, tmp_path_factory) -> Launcher:
    place = tmp_path_factory.mktemp("built")
    driver = build(place, *(["-DOLD_DRIVER"] if request.param == "CUDA 11.8" else []))
    return opened(as_c, place, driver, folder)


@pytest.mark.parametrize(("status", "spoil", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_wrong_use_has_an_error(launcher, stub, status, spoil, says):  # noqa: F811
    test_c_launcher.test_wrong_use_has_a_status_and_a_message(launcher, stub, status, spoil, says)


def test_tensors_that_nothing_reads(launcher, stub):  # noqa: F811
    attention, _ = made("all")
    attention.d_bias_tensors[1].address = 256
    assert launcher.launch(BACKWARD, attention) == "WRONG_SIZE"
    assert launcher.message == "d_bias_tensors: found 2 tensors, needed 1"
    assert not stub.launches


def test_no_driver(as_c, folder, tmp_path):
    launcher = opened(as_c, tmp_path, tmp_path / "none.so", folder)
    attention, _ = made()
    assert launcher.launch(FORWARD, attention) == "NO_DRIVER"
    assert "none.so" in launcher.message
    assert "driver is needed" in launcher.message


def test_threads_load_and_launch_at_once(launcher, stub):  # noqa: F811
    """On two devices; each thread has a context of its own current."""
    attention, launches = made("inputs")
    statuses = []

    def work(device):
        stub.make_current(device)
        for _ in range(50):
            statuses.append(launcher.launch(BACKWARD, attention))

    threads = [threading.Thread(target=work, args=(1 + n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {"SUCCESS"}
    devices = [each.device for each in stub.launches]
    assert devices.count(1) == devices.count(2) == 4 * 50 * len(launches)
    assert stub.loads() <= 2 * len(launches)


def test_the_crate_passes_its_own_tests(crate):
    cargo("test", folder=crate)


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("rustfmt", ["fmt", "--check"]),
        ("cargo-clippy", ["clippy", "--all-targets", "--", "-D", "warnings"]),
        ("rustdoc", ["doc"]),
    ],
)
@pytest.mark.parametrize("which", ["exported", "as_c"])
def test_lints(crate, tool, arguments, which):
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    cargo(*arguments, folder=crate.with_name(which))


def test_masks_and_biases_have_names_in_rust():
    texts = ["causal & key_lengths", "sliding_window(left=8, right=0)", "causal"]
    assert _spelled("mask", texts) == {
        "none": "None",
        "causal": "Causal",
        "causal & key_lengths": "CausalAndKeyLengths",
        "sliding_window(left=8, right=0)": "SlidingWindowLeft8Right0",
    }
    with pytest.raises(ValueError, match="alike"):
        _spelled("mask", ["prefix_lm", "prefix lm"])


def test_the_examples_are_formatted():
    if shutil.which("rustfmt") is None:
        pytest.skip("needs rustfmt")
    examples = (ROOT / "examples" / "rust").glob("*.rs")
    subprocess.run(["rustfmt", "--check", "--edition", "2021", *examples], check=True)


def test_the_tutorial_s_kernel(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rust.md").read_text(), re.S)
    (tmp_path / "tutorial.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "scaled_add 128 threads 0 bytes\n"
    ptx = (tmp_path / "scaled_add.ptx").read_text()
    assert ".version 7.0" in ptx
    kinds = re.findall(r"\.param \.(\w+)", ptx)
    assert kinds == ["u64", "u64", "u64", "f32", "u32", "u64", "u64"]
