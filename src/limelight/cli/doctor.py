"""`limelight doctor`: what this machine has, and whether each backend computes what it should."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from limelight.cli.console import console

PACKAGES = ("numpy", "torch", "triton", "jax", "cupy", "transformers")


def doctor(
    cold_start: Annotated[
        bool,
        typer.Option("--cold-start", help="Time the first compilation too; takes some seconds."),
    ] = False,
) -> None:
    """Check every backend that can run here against the float64 oracle, forward and gradients.

    Exits with 1 where a check fails.
    """
    from limelight.cli.checks import Check, checks

    out = console()
    out.print(_machine())
    with out.status("checking"):
        found = list(checks())
    out.print(_results(found))
    for part in _torch_choices():
        out.print(part)
    if cold_start:
        with out.status("compiling"):
            line = _cold_start()
        out.print(line)
    failed = [check for check in found if isinstance(check, Check) and not check.passed]
    if failed:
        out.print(f"[bold red]{len(failed)} of the checks failed[/bold red]")
        raise typer.Exit(1)
    out.print(
        "[bold green]all checks passed[/bold green]: ||out - reference|| / ||reference||, forward "
        "and the worst gradient, against limelight.reference"
    )


def _cold_start() -> str:
    """How long a first call waits, in words: on the first GPU, else for one by name."""
    from limelight.cli.cold_start import cold_start
    from limelight.devices import Device

    device = next(iter(_gpus()), Device.named("A100"))
    target = device.compute_capability
    assert target is not None  # it is a GPU
    found = cold_start(target)
    if isinstance(found, str):
        return f"[dim]cold start not timed: {found}[/dim]"
    return (
        f"cold start for {device}: {found.empty:.1f} s until a causal float16 forward and backward "
        f"are compiled, {found.from_disk:.1f} s in the next process"
    )


def _torch_choices() -> Iterator[Any]:
    """What PyTorch's own function would run, on each GPU or else on the CPU, for a plain call."""
    if find_spec("torch") is None:
        return
    from limelight import Problem, explain_torch
    from limelight.devices import CPU
    from limelight.pytorch import text

    for device in _gpus() or [CPU]:
        early = device.compute_capability is not None and device.compute_capability < (8, 0)
        dtype = "float16" if early else "bfloat16"
        found = explain_torch(Problem.of(dtype=dtype, device=device))
        yield text.prediction_head(found)
        yield text.prediction_table(found)
        yield from text.prediction_notes(found)


def _machine() -> Any:
    """Versions and devices, as a table."""
    from rich.table import Table

    from limelight import __version__

    table = Table.grid(padding=(0, 2))
    table.add_row("limelight", __version__)
    table.add_row(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for name in PACKAGES:
        table.add_row(name, installed(name) or "[dim]not installed[/dim]")
    table.add_row("cpu", f"{_cpu()}, {_cores()} cores")
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        table.add_row("driver", driver.read_text().splitlines()[0].removeprefix("NVRM version: "))
    gpus = _gpus()
    for n, device in enumerate(gpus):
        kib = (
            f", {device.shared_memory // 1024} KiB shared memory a block"
            if device.shared_memory
            else ""
        )
        table.add_row(f"gpu {n}", f"{device}, {device.sms} SMs{kib}")
    if not gpus:
        table.add_row(
            "gpu",
            "[dim]none that torch sees[/dim]"
            if find_spec("torch")
            else "[dim]not looked for: no torch[/dim]",
        )
    return table


def installed(name: str) -> str | None:
    """A package's version, without importing it; None where it is not installed."""
    try:
        return version(name) if find_spec(name) is not None else None
    except (PackageNotFoundError, ValueError):
        return "installed, version unknown"


def _gpus() -> list[Any]:
    if find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    from limelight.adapters.torch.adapter import ADAPTER

    return [
        ADAPTER.device(torch.empty(0, device=f"cuda:{n}")) for n in range(torch.cuda.device_count())
    ]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _results(found: list[Any]) -> Any:
    from rich import box
    from rich.table import Table

    from limelight.cli.checks import Check

    table = Table(box=box.ROUNDED, header_style="bold")
    for name in ("backend", "arrays", "device", "dtype"):
        table.add_column(name)
    for name in ("out", "gradients", "tolerance"):
        table.add_column(name, justify="right")
    table.add_column("")
    for check in found:
        if isinstance(check, Check):
            mark = "[green]ok[/green]" if check.passed else "[bold red]FAILED[/bold red]"
            numbers = (f"{check.out:.1e}", f"{check.gradients:.1e}", f"{check.tolerance:.1e}")
            table.add_row(check.backend, check.library, check.device, check.dtype, *numbers, mark)
        else:
            table.add_row(
                f"[dim]{check.backend}[/dim]", "", "", "", "", "", "", f"[dim]{check.why}[/dim]"
            )
    return table
