"""limelight: fused scaled dot-product attention for every bias, that says which kernel ran and why.

Importing it imports no array library and no compiler.
"""

from limelight._version import __version__ as __version__
from limelight.api import attention as attention
from limelight.api import attention_vjp as attention_vjp
from limelight.api import explain as explain
from limelight.api import explain_torch as explain_torch
from limelight.api import precompile as precompile
from limelight.api import scaled_dot_product_attention as scaled_dot_product_attention
from limelight.biases import ALiBi as ALiBi
from limelight.biases import Bias as Bias
from limelight.biases import DecomposedBias as DecomposedBias
from limelight.biases import DenseBias as DenseBias
from limelight.biases import RelativeBias as RelativeBias
from limelight.biases import RelativeBias2D as RelativeBias2D
from limelight.biases import ShawRelative as ShawRelative
from limelight.biases import T5Bias as T5Bias
from limelight.biases import TransformerXLBias as TransformerXLBias
from limelight.devices import Device as Device
from limelight.dispatch import backends as backends
from limelight.dispatch import record as record
from limelight.errors import NoBackendError as NoBackendError
from limelight.masks import BlockSparse as BlockSparse
from limelight.masks import Causal as Causal
from limelight.masks import DenseMask as DenseMask
from limelight.masks import Documents as Documents
from limelight.masks import KeyLengths as KeyLengths
from limelight.masks import Mask as Mask
from limelight.masks import Packed as Packed
from limelight.masks import PrefixLM as PrefixLM
from limelight.masks import SlidingWindow as SlidingWindow
from limelight.problem import Problem as Problem
