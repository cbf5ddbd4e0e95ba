"""PyTorch's own choice, predicted: which backend `scaled_dot_product_attention` runs, and why.

The rules are PyTorch's, in its order, each a function of plain data with the versions it holds for
and its place in PyTorch's source. Nothing here imports torch, so a question about a card, a release
or a cuDNN that is not here has an answer.
"""

from limelight.pytorch.builds import Build, Switches
from limelight.pytorch.prediction import Candidate, Prediction, predict
from limelight.pytorch.rule import Situation, TorchReason, Verdict
from limelight.pytorch.sdpa import SDPA, Operand

__all__ = [
    "SDPA",
    "Build",
    "Candidate",
    "Operand",
    "Prediction",
    "Situation",
    "Switches",
    "TorchReason",
    "Verdict",
    "predict",
]
