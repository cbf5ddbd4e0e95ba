"""Backends, one file each. A new one needs its file and its place in `BACKENDS`."""

from limelight.backends.base import Backend, Reason
from limelight.backends.flash import Flash
from limelight.backends.hopper import Hopper
from limelight.backends.math import Math
from limelight.backends.tiled import Tiled
from limelight.backends.torch_cpu import TorchCPU

# In the order in which they are tried: the first without a reason against the problem runs.
BACKENDS: tuple[Backend, ...] = (TorchCPU(), Hopper(), Flash(), Tiled(), Math())

__all__ = ["BACKENDS", "Backend", "Reason"]
