"""A CUDA driver without a GPU, built from stub/fakecuda.c, and what it was asked to launch."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from limelight.launcher import Binary, Parameter

SOURCE = Path(__file__).parent / "stub" / "fakecuda.c"


class Launch(ctypes.Structure):
    """`Launch` of stub/fakecuda.c."""

    _fields_ = (
        ("entry", ctypes.c_char * 128),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("size", ctypes.c_uint),
        ("stream", ctypes.c_uint64),
        ("bytes", ctypes.c_ubyte * 512),
    )

    @property
    def parameters(self) -> bytes:
        """The raw bytes of the parameters, one after another, without gaps."""
        return bytes(self.bytes[: self.size])


class Stub:
    """The stub's own functions: `stub.launches` and every `fake_...` of it by its short name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.fake_launch.restype = ctypes.POINTER(Launch)

    def __getattr__(self, name: str):
        return getattr(self._library, f"fake_{name}")

    @property
    def launches(self) -> list[Launch]:
        return [self._library.fake_launch(n).contents for n in range(self._library.fake_launches())]


def build(folder: Path, *flags: str) -> Path:
    library = folder / "libcuda.so.1"
    warnings = ("-Wall", "-Wextra", "-Werror")
    command = ["gcc", "-std=c11", "-O1", "-shared", "-fPIC", "-pthread", *warnings, *flags]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


def binary(*kinds: str, entry: str = "kernel", **facts: object) -> Binary:
    """A binary whose machine code is the stub's: the kernel's name and its parameters' sizes."""
    return with_stub_code(
        Binary(
            cubin=b"",
            ptx="",
            entry=entry,
            target=(9, 0),
            parameters=tuple(Parameter(f"p{n}", kind) for n, kind in enumerate(kinds)),
            threads=128,
            shared=0,
        ),
        **facts,
    )


def with_stub_code(binary: Binary, **facts: object) -> Binary:
    sizes: Sequence[int] = [each.size for each in binary.parameters] + [8, 8]
    code = " ".join([binary.entry, *map(str, sizes)])
    return replace(binary, cubin=code.encode() + b"\0", ptx=code, **facts)
