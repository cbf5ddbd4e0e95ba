"""`import limelight` brings no framework and is quick; imports inside run downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import limelight

ROOT = Path(limelight.__file__).parent

# In a process of its own, with these blocked: limelight's own import needs none, NumPy neither.
BLOCKED = ("torch", "jax", "triton", "cupy", "numpy", "rich", "typer", "transformers")

FRESH = """
import sys, time

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
start = time.process_time()
import {module}
print(time.process_time() - start)
"""


def fresh_import(module="limelight", blocked=BLOCKED):
    """Seconds of processor time, which do not grow when other programs run, or what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(blocked=blocked, module=module)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ImportError(done.stderr)
    return float(done.stdout)


def test_import_needs_no_framework_and_no_compiler():
    fresh_import()


def test_the_block_works():
    for module in ("torch", "numpy", "limelight.reference", "limelight.kernels.tiled"):
        with pytest.raises(ImportError, match="is blocked"):
            fresh_import(module)


def test_import_is_quick():
    """Well under 0.2 s: the least of several, each in a new process."""
    times = []
    for _ in range(7):
        times.append(fresh_import())
        if times[-1] < 0.2:
            return
    raise AssertionError(f"import limelight took {min(times):.2f} s at best")


def test_public_names():
    for name in (
        "attention", "attention_vjp", "explain", "explain_torch", "scaled_dot_product_attention", "record", "backends",
        "NoBackendError", "Problem", "Device", "Mask", "Bias", "Causal", "SlidingWindow", "KeyLengths",
        "Documents", "DenseMask", "PrefixLM", "Packed", "BlockSparse", "ALiBi", "DecomposedBias",
        "DenseBias", "RelativeBias", "RelativeBias2D", "ShawRelative", "T5Bias", "TransformerXLBias",
        "__version__",
    ):  # fmt: skip
        assert hasattr(limelight, name)


# Who may know whom, from the bottom up. A part imports from rows above its own in this list, and
# within its own part: of masks, biases and backends only what several share. A new part needs its
# place here.

LAYERS = (
    ("errors", "_jit", "_version", "reason"),
    ("tile", "devices", "tables", "namespace"),
    ("terms", "dropout"),
    ("masks", "biases"),
    ("problem", "picture"),
    ("call", "pytorch"),
    ("reference", "tuning", "preference"),
    ("launcher",),
    ("kernels",),
    ("backends",),
    ("dispatch", "report"),
    ("adapters",),
    ("api",),
    ("nn", "integrations", "jax", "testing", "examples"),
    ("grammar",),
    ("export",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

# What the layers above `api` may take from the package itself, as any user does.
PUBLIC = {*limelight.__dict__} - {path.stem for path in ROOT.iterdir()}

# Two files of one layer that know each other: `report` writes what `dispatch` decides.
TOGETHER = {("dispatch", "report"), ("report", "dispatch")}
FAMILIES = ("masks", "biases", "backends")
SHARED = ("base", "table")
FRAMEWORKS = {"torch", "jax", "triton", "cupy", "numpy", "transformers"}
# Who may import a framework when a module is loaded.
AT_HOME = {
    "numpy": (
        "adapters.numpy",
        "adapters.cupy",
        "adapters.jax",
        "kernels.jax_tiled",
        "reference",
        "picture",
        "testing",
        "export",
        "cli",
        "demo",
        "examples",
    ),
    "torch": ("adapters.torch", "kernels", "nn", "integrations"),
    "jax": ("adapters.jax", "kernels", "jax"),
    "cupy": (),  # by name, as it has no types
    "triton": ("kernels", "export"),
    "transformers": ("integrations",),
}


def imports(source):
    """Every module that a file imports when it runs, and whether that is at once, not in a function."""
    found = []

    def visit(node, at_once):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "relative imports hide who knows whom"
                if child.module == "limelight":
                    found.extend((f"limelight.{alias.name}", at_once) for alias in child.names)
                else:
                    found.append((child.module, at_once))
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            visit(child, at_once and not inside)

    visit(ast.parse(source), True)
    return found


def faults(name, source):
    """What is wrong with the imports of a module, by its name below `limelight`."""
    part, _, rest = name.partition(".")
    if not part:  # limelight/__init__.py, the public surface
        return []
    if part not in RANK:
        return [f"{name}: has no place in the layers"]
    found = []
    for module, at_once in imports(source):
        top, _, below = module.partition(".")
        if top in FRAMEWORKS:
            home = any(f"{name}.".startswith(f"{place}.") for place in AT_HOME.get(top, ()))
            if at_once and not home:
                found.append(f"{name}: imports {top} when loaded")
        if top != "limelight":
            continue
        other, _, leaf = below.partition(".")
        if not other or other in PUBLIC:
            if RANK[part] <= RANK["api"]:
                found.append(f"{name}: imports the public surface")
        elif other == part:
            if part in FAMILIES and rest and leaf.split(".")[0] not in SHARED:
                found.append(f"{name}: imports its sibling {module}")
        elif other not in RANK:
            found.append(f"{name}: {module} has no place in the layers")
        elif RANK[other] >= RANK[part] and (part, other) not in TOGETHER:
            found.append(f"{name}: imports {module}, which lies above it")
    return found


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path.read_text()


def test_imports_run_downwards_only():
    found = [fault for name, source in modules() for fault in faults(name, source)]
    assert not found, "\n".join(found)


def test_every_file_was_looked_at():
    names = [name for name, _ in modules()]
    assert {"api", "masks.causal", "adapters.torch.eager", "kernels.tiled"} <= set(names)


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("masks.causal", "import limelight.api", "lies above"),
        ("masks.causal", "from limelight.backends.base import Reason", "lies above"),
        ("masks.causal", "from limelight import dispatch", "lies above"),
        ("masks.causal", "from limelight.biases.alibi import ALiBi", "lies above"),
        ("masks.causal", "from limelight.masks.dense import DenseMask", "sibling"),
        ("backends.tiled", "from limelight.backends.math import Math", "sibling"),
        ("backends.math", "def run():\n    from limelight.adapters import torch", "lies above"),
        ("errors", "if 1:\n    from limelight.tile import Size", "lies above"),
        (
            "kernels.tiled",
            "try:\n    import limelight.backends\nexcept ImportError: pass",
            "lies above",
        ),
        ("masks.causal", "import numpy", "imports numpy when loaded"),
        ("problem", "import torch.nn as nn", "imports torch when loaded"),
        ("adapters.numpy", "from torch import Tensor", "imports torch when loaded"),
        ("masks.causal", "import limelight", "public surface"),
        ("novelty", "", "no place"),
        ("api", "import limelight.novelty", "no place"),
    ],
)
def test_the_check_can_fail(name, source, fault):
    assert len(faults(name, source)) == 1
    assert fault in faults(name, source)[0]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("masks.causal", "from limelight.masks.base import Mask\nfrom limelight.tile import Tile"),
        ("backends.tiled", "def run():\n    from limelight.kernels import tiled"),
        ("errors", "if TYPE_CHECKING:\n    from limelight.dispatch import Choice"),
        (
            "adapters.torch.eager",
            "import torch\nfrom limelight.adapters.torch.gradients import spread",
        ),
        ("masks.causal", "def draw():\n    import numpy"),
        ("", "from limelight.api import attention"),
    ],
)
def test_the_check_can_pass(name, source):
    assert faults(name, source) == []
