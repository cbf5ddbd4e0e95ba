"""PyTorch's rules for its flash attention on the CPU: `use_flash_attention_cpp`."""

from __future__ import annotations

from dataclasses import replace

from limelight.pytorch import flash, shared
from limelight.pytorch.rule import CPU, Broken, Situation, Verdict, rule, sizes


@rule("use_flash_attention_cpp", CPU, kind=Verdict.NOT_BUILT, before=(2, 1))
def built(s: Situation) -> Broken | None:
    return "exists since PyTorch 2.1", str(s.build), "take a newer PyTorch"


@rule("check_nested_tensor", dense=False)
def nested(s: Situation) -> Broken | None:
    return "takes no nested tensors", "nested", "pad instead of nesting"


@rule("check_for_dropout")
def dropout(s: Situation) -> Broken | None:
    if s.sdpa.dropout_p == 0:
        return None
    return "has no dropout", f"dropout_p {s.sdpa.dropout_p}", "set dropout_p=0"


@rule("check_for_attn_mask", before=(2, 3))
def no_mask(s: Situation) -> Broken | None:
    return flash.no_mask.broken(s)


@rule("check_head_dim_size_cpp", CPU)
def head_dim(s: Situation) -> Broken | None:
    if len({operand.shape[-1] for operand in s.sdpa.operands}) == 1:
        return None
    return "needs one head_dim of query, key and value", sizes(s, -1), "pad the smaller with zeros"


@rule("check_tensor_dtype")
def dtype(s: Situation) -> Broken | None:
    half = ("bfloat16", "float16") if s.since(2, 3) else ("bfloat16",)
    return shared.dtypes(("float32", "float64", *half), s)


RULES = (
    built,
    flash.enabled,
    nested,
    dropout,
    shared.four_dimensions,
    shared.equal_batch,
    shared.equal_grouped_heads,
    shared.dividing_heads(value_too=False),
    shared.equal_heads(grouped_since=(2, 5)),
    no_mask,
    shared.mask_without_gradient,
    shared.mask_sizes,
    shared.mask_dimensions,
    head_dim,
    shared.nonempty,
    replace(shared.unit_strides(ignore_one=False), before=(2, 8)),
    replace(shared.unit_strides(ignore_one=False, mask_too=False), since=(2, 8)),
    dtype,
)
