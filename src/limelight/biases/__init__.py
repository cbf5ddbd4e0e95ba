"""Biases, one file each. A new one needs its file and its line here."""

from limelight._jit import jit as jit
from limelight._jit import tl as tl
from limelight.biases.alibi import ALiBi
from limelight.biases.base import Bias, Sum
from limelight.biases.dense import DenseBias
from limelight.biases.relative import RelativeBias
from limelight.biases.relative_2d import RelativeBias2D
from limelight.biases.t5 import T5Bias

__all__ = [
    "ALiBi",
    "Bias",
    "DenseBias",
    "RelativeBias",
    "RelativeBias2D",
    "Sum",
    "T5Bias",
]
