"""The checks that several backends share: PyTorch's `sdp_utils_cpp.h`, on CUDA and on the CPU."""

from __future__ import annotations

from limelight.pytorch.rule import CUDA, Broken, Rule, Situation, rule, sizes


@rule("check_all_tensors_on_device", CUDA)
def on_cuda(s: Situation) -> Broken | None:
    if s.device.kind == "cuda":
        return None
    return "runs on CUDA devices", str(s.device), "move the tensors to a GPU"


@rule("check_tensor_shapes")
def four_dimensions(s: Situation) -> Broken | None:
    if s.sdpa.four_dimensional:
        return None
    dims = ", ".join(str(operand.dims) for operand in s.sdpa.operands)
    lift = "query.unsqueeze(0) and so on give three dimensions a batch"
    return "needs query, key and value of four dimensions", f"{dims} dimensions", lift


def dtypes(taken: tuple[str, ...], s: Situation) -> Broken | None:
    found = [operand.dtype for operand in s.sdpa.operands]
    if len(set(found)) == 1 and found[0] in taken:
        return None
    words = f"needs query, key and value all {' or all '.join(taken)}"
    return words, ", ".join(dict.fromkeys(found)), f"cast to {taken[0]}"


@rule("check_tensor_dtype")
def low_precision(s: Situation) -> Broken | None:
    if s.capability >= (8, 0):
        return dtypes(("float16", "bfloat16"), s)
    broken = dtypes(("float16",), s)
    return broken and (f"{broken[0]} on cards before Ampere (sm_80)", *broken[1:])


@rule("check_batch_size_and_num_heads_dense", message="batch", nested=False, four=True)
def equal_batch(s: Situation) -> Broken | None:
    if len({operand.shape[0] for operand in s.sdpa.operands}) == 1:
        return None
    lift = "expand query, key and value to one batch"
    return "needs one batch size: it does not broadcast", f"batch {sizes(s, 0)}", lift


def _one_shared_head(s: Situation) -> bool:
    """Since 2.14 one head of keys and values serves every query head, without a flag."""
    return s.since(2, 14) and s.sdpa.key.shape[1] == s.sdpa.value.shape[1] == 1


def equal_heads(grouped_since: tuple[int, int]) -> Rule:
    """Equal numbers of heads, unless `enable_gqa` is set and the backend can group heads."""

    @rule("check_batch_size_and_num_heads_dense", message="heads", nested=False, four=True)
    def broken(s: Situation) -> Broken | None:
        grouping = s.since(*grouped_since)
        if (s.sdpa.enable_gqa and grouping) or (grouping and _one_shared_head(s)):
            return None
        if len({operand.shape[1] for operand in s.sdpa.operands}) == 1:
            return None
        lift = "set enable_gqa=True" if grouping else "repeat the heads of key and value"
        if s.sdpa.enable_gqa and not s.since(2, 14):
            lift = "repeat the heads of key and value, or take PyTorch 2.14 or newer"
        return "needs as many heads of keys and values as of queries", sizes(s, 1), lift

    return broken


@rule("check_grouped_query_attention", message="key and value", nested=False, four=True)
def equal_grouped_heads(s: Situation) -> Broken | None:
    key, value = s.sdpa.key.shape[1], s.sdpa.value.shape[1]
    if not s.sdpa.enable_gqa or key == value:
        return None
    return "needs as many heads of keys as of values", f"{key} and {value}", ""


def dividing_heads(value_too: bool) -> Rule:
    """value_too: for the backend whose key and value may differ in heads."""

    @rule("check_grouped_query_attention", message="divides", nested=False, four=True)
    def broken(s: Situation) -> Broken | None:
        query, key, value = (operand.shape[1] for operand in s.sdpa.operands)
        asked = (key, value) if value_too else (key,)
        if not s.sdpa.enable_gqa or all(heads and query % heads == 0 for heads in asked):
            return None
        return "needs query heads that are a multiple of those of keys", sizes(s, 1), ""

    return broken


@rule("check_nonzero_sequence_lengths_dense", nested=False, four=True)
def nonempty(s: Situation) -> Broken | None:
    if s.sdpa.query.shape[-2] and s.sdpa.key.shape[-2]:
        return None
    return "needs at least one query and one key", sizes(s, -2), ""


def unit_strides(ignore_one: bool, mask_too: bool = True) -> Rule:
    """ignore_one: whether a head_dim of 1 is let through, whose stride does not matter."""

    @rule("check_last_dim_stride_equals_1_dense", nested=False)
    def broken(s: Situation) -> Broken | None:
        inputs = all(operand.layout.strides[-1] == 1 for operand in s.sdpa.operands)
        inputs = inputs or (ignore_one and s.sdpa.query.shape[-1] == 1)
        mask = s.sdpa.attn_mask
        if inputs and (mask is None or not mask_too or mask.layout.strides[-1] == 1):
            return None
        named = [("query", s.sdpa.query), ("key", s.sdpa.key), ("value", s.sdpa.value)]
        named += [("attn_mask", mask)] if mask is not None and mask_too else []
        found = [f"{name} {each.layout.strides[-1]}" for name, each in named]
        lift = "call .contiguous() on it; do not expand the last dimension of a mask"
        return "needs rows whose elements lie side by side", f"strides {', '.join(found)}", lift

    return broken


@rule("check_attn_mask_shape", silent=True)
def mask_without_gradient(s: Situation) -> Broken | None:
    mask = s.sdpa.attn_mask
    if mask is None or not mask.requires_grad:
        return None
    return "gives no gradient of a mask", "attn_mask.requires_grad", "detach the mask"


@rule("check_attn_mask_shape", silent=True, four=True)
def mask_sizes(s: Situation) -> Broken | None:
    mask = s.sdpa.attn_mask
    if mask is None or mask.dims < 2:
        return None
    q_len, kv_len = s.sdpa.query.shape[2], s.sdpa.key.shape[2]
    if mask.shape[-2] in (1, q_len) and mask.shape[-1] in (1, kv_len):
        return None
    return f"needs a mask that ends in ({q_len} or 1, {kv_len} or 1)", str(list(mask.shape)), ""


@rule("check_attn_mask_shape", message="dims", four=True)
def mask_dimensions(s: Situation) -> Broken | None:
    mask = s.sdpa.attn_mask
    if mask is None or mask.dims == 2:
        return None
    batch, heads = s.sdpa.query.shape[:2]
    if mask.dims == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads):
        return None
    rule = "needs a mask of two dimensions, or of four that broadcast"
    return rule, str(list(mask.shape)), "mask.unsqueeze(0)"
