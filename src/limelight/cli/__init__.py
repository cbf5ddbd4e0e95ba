"""The command line: `limelight doctor | explain | show | export | demo`.

A command is one file, and imports what it needs when it runs: help needs no framework.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from limelight import __version__
from limelight.cli.demo import demo
from limelight.cli.doctor import doctor
from limelight.cli.explain import explain
from limelight.cli.export import export
from limelight.cli.show import show

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class _Group(TyperGroup):
    """Wrong usage gives one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        extra.setdefault("prog_name", "limelight")  # also under `python -m limelight`
        try:
            status = super().main(*args, standalone_mode=False, **extra)
        except _UsageError as error:
            message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
            typer.echo(f"limelight: {message}", err=True)
            sys.exit(2)
        except typer.Abort:
            typer.echo("limelight: stopped", err=True)
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    cls=_Group,
    name="limelight",
    help="Fused attention that says which kernel ran and why.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"limelight {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (doctor, explain, show, export, demo):
    app.command()(command)

__all__ = ["app"]
