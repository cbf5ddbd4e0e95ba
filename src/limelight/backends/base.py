"""The contract of a backend: one way to run a problem.

A backend is one file: `why_not`, pure, which lists every reason against a problem; `forward` and
`backward`, which run one. A backend that refuses nothing it cannot do, or does wrong what it does
not refuse, is a bug: selection catches no exceptions.
"""

from __future__ import annotations

from typing import Any, ClassVar

from limelight.call import Call, Gradients
from limelight.problem import Problem
from limelight.reason import Reason as Reason
from limelight.tuning import TileConfig


class Backend:
    """One way to run a problem. Stateless."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for explain()

    def why_not(self, problem: Problem) -> list[Reason]:
        """Every reason against running the problem; an empty list means that it can run.

        Pure: asks no device and reads no data, so it answers for devices that are not here.
        """
        raise NotImplementedError

    def config(self, problem: Problem) -> TileConfig | None:
        """How the problem would be cut into tiles, where the backend does that."""
        return None

    def forward(self, call: Call) -> tuple[Any, Any]:
        """out [B, H, M, E] and the log-sum-exp [B, H, M], float32 (float64 for float64), which may
        be None where the problem asks for neither it nor gradients.

        `out` may be wider than the inputs: the adapter rounds what the caller gets, and hands the
        backward what it was given here.
        """
        raise NotImplementedError

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        """The wanted gradients (others None), each in its input's dtype.

        d_out and d_lse may be None where no gradient arrives; `wanted` holds booleans. `out` and
        `lse` may come from another backend's forward.
        """
        raise NotImplementedError
