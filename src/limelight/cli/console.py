"""What the commands share: the console they print on, and how they refuse an option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console

from limelight.tables import WIDTH


def console() -> Console:
    """Standard output; as wide as tables need where it is no terminal."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=WIDTH)


def refused(option: str, message: str) -> typer.BadParameter:
    """The error for an option's value."""
    return typer.BadParameter(message, param_hint=option)


@contextmanager
def options(of: Mapping[str, str], default: str) -> Iterator[None]:
    """Turns an error about an argument of the library into one about the option that set it.

    of: the option for each argument, as error messages spell it; default: the option otherwise.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        argument = str(error).split(":")[0].split(" ")[0]
        raise refused(of.get(argument, default), str(error)) from error
