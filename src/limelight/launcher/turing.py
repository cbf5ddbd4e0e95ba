"""Tensor cores on Turing (sm_75), which Triton lowers to and no longer chooses.

From 3.3 on Triton lays products out for tensor cores from sm_80 on only, and below that multiplies
in FMA. The lowering to Turing's own instruction, `mma.sync.m16n8k8` on float16, is still there. So
a kernel is laid out for sm_80, its layouts are renamed to Turing's, and the rest is compiled from
that text for sm_75.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from limelight.launcher.recipe import Recipe

TARGET = (7, 5)
INSTRUCTION = "mma.sync.aligned.m16n8k8"

_PRODUCT = re.compile(r"tt\.dot .*: tensor<[\dx]+x(\w+), .*> \* tensor<[\dx]+x(\w+), ")
_RENAMED = {
    '"cuda:80"': '"cuda:75"',
    "versionMajor = 2, versionMinor = 0": "versionMajor = 2, versionMinor = 1",
}


def compile_for_tensor_cores(recipe: Recipe) -> Any:
    """Triton's compiled kernel, or None where Turing's tensor cores cannot run its products.

    They multiply float16. A kernel without such a product, or with one of another type, is left to
    the ordinary way, and so is one whose PTX does not hold the instruction after all.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    parameters = recipe.read_signature().parameters
    if recipe.target != TARGET or all(each.kind != "*fp16" for each in parameters):
        return None
    # With one stage there are no asynchronous copies, which Turing lacks: LLVM aborts on them.
    options = recipe.all_options() | {"num_stages": 1}
    laid_out = triton.compile(recipe.source(), target=GPUTarget("cuda", 80, 32), options=options)
    text = laid_out.asm["ttgir"]
    if not _fits(text):
        return None
    for before, after in _RENAMED.items():
        text = text.replace(before, after)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(text)
        compiled = triton.compile(str(path), target=GPUTarget("cuda", 75, 32), options=options)
    return compiled if INSTRUCTION in compiled.asm["ptx"] else None


def _fits(text: str) -> bool:
    """Whether all products in a kernel laid out for sm_80 can be Turing's."""
    products = _PRODUCT.findall(text)
    return (
        bool(products)
        and len(products) == text.count("tt.dot ")
        and set(sum(products, ())) == {"f16"}
        and all(before in text for before in _RENAMED)
        and "async_copy" not in text
    )
