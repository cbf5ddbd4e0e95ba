"""PyTorch's rules for cuDNN attention: `can_use_cudnn_attention`."""

from __future__ import annotations

import math

from limelight.pytorch import shared
from limelight.pytorch.builds import cudnn_spelled
from limelight.pytorch.rule import CUDA, Broken, Situation, Verdict, in_range, rule

MOST_BLOCKS = 65_535


@rule("can_use_cudnn_attention", CUDA, kind=Verdict.NOT_BUILT)
def built(s: Situation) -> Broken | None:
    if s.since(2, 2) and s.build.cudnn >= 90_000:
        return None
    found = f"{s.build} with cuDNN {cudnn_spelled(s.build.cudnn)}"
    return "needs cuDNN 9 or newer", found, "take PyTorch 2.5 or newer"


@rule("can_use_cudnn_attention", CUDA, "dropout")
def dropout_version(s: Situation) -> Broken | None:
    if not (s.sdpa.dropout_p > 0 and 91_100 < s.build.cudnn < 91_400):
        return None
    found = f"cuDNN {cudnn_spelled(s.build.cudnn)}"
    return "has no dropout in cuDNN 9.11 to 9.13", found, "leave dropout out"


@rule("check_runtime_disabled_cudnn", CUDA, kind=Verdict.OFF)
def enabled(s: Situation) -> Broken | None:
    if not s.since(2, 5) and not s.switches.cudnn_enabled:
        return "is off before PyTorch 2.5", "not asked for", "set TORCH_CUDNN_SDPA_ENABLED=1"
    if s.switches.cudnn:
        return None
    return "must not be switched off", "off", "torch.backends.cuda.enable_cudnn_sdp(True)"


@rule("check_for_nested_inputs", CUDA, dense=False)
def nested(s: Situation) -> Broken | None:
    if s.switches.cudnn_nested and s.capability[0] in (9, 10):
        return None
    lift = "set TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1"
    return "takes nested tensors only on request, on Hopper and Blackwell", str(s.device), lift


@rule("check_cudnn_deterministic", CUDA)
def deterministic(s: Situation) -> Broken | None:
    if not s.switches.deterministic:
        return None
    found = "torch.use_deterministic_algorithms(True)"
    return "is not deterministic", found, "pass warn_only=True, or leave the switch off"


@rule("check_cudnn_hardware_support", CUDA)
def architecture(s: Situation) -> Broken | None:
    most = (12, 1) if s.since(2, 8) else (12, 0) if s.since(2, 7) else (9, 0)
    if in_range(s, (8, 0), most):
        return None
    rule = f"runs on Ampere (sm_80) and newer, up to sm_{most[0]}{most[1]}"
    return rule, str(s.device), ""


@rule("check_cudnn_dropout", CUDA, since=(2, 12))
def dropout(s: Situation) -> Broken | None:
    sixteenths = s.sdpa.dropout_p * 16
    if sixteenths == math.floor(sixteenths):
        return None
    rule = "needs a dropout probability that is a multiple of 1/16"
    return rule, str(s.sdpa.dropout_p), f"use {round(sixteenths) / 16:g}"


@rule("check_cudnn_tensor_shapes", CUDA, "blocks", since=(2, 13), nested=False, four=True)
def blocks(s: Situation) -> Broken | None:
    batch, heads = s.sdpa.query.shape[:2]
    if max(batch, heads) <= MOST_BLOCKS:
        return None
    rule = f"needs batch and heads up to {MOST_BLOCKS}"
    return rule, f"batch {batch}, {heads} heads", "split the batch"


@rule("check_cudnn_tensor_shapes", CUDA, "decode", since=(2, 14), nested=False, four=True)
def decode(s: Situation) -> Broken | None:
    cudnn = s.build.cudnn
    wrong = 91_900 <= cudnn <= 92_500 and cudnn != 92_401 and s.capability[0] == 10
    if s.sdpa.query.shape[2] != 1 or not wrong:
        return None
    rule = "takes no single query on data-center Blackwell with cuDNN 9.19 to 9.25"
    return rule, f"cuDNN {cudnn_spelled(cudnn)}", "cuDNN 9.26 or newer"


def _takes_256(s: Situation) -> bool:
    """Whether head_dim goes up to 256: by cuDNN and card, and since 2.14 by another rule."""
    cudnn = s.build.cudnn
    if not s.since(2, 14):
        return s.capability == (9, 0) and cudnn >= 91_000
    too_new = s.capability == (10, 7) and cudnn <= 92_500
    return (s.capability == (9, 0) or s.capability[0] == 10) and not too_new and cudnn > 92_200


@rule("check_cudnn_tensor_shapes", CUDA, "head_dim", nested=False, four=True)
def head_dim(s: Situation) -> Broken | None:
    dim, value_dim = s.sdpa.query.shape[3], s.sdpa.value.shape[3]
    most = 256 if _takes_256(s) else 128
    latent = (dim, value_dim) == (192, 128) and s.build.cudnn >= 91_100
    if latent and (s.capability[0] == 10 or s.capability == (9, 0)):
        most = max(most, 192)
    if max(dim, value_dim) <= most:
        return None
    rule = f"needs head_dim up to {most} on this card"
    return rule, f"{dim}, of values {value_dim}", ""


@rule("check_cudnn_tensor_shapes", CUDA, "multiple", nested=False, four=True)
def multiple(s: Situation) -> Broken | None:
    dims = s.sdpa.query.shape[3], s.sdpa.value.shape[3]
    if not any(dim % 8 for dim in dims):
        return None
    return "needs a head_dim that 8 divides", f"{dims[0]}, of values {dims[1]}", "pad with zeros"


@rule("check_cudnn_tensor_shapes", CUDA, "one key", nested=False, four=True)
def one_key(s: Situation) -> Broken | None:
    if s.sdpa.key.shape[2] != 1:
        return None
    return "needs more than one key", "1", ""


@rule("check_cudnn_tensor_shapes", CUDA, "one query", nested=False, four=True)
def one_query(s: Situation) -> Broken | None:
    if s.sdpa.dropout_p == 0 or s.sdpa.query.shape[2] != 1:
        return None
    return "takes no single query with dropout", f"dropout_p {s.sdpa.dropout_p}", "leave it out"


@rule("check_cudnn_d256_bprop_head_dim", CUDA, since=(2, 14), nested=False, four=True)
def backward_head_dim(s: Situation) -> Broken | None:
    dims = s.sdpa.query.shape[3], s.sdpa.value.shape[3]
    if not (s.sdpa.training and _takes_256(s)) or max(dims) <= 128:
        return None
    if dims in ((192, 128), (256, 256)):
        return None
    rule = "for training, needs head_dim up to 128, or 256, or 192 with values of 128"
    return rule, f"{dims[0]}, of values {dims[1]}", "pad to 256"


RULES = (
    built,
    dropout_version,
    enabled,
    nested,
    shared.on_cuda,
    shared.four_dimensions,
    deterministic,
    shared.low_precision,
    shared.mask_without_gradient,
    shared.mask_sizes,
    shared.mask_dimensions,
    architecture,
    dropout,
    shared.nonempty,
    shared.unit_strides(ignore_one=True),
    shared.equal_batch,
    shared.dividing_heads(value_too=True),
    shared.equal_heads(grouped_since=(2, 5)),
    blocks,
    decode,
    head_dim,
    multiple,
    one_key,
    one_query,
    backward_head_dim,
)
