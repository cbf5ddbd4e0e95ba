"""What each kernel is launched on: once on the call, or float32 on Hopper twice, in halves and not.

Whether a head fits halves is known on the device alone. So a launch on the halves and one on the
tensors themselves share the heads: each program asks the head's units whether it is its own, and
where none is a launch takes microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from limelight.call import Call
from limelight.kernels import arguments as args
from limelight.kernels import configs
from limelight.kernels.cut import dim_of, tiles_of
from limelight.kernels.halves import Whole, measure_peaks, split_into_halves
from limelight.kernels.launch import Array, Launch, Shape, i32


class Variant(NamedTuple):
    """Tensors as one launch of a kernel takes them.

    units: the kernels' argument. precision: of the products. item: what `configs` goes by.
    """

    query: Array
    key: Array
    value: Array
    d_out: Array | None
    units: tuple[Array, ...]
    precision: str
    item: int

    def tensors(self) -> dict[str, Array | None]:
        return dict(zip(self._fields[:4], self[:4], strict=True))


def of(
    call: Call, d_out: Array | None, memory: dict[str, Array], capability: int, allow_tf32: bool
) -> list[Variant]:
    """One for each launch, the tensors themselves last. memory: what `scratch` asked for."""
    precision = args.precision(call.query.dtype, capability, allow_tf32)
    units = (memory["units"],) if "units" in memory else ()
    plain = Variant(
        call.query, call.key, call.value, d_out, units, precision, configs.item(call.query.dtype)
    )
    if not units:
        return [plain]
    halves = Variant(
        memory["query_halves"],
        memory["key_halves"],
        memory["value_halves"],
        memory.get("d_out_halves"),
        units,
        "fp16x3",
        configs.HALVES,
    )
    return [halves, plain]


def are_halves(call: Call, capability: int, allow_tf32: bool) -> bool:
    if call.bias is not None and call.bias.makes_products():  # of whole numbers
        return False
    lengths = (call.size.q_len, call.size.kv_len)
    return configs.in_halves(call.query.dtype, capability, dim_of(call), lengths, allow_tf32)


def scratch(call: Call, *, with_d_out: bool) -> dict[str, Shape]:
    """Memory for the halves, as much as the tensors take, and for what splitting them needs."""
    batch, kv_heads = call.key.shape[:2]
    shapes = {"query": call.query.shape, "key": call.key.shape, "value": call.value.shape}
    if with_d_out:
        shapes["d_out"] = (*call.query.shape[:3], call.value.shape[3])
    needed = {"units": Shape((batch, kv_heads, 4), "float32")}
    for name, (_, heads, length, dim) in shapes.items():
        blocks = heads // kv_heads * tiles_of(length, configs.SPLIT.rows)
        needed[f"{name}_halves"] = Shape((batch, heads, length, 2 * dim), "float16")
        needed[f"{name}_peaks"] = Shape((batch, kv_heads, blocks, 2), "float32")
    return needed


def splitting(call: Call, d_out: Array | None, memory: dict[str, Array]) -> list[Launch]:
    """The launches, if any, that fill the halves and their units."""
    batch, kv_heads = call.key.shape[:2]
    if "units" not in memory or batch * kv_heads == 0:
        return []
    tensors = {"query": call.query, "key": call.key, "value": call.value, "d_out": d_out}
    wholes = tuple(
        Whole(
            array,
            args.strides(array),
            memory[f"{name}_halves"],
            args.strides(memory[f"{name}_halves"]),
            memory[f"{name}_peaks"],
            i32(array.shape[1] // kv_heads),
            i32(array.shape[2]),
        )
        for name, array in tensors.items()
        if array is not None
    )
    blocks = max(whole.peaks.shape[2] for whole in wholes)
    rest = {"blocks": i32(blocks), "kv_heads": i32(kv_heads)}
    grid = blocks * kv_heads * batch
    warps = configs.SPLIT.num_warps
    constants = {
        "HEAD_DIM": call.query.shape[3],
        "VALUE_DIM": call.value.shape[3],
        "TILE": configs.SPLIT.rows,
    }
    measured = {"wholes": wholes, **rest}
    written = {"wholes": wholes, "units": memory["units"], **rest}
    return [
        Launch(measure_peaks, grid, measured, constants, warps, num_stages=1),
        Launch(split_into_halves, grid, written, constants, warps, num_stages=1),
    ]
