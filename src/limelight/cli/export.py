"""`limelight export`: the kernels as files that C, Rust and others load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from limelight.cli.console import console, options, refused

_OPTIONS = {
    "target": "--target",
    "dtype": "--dtype",
    "dtypes": "--dtype",
    "head_dim": "--head-dim",
    "query": "--head-dim",
    "mask": "--mask",
    "bias": "--bias",
    "out": "--out",
}


def export(
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("limelight-kernels"),
    target: Annotated[
        list[str] | None, typer.Option(help="A GPU's architecture, such as sm_80. May be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float16, bfloat16 or float32. May be repeated.")
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(min=1, max=256, help="Numbers in a query, key and value. May be repeated."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="As --mask causal.")] = False,
    mask: Annotated[
        list[str] | None,
        typer.Option(help='Names joined by & and |, or "none". May be repeated. See `show`.'),
    ] = None,
    bias: Annotated[
        list[str] | None,
        typer.Option(help='Names joined by +, or "none". May be repeated.'),
    ] = None,
    softcap: Annotated[bool, typer.Option("--softcap", help="Cap the scores.")] = False,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Without the gradients.")
    ] = False,
    max_stack: Annotated[
        int | None, typer.Option(min=0, help="Bytes that a thread may spill.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at once; by default one a processor.")
    ] = None,
) -> None:
    """Compile kernels for GPUs that need not be here, with a manifest and launchers in C and Rust.

    Every combination of the options given is exported; what is not given has several values: see
    the defaults in docs/export.md.
    """
    from importlib.util import find_spec

    if find_spec("triton") is None:
        typer.echo("limelight: export needs Triton, which compiles: pip install triton", err=True)
        raise typer.Exit(1)
    from rich.progress import Progress, TimeElapsedColumn

    from limelight import export

    masks = (mask or []) + ["causal"] * causal
    given: dict[str, Any] = {
        "targets": target,
        "dtypes": dtype,
        "head_dims": head_dim,
        "masks": masks,
        "biases": bias,
        "max_stack": max_stack,
    }
    start = time.monotonic()
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn())
    with options(_OPTIONS, "--mask"), Progress(*columns, console=console()) as shown:

        def progress(done: int, total: int, name: str) -> None:
            task = shown.task_ids[0] if shown.task_ids else shown.add_task("")
            shown.update(task, completed=done, total=total, description=name)

        try:
            made = export.compile(
                out,
                softcap=softcap,
                gradients=not forward_only,
                jobs=jobs,
                progress=progress,
                **{name: value for name, value in given.items() if value not in (None, [])},
            )
        except export.SpillError as error:
            raise refused("--max-stack", str(error)) from error
    kernels, variants = (len(made.manifest[name]) for name in ("kernels", "variants"))
    console().print(
        f"variants: {variants}, kernels: {kernels}, {made.size / 1e6:.1f} MB, "
        f"{time.monotonic() - start:.0f} s, in {made.folder}",
        soft_wrap=True,
    )
