"""Launches through a stub of the driver: what arrives there, bit for bit."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from stub_driver import binary

from limelight.launcher import (
    CaptureError,
    Driver,
    DriverError,
    DriverNotFound,
    Kernel,
    SharedMemoryError,
)
from limelight.launcher.binary import Scratch

STREAM = 0x7F12_3456_789A
GRID = (7, 5, 3)


def test_every_kind_of_argument_arrives_unchanged(stub, fake):
    kernel = Kernel(binary("*fp16", "i32", "*bf16", "fp32", "i64", "u32", "u64", "fp64"), fake)
    args = (2**64 - 256, -(2**31), 0, 0.125, -(2**63), 2**32 - 1, 2**64 - 1, 0.1)
    kernel(1, STREAM, GRID, args)
    (launch,) = stub.launches
    assert launch.parameters == struct.pack("=QiQfqIQd", *args) + bytes(16)
    assert (tuple(launch.grid), tuple(launch.block)) == (GRID, (128, 1, 1))
    assert (launch.stream, launch.device, launch.shared) == (STREAM, 1, 0)
    assert (launch.entry, launch.cluster) == (b"kernel", 1)


@pytest.mark.parametrize("scale", [0.125, 1 / 3, -0.0, 1e-45, float("inf"), 3, 2**24 + 1])
def test_a_float_is_four_exact_bytes(stub, fake, scale):
    """Triton's own ahead-of-time tool passes a double here, which the kernel reads as 0."""
    Kernel(binary("i32", "fp32", "i32"), fake)(0, 0, GRID, (1, scale, 2))
    assert stub.launches[0].parameters[4:8] == struct.pack("<f", scale)


@pytest.mark.parametrize("code", "iqIQfd")
def test_alignment_with_every_neighbour(stub, fake, code):
    """The stub refuses a parameter that is not aligned to its own size."""
    kinds = {"i": "i32", "q": "i64", "I": "u32", "Q": "*i8", "f": "fp32", "d": "fp64"}
    codes = "i" + code + "f" + code + "Q" + code + "I"
    Kernel(binary(*(kinds[each] for each in codes)), fake)(0, 0, GRID, range(7))
    assert stub.launches[0].parameters == struct.pack("=" + codes, *range(7)) + bytes(16)


def test_a_later_launch_takes_its_own_arguments(stub, fake):
    kernel = Kernel(binary("*fp16", "fp32"), fake)
    for n in range(3):
        kernel(0, n, (n + 1, 1, 1), (n, n / 2))
    assert [launch.parameters[:12] for launch in stub.launches] == [
        struct.pack("=Qf", n, n / 2) for n in range(3)
    ]
    assert [(launch.stream, launch.grid[0]) for launch in stub.launches] == [(0, 1), (1, 2), (2, 3)]


def test_a_bound_kernel_fills_in_addresses(stub, fake):
    kernel = Kernel(binary("i32", "*fp16", "fp32", "*bf16"), fake)
    bound = kernel.bind((3, 1, 1), (7, 0, 0.5, 0), places=[(1, 1, 0), (3, 0, 16)])
    bound(0, STREAM, (0x1000, 0x2000))
    bound(1, STREAM + 1, (0x3000, 0x4000))
    found = [struct.unpack("=iQfQ", launch.parameters[:24]) for launch in stub.launches]
    assert found == [(7, 0x2000, 0.5, 0x1010), (7, 0x4000, 0.5, 0x3010)]
    assert [(each.stream, each.device) for each in stub.launches] == [(STREAM, 0), (STREAM + 1, 1)]


def test_a_bound_kernel_names_an_argument_that_does_not_fit(stub, fake):
    with pytest.raises(ValueError, match=r"p0 \(i32\): found 1.5"):
        Kernel(binary("i32"), fake).bind(GRID, (1.5,))


def test_an_empty_grid_launches_nothing(stub, fake):
    Kernel(binary(), fake)(0, 0, (4, 0, 1), ())
    Kernel(binary(), fake).bind((4, 0, 1), ())(0, 0)
    assert stub.launches == []


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((None, 1, 1.0), TypeError, r"p0 \(pointer\): found None"),
        ((-1, 1, 1.0), ValueError, r"p0 \(pointer\): found -1"),
        ((0, 2**31, 1.0), ValueError, r"p1 \(i32\): found 2147483648"),
        ((0, 1.5, 1.0), ValueError, r"p1 \(i32\): found 1.5"),
        ((0, 1, "x"), TypeError, r"p2 \(fp32\): found 'x'"),
        ((0, 1), TypeError, "found 2 arguments, needed 3: p0, p1, p2"),
        ((0, 1, 1.0, 0), TypeError, "found 4 arguments, needed 3"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(stub, fake, args, error, message):
    with pytest.raises(error, match=message):
        Kernel(binary("*fp16", "i32", "fp32"), fake)(0, 0, GRID, args)
    assert stub.launches == []


def test_a_grid_that_does_not_fit(stub, fake):
    with pytest.raises(ValueError, match=r"found grid \(-1, 1, 1\)"):
        Kernel(binary(), fake)(0, 0, (-1, 1, 1), ())


# Contexts.


@pytest.mark.parametrize("before", [-1, 0, 2])
def test_the_thread_keeps_its_context(stub, fake, before):
    kernel = Kernel(binary(), fake)
    stub.make_current(before)
    for _ in range(2):
        kernel(0, 0, GRID, ())
        kernel(1, 0, GRID, ())
        assert stub.current_device() == before
    assert [launch.device for launch in stub.launches] == [0, 1, 0, 1]
    assert stub.retains() == 2


def test_the_context_is_put_back_after_a_failure(stub, fake):
    kernel = Kernel(binary(), fake)
    kernel.load(1)
    stub.make_current(0)
    stub.fail_launches(719)
    with pytest.raises(DriverError):
        kernel(1, 0, GRID, ())
    assert stub.current_device() == 0


# Loading.


def test_code_is_loaded_once(stub, fake):
    kernel = Kernel(binary(), fake)
    for device in (0, 1, 0, 1):
        kernel(device, 0, GRID, ())
    assert stub.loads() == (1 if fake.has_libraries else 2)


@pytest.mark.parametrize(("shared", "times"), [(48 * 1024, 0), (48 * 1024 + 16, 2)])
def test_shared_memory_over_48_kib_is_asked_for_once_per_device(stub, fake, shared, times):
    kernel = Kernel(binary(shared=shared), fake)
    for device in (0, 1, 0, 1):
        kernel(device, 0, GRID, ())
    assert stub.attributes_set() == times
    assert [launch.shared for launch in stub.launches] == [shared] * 4


def test_more_shared_memory_than_the_device_has(stub, fake):
    stub.max_shared(99 * 1024)
    kernel = Kernel(binary(shared=120 * 1024), fake)
    with pytest.raises(SharedMemoryError, match=r"needs 122880 .* device 2 has 101376"):
        kernel(2, 0, GRID, ())
    assert stub.loads() == 0


def test_ptx_instead_of_machine_code(stub, fake):
    compiled = replace(binary("i32"), cubin=b"\x7fELF")
    Kernel(compiled, fake, from_ptx=True)(0, 0, GRID, (5,))
    assert stub.launches[0].parameters[:4] == struct.pack("=i", 5)


@pytest.mark.parametrize(("blocks", "times"), [(2, 0), (16, 1)])
def test_clusters(stub, fake, blocks, times):
    Kernel(binary(num_ctas=blocks), fake)(0, 0, GRID, ())
    (launch,) = stub.launches
    assert (launch.cluster, tuple(launch.grid)) == (blocks, (7 * blocks, 5, 3))
    assert stub.attributes_set() == times


# Capture.


@pytest.mark.parametrize("status", [1, 2, 906])
def test_nothing_is_loaded_during_a_capture(stub, fake, status):
    kernel = Kernel(binary(), fake)
    stub.capture(status)
    with pytest.raises(CaptureError, match=r"cannot load kernel .* once before"):
        kernel(0, STREAM, GRID, ())
    assert (stub.loads(), stub.launches) == (0, [])
    stub.capture(0)
    kernel.load(0)
    stub.capture(status)
    kernel(0, STREAM, GRID, ())
    assert len(stub.launches) == 1


# Scratch.


def test_scratch_comes_from_the_caller(stub, fake):
    asked = []

    def allocate(size: int) -> int:
        asked.append(size)
        return 0x1000 * len(asked)

    kernel = Kernel(binary("i32", num_ctas=2, global_scratch=Scratch(256, 128)), fake)
    kernel(0, 0, GRID, (1,), allocate)
    assert asked == [256 * 2 * 7 * 5 * 3]
    assert stub.launches[0].parameters == struct.pack("=iQQ", 1, 0x1000, 0)

    profiled = Kernel(binary(global_scratch=Scratch(8, 8), profile_scratch=Scratch(16, 8)), fake)
    profiled(0, 0, (1, 1, 1), (), allocate)
    assert stub.launches[1].parameters == struct.pack("=QQ", 0x2000, 0x3000)


def test_scratch_that_is_missing_or_not_aligned(stub, fake):
    kernel = Kernel(binary(global_scratch=Scratch(256, 128)), fake)
    with pytest.raises(TypeError, match="kernel needs scratch memory: found allocate=None"):
        kernel(0, 0, GRID, ())
    with pytest.raises(ValueError, match="found address 0x1040, kernel needs a multiple of 128"):
        kernel(0, 0, GRID, (), lambda size: 0x1040)


# Errors.


def test_a_result_becomes_an_exception(stub, fake):
    stub.fail_launches(719)
    with pytest.raises(DriverError) as raised:
        Kernel(binary(), fake)(0, 0, GRID, ())
    error = raised.value
    assert (error.name, error.code) == ("CUDA_ERROR_LAUNCH_FAILED", 719)
    assert error.doing == "launch kernel with grid (7, 5, 3)"
    assert "unspecified launch failure" in str(error)


def test_an_unknown_result(stub, fake):
    stub.fail_launches(12345)
    with pytest.raises(DriverError, match=r"an unknown error \(12345\)"):
        Kernel(binary(), fake)(0, 0, GRID, ())


def test_loading_that_fails_can_be_tried_again(stub, fake):
    kernel = Kernel(binary(), fake)
    stub.fail_next_load(200)
    with pytest.raises(DriverError, match="cannot load kernel: CUDA_ERROR_INVALID_IMAGE"):
        kernel(0, 0, GRID, ())
    kernel(0, 0, GRID, ())
    assert len(stub.launches) == 1


def test_a_kernel_that_is_not_in_its_image(stub, fake):
    with pytest.raises(DriverError, match="cannot load other: CUDA_ERROR_NOT_FOUND"):
        Kernel(replace(binary(), entry="other"), fake).load(0)


def test_a_device_that_is_not_there(stub, fake):
    with pytest.raises(DriverError, match="context on device 9: CUDA_ERROR_INVALID_DEVICE"):
        Kernel(binary(), fake)(9, 0, GRID, ())


def test_no_driver():
    with pytest.raises(DriverNotFound, match=r"no-such\.so cannot be opened .* NVIDIA's driver"):
        Driver("no-such.so")


def test_a_driver_that_is_too_old():
    with pytest.raises(DriverNotFound, match=r"older than CUDA 11\.8"):
        Driver("libm.so.6")


# Threads.


def test_eight_threads_do_not_mix_their_arguments(stub, fake):
    kernels = [Kernel(binary("*fp16", "i32", "fp32", entry=name), fake) for name in ("even", "odd")]
    failures = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        try:
            start.wait()
            for n in range(1000):
                mark = thread * 1000 + n
                kernels[n % 2](thread % 4, mark, (mark + 1, 1, 1), (mark, mark, mark / 2))
            assert stub.current_device() == -1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    launches = stub.launches
    assert sorted(launch.stream for launch in launches) == list(range(8000))
    for launch in launches:
        mark = launch.stream
        assert launch.grid[0] == mark + 1
        assert launch.parameters[:16] == struct.pack("=Qif", mark, mark, mark / 2)
        assert launch.device == mark // 1000 % 4
        assert launch.entry == (b"odd" if mark % 2 else b"even")
    assert stub.loads() == (2 if fake.has_libraries else 8)


def test_importing_the_launcher_opens_nothing():
    """Neither a compiler nor a driver: both wait for their first use."""
    program = """
import sys
import limelight.launcher
assert "triton" not in sys.modules
assert "libcuda" not in open("/proc/self/maps").read()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
