"""Backends, one file each. A new one needs its file and its place in `BACKENDS`."""

from limelight.backends.base import Backend, Reason
from limelight.backends.flash import Flash
from limelight.backends.hopper import Hopper
from limelight.backends.math import Math
from limelight.backends.tiled import Tiled
from limelight.backends.torch_cpu import TorchCPU
from limelight.backends.torch_cudnn import TorchCuDNN
from limelight.backends.torch_efficient import TorchEfficient
from limelight.backends.torch_flash import TorchFlash

# The usual order in which they are tried; `preference` moves some ahead for a device and problem.
# The first without a reason against the problem runs.
BACKENDS: tuple[Backend, ...] = (
    TorchCPU(),
    Flash(),
    Hopper(),
    TorchCuDNN(),
    TorchFlash(),
    TorchEfficient(),
    Tiled(),
    Math(),
)

__all__ = ["BACKENDS", "Backend", "Reason"]
