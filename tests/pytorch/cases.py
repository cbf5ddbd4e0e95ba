"""The calls whose real answers the fixtures hold, by name."""

from __future__ import annotations

from limelight.problem import ITEM_BYTES, Layout, row_alignment
from limelight.pytorch import SDPA, Operand

PLAIN = (2, 8, 128, 64)


def operand(shape, dtype="float16", *, strides=None, offset=0, requires_grad=False):
    layout = Layout.contiguous(tuple(shape), dtype)
    if strides is not None:
        item = ITEM_BYTES.get(dtype, 1)
        alignment = row_alignment(offset * item, shape, strides, item)
        layout = Layout(tuple(shape), tuple(strides), dtype, alignment)
    return Operand(layout, offset, requires_grad)


def call(query=PLAIN, key=None, value=None, **options):
    return SDPA.of(query, key, value, **options)


def each(shape, *, strides, offset=0):
    """Query, key and value with these strides."""
    same = operand(shape, strides=strides, offset=offset)
    return SDPA(same, same, same)


def masked(shape, dtype="float16", query=PLAIN, **options):
    mask = {name: options.pop(name) for name in ("strides",) if name in options}
    learns = options.pop("mask_grad", False)
    return call(query, attn_mask=operand(shape, dtype, requires_grad=learns, **mask), **options)


def cases():
    found = {
        "base_f16": call(),
        "base_bf16": call(dtype="bfloat16"),
        "base_f32": call(dtype="float32"),
        "base_f64": call(dtype="float64"),
    }
    for dim in (4, 8, 12, 36, 40, 72, 96, 100, 128, 136, 160, 192, 200, 224, 232, 256, 264, 512):
        found[f"f16_D{dim}"] = call((2, 8, 128, dim))
    for dim in (1, 2, 3, 4, 6, 8, 20, 256, 512):
        found[f"f32_D{dim}"] = call((2, 8, 128, dim), dtype="float32")
    for dim in (64, 128, 192, 200, 224, 256):
        found[f"f16_grad_D{dim}"] = call((2, 8, 128, dim), requires_grad=True)
    for dim in (192, 200, 256):
        found[f"f16_grad_D{dim}_drop.25"] = call(
            (2, 8, 128, dim), requires_grad=True, dropout_p=0.25
        )
    grouped, one = (2, 2, 128, 64), (2, 8, 1, 64)
    mixed = SDPA(operand(PLAIN), operand(PLAIN, "bfloat16"), operand(PLAIN))
    found |= {
        "drop.1": call(dropout_p=0.1),
        "drop.125": call(dropout_p=0.125),
        "Dqk192_Dv128": call((2, 8, 128, 192), value=(2, 8, 128, 128)),
        "Dqk64_Dv32": call(PLAIN, value=(2, 8, 128, 32)),
        "causal_sq": call(is_causal=True),
        "causal_nonsq": call(PLAIN, (2, 8, 256, 64), is_causal=True),
        "mask_2d_bool": masked((128, 128), "bool"),
        "mask_2d_f16": masked((128, 128)),
        "mask_2d_1xS": masked((1, 128)),
        "mask_3d": masked((8, 128, 128)),
        "mask_4d_b111": masked((2, 1, 1, 128)),
        "mask_4d_full": masked((2, 8, 128, 128)),
        "mask_bad_shape": masked((64, 128)),
        "mask_grad": masked((128, 128), mask_grad=True),
        "mask_laststride2": masked((128, 128), strides=(256, 2)),
        "mask_f32_q_f16": masked((128, 128), "float32"),
        "mask_and_causal": masked((128, 128), is_causal=True),
        "gqa_flag": call(PLAIN, grouped, enable_gqa=True),
        "gqa_flag_bad": call(PLAIN, (2, 3, 128, 64), enable_gqa=True),
        "gqa_kv_differ": call(PLAIN, (2, 4, 128, 64), grouped, enable_gqa=True),
        "gqa_noflag": call(PLAIN, grouped),
        "mqa_noflag": call(PLAIN, (2, 1, 128, 64)),
        "gqa_flag_grad": call(PLAIN, grouped, enable_gqa=True, requires_grad=True),
        "batch_bcast": call(PLAIN, (1, 8, 128, 64)),
        "q1": call(one, PLAIN),
        "k1": call(PLAIN, one),
        "q1_drop.25": call(one, PLAIN, dropout_p=0.25),
        "q0": call((2, 8, 0, 64), PLAIN),
        "k0": call(PLAIN, (2, 8, 0, 64)),
        "3d": call((8, 128, 64)),
        "2d": call((128, 64)),
        "5d": call((1, 2, 8, 128, 64)),
        "lastdim_stride": each((2, 8, 64, 64), strides=(32768, 4096, 1, 64)),
        # torch.empty(2, 8, 128, 2)[..., ::2] has one element a row.
        "D1_laststride2": each((2, 8, 128, 1), strides=(2048, 256, 2, 2)),
        "bshd_transposed": each(PLAIN, strides=(65536, 64, 512, 1)),
        "offset_misaligned": each(PLAIN, strides=(73728, 9216, 72, 1), offset=4),
        "dtype_mix": mixed,
        "batch70000": call((70000, 1, 16, 64)),
        "heads70000": call((1, 70000, 16, 64)),
        "kv_len_mismatch": call(PLAIN, PLAIN, (2, 8, 120, 64)),
        "sk192_mask_grad": masked((192, 192), query=(2, 8, 192, 64), requires_grad=True),
        "sk192_grad": call((2, 8, 192, 64), requires_grad=True),
    }
    return found
