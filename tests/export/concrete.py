"""One attention with sizes, strides and addresses, as an export takes it and as the plan does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from limelight.call import Call, Gradients
from limelight.export.variant import Problem, Variant
from limelight.kernels import plan
from limelight.kernels.launch import ITEM_BYTES, Array, Launch

WORKSPACE = 0x7000_0000_0000


@dataclass
class Attention:
    """sizes: batch, q_heads, kv_heads, q_len, kv_len. spread: how far apart rows lie, in 8s; not 0,
    as a plan compiles in that rows lie side by side, which an export leaves open."""

    problem: Problem
    sizes: dict[str, int]
    query_start: int = 0
    scale: float = 0.125
    softcap: float = 20.0
    spread: int = 1
    arrays: dict[str, Array] = field(default_factory=dict)

    def matrix(self, name: str, length: str, heads: str, dim: int) -> Array:
        """Strided: (batch, length, heads, dim) in memory, with a gap behind each row."""
        batch, heads_, rows = (self.sizes[each] for each in ("batch", heads, length))
        step = dim + 8 * self.spread
        strides = (rows * heads_ * step, step, heads_ * step, 1)
        return self.keep(name, (batch, heads_, rows, dim), strides, self.problem.dtype, 16)

    def plain(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * size)
        return self.keep(name, shape, tuple(reversed(strides)), dtype, 1)

    def keep(self, name: str, shape: Any, strides: Any, dtype: str, alignment: int) -> Array:
        address = 0x100_0000 * (len(self.arrays) + 1)
        self.arrays[name] = Array(address, shape, strides, dtype, alignment)
        return self.arrays[name]

    def launches(self, variant: Variant) -> list[Launch]:
        """What the plan makes of it. Fills `arrays`."""
        p, of = self.problem, self.sizes
        major, minor = variant.target
        capability = 10 * major + minor
        query = self.matrix("query", "q_len", "q_heads", p.head_dim)
        key = self.matrix("key", "kv_len", "kv_heads", p.head_dim)
        value = self.matrix("value", "kv_len", "kv_heads", p.value_dim)
        rows = (of["batch"], of["q_heads"], of["q_len"])
        sinks = self.plain("sinks", (of["q_heads"],))
        terms = [self.on_device(term, variant) for term in p.terms()]
        call = Call(
            None, query, key, value, *terms, sinks, self.query_start, self.scale,
            self.softcap if p.softcap else None, 0.0, None,
        )  # fmt: skip
        out, lse = self.matrix("out", "q_len", "q_heads", p.value_dim), self.plain("lse", rows)
        if p.operation == "forward":
            memory = self.memory(plan.forward_scratch(call, capability))
            return plan.forward(call, out, lse, memory, capability=capability)
        d_out = self.matrix("d_out", "q_len", "q_heads", p.value_dim)
        d_lse = self.plain("d_lse", rows)
        bias = call.bias.tensors() if call.bias is not None else []
        wanted = [name for name in self.arrays if name.startswith("bias.")]
        gradients = Gradients(
            self.matrix("d_query", "q_len", "q_heads", p.head_dim),
            self.matrix("d_key", "kv_len", "kv_heads", p.head_dim),
            self.matrix("d_value", "kv_len", "kv_heads", p.value_dim),
            self.plain("d_sinks", (of["q_heads"],)),
            tuple(
                self.plain(f"d_{name}", tensor.shape, tensor.dtype)
                if p.gradients == "all"
                else None
                for name, tensor in zip(wanted, bias, strict=True)
            ),
        )
        memory = self.memory(plan.scratch(call, gradients, capability))
        return plan.backward(call, out, lse, d_out, d_lse, gradients, memory, capability=capability)

    def on_device(self, term: Any, variant: Variant) -> Any:
        if term is None:
            return None
        start = f"{term.argument}."
        names = iter([each.name for each in variant.tensors if each.name.startswith(start)])
        return term.map_tensors(lambda example: self.term(variant, next(names), example))

    def term(self, variant: Variant, name: str, example: Any) -> Array:
        (declared,) = (tensor for tensor in variant.tensors if tensor.name == name)
        shape = tuple(
            self.sizes.get(size, example.shape[axis]) if isinstance(size, str) else size
            for axis, size in enumerate(declared.shape)
        )
        return self.plain(name, shape, example.dtype)

    def memory(self, needed: dict[str, Any]) -> dict[str, Array]:
        """Laid out as docs/export.md says."""
        found, offset = {}, 0
        for name, (shape, dtype) in needed.items():
            array = self.plain(f"workspace.{name}", shape, dtype)
            item = ITEM_BYTES.get(dtype, 4)
            aligned = 16 if shape[-1] * item % 16 == 0 else 1
            found[name] = Array(WORKSPACE + offset, shape, array.strides, dtype, aligned)
            self.arrays[f"workspace.{name}"] = found[name]
            size = item
            for each in shape:
                size *= each
            offset += -(-size // 256) * 256
        return found

    def values(self) -> dict[str, float]:
        """Of every name that an expression may have."""
        values: dict[str, float] = {
            **self.sizes,
            "query_start": self.query_start,
            "scale": self.scale,
            "softcap": self.softcap,
        }
        for name, array in self.arrays.items():
            values[name] = array.address
            for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
                values[f"{name}.shape.{axis}"] = size
                values[f"{name}.stride.{axis}"] = 0 if size == 1 else stride
        return values
