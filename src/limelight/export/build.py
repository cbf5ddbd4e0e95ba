"""Compiles a matrix of problems for several targets, and writes the folder that others take."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from limelight.backends import flash
from limelight.devices import SHARED_MEMORY
from limelight.errors import invalid
from limelight.export.c_source import tables
from limelight.export.manifest import (
    is_portable,
    name_of,
    schema,
    to_manifest,
    to_text,
    validate,
)
from limelight.export.rust_source import crate
from limelight.export.tracer import plan_variant
from limelight.export.variant import EXAMPLE, Problem, Variant
from limelight.kernels import configs
from limelight.launcher import Binary, Recipe, SharedMemoryError, compile_kernel

TARGETS = ("sm_60", "sm_70", "sm_75", "sm_80", "sm_90")
DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 128)
MASKS = ("none", "causal", "key_lengths")
BIASES = ("none", "alibi")
MAX_STACK = 512  # bytes of a thread

Progress = Callable[[int, int, str], None]
"""Called with how many kernels are compiled, of how many, and the name of the last one."""


@dataclass(frozen=True)
class Export:
    """folder: where everything was written. manifest: its manifest.json. size: bytes of all."""

    folder: Path
    manifest: dict[str, Any]
    size: int


class SpillError(RuntimeError):
    """A kernel spills more registers than is allowed."""


def compile(
    folder: str | os.PathLike[str],
    *,
    targets: Sequence[str] = TARGETS,
    dtypes: Sequence[str] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    biases: Sequence[str] = BIASES,
    softcap: bool = False,
    gradients: bool = True,
    max_stack: int = MAX_STACK,
    jobs: int | None = None,
    progress: Progress = lambda done, total, name: None,
) -> Export:
    """Compiles every combination; writes kernels, manifest, C launcher and Rust crate to a folder.

    targets: such as "sm_80". masks, biases: as on the command line, such as "causal & key_lengths",
    or "none". softcap: whether scores are capped. gradients: with backwards; those of a bias's
    tensors as a variant of its own. max_stack: bytes that a thread may spill. jobs: processes at
    once; as many as there are processors by default.

    Left out are bfloat16 before sm_80, and float32 with a head_dim up to 64 on sm_90, where the
    plan depends on the lengths (sm_80's PTX serves it).

    No GPU and no array library is needed; the same call writes the same bytes.

    Raises ValueError for what cannot be exported, SpillError and SharedMemoryError for a kernel
    that does not fit its target, CompileError where the compiler ended without one.
    """
    check_folder(Path(folder))  # before minutes of compiling
    variants = planned(targets, dtypes, head_dims, masks, biases, softcap, gradients)
    recipes = {
        name_of(launch.recipe): launch.recipe for each in variants for launch in each.launches
    }
    binaries = _compiled(recipes, max_stack, jobs or os.cpu_count() or 1, progress)
    return write(Path(folder), variants, binaries)


def planned(
    targets: Sequence[str] = TARGETS,
    dtypes: Sequence[str] = DTYPES,
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    biases: Sequence[str] = BIASES,
    softcap: bool = False,
    gradients: bool = True,
) -> list[Variant]:
    """What `compile` compiles."""
    for dtype in dtypes:
        if dtype not in flash.DTYPES:
            raise invalid("dtype", found=repr(dtype), needed=f"one of {', '.join(flash.DTYPES)}")
    wanted: dict[tuple[Problem, tuple[int, int]], None] = {}  # a set, in order
    for text, dtype, dim, mask, bias in product(targets, dtypes, head_dims, masks, biases):
        target = _target(text)
        if _is_left_out(dtype, dim, target):
            continue
        kinds = ("none", "inputs", *(["all"] if bias != "none" else [])) if gradients else ("none",)
        for kind in kinds:
            problem = Problem.of(dtype, dim, mask=mask, bias=bias, softcap=softcap, gradients=kind)
            wanted[problem, target] = None
    if not wanted:
        found = f"{', '.join(dtypes)} for {', '.join(targets)}"
        raise invalid("dtypes", found=found, needed="one that a target can run")
    return [plan_variant(problem, target) for problem, target in wanted]


def write(folder: Path, variants: Sequence[Variant], binaries: Mapping[str, Binary]) -> Export:
    """Writes the folder, in the place of an export that is there.

    binaries: of every kernel that the variants launch, by `name_of`.
    """
    found = to_manifest(variants, binaries)
    validate(found)
    own = resources.files("limelight.export").joinpath("c")
    files = {each.name: each.read_bytes() for each in own.iterdir()} | {
        "manifest.json": to_text(found).encode(),
        "manifest.schema.json": schema().encode(),
        "limelight_tables.h": tables(found).encode(),
        **crate(found),
    }
    for name, binary in binaries.items():
        paths = found["kernels"][name]["files"]
        files |= {paths["cubin"]: binary.cubin, paths["ptx"]: binary.ptx.encode()}
    check_folder(folder)
    before = _kernels(folder)
    # The manifest last: what it names is there.
    for path in sorted(files, key=lambda path: path == "manifest.json"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(files[path])
    for path in before - set(files):
        (folder / "kernels" / Path(path).name).unlink(missing_ok=True)
    return Export(folder, found, sum(map(len, files.values())))


def _is_left_out(dtype: str, dim: int, target: tuple[int, int]) -> bool:
    """What another target's code serves, or nothing can."""
    major, minor = target
    lengths = (EXAMPLE.q_len, EXAMPLE.kv_len)
    by_length = configs.in_halves(dtype, 10 * major + minor, dim, lengths, allow_tf32=False)
    return by_length or (dtype == "bfloat16" and target < (8, 0))


def check_folder(folder: Path) -> None:
    """Raises ValueError unless the folder is new, empty, or holds an earlier export."""
    if folder.exists() and not folder.is_dir():
        raise invalid("out", found=f"a file, {folder}", needed="a folder")
    if folder.exists() and any(folder.iterdir()) and not _is_export(folder):
        raise invalid(
            "out",
            found=f"{folder}, with files of another origin",
            needed="a new or empty folder, or an earlier export",
        )


def _is_export(folder: Path) -> bool:
    try:
        found = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"limelight", "schema", "kernels"} <= found.keys()


def _kernels(folder: Path) -> set[str]:
    """The paths of the kernels of an earlier export."""
    path = folder / "manifest.json"
    kernels = json.loads(path.read_text())["kernels"].values() if path.exists() else ()
    return {file for kernel in kernels for file in kernel["files"].values()}


def _target(text: str) -> tuple[int, int]:
    """Of "sm_75", (7, 5)."""
    known = {f"sm_{major}{minor}": (major, minor) for major, minor in SHARED_MEMORY}
    if text not in known:
        raise invalid("target", found=repr(text), needed=f"one of {', '.join(known)}")
    return known[text]


def _compiled(
    recipes: dict[str, Recipe], max_stack: int, jobs: int, progress: Progress
) -> dict[str, Binary]:
    """Each in a process of its own, as the compiler may abort its own."""
    binaries = {}
    progress(0, len(recipes), "compiling")
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(compile_kernel, recipe, isolated=True): name
            for name, recipe in recipes.items()
        }
        try:
            for done in as_completed(running):
                name = running[done]
                binaries[name] = done.result()
                _check(name, binaries[name], max_stack)
                progress(len(binaries), len(recipes), name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return binaries


def _check(name: str, binary: Binary, max_stack: int) -> None:
    if binary.stack > max_stack:
        raise SpillError(f"{name} spills {binary.stack} bytes of a thread, over {max_stack}")
    if binary.global_scratch.size or binary.profile_scratch.size or binary.num_ctas > 1:
        raise invalid(name, found="scratch memory or clusters", needed="a kernel without")
    major, _ = binary.target
    family = {each: limit for each, limit in SHARED_MEMORY.items() if each[0] == major}
    for each, limit in family.items():
        if is_portable(binary.target) and each > binary.target and binary.shared > limit:
            raise SharedMemoryError(name, binary.shared, limit, f"sm_{each[0]}{each[1]}")
