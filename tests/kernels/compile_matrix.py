"""Compiles every kernel for every GPU, dtype and head_dim, and compares with what is recorded.

    python -m compile_matrix            a table; ends with 1 where something got worse
    python -m compile_matrix --record   writes resources.json anew
    python -m compile_matrix --sample --tried versions.json   a few cases; notes the outcome

A process for each case: a compiler that fails may abort its own. sm_90 is left out, as its
configurations were measured on one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from limelight.devices import SHARED_MEMORY
from limelight.kernels import configs
from limelight.kernels.launch import ITEM_BYTES

RECORD = Path(__file__).with_name("resources.json")
SLACK = 64  # bytes of stack that versions of Triton may differ in
Report = dict[str, dict[str, Any]]


class Case(NamedTuple):
    capability: int
    dtype: str
    dim: int

    def __str__(self) -> str:
        return f"sm_{self.capability} {self.dtype} {self.dim}"


SAMPLE = [
    Case(61, "float16", 64),
    Case(75, "float16", 128),
    Case(75, "float32", 256),
    Case(80, "bfloat16", 128),
    Case(100, "float16", 64),
]


def cases() -> Iterator[Case]:
    for major, minor in SHARED_MEMORY:
        capability = 10 * major + minor
        for dtype in ("float16", "bfloat16", "float32"):
            if capability != 90 and (dtype != "bfloat16" or capability >= 80):
                yield from (Case(capability, dtype, dim) for dim in (64, 128, 256))


def config_of(kernel: str, case: Case) -> dict[str, str]:
    """How a kernel is cut, and where that comes from, in words."""
    config = getattr(configs, kernel)(case.capability, ITEM_BYTES[case.dtype], case.dim)
    tiles = f"{config.rows} x {config.keys}, warps {config.num_warps}, stages {config.num_stages}"
    return {"config": tiles, "source": config.source}


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A module as a program, in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def compiled(case: Case) -> Report | str:
    """The resources of each kernel, or how compiling ended."""
    done = run("compiling", *case)
    if done.returncode:
        return done.stderr.strip()[-2000:] or f"ended with {done.returncode}"
    found = json.loads(done.stdout).items()
    return {kernel: config_of(kernel, case) | resources for kernel, resources in found}


def complaints(case: Case, found: Report | str, recorded: Report | None) -> list[str]:
    """What is worse than recorded. Too much shared memory does not even compile."""
    if isinstance(found, str):
        return [f"{case}: {found}"]
    if recorded is None:
        return [f"{case}: not in {RECORD.name}"]
    worse = [
        f"{case}: {kernel} has {resources['stack']} bytes of stack, recorded are "
        f"{recorded[kernel]['stack']}"
        for kernel, resources in found.items()
        if resources["stack"] > recorded[kernel]["stack"] + SLACK
    ]
    if case.capability == 75 and case.dtype == "float16":
        worse += [
            f"{case}: {kernel} uses no tensor cores"
            for kernel, resources in found.items()
            if kernel != "row_numbers" and not resources["tensor_cores"]
        ]
    return worse


def rows_of(case: Case, found: Report | str) -> Iterator[list[str]]:
    """Of each kernel, the cells of its row."""
    if isinstance(found, str):
        yield [str(case), "[bold red]failed[/bold red]", "", "", "", "", ""]
        return
    for kernel, resources in found.items():
        numbers = [str(resources[name]) for name in ("registers", "stack", "shared")]
        yield [str(case), kernel, resources["config"], *numbers, resources["source"]]


def text(record: dict[str, Any]) -> str:
    """As JSON, a kernel on each line."""
    by_case = [
        f"  {json.dumps(case)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(kernels[name])}" for name in kernels)
        + "\n  }"
        for case, kernels in record["cases"].items()
    ]
    versions = json.dumps(record["triton"])
    return f'{{\n "triton": {versions},\n "cases": {{\n' + ",\n".join(by_case) + "\n }\n}\n"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--capability", type=int, action="append", help="75 for sm_75 alone")
    options.add_argument("--sample", action="store_true", help="the few cases that CI compiles")
    options.add_argument("--tried", type=Path, help="JSON to add this Triton's outcome to")
    asked = options.parse_args()
    wanted = [
        case
        for case in (SAMPLE if asked.sample else cases())
        if case.capability in (asked.capability or [case.capability])
    ]
    recorded = json.loads(RECORD.read_text())
    columns = ("case", "kernel", "tiles", "registers", "stack", "shared", "tiles from")
    table, wrong, console = Table(*columns, box=None), list[str](), Console()
    with ThreadPoolExecutor(asked.jobs) as pool, console.status("compiling") as status:
        for case, found in zip(wanted, pool.map(compiled, wanted), strict=True):
            status.update(f"compiled {case}")
            if asked.record and not isinstance(found, str):
                recorded["cases"][str(case)] = found
            wrong += complaints(case, found, recorded["cases"].get(str(case)))
            for row in rows_of(case, found):
                table.add_row(*row)
    console.print(table)
    if asked.record:
        RECORD.write_text(text(recorded | {"triton": version("triton")}))
    if asked.tried:
        tried = json.loads(asked.tried.read_text()) if asked.tried.exists() else {}
        tried[version("triton")] = {
            "date": date.today().isoformat(),
            "compiled": [str(case) for case in wanted],
            "complaints": wrong,
        }
        asked.tried.write_text(json.dumps(dict(sorted(tried.items())), indent=1) + "\n")
    for complaint in wrong:
        console.print(complaint, style="bold red", highlight=False)
    console.print(f"Triton {version('triton')}: {len(wanted)} cases, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
