"""When a problem may be handed over to one of PyTorch's own kernels on CUDA.

PyTorch's rules say what its kernel takes; limelight's semantics ask for more, and each is a reason
of its own here: nothing is handed over that could come out different from what limelight promises.
"""

from __future__ import annotations

from dataclasses import replace

from limelight.masks import Causal
from limelight.problem import ITEM_BYTES, Layout, Problem
from limelight.pytorch import faults
from limelight.pytorch.builds import Build, Switches, machine_code
from limelight.pytorch.prediction import rules
from limelight.pytorch.rule import Situation, reasons
from limelight.pytorch.sdpa import SDPA, Operand
from limelight.reason import Reason


def why_not(backend: str, problem: Problem) -> list[Reason]:
    """Every reason against. backend: "flash", "efficient" or "cudnn", as `predict` calls them."""
    p = problem
    if p.library != "torch":
        return [Reason("runs on PyTorch tensors", p.library, "pass torch tensors")]
    if p.device.kind != "cuda":
        return [Reason("runs on NVIDIA GPUs", str(p.device), "move the tensors to one")]
    found = [*_semantics(backend, p)]
    if not _pads(backend, p.query):  # what is padded is copied
        found += _layouts(p)
    situation = _situation(backend, p)
    found += reasons(rules(backend, p.device), situation)
    missing = machine_code(situation.build, p.device)
    if missing is not None:
        found.append(Reason("needs machine code for this card", missing, "use another build"))
    found += [
        Reason(f"is known to fail for {fault.what}", fault.result, "")
        for fault in faults.of(backend, situation)
    ]
    return found


def is_causal(backend: str, problem: Problem) -> bool:
    """Whether the kernel's own flag is to say what the mask says. A last query sees every key."""
    last = problem.q_len == 1 and problem.start == problem.kv_len - 1
    return isinstance(problem.mask, Causal) and not last


def visible_keys(problem: Problem) -> int:
    """How many keys the kernel is to get: those behind the last query's are left out."""
    causal_from_the_first = isinstance(problem.mask, Causal) and problem.start == 0
    return min(problem.kv_len, problem.q_len) if causal_from_the_first else problem.kv_len


def _corner(backend: str, p: Problem) -> bool:
    """Whether the kernel's causal mask lies where the problem's does, and hides no key from all."""
    if backend == "flash":  # aligned to the bottom right
        return p.start is not None and p.start == visible_keys(p) - p.q_len >= 0
    return p.start == 0


def _semantics(backend: str, p: Problem) -> list[Reason]:
    causal = isinstance(p.mask, Causal)
    learned = bool(p.gradients)
    checks = (
        (
            p.mask is not None and not causal,
            "takes Causal alone: NaN at keys that other masks hide would reach the output",
            p.mask,
            "",
        ),
        (
            causal and is_causal(backend, p) and not _corner(backend, p),
            "aligns Causal to another corner, or would read keys that no query sees",
            f"{p.q_len} queries from position {p.start}, {p.kv_len} keys",
            "",
        ),
        (p.bias is not None, "takes no bias: -inf in it may hide a NaN", p.bias, ""),
        (p.softcap is not None, "has no softcap", p.softcap, ""),
        (p.sinks is not None, "has no sinks", p.sinks, ""),
        (p.dropout_p > 0, "drops other weights than limelight's seed says", p.dropout_p, ""),
        (p.return_lse and learned, "has no gradient of the LSE", "return_lse", ""),
        (p.deterministic and learned, "has gradients that do not repeat", "deterministic", ""),
        (
            0 in (p.batch, p.q_len, p.kv_len),
            "needs at least one batch element, one query and one key",
            f"{p.batch}, {p.q_len} and {p.kv_len}",
            "",
        ),
        (
            backend == "efficient" and p.group > 1,
            "takes as many heads of keys as of queries",
            f"{p.q_heads} and {p.kv_heads}",
            "",
        ),
    )
    return [Reason(rule, str(found), lift) for against, rule, found, lift in checks if against]


def _layouts(p: Problem) -> list[Reason]:
    """Rows off 16 bytes come out silently wrong, so every step and address counts."""
    odd = [name for name in ("query", "key", "value") if not _regular(getattr(p, name))]
    if not odd:
        return []
    rule = "needs rows that start at multiples of 16 bytes, and no expanded dimension"
    return [Reason(rule, ", ".join(odd), "call .contiguous() or .clone() on it")]


def _pads(backend: str, layout: Layout) -> bool:
    """Whether columns of zeros are added: FlashAttention takes head dims that 8 divides."""
    return backend == "flash" and layout.shape[-1] % 8 != 0


def _regular(layout: Layout) -> bool:
    item = ITEM_BYTES[layout.dtype]
    if not layout.unit_stride:
        return layout.shape[-1] * item % 16 == 0  # copied before it runs
    steps = zip(layout.shape[:-1], layout.strides[:-1], strict=True)
    return layout.alignment == 16 and all(
        step * item % 16 == 0 and (step > 0 or size == 1) for size, step in steps
    )


def _situation(backend: str, p: Problem) -> Situation:
    """The problem as the kernel would get it: with nothing that `_semantics` refuses anyway."""

    def operand(name: str) -> Operand:
        layout = getattr(p, name)
        *_, length, dim = layout.shape
        if name != "query":
            length = visible_keys(p)
            layout = replace(layout, shape=(*layout.shape[:2], length, dim))
        if _pads(backend, layout):
            layout = Layout.contiguous((*layout.shape[:3], dim + -dim % 8), layout.dtype)
        elif not layout.unit_stride:
            layout = Layout.contiguous(layout.shape, layout.dtype)
        return Operand(layout, requires_grad=name in p.gradients)

    sdpa = SDPA(
        operand("query"),
        operand("key"),
        operand("value"),
        is_causal=is_causal(backend, p) and p.q_len == visible_keys(p),
        scale=p.scale,
        enable_gqa=p.group > 1,
    )
    build = Build.released(p.library_version or None)
    if p.cudnn_version is not None:
        build = build.with_cudnn(p.cudnn_version)
    # PyTorch's own switch reaches `deterministic`, which asks more of gradients than of outputs.
    return Situation(sdpa, p.device, build, Switches())
