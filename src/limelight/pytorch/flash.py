"""PyTorch's rules for FlashAttention on CUDA: `can_use_flash_attention`."""

from __future__ import annotations

from dataclasses import replace

from limelight.pytorch import shared
from limelight.pytorch.rule import CUDA, Broken, Situation, Verdict, in_range, rule, sizes

MOST_HEAD_DIM = 256


@rule("can_use_flash_attention", CUDA, kind=Verdict.NOT_BUILT)
def built(s: Situation) -> Broken | None:
    if s.build.flash:
        return None
    return "needs a PyTorch that was built with flash attention", str(s.build), "use another build"


@rule("check_runtime_disabled_flash", kind=Verdict.OFF)
def enabled(s: Situation) -> Broken | None:
    if s.switches.flash:
        return None
    return "must not be switched off", "off", "torch.backends.cuda.enable_flash_sdp(True)"


@rule("check_for_attn_mask")
def no_mask(s: Situation) -> Broken | None:
    mask = s.sdpa.attn_mask
    if mask is None:
        return None
    lift = "if the mask is causal, leave it out and set is_causal=True"
    return "takes no attn_mask", str(mask.layout), lift


@rule("check_head_dim_size_flash", CUDA)
def head_dim(s: Situation) -> Broken | None:
    most = MOST_HEAD_DIM if s.since(2, 2) else 128
    dims = [operand.shape[-1] for operand in s.sdpa.operands]
    if len(set(dims)) == 1 and dims[0] <= most and (s.since(2, 1) or dims[0] % 8 == 0):
        return None
    rule = f"needs one head_dim of query, key and value, at most {most}"
    return rule, sizes(s, -1), "pad the smaller with zeros"


@rule("check_flash_attention_hardware_support", CUDA)
def architecture(s: Situation) -> Broken | None:
    if s.since(2, 8):
        least, most = (8, 0), (12, 1)
    elif s.since(2, 7):
        least, most = (8, 0), (12, 0)
    elif s.since(2, 2):
        least, most = (8, 0), (9, 0)
    else:
        least, most = (7, 5), (8, 9)
    if in_range(s, least, most):
        return None
    name = "Ampere" if least == (8, 0) else "Turing"
    span = f"{name} (sm_{least[0]}{least[1]}) and newer, up to sm_{most[0]}{most[1]}"
    return f"runs on {span}", str(s.device), ""


@rule("check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120", CUDA)
def backward_head_dim(s: Situation) -> Broken | None:
    small = in_range(s, (8, 6), (8, 9)) or (in_range(s, (12, 0), (12, 1)) and s.since(2, 7))
    dim = s.sdpa.query.shape[-1]
    without_dropout = s.sdpa.dropout_p == 0 and s.since(2, 5)
    if not (s.sdpa.training and small) or dim <= 192 or (dim > 224 and without_dropout):
        return None
    words = "for training on sm_86 to sm_89 and sm_120, needs head_dim up to 192, or over 224"
    found = f"head_dim {dim}" + (", with dropout" if s.sdpa.dropout_p else "")
    return f"{words} without dropout", found, "pad head_dim to 256 and leave dropout out"


@rule("check_flash_causal_non_square_seqlens", CUDA, nested=False)
def causal_square(s: Situation) -> Broken | None:
    q_len, kv_len = s.sdpa.query.shape[-2], s.sdpa.key.shape[-2]
    if not s.sdpa.is_causal or q_len == kv_len:
        return None
    rule = "takes is_causal only for as many queries as keys: it would align to the other corner"
    return rule, f"{q_len} queries, {kv_len} keys", ""


@rule("check_head_dim_size_flash_nested", CUDA, dense=False)
def nested_head_dim(s: Situation) -> Broken | None:
    dim = s.sdpa.query.shape[-1]
    if dim % 8 == 0:
        return None
    return "needs a head_dim that 8 divides for nested tensors", str(dim), "pad head_dim"


@rule("check_flash_attention_grid_size", CUDA, since=(2, 15), nested=False, four=True)
def grid(s: Situation) -> Broken | None:
    batch, heads = s.sdpa.query.shape[:2]
    if max(batch, heads) <= 65_535:
        return None
    return "needs batch and heads up to 65535", f"batch {batch}, {heads} heads", "split the batch"


RULES = (
    built,
    enabled,
    shared.on_cuda,
    shared.four_dimensions,
    no_mask,
    head_dim,
    architecture,
    replace(backward_head_dim, before=(2, 15)),
    replace(backward_head_dim, check=f"{backward_head_dim.check}_121", since=(2, 15)),
    causal_square,
    shared.low_precision,
    nested_head_dim,
    grid,
    shared.equal_batch,
    shared.equal_grouped_heads,
    shared.dividing_heads(value_too=False),
    shared.equal_heads(grouped_since=(2, 5)),
    shared.nonempty,
    shared.unit_strides(ignore_one=True),
)
