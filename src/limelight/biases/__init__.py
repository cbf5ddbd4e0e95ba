"""Biases, one file each. A new one needs its file and its line here."""

from limelight.biases.alibi import ALiBi
from limelight.biases.base import Bias, Sum
from limelight.biases.dense import DenseBias

__all__ = ["ALiBi", "Bias", "DenseBias", "Sum"]
