"""Pages that a script writes are up to date."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_which_kernel_is_up_to_date():
    script = runpy.run_path(str(DOCS / "which_kernel.py"))
    for name, write in (("which-kernel.md", "page"), ("which-kernel.svg", "chart")):
        assert script[write]() == (DOCS / name).read_text(), "run docs/which_kernel.py"
