"""The demo: a real model searches a real text, on limelight and on PyTorch's own attention.

`text.txt` says where its sentences come from.
"""

from __future__ import annotations

from importlib.resources import files


def sentences() -> list[str]:
    """The sentences of the text, in its order."""
    lines = files(__name__).joinpath("text.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def source() -> str:
    """The text's title: the first line of its header."""
    first = files(__name__).joinpath("text.txt").read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ").split(":")[0]
