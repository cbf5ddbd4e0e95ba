"""Faults of PyTorch's kernels: problems that a rule lets through and that come out wrong.

Each says what goes wrong, for which releases it is known, and who reported it. `seen` is where it
was reproduced: against float64, on small problems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from limelight.problem import ITEM_BYTES
from limelight.pytorch.rule import Situation
from limelight.pytorch.sdpa import Operand

SEEN = "an H200, PyTorch 2.11.0, cuDNN 9.19"


@dataclass(frozen=True)
class Fault:
    """what, result: the problem, and what comes of it. applies: whether a situation is one."""

    backends: tuple[str, ...]
    what: str
    result: str
    applies: Callable[[Situation], bool]
    report: str = ""
    seen: str = SEEN
    device: str = "cuda"

    def __str__(self) -> str:
        source = f"{self.report}; " if self.report else ""
        return f"known fault: {self.what}: {self.result} ({source}seen on {self.seen})"


def of(backend: str | None, s: Situation) -> list[Fault]:
    """The known faults that a backend has for a situation."""
    here = [fault for fault in FAULTS if fault.device == s.device.kind]
    return [fault for fault in here if backend in fault.backends and fault.applies(s)]


def misaligned(operand: Operand, whole: bool = False) -> bool:
    """Whether a row starts off a multiple of 16 bytes. whole: singleton dimensions count too."""
    layout = operand.layout
    item = ITEM_BYTES.get(layout.dtype, 1)
    steps = layout.strides[:-1] if whole else ()
    offset = operand.storage_offset * item % 16 != 0
    return offset or layout.alignment < 16 or any(item * step % 16 for step in steps)


def _unaligned(s: Situation) -> bool:
    return any(misaligned(operand) for operand in s.sdpa.operands)


def _odd_singleton(s: Situation) -> bool:
    return not _unaligned(s) and any(misaligned(each, whole=True) for each in s.sdpa.operands)


def _low_lse(s: Situation) -> bool:
    kv_len = s.sdpa.key.shape[-2]
    return s.sdpa.training and kv_len % 128 == 64 and s.build.cudnn < 92_600


def _many_blocks(s: Situation) -> bool:
    return s.sdpa.four_dimensional and max(s.sdpa.query.shape[:2]) > 65_535


def _broadcast_mask(s: Situation) -> bool:
    mask = s.sdpa.attn_mask
    return mask is not None and mask.shape[-1] == 1 and s.sdpa.key.shape[-2] > 1


def _only_mask_learns(s: Situation) -> bool:
    mask = s.sdpa.attn_mask
    return mask is not None and mask.requires_grad and not s.sdpa.training


def _no_positive_scale(s: Situation) -> bool:
    return s.half and s.sdpa.scale is not None and s.sdpa.scale <= 0


def _wide_mask(s: Situation) -> bool:
    mask = s.sdpa.attn_mask
    return mask is not None and mask.dtype == "float32" and s.half


_ALL = ("flash", "efficient", "cudnn")

FAULTS = (
    Fault(
        _ALL,
        "tensors whose rows do not start at multiples of 16 bytes",
        "silently wrong in half precision, a fault that ends the process in float32",
        _unaligned,
    ),
    Fault(
        _ALL,
        "strides of dimensions of size 1 that are no multiples of 16 bytes",
        "an internal error",
        _odd_singleton,
    ),
    Fault(
        _ALL,
        "a scale of 0 or less in half precision",
        "NaN, in efficient for 0 alone",
        _no_positive_scale,
    ),
    Fault(
        ("cudnn",),
        "gradients where kv_len is 64 modulo 128",
        "NaN in the query's gradient where the log-sum-exp is low",
        _low_lse,
        report="https://github.com/pytorch/pytorch/issues/196678",
    ),
    Fault(
        _ALL,
        "batch or heads above 65535",
        "'invalid configuration argument' or an internal error",
        _many_blocks,
        report="https://github.com/pytorch/pytorch/issues/142228",
    ),
    Fault(
        ("efficient", "cudnn"),
        "a mask whose last dimension is 1",
        "an error: its last dimension must be contiguous",
        _broadcast_mask,
    ),
    Fault(
        ("efficient",),
        "only the mask requires a gradient",
        "an internal error: 'LSE is not correctly aligned'",
        _only_mask_learns,
    ),
    Fault(
        ("efficient", "cudnn"),
        "a float32 mask on half-precision inputs",
        "large entries, as -1e9, give silently wrong results; its gradient is an internal error",
        _wide_mask,
    ),
    Fault(
        ("flash",),
        "is_causal with a scale of 0 or less",
        "NaN, or in half precision finite and wrong",
        lambda s: s.sdpa.is_causal and s.sdpa.scale is not None and s.sdpa.scale <= 0,
        seen="PyTorch 2.13.0 on an x86-64 CPU",
        device="cpu",
    ),
)
