"""From a call to launches: which kernels run, with which grids, tiles and arguments.

No array library is needed: the call's tensors are `Array`s, and so are the outputs and the scratch
memory that the caller allocates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from limelight import dropout as dropout_rule
from limelight._jit import DeviceFunction, ready
from limelight.biases import Bias, Sum
from limelight.call import Call
from limelight.kernels import configs
from limelight.kernels.configs import Config
from limelight.kernels.forward import forward as forward_kernel
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Scalar, f32, i32, i64, null
from limelight.masks import And, Mask


class Strides(NamedTuple):
    batch: Scalar
    head: Scalar
    row: Scalar


class Sizes(NamedTuple):
    q_heads: Scalar
    group: Scalar  # query heads that share one head of keys and values
    q_len: Scalar
    kv_len: Scalar


class Numbers(NamedTuple):
    query_start: Scalar  # where there is none per batch element
    scale: Scalar
    softcap: Scalar
    seed: Scalar  # where there is none on the device
    drop_below: Scalar  # dropout drops a weight whose 32-bit word lies under this
    keep_scale: Scalar


class Options(NamedTuple):
    """What is compiled into a kernel."""

    softcap: bool
    dropout: bool
    late_scale: bool  # nothing comes between the scale and the exponent, so it can wait
    all_partial: bool  # a bias may hide keys anywhere
    gaps: bool  # a key inside a range may be hidden from every query of a tile
    precision: str  # of products of float32


def forward(
    call: Call,
    out: Array,
    lse: Array,
    *,
    capability: int,
    allow_tf32: bool = False,
    config: Config | None = None,
) -> list[Launch]:
    """out [B, H, M, E], any strides but the last; lse [B, H, M] float32, contiguous.

    capability: of the device, 90 for sm_90. allow_tf32: one-pass TF32 is good enough for float32.
    config: instead of the table's.
    """
    size = call.size
    config = config or configs.forward(capability, *_kind(call))
    arguments = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        **_optional(call),
        "masks": device_masks(call.mask),
        "biases": device_biases(call.bias),
        "out": out,
        "lse": lse,
        "query_strides": strides(call.query),
        "key_strides": strides(call.key),
        "value_strides": strides(call.value),
        "out_strides": strides(out),
        **shared(call, capability, allow_tf32),
    }
    grid = -(-size.q_len // config.rows) * size.q_heads * size.batch
    constants = {
        "HEAD_DIM": call.query.shape[3],
        "VALUE_DIM": call.value.shape[3],
        "TILE_M": config.rows,
        "TILE_N": config.keys,
    }
    launch = Launch(forward_kernel, grid, arguments, constants, config.num_warps, config.num_stages)
    return [launch] if grid else []


def _kind(call: Call) -> tuple[int, int]:
    return ITEM_BYTES[call.query.dtype], max(call.query.shape[3], call.value.shape[3])


def _optional(call: Call) -> dict[str, Any]:
    starts = null("int64") if isinstance(call.query_start, int) else call.query_start
    seeds = null("int64") if call.seed is None or isinstance(call.seed, int) else call.seed
    sinks = null(call.query.dtype) if call.sinks is None else call.sinks
    return {"sinks": sinks, "query_starts": starts, "seeds": seeds}


def shared(call: Call, capability: int, allow_tf32: bool) -> dict[str, Any]:
    """The scalars and options that every kernel which makes scores takes."""
    size = call.size
    threshold = dropout_rule.threshold(call.dropout_p)
    everything_dropped = threshold >= 2**32
    numbers = Numbers(
        query_start=i32(call.query_start if isinstance(call.query_start, int) else 0),
        scale=f32(call.scale),
        softcap=f32(call.softcap or 0.0),
        seed=i64(_signed(call.seed) if isinstance(call.seed, int) else 0),
        drop_below=i64(threshold),
        keep_scale=f32(0.0 if everything_dropped else 1 / (1 - call.dropout_p)),
    )
    hides = call.bias is not None and call.bias.hides()
    options = Options(
        softcap=call.softcap is not None,
        dropout=call.dropout_p > 0,
        late_scale=call.softcap is None and call.bias is None and call.scale > 0,
        all_partial=hides,
        gaps=hides or (call.mask is not None and call.mask.has_gaps()),
        precision=_precision(call.query.dtype, capability, allow_tf32),
    )
    sizes = Sizes(i32(size.q_heads), i32(call.group), i32(size.q_len), i32(size.kv_len))
    return {"sizes": sizes, "numbers": numbers, "options": options}


def _precision(dtype: str, capability: int, allow_tf32: bool) -> str:
    if dtype != "float32":
        return "tf32"  # Triton's default; it says nothing about products of 16 bits
    if capability < 80:
        return "ieee"
    return "tf32" if allow_tf32 else "tf32x3"


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63


def strides(array: Array) -> Strides:
    batch, head, row, _ = (
        0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)
    )
    # The address of every row is a multiple of 16 bytes, so each stride is one too.
    divisor = 16 // ITEM_BYTES[array.dtype] if array.alignment == 16 else 1
    # Row offsets inside a tile of at most 256 rows fit 32 bits, unless rows lie very far apart.
    row_type = "i32" if abs(row) < 2**23 else "i64"
    return Strides(
        Scalar(batch, "i64", divisor), Scalar(head, "i64", divisor), Scalar(row, row_type, divisor)
    )


def device_masks(mask: Mask | None) -> tuple[Any, ...]:
    if mask is None:
        return ()
    children = mask.children if isinstance(mask, And) else (mask,)
    return tuple(on_device(child.on_device()) for child in children)


def device_biases(bias: Bias | None) -> tuple[Any, ...]:
    return tuple(on_device(child.on_device()) for child in bias_children(bias))


def bias_children(bias: Bias | None) -> tuple[Bias, ...]:
    if bias is None:
        return ()
    return bias.children if isinstance(bias, Sum) else (bias,)


def on_device(node: Any, name: str = "") -> Any:
    """A mask or bias on the device as arguments of a kernel: functions ready, numbers typed."""
    if isinstance(node, tuple):
        names = getattr(node, "_fields", ("",) * len(node))
        parts = [on_device(part, name) for part, name in zip(node, names, strict=True)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if isinstance(node, DeviceFunction):
        return ready(node)
    if isinstance(node, int) and not isinstance(node, bool):
        return _stride(node) if name.endswith("stride") else i32(node)
    return node


def _stride(value: int) -> Any:
    """0 and 1 are compiled in: a broadcast dimension, and elements side by side."""
    if value in (0, 1):
        return value
    return Scalar(value, "i64", divisor=_power_of_two_in(value))


def _power_of_two_in(value: int) -> int:
    return min(value & -value, 16)
