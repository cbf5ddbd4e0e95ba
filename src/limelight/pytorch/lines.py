"""Where in a release's source a check's message stands."""

from __future__ import annotations

from collections.abc import Sequence

_LINES: dict[tuple[str, str], dict[int, int]] = {}


def line(check: str, message: str, version: Sequence[int]) -> int | None:
    return _LINES.get((check, message), {}).get(version[1])
