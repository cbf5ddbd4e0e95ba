"""The C launcher through ctypes, and folders for it whose kernels are the stub driver's."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from concrete import Attention
from stub_driver import Stub, with_stub_code

from limelight.export.build import write
from limelight.export.manifest import name_of
from limelight.export.tracer import plan_variant
from limelight.export.variant import Problem, Variant
from limelight.kernels.launch import Array
from limelight.launcher import Binary, Recipe

FORWARD, BACKWARD = 0, 1
DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
TARGETS = ((6, 1), (7, 5), (8, 0), (9, 0))
FOLDER_PROBLEMS = [
    Problem.of("float16", 64, mask=mask, bias="alibi", gradients=gradients)
    for mask in ("causal", "causal & key_lengths")
    for gradients in ("none", "inputs", "all")
] + [Problem.of("float16", 64, mask="none", bias="relative_bias", gradients="all")]


def stub_binary(recipe: Recipe) -> Binary:
    binary = Binary(
        cubin=b"",
        ptx="",
        entry=recipe.name,
        target=recipe.target,
        parameters=recipe.read_signature().parameters,
        threads=32 * recipe.num_warps,
        shared=60 * 1024 if recipe.name == "forward" and recipe.target >= (8, 0) else 1024,
        triton_version="stub",
    )
    made = with_stub_code(binary)
    return replace(made, ptx=f"{made.ptx} .version 8.0")


def stub_folder(folder: Path, problems: Sequence[Problem]) -> Path:
    variants = [plan_variant(problem, target) for target in TARGETS for problem in problems]
    recipes = {name_of(each.recipe): each.recipe for v in variants for each in v.launches}
    write(folder, variants, {name: stub_binary(recipe) for name, recipe in recipes.items()})
    return folder


def compiled(folder: Path, place: Path, driver: Path, *flags: str) -> Path:
    library = place / "liblimelight.so"
    command = ["gcc", "-std=c11", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra"]
    command += ["-pedantic", "-Werror", f'-DLIMELIGHT_DRIVER="{driver}"', *flags]
    subprocess.run([*command, "-o", library, folder / "limelight.c", "-ldl", "-lm"], check=True)
    return library


class CTensor(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("stride", ctypes.c_int64 * 4),
        ("shape", ctypes.c_int64 * 4),
    )


class CAttention(ctypes.Structure):
    """`limelight_attention`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("value_dim", ctypes.c_int),
        ("mask", ctypes.c_char_p),
        ("bias", ctypes.c_char_p),
        ("bias_gradients", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len")),
        ("query_start", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *((name, CTensor) for name in ("query", "key", "value", "sinks")),
        ("mask_tensors", CTensor * 4),
        ("bias_tensors", CTensor * 4),
        *((name, CTensor) for name in ("out", "lse", "d_out", "d_lse")),
        *((name, CTensor) for name in ("d_query", "d_key", "d_value", "d_sinks")),
        ("d_bias_tensors", CTensor * 4),
        ("workspace", ctypes.c_uint64),
        ("workspace_size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("target", ctypes.c_int),
        ("from_ptx", ctypes.c_int),
    )


class Launcher:
    """An opened folder. `launch` and the others return a status by its name."""

    def __init__(self, library: Path, stub: Stub, folder: Path) -> None:
        self.library, self.stub = ctypes.CDLL(str(library)), stub
        self.library.limelight_name.restype = ctypes.c_char_p
        self.library.limelight_message.restype = ctypes.c_char_p
        self.folder = folder
        self.opened = self.open(folder)

    def open(self, folder: Path) -> ctypes.c_void_p:
        opened = ctypes.c_void_p()
        status = self.library.limelight_open(str(folder).encode(), ctypes.byref(opened))
        self.status = self.name(status)
        return opened

    def name(self, status: int) -> str:
        return self.library.limelight_name(status).decode().removeprefix("LIMELIGHT_")

    @property
    def message(self) -> str:
        return self.library.limelight_message().decode()

    def launch(self, operation: int, attention: CAttention) -> str:
        found = self.library.limelight_launch(self.opened, operation, ctypes.byref(attention))
        return self.name(found)

    def preload(self, operation: int, attention: CAttention) -> str:
        found = self.library.limelight_preload(self.opened, operation, ctypes.byref(attention))
        return self.name(found)

    def workspace(self, operation: int, attention: CAttention) -> int:
        size = ctypes.c_size_t()
        status = self.library.limelight_workspace(
            self.opened, operation, ctypes.byref(attention), ctypes.byref(size)
        )
        assert self.name(status) == "SUCCESS", self.message
        return size.value


def c_attention(attention: Attention, variant: Variant) -> CAttention:
    """The same for C; `attention.launches` must have been called. Its workspace is ample."""
    p = attention.problem
    made = CAttention(
        struct_size=ctypes.sizeof(CAttention),
        dtype=DTYPES[p.dtype],
        head_dim=p.head_dim,
        mask=None if p.mask == "none" else p.mask.encode(),
        bias=None if p.bias == "none" else p.bias.encode(),
        bias_gradients=p.gradients == "all",
        query_start=attention.query_start,
        scale=attention.scale,
        softcap=attention.softcap if p.softcap else 0.0,
        workspace=0x7000_0000_0000,
        workspace_size=2**40,
        **attention.sizes,
    )
    counts: dict[str, int] = {}
    for tensor in variant.tensors:
        role, dot, _ = tensor.name.partition(".")
        array = attention.arrays[tensor.name]
        if not dot:
            setattr(made, role, c_tensor(array))
            continue
        place = counts.get(role, 0)
        counts[role] = place + 1
        getattr(made, f"{role}_tensors")[place] = c_tensor(array)
    return made


def c_tensor(array: Array) -> CTensor:
    made = CTensor(address=array.address)
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        made.shape[axis], made.stride[axis] = size, stride
    return made


def packed(values: Sequence[tuple[str, Any]]) -> bytes:
    """The plan's arguments as the stub records them: one after another, without gaps."""
    import struct

    from limelight.launcher.signature import Parameter

    parts = [struct.pack(f"<{Parameter('', kind).code}", value) for kind, value in values]
    return b"".join(parts) + bytes(16)  # two pointers of Triton's own
