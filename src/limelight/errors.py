"""Errors that carry what went wrong as data, not only as text."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from limelight.dispatch import Choice


class NoBackendError(RuntimeError):
    """No allowed backend can run the problem. The message lists every reason of every backend.

    `choice` holds the same as data: `choice.reasons` maps each backend's name to its reasons.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        super().__init__(f"no allowed backend can run this attention\n{choice}")

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[Choice]]:
        return NoBackendError, (self.choice,)


def invalid(argument: str, *, found: object, needed: str) -> ValueError:
    """The error for an argument of the right kind with a wrong value or shape."""
    return ValueError(f"{argument}: found {found}, needed {needed}")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python's or NumPy's; True and False are not."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def invalid_type(argument: str, *, found: object, needed: str) -> TypeError:
    """The error for an argument of a wrong kind."""
    return TypeError(f"{argument}: found {found}, needed {needed}")
