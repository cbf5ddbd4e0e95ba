"""Runs exported variants in Triton's interpreter, in the place of the plan's own launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import interpreter
import torch

from limelight.call import Call, Gradients
from limelight.export.expression import evaluate
from limelight.export.tracer import plan_variant
from limelight.export.variant import Planned, Problem, Variant
from limelight.kernels.launch import POINTER_TYPES, Array, Launch, Scalar
from limelight.launcher import Constant

_DTYPES = {kind: dtype for dtype, kind in POINTER_TYPES.items()}


@dataclass
class Exported:
    """`forward` and `backward` as `interpreter`'s, for calls of this mask and bias."""

    mask: str = "none"
    bias: str = "none"

    def forward(self, call: Call, capability: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
        variant = self.variant(call, "none", capability)
        batch, heads, q_len, _ = call.query.shape
        out = torch.full_like(call.query, math.nan)
        lse = torch.full((batch, heads, q_len), math.nan)
        self.run(variant, call, {"out": out, "lse": lse})
        return out, lse

    def backward(
        self,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        d_out: torch.Tensor,
        d_lse: torch.Tensor,
        wanted: Gradients,
        capability: int = 80,
    ) -> Gradients:
        variant = self.variant(call, "all" if any(wanted.bias) else "inputs", capability)
        parameters = call.bias.tensors() if call.bias is not None else []
        inputs = [call.query, call.key, call.value, call.sinks, *parameters]
        flags = [*wanted[:4], *wanted.bias]
        made = [
            torch.full_like(tensor, math.nan) if flag else None
            for tensor, flag in zip(inputs, flags, strict=True)
        ]
        names = [each.name for each in variant.tensors if each.name.startswith("d_bias.")]
        # A variant without the bias's gradients has none of their names.
        names = ["d_query", "d_key", "d_value", "d_sinks", *names]
        given = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
        self.run(variant, call, given | dict(zip(names, made, strict=False)))
        query, key, value, sinks, *bias = made
        return Gradients(query, key, value, sinks, tuple(bias))

    def variant(self, call: Call, gradients: str, capability: int) -> Variant:
        dtype, dim = str(call.query.dtype).removeprefix("torch."), call.query.shape[3]
        problem = Problem.of(dtype, dim, mask=self.mask, bias=self.bias, gradients=gradients)
        return plan_variant(problem, divmod(capability, 10))

    def run(self, variant: Variant, call: Call, tensors: dict[str, torch.Tensor | None]) -> None:
        """As docs/export.md tells a launcher to."""
        batch, q_heads, q_len, kv_len = call.size
        values: dict[str, Any] = {
            "batch": batch, "q_heads": q_heads, "kv_heads": call.key.shape[1], "q_len": q_len,
            "kv_len": kv_len, "query_start": call.query_start, "scale": call.scale,
        }  # fmt: skip
        tensors = {"query": call.query, "key": call.key, "value": call.value, **tensors}
        tensors |= {"sinks": call.sinks}
        for role, term in (("mask.", call.mask), ("bias.", call.bias)):
            own = [each.name for each in variant.tensors if each.name.startswith(role)]
            tensors |= dict(zip(own, term.tensors() if term is not None else [], strict=True))
        for each in variant.tensors:
            tensor = tensors[each.name]
            values[each.name] = 0 if tensor is None else tensor.data_ptr()
            for axis in range(len(each.shape)):
                size = 1 if tensor is None else tensor.shape[axis]
                values[f"{each.name}.shape.{axis}"] = size
                values[f"{each.name}.stride.{axis}"] = 0 if size == 1 else tensor.stride(axis)
        kept = []
        for each in variant.workspace:
            kept.append(torch.full((evaluate(each.size, values) // 4,), math.nan))
            values[each.name] = kept[-1].data_ptr()
        for planned in variant.launches:
            needed = planned.needed_for
            grid = evaluate(planned.grid, values)
            if grid and (not needed or any(values[name] for name in needed)):
                interpreter.run([_launch(planned, grid, values)])


def _launch(planned: Planned, grid: int, values: dict[str, Any]) -> Launch:
    """The launch with its arguments in the tree that the kernel takes."""
    parameters = planned.recipe.read_signature().parameters
    flat = iter(zip(parameters, planned.arguments, strict=True))

    def concrete(node: Any) -> Any:
        if isinstance(node, tuple):
            parts = map(concrete, node)
            return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
        if not isinstance(node, str):
            return node.value if isinstance(node, Constant) else node
        parameter, argument = next(flat)
        value = evaluate(argument, values)
        if parameter.kind.startswith("*"):
            return Array(value, (), (), _DTYPES[parameter.kind])
        return Scalar(value, parameter.kind)

    arguments = {name: concrete(node) for name, node in planned.recipe.signature.items()}
    return Launch(planned.recipe.function, grid, arguments, {}, 4, 1)
