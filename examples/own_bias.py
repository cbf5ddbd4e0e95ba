"""Two biases of your own, outside limelight: fused on the GPU, with gradients.

    python examples/own_bias.py

`PeriodicBias` is a table that is looked up by the offset between key and query; it states the rule
twice, for array libraries and for the kernels. `LogDistance` has one number per head and writes its
fragment itself. limelight.testing.check compares both with a float64 oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from limelight import Bias
from limelight.biases import jit, tl
from limelight.biases.table import TableBias


@dataclass(frozen=True)
class PeriodicBias(TableBias):
    """Adds `table[h, (j - p) mod period]`: bars of music, hours of the day.

    table: [heads or 1, period], differentiable.
    """

    table: Any

    def entry(self, offset: Any, xp: Any) -> Any:
        return offset % self.table.shape[1]

    def rule(self) -> NamedTuple:
        return _Rule(_entry, self.table.shape[1])


class _Rule(NamedTuple):
    entry: Any
    period: int


@jit
def _entry(offset, rule):
    rest = offset % rule.period  # of the sign of the offset, on the device
    return tl.where(rest < 0, rest + rule.period, rest)


@dataclass(frozen=True)
class LogDistance(Bias):
    """Adds `-rates[h] * log(1 + |p - j|)`, after Kerple (Chi et al., arXiv:2205.09921).

    rates: [heads], differentiable.
    """

    rates: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("rates",)
    gradient: ClassVar[Any] = "head"

    def values(self, at: Any, xp: Any) -> Any:
        return xp.astype(self.rates[None, at.heads, None, None], at.dtype) * self._slopes(at, xp)

    def fold(self, d_scores: Any, at: Any, xp: Any, gradients: list[Any]) -> None:
        gradients[0][at.heads] += xp.sum(d_scores * self._slopes(at, xp), axis=(0, 2, 3))

    def _slopes(self, at: Any, xp: Any) -> Any:
        return -xp.log1p(xp.astype(xp.abs(at.q_pos - at.k_pos), at.dtype))

    def on_device(self) -> NamedTuple:
        return _OnDevice(_fragment, _slope, self.rates, self.rates.strides[0])


class _OnDevice(NamedTuple):
    fragment: Any
    slope: Any
    rates: Any
    head_stride: int


@jit
def _fragment(scores, at, own):
    rate = tl.load(own.rates + at.head * own.head_stride).to(tl.float32)
    return scores + rate * at.unit * _slope(at, own)


@jit
def _slope(at, own):
    return -tl.log(1.0 + tl.abs(at.q_pos - at.k_pos).to(tl.float32))


if __name__ == "__main__":
    import torch

    import limelight
    from limelight.testing import check

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 4, 100, 32, device=device, requires_grad=True) for _ in range(3))
    table = torch.randn(4, 12, device=device, requires_grad=True)
    rates = torch.rand(4, device=device, requires_grad=True)
    bias = PeriodicBias(table) + LogDistance(rates)
    check(q, k, v, bias=bias, mask=limelight.Causal())
    print(f"output and gradients are right: {bias}")
    print(limelight.explain(q, k, v, bias=bias, mask=limelight.Causal()))
