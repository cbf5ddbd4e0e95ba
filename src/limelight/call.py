"""Call: the tensors and numbers of one attention, checked, as a backend receives them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from limelight.biases import Bias
from limelight.masks import Mask
from limelight.problem import Problem
from limelight.tile import Positions, Size, device_of


class Gradients(NamedTuple):
    """One entry for each input that can have a gradient; also used for which are wanted."""

    query: Any
    key: Any
    value: Any
    sinks: Any
    bias: tuple[Any, ...]  # one per tensor of the bias

    @classmethod
    def named(cls, names: Collection[str], bias: Bias | None) -> Gradients:
        """Booleans: true for the entries of these names, as `Problem.gradients` has them."""
        parameters = 0 if bias is None else len(bias.tensors())
        plain = (name in names for name in cls._fields[:4])
        return cls(*plain, bias=tuple(f"bias.{n}" in names for n in range(parameters)))

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
        reads_query = self.bias is not None and self.bias.reads_query()
        return Positions.of(
            xp,
            size=self.size,
            dtype=dtype,
            device=device_of(self.query),
            query_start=self.query_start,
            query=xp.astype(self.query, dtype) if reads_query else None,
            scale=self.scale,
        )

    def tensors(self) -> list[Any]:
        """Every tensor of the call, in a fixed order."""
        tensors = [self.query, self.key, self.value]
        if self.sinks is not None:
            tensors.append(self.sinks)
        for term in (self.bias, self.mask):
            if term is not None:
                tensors += term.tensors()
        for number in (self.query_start, self.seed):
            if number is not None and not isinstance(number, int):
                tensors.append(number)
        return tensors

    def with_tensors(self, tensors: Iterable[Any]) -> Call:
        """The same call around other tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        start, seed = self.query_start, self.seed
        return Call(  # by hand: dataclasses.replace takes five times as long
            self.problem,
            query=next(rest),
            key=next(rest),
            value=next(rest),
            sinks=None if self.sinks is None else next(rest),
            bias=None if self.bias is None else self.bias.with_tensors(rest),
            mask=None if self.mask is None else self.mask.with_tensors(rest),
            query_start=start if isinstance(start, int) else next(rest),
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            seed=seed if seed is None or isinstance(seed, int) else next(rest),
        )
