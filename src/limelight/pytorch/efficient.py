"""PyTorch's rules for memory-efficient attention (CUTLASS): `can_use_mem_efficient_attention`."""

from __future__ import annotations

from dataclasses import replace

from limelight.problem import ITEM_BYTES
from limelight.pytorch import shared
from limelight.pytorch.rule import CUDA, Broken, Situation, Verdict, in_range, rule, sizes


@rule("can_use_mem_efficient_attention", CUDA, kind=Verdict.NOT_BUILT)
def built(s: Situation) -> Broken | None:
    if s.build.efficient:
        return None
    rule = "needs a PyTorch that was built with memory-efficient attention"
    return rule, str(s.build), "use another build"


@rule("check_runtime_disabled_mem_efficient", kind=Verdict.OFF)
def enabled(s: Situation) -> Broken | None:
    if s.switches.efficient:
        return None
    return "must not be switched off", "off", "torch.backends.cuda.enable_mem_efficient_sdp(True)"


@rule("check_mem_efficient_hardware_support", CUDA)
def architecture(s: Situation) -> Broken | None:
    most = (12, 1) if s.since(2, 8) else (12, 0) if s.since(2, 7) else (9, 0)
    if in_range(s, (5, 0), most):
        return None
    return f"runs on sm_50 to sm_{most[0]}{most[1]}", str(s.device), ""


def alignment(s: Situation) -> int:
    """Elements that head_dim must be a multiple of, so that the matrix units can load rows."""
    major = s.capability[0]
    tensor_cores = major >= 8 or (major >= 7 and s.half)
    least = 4 if major >= 8 else 1
    return max(least, 8 if s.half else 4) if tensor_cores else least


@rule("check_head_dim_size_mem_efficient", CUDA)
def head_dim(s: Situation) -> Broken | None:
    query, key, value = (operand.shape[-1] for operand in s.sdpa.operands)
    multiple = alignment(s)
    if query == key and query > 0 and value > 0 and not (query % multiple or value % multiple):
        return None
    rule = "needs one head_dim of query and key"
    if multiple > 1:
        rule += f", and multiples of {multiple} for it and for the values'"
    return rule, sizes(s, -1), f"pad with zeros to a multiple of {multiple}"


@rule("check_data_ptr_alignment_mem_efficient", CUDA, since=(2, 13), nested=False)
def offsets(s: Situation) -> Broken | None:
    if s.capability < (8, 0):
        return None
    item = ITEM_BYTES.get(s.sdpa.query.dtype, 1)
    needed = alignment(s) * item
    found = [operand.storage_offset * item % needed for operand in s.sdpa.operands]
    if not any(
        rest for rest, each in zip(found, s.sdpa.operands, strict=True) if 0 not in each.shape
    ):
        return None
    rule = f"needs tensors that start at a multiple of {needed} bytes of their storage"
    return rule, f"{', '.join(map(str, found))} bytes beyond one", "call .clone() on them"


@rule("check_requires_grad_and_nested", dense=False)
def nested_training(s: Situation) -> Broken | None:
    if not s.sdpa.training:
        return None
    return "gives no gradients of nested tensors", "requires_grad", "pad instead of nesting"


@rule("check_tensor_dtype")
def dtype(s: Situation) -> Broken | None:
    if s.capability >= (8, 0):
        return shared.dtypes(("float16", "float32", "bfloat16"), s)
    broken = shared.dtypes(("float16", "float32"), s)
    return broken and (f"{broken[0]} on cards before Ampere (sm_80)", *broken[1:])


RULES = (
    built,
    enabled,
    shared.on_cuda,
    architecture,
    shared.four_dimensions,
    head_dim,
    offsets,
    nested_training,
    shared.nonempty,
    shared.unit_strides(ignore_one=False),
    shared.equal_batch,
    replace(shared.equal_grouped_heads, since=(2, 14)),
    replace(shared.dividing_heads(value_too=False), since=(2, 14)),
    shared.equal_heads(grouped_since=(2, 14)),
    dtype,
)
