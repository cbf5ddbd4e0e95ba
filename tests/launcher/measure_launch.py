"""How long one launch takes on the CPU, in microseconds, against the stub driver.

PYTHONPATH=tests python tests/launcher/measure_launch.py
"""

from __future__ import annotations

import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

from stub_driver import Stub, binary, build

from limelight.launcher import Driver, Kernel


def microseconds(statement: Callable[[], None], loops: int = 1_000, repeats: int = 200) -> float:
    """The thread's CPU time for one run, at its best: other work on the machine only adds to it."""
    return (
        min(timeit.repeat(statement, time.thread_time, number=loops, repeat=repeats)) / loops * 1e6
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder))
        stub, driver = Stub(path), Driver(str(path))
        for pointers, integers, floats in ((5, 4, 1), (14, 22, 4)):
            kernel = Kernel(
                binary(*["*fp16"] * pointers, *["i64"] * integers, *["fp32"] * floats), driver
            )
            addresses = [0x7F00_0000_0000 + 4096 * n for n in range(pointers)]
            args = (*addresses, *range(integers), *[0.125] * floats)
            grid = (64, 8, 1)
            for where in ("current", "not current"):
                stub.make_current(0 if where == "current" else -1)
                cost = microseconds(lambda: kernel(0, 0x5000, grid, args))  # noqa: B023
                print(f"{len(args)} arguments, context {where}: {cost:.2f} us a launch")


if __name__ == "__main__":
    main()
