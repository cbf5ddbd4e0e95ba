"""Biases, one file each. A new one needs its file and its line here."""

from limelight._jit import jit as jit
from limelight._jit import tl as tl
from limelight.biases.alibi import ALiBi
from limelight.biases.base import Bias, Sum
from limelight.biases.decomposed import DecomposedBias
from limelight.biases.dense import DenseBias
from limelight.biases.relative import RelativeBias
from limelight.biases.relative_2d import RelativeBias2D
from limelight.biases.relative_keys import ShawRelative, TransformerXLBias
from limelight.biases.t5 import T5Bias

__all__ = [
    "ALiBi",
    "Bias",
    "DecomposedBias",
    "DenseBias",
    "RelativeBias",
    "RelativeBias2D",
    "ShawRelative",
    "Sum",
    "T5Bias",
    "TransformerXLBias",
]
