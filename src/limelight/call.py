"""Call: the tensors and numbers of one attention, checked, as a backend receives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from limelight.biases import Bias
from limelight.masks import Mask
from limelight.problem import Problem
from limelight.tile import Positions, Size


class Gradients(NamedTuple):
    """One entry for each input that can have a gradient; also used for which are wanted."""

    query: Any
    key: Any
    value: Any
    sinks: Any
    bias: tuple[Any, ...]  # one per tensor of the bias

    def names(self) -> tuple[str, ...]:
        """The names, as `Problem.gradients` has them, of the entries that are true."""
        plain = [name for name in self._fields[:4] if getattr(self, name)]
        return (*plain, *(f"bias.{n}" for n, entry in enumerate(self.bias) if entry))


@dataclass(slots=True, eq=False)  # never changed; frozen would cost 3 us at each call
class Call:
    """query [B, H, M, D], key [B, G, N, D], value [B, G, N, E], sinks [H] or None.

    problem: what the call poses, by which backends keep what they prepared.
    query_start: a number, or an integer array [B].
    seed: a number or an int64 array of one element, None without dropout.
    """

    problem: Problem
    query: Any
    key: Any
    value: Any
    mask: Mask | None
    bias: Bias | None
    sinks: Any
    query_start: Any
    scale: float
    softcap: float | None
    dropout_p: float
    seed: Any

    @property
    def size(self) -> Size:
        batch, heads, q_len, _ = self.query.shape
        return Size(batch, heads, q_len, self.key.shape[2])

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    def positions(self, xp: Any, dtype: Any) -> Positions:
        return Positions.of(
            xp,
            size=self.size,
            dtype=dtype,
            device=self.query.device,
            query_start=self.query_start,
        )

    def tensors(self) -> list[Any]:
        """Every tensor of the call, in a fixed order, absent ones as None."""
        start = None if isinstance(self.query_start, int) else self.query_start
        seed = None if isinstance(self.seed, int) else self.seed
        mask = self.mask.tensors() if self.mask is not None else []
        bias = self.bias.tensors() if self.bias is not None else []
        return [self.query, self.key, self.value, self.sinks, *bias, *mask, start, seed]

    def with_tensors(self, tensors: list[Any]) -> Call:
        """The same call around other tensors, in the order of `tensors()`."""
        query, key, value, sinks, *terms, start, seed = tensors
        rest = iter(terms)
        bias = self.bias.with_tensors(rest) if self.bias is not None else None
        return Call(  # by hand: dataclasses.replace takes five times as long
            self.problem,
            query,
            key,
            value,
            self.mask.with_tensors(rest) if self.mask is not None else None,
            bias,
            sinks,
            self.query_start if start is None else start,
            self.scale,
            self.softcap,
            self.dropout_p,
            self.seed if seed is None else seed,
        )
