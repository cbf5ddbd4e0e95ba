"""A call as the kernels take it: the groups of arguments that they share.

What a kernel reads at run time is an `Array` or a `Scalar`; the rest is compiled into it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from limelight import dropout
from limelight._jit import DeviceFunction, Fixed, ready
from limelight.biases import Bias, Sum
from limelight.call import Call
from limelight.kernels.launch import ITEM_BYTES, Array, Scalar, f32, i32, i64, null
from limelight.kernels.scores import Product, Spread, multiply, spread
from limelight.masks import And, Mask
from limelight.masks.base import has_states, with_states
from limelight.terms import broadcast_strides


class Strides(NamedTuple):
    batch: Scalar
    head: Scalar
    row: Scalar | int


class TensorStrides(NamedTuple):
    query: Strides
    key: Strides
    value: Strides
    out: Strides
    d_out: Strides
    d_query: Strides
    d_key: Strides
    d_value: Strides


class DenseStrides(NamedTuple):
    batch: Scalar
    head: Scalar
    row: Scalar
    key: Any


class HeadStrides(NamedTuple):
    batch: Any
    head: Any


class EntryStrides(NamedTuple):
    head: Any
    entry: Any


class Sizes(NamedTuple):
    q_heads: Scalar
    group: Scalar  # query heads that share one head of keys and values
    q_len: Scalar
    kv_len: Scalar


class Numbers(NamedTuple):
    query_start: Scalar  # where there is none per batch element
    scale: Scalar
    unit: Scalar | float  # what a bias of 1 is in scores that wait for the scale
    softcap: Scalar
    seed: Scalar  # where there is none on the device
    drop_below: Scalar  # dropout drops a weight whose 32-bit word lies under this
    keep_scale: Scalar


class Options(NamedTuple):
    """What is compiled into a kernel."""

    softcap: bool
    dropout: bool
    late_scale: bool  # the scale waits for the exponent
    hides: bool  # a bias may hide keys anywhere
    gaps: bool  # a key inside a range may be hidden from every query of a tile
    scattered: bool  # the masks have states: tiles inside a range may be skipped
    precision: str  # of products of float32
    reading: tuple[bool, ...]  # of each bias, whether it reads the query
    upright: bool  # a bias needs its scores as [queries, keys]


def terms(call: Call, precision: str) -> dict[str, Any]:
    """The inputs that say where scores lie and what is added to them. precision: of products."""
    starts = null("int64") if isinstance(call.query_start, int) else call.query_start
    seeds = null("int64") if call.seed is None or isinstance(call.seed, int) else call.seed
    return {
        "query_starts": starts,
        "seeds": seeds,
        "masks": device_masks(call.mask),
        "biases": device_biases(call.bias, precision),
    }


def sizes(call: Call) -> Sizes:
    size = call.size
    # Reads of several keys at once need to know that none of them lies past the end.
    by_key = any(tensor.shape[-1:] == (size.kv_len,) for tensor in _term_tensors(call))
    divisor = 16 if by_key and size.kv_len % 16 == 0 else 1
    kv_len = Scalar(size.kv_len, "i32", divisor)
    return Sizes(i32(size.q_heads), i32(call.group), i32(size.q_len), kv_len)


def numbers_and_options(call: Call, precision: str) -> dict[str, Any]:
    """The scalars and options that every kernel which makes scores takes."""
    threshold = dropout.threshold(call.dropout_p)
    everything_dropped = threshold >= 2**32
    hides = call.bias is not None and call.bias.hides()
    # Nothing may come between. A bias that hides may be the least of all numbers, and a tiny scale
    # makes a large unit: together they would be infinite.
    late_scale = call.softcap is None and call.scale > 1e-20 and not hides
    numbers = Numbers(
        query_start=i32(call.query_start if isinstance(call.query_start, int) else 0),
        scale=f32(call.scale),
        unit=f32(1 / call.scale) if late_scale else 1.0,
        softcap=f32(call.softcap or 0.0),
        seed=i64(_signed(call.seed) if isinstance(call.seed, int) else 0),
        drop_below=i64(threshold),
        keep_scale=f32(0.0 if everything_dropped else 1 / (1 - call.dropout_p)),
    )
    options = Options(
        softcap=call.softcap is not None,
        dropout=call.dropout_p > 0,
        late_scale=late_scale,
        hides=hides,
        gaps=hides or (call.mask is not None and call.mask.has_gaps()),
        scattered=any(map(has_states, _parts(call.mask))),
        precision=precision,
        reading=tuple(child.reads_query() for child in bias_children(call.bias)),
        upright=any(type(child).upright for child in bias_children(call.bias)),
    )
    return {"sizes": sizes(call), "numbers": numbers, "options": options}


def _term_tensors(call: Call) -> list[Any]:
    return [tensor for term in (call.mask, call.bias) if term for tensor in term.tensors()]


def precision(dtype: str, capability: int, allow_tf32: bool) -> str:
    if dtype != "float32":
        return "tf32"  # Triton's default; it says nothing about products of 16 bits
    if capability < 80:
        return "ieee"
    return "tf32" if allow_tf32 else "tf32x3"


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63


def tensor_strides(call: Call, **others: Array | None) -> TensorStrides:
    absent = Array(0, (1, 1, 1, 1), (0, 0, 0, 1), call.query.dtype, alignment=16)
    arrays = {"query": call.query, "key": call.key, "value": call.value, **others}
    return TensorStrides(*(strides(arrays.get(name) or absent) for name in TensorStrides._fields))


def dense_strides(array: Array) -> DenseStrides:
    """Of a tensor that broadcasts to the scores."""
    return DenseStrides(*map(stride, broadcast_strides(array)))


def head_strides(array: Array) -> HeadStrides:
    """Of a tensor [H] or [B, H]."""
    batch = array.strides[0] if len(array.shape) == 2 else 0
    return HeadStrides(stride(batch), stride(array.strides[-1]))


def entry_strides(array: Array, heads_last: bool) -> tuple[int, int, EntryStrides]:
    """The heads and entries of a table [heads, entries], or [entries, heads], and its strides."""
    order = (1, 0) if heads_last else (0, 1)
    heads, entries = (array.shape[axis] for axis in order)
    return heads, entries, EntryStrides(*(stride(array.strides[axis]) for axis in order))


def strides(array: Array) -> Strides:
    batch, head, row, _ = (
        0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)
    )
    # The address of every row is a multiple of 16 bytes, so each stride is one too.
    divisor = 16 // ITEM_BYTES[array.dtype] if array.alignment == 16 else 1
    # Row offsets inside a tile of at most 256 rows fit 32 bits, unless rows lie very far apart.
    row_type = "i32" if abs(row) < 2**23 else "i64"
    return Strides(
        Scalar(batch, "i64", divisor),
        Scalar(head, "i64", divisor),
        # Rows that lie side by side are compiled in: a thread then needs one address for a tile.
        row if row == array.shape[3] else Scalar(row, row_type, divisor),
    )


def device_masks(mask: Mask | None) -> tuple[Any, ...]:
    """The masks of which all must show a key: if one has states, all have."""
    parts = _parts(mask)
    if any(map(has_states, parts)):
        parts = tuple(map(with_states, parts))
    return tuple(map(on_device, parts))


def _parts(mask: Mask | None) -> tuple[Any, ...]:
    if mask is None:
        return ()
    children = mask.children if isinstance(mask, And) else (mask,)
    return tuple(child.on_device() for child in children)


def device_biases(bias: Bias | None, precision: str) -> tuple[Any, ...]:
    return tuple(with_fragment(child.on_device(), precision) for child in bias_children(bias))


def with_fragment(bias: Any, precision: str) -> Any:
    ready_bias = on_device(bias)
    if hasattr(bias, "product_fragment"):
        return Product(multiply, ready_bias, {"ieee": 0, "tf32": 1}.get(precision, 3))
    return Spread(spread, ready_bias) if hasattr(bias, "offset_fragment") else ready_bias


def bias_children(bias: Bias | None) -> tuple[Bias, ...]:
    if bias is None:
        return ()
    return bias.children if isinstance(bias, Sum) else (bias,)


def on_device(node: Any, name: str = "", near: bool = False) -> Any:
    """A mask or bias on the device as arguments of a kernel: functions ready, numbers typed.

    Numbers named in capitals are compiled in.
    near: the offsets that strides lead to, within one matrix, fit 32 bits.
    """
    if isinstance(node, tuple):
        names = getattr(node, "_fields", ("",) * len(node))
        near = all(_span(part) < 2**31 for part in node if isinstance(part, Array))
        parts = [on_device(part, name, near) for part, name in zip(node, names, strict=True)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if isinstance(node, DeviceFunction):
        return ready(node)
    if isinstance(node, Fixed):
        return int(node)
    if isinstance(node, int) and not isinstance(node, bool):
        if name.isupper():
            return node
        if not name.endswith("stride"):
            return i32(node)
        return stride(node, near and "batch" not in name and "head" not in name)
    return node


def _span(array: Array) -> int:
    """How far apart two elements of the last two dimensions may lie."""
    pairs = zip(array.shape[-2:], array.strides[-2:], strict=True)
    return sum((size - 1) * abs(stride) for size, stride in pairs)


def stride(value: int, near: bool = False) -> Any:
    """0 and 1 are compiled in: a broadcast dimension, and elements side by side."""
    if value in (0, 1):
        return value
    return Scalar(value, "i32" if near else "i64", divisor=min(value & -value, 16))
