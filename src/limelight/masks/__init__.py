"""Masks, one file each. A new one needs its file and its line here."""

from limelight.masks.base import And, Mask, Or
from limelight.masks.block_sparse import BlockSparse
from limelight.masks.causal import Causal
from limelight.masks.dense import DenseMask
from limelight.masks.documents import Documents
from limelight.masks.key_lengths import KeyLengths
from limelight.masks.packed import Packed
from limelight.masks.prefix_lm import PrefixLM
from limelight.masks.sliding_window import SlidingWindow

__all__ = [
    "And",
    "BlockSparse",
    "Causal",
    "DenseMask",
    "Documents",
    "KeyLengths",
    "Mask",
    "Or",
    "Packed",
    "PrefixLM",
    "SlidingWindow",
]
