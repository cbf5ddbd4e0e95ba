"""The contract of a backend: one way to run a problem.

A backend is one file: `why_not`, pure, which lists every reason against a problem; `forward` and
`backward`, which run one. A backend that refuses nothing it cannot do, or does wrong what it does
not refuse, is a bug: selection catches no exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from limelight.biases import Bias
from limelight.biases.table import TableBias
from limelight.call import Call, Gradients
from limelight.masks import Mask
from limelight.problem import Problem
from limelight.reason import Reason as Reason
from limelight.tuning import TileConfig

_ARRAYS = {"torch": "PyTorch tensors", "jax": "JAX arrays", "cupy": "CuPy arrays"}


class Backend:
    """One way to run a problem. Stateless."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for explain()
    compiles: ClassVar[bool] = False  # whether a first call compiles something
    # Whether `forward` is made of operators that the library's autograd follows by itself.
    native: ClassVar[bool] = False

    def why_not(self, problem: Problem) -> list[Reason]:
        """Every reason against running the problem; an empty list means that it can run.

        Pure: asks no device and reads no data, so it answers for devices that are not here.
        """
        raise NotImplementedError

    def config(self, problem: Problem) -> TileConfig | None:
        """How the problem would be cut into tiles, where the backend does that."""
        return None

    def precompile(self, call: Call) -> None:
        """Makes ready what `forward` and the gradients that the problem names need to compile.

        The call's tensors may hold nothing, and be on another device than the problem's.
        """
        raise NotImplementedError

    def forward(self, call: Call) -> tuple[Any, Any]:
        """out [B, H, M, E] and the log-sum-exp [B, H, M], float32 (float64 for float64), which may
        be None where the problem asks for neither it nor gradients.

        `out` may be wider than the inputs: the adapter rounds what the caller gets, and hands the
        backward what it was given here.
        """
        raise NotImplementedError

    def shortcut(self, call: Call) -> Callable[[Any, Any, Any], Any] | None:
        """`out` as a function of query, key and value, for calls that differ in nothing but these.

        The call has no other tensors and asks for no LSE; nor, unless the backend is native, for
        gradients. None where `forward` is as quick.
        """
        return None

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        """The wanted gradients (others None), each in its input's dtype.

        d_out and d_lse may be None where no gradient arrives; `wanted` holds booleans. `out` and
        `lse` may come from another backend's forward.
        """
        raise NotImplementedError


def fused_reasons(problem: Problem, libraries: tuple[str, ...] = ("torch",)) -> list[Reason]:
    """What speaks against every one of our own kernels for GPUs.

    libraries: whose arrays the backend takes.
    """
    p = problem
    taken = [_ARRAYS[library] for library in libraries]
    masks = p.mask.parts() if p.mask is not None else ()
    biases = p.bias.parts() if p.bias is not None else ()
    bare = [part for part in (*masks, *biases) if _is_bare(type(part))]
    rules = (
        (
            p.library not in libraries,
            f"runs on {', '.join(taken)}",
            p.library,
            f"pass {' or '.join(taken)}",
        ),
        (p.device.kind != "cuda", "runs on NVIDIA GPUs", p.device, "move the tensors to one"),
        (
            p.triton_version is None,
            "needs Triton, which compiles the kernels",
            "not installed",
            "pip install triton",
        ),
        (
            bool(bare),
            "takes masks and biases that define a fragment (on_device)",
            ", ".join(map(repr, bare)),
            "",
        ),
        (
            p.start is not None and abs(p.start) > 2**30,
            "counts positions in 32 bits",
            f"query_start={p.start}",
            "count them from nearer by",
        ),
    )
    return [Reason(rule, str(found), lift) for against, rule, found, lift in rules if against]


def _is_bare(kind: type[Any]) -> bool:
    """Whether a mask or bias says nothing about itself to a kernel."""
    on_device = getattr(kind, "on_device", None)
    if on_device is TableBias.on_device:
        return kind.rule is TableBias.rule
    return on_device in (None, Mask.on_device, Bias.on_device)
