"""Compiled kernels, kept in memory and on disk. Many processes may fill one folder at once.

Each kernel is one file, named by its recipe's digest and written under a temporary name first: a
reader finds a whole file or none. Two processes that compile the same kernel at the same time
both do the work; the files are equal, so the last one wins.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path

from limelight.launcher.binary import Binary, DamagedBinary
from limelight.launcher.compile import compile_kernel
from limelight.launcher.driver import Driver, driver
from limelight.launcher.launch import Kernel
from limelight.launcher.recipe import Recipe

FOLDER_VARIABLE = "LIMELIGHT_CACHE_DIR"


def default_folder() -> Path:
    """$LIMELIGHT_CACHE_DIR, or ~/.cache/limelight."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path.home() / ".cache" / "limelight")


class Cache:
    """Recipes to kernels: from memory, else from a file, else compiled.

    folder: made when the first kernel is stored; one that cannot be written costs a warning and a
    compilation in each process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder
        self._binaries: dict[str, Binary] = {}
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.RLock()

    def kernel(
        self, recipe: Recipe, *, device: int, stream: int = 0, on: Driver | None = None
    ) -> Kernel:
        """The recipe's kernel, loaded on a device. Callers keep it: the digest takes about 1 ms.

        device: the driver's index. stream: the call's, which must not be under capture unless the
        kernel is there already. on: the driver, if not this machine's.

        Raises CaptureError; what `compile_kernel` and `Kernel.load` raise.
        """
        digest = recipe.digest()
        with self._lock:
            kernel = self._kernels.get(digest)
            if kernel is None:
                on = driver() if on is None else on
                on.refuse_capture(device, stream, f"compile {recipe.name}")
                kernel = self._kernels[digest] = Kernel(self.binary(recipe), on)
        kernel.load(device, stream)
        return kernel

    def binary(self, recipe: Recipe, *, isolated: bool = False) -> Binary:
        """The recipe's compiled kernel. No GPU is needed. isolated: see `compile_kernel`."""
        digest = recipe.digest()
        with self._lock:
            binary = self._binaries.get(digest)
            if binary is None:
                path = self.folder / f"{recipe.name}-{digest}.kernel"
                binary = _read(path)
                if binary is None:
                    binary = compile_kernel(recipe, isolated=isolated)
                    _write(path, binary)
                self._binaries[digest] = binary
            return binary


@cache
def default_cache() -> Cache:
    """The process's own."""
    return Cache()


def _read(path: Path) -> Binary | None:
    """None where there is no whole file: a damaged one counts as absent, and is replaced."""
    try:
        return Binary.from_bytes(path.read_bytes())
    except (OSError, DamagedBinary):
        return None


def _write(path: Path, binary: Binary) -> None:
    """All of the file or none of it."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            temporary = Path(file.name)
            file.write(binary.to_bytes())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        warnings.warn(
            f"{path.parent} cannot keep compiled kernels ({error}); set {FOLDER_VARIABLE} to a "
            "folder that can",
            RuntimeWarning,
            stacklevel=2,
        )
