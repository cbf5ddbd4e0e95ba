"""The `hopper` backend: kernels for Hopper's own instructions, written in Gluon.

Where gradients must repeat bit for bit, where a bias wants its own, and for a head_dim over 128 the
backward is `flash`'s. docs/hopper.md tells how the kernels (`kernels/hopper/`) work.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from limelight.backends.base import Backend, Reason, fused_reasons
from limelight.call import Call, Gradients
from limelight.problem import Layout, Problem
from limelight.tuning import TileConfig

DTYPES = ("float16", "bfloat16")
_MAX_STRIDE = 2**40  # bytes that the copy engine takes between rows


class Hopper(Backend):
    name = "hopper"
    compiles = True
    summary = "warp-specialised kernels for H100 and H200"

    def why_not(self, problem: Problem) -> list[Reason]:
        p = problem
        capability = p.device.compute_capability
        gaps = [p.mask] if p.mask is not None and p.mask.has_gaps() else []
        gaps += [p.bias] if p.bias is not None and p.bias.hides() else []
        bias = None if p.bias is None else p.bias.resolved(p.q_heads, _laid_out)
        biases = bias.parts() if bias is not None else ()
        other = [part for part in biases if not _is_elementwise(part)]
        layouts = {"query": p.query, "key": p.key, "value": p.value}
        bad = [f"{name} {why}" for name, each in layouts.items() if (why := _indescribable(each))]
        rules = (
            (
                p.device.kind == "cuda" and capability != (9, 0),
                "runs on compute capability 9.0 (H100, H200)",
                p.device,
                "",
            ),
            (p.dtype not in DTYPES, f"takes {', '.join(DTYPES)}", p.dtype, "cast the inputs"),
            (p.dropout_p > 0, "has no dropout", p.dropout_p, ""),
            (
                bool(gaps),
                "cannot keep a NaN out at keys that are hidden between visible ones",
                ", ".join(map(repr, gaps)),
                "",
            ),
            (
                bool(other),
                "takes biases with an elementwise fragment",
                ", ".join(map(repr, other)),
                "",
            ),
            (p.kv_len == 0, "needs a key", "kv_len 0", ""),
            (
                bool(bad),
                "needs tensors that the copy engine can describe: rows at multiples of 16 bytes, "
                "no broadcast dimension",
                ", ".join(bad),
                "pass a contiguous tensor",
            ),
        )
        own = [Reason(rule, str(found), lift) for against, rule, found, lift in rules if against]
        return fused_reasons(problem) + own

    def config(self, problem: Problem) -> TileConfig | None:
        from limelight.kernels.hopper import configs

        plain = problem.bias is None and problem.softcap is None
        found = configs.forward(max(problem.head_dim, problem.value_dim), plain)
        return TileConfig(found.rows, found.keys, found.source)

    def precompile(self, call: Call) -> None:
        kernels, plan = _kernels()
        wanted = Gradients.named(call.problem.gradients, call.bias)
        kernels.precompile(call, plan.forward, _backward_plan(call, wanted))

    def forward(self, call: Call) -> tuple[Any, Any]:
        kernels, plan = _kernels()
        return kernels.forward(call, plan.forward)

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        from limelight.kernels import plan
        from limelight.kernels.torch_operators import regular

        kernels, _ = _kernels()
        planned = _backward_plan(call, wanted)
        if d_out is not None and planned is not plan:
            d_out = regular(d_out)  # for the copy engine
        return kernels.backward(call, out, lse, d_out, d_lse, wanted, planned)


@cache
def _kernels() -> tuple[Any, Any]:
    from limelight.kernels import torch_flash  # takes torch and Triton along
    from limelight.kernels.hopper import plan

    return torch_flash, plan


_BACKWARD_DIM = 128


def _backward_plan(call: Call, wanted: Gradients) -> Any:
    """The module that plans the backward: our own kernel's, or that of `flash`."""
    from limelight.kernels import plan
    from limelight.kernels.hopper import backward_plan

    p = call.problem
    own = (
        not p.deterministic
        and not any(wanted.bias)
        and max(p.head_dim, p.value_dim) <= _BACKWARD_DIM
        and p.value_dim % 8 == 0  # rows of 16 bytes, once the arriving gradient is contiguous
    )
    return backward_plan if own else plan


def _laid_out(values: Sequence[float]) -> Layout:
    return Layout.contiguous((len(values),), "float32")


def _is_elementwise(bias: Any) -> bool:
    """Whether a bias has a fragment that asks for nothing but positions; bare ones are no matter
    here."""
    try:
        return hasattr(bias.on_device(), "fragment")
    except NotImplementedError:
        return True


def _indescribable(layout: Layout) -> str:
    """Why the copy engine cannot describe a tensor; nothing if it can."""
    if not layout.unit_stride:  # a contiguous copy is made first
        layout = Layout.contiguous(layout.shape, layout.dtype)
    steps = [
        stride
        for size, stride in zip(layout.shape[:3], layout.strides[:3], strict=True)
        if size > 1
    ]
    if layout.alignment != 16:
        return f"has rows at multiples of {layout.alignment} bytes"
    if any(not 0 < 2 * step < _MAX_STRIDE for step in steps):
        return f"has strides {layout.strides}"
    return ""
