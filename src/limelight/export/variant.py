"""Variant: the launches of one kind of attention on one target, for all sizes, strides and numbers.

`tracer.py` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from limelight.errors import invalid
from limelight.export.expression import Expression
from limelight.grammar import parse_bias, parse_mask, written
from limelight.launcher import Recipe
from limelight.tile import Size

ALIGNMENT = 256  # bytes, of the workspace and of each slice of it

# No two are equal, and none is a head_dim: a dimension of a mask's or bias's tensor is known by it.
EXAMPLE = Size(batch=1013, q_heads=1042, q_len=2003, kv_len=3001)
OTHER_EXAMPLE = Size(batch=1019, q_heads=1046, q_len=2011, kv_len=4001)


@dataclass(frozen=True)
class Problem:
    """What decides an exported kernel. mask, bias: as on the command line, or "none".

    softcap: whether scores are capped. gradients: "none" for a forward; of a backward "inputs", or
    "all", the tensors of the bias among them.
    """

    dtype: str
    head_dim: int
    value_dim: int
    mask: str = "none"
    bias: str = "none"
    softcap: bool = False
    gradients: str = "none"

    @property
    def operation(self) -> str:
        return "forward" if self.gradients == "none" else "backward"

    @classmethod
    def of(cls, dtype: str, head_dim: int, *, mask: str, bias: str, **others: Any) -> Problem:
        """With equal dimensions, and the masks and biases in the spelling that manifests have.

        Raises ValueError for a text that is none, or that leaves out what depends on sizes.
        """
        given = cls(dtype, head_dim, head_dim, mask, bias, **others)
        (mask, bias), again = (
            ["none" if term is None else written(term) for term in given.terms(size)]
            for size in (EXAMPLE, OTHER_EXAMPLE)
        )
        for name, spelling, other in zip(("mask", "bias"), (mask, bias), again, strict=True):
            if spelling != other:
                raise invalid(name, found=getattr(given, name), needed=f"numbers, as {spelling!r}")
        return cls(dtype, head_dim, head_dim, mask, bias, **others)

    def terms(self, size: Size = EXAMPLE) -> tuple[Any, Any]:
        """The mask and the bias, or None, with examples of this size in the place of tensors."""
        mask = None if self.mask == "none" else parse_mask(self.mask, size)
        bias = None if self.bias == "none" else parse_bias(self.bias, size, self.head_dim)
        return mask, bias and bias.resolved(size.q_heads, _Slopes.of)

    def __str__(self) -> str:
        kind = self.operation + " with its bias's gradients" * (self.gradients == "all")
        return f"{kind}, {self.dtype}, head_dim {self.head_dim}, mask {self.mask}, bias {self.bias}"


class Tensor(NamedTuple):
    """shape, strides: of each dimension an expression; a free one is a name of its own.

    Strides count elements. optional: may be null. written: an output.
    """

    name: str
    dtype: str
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    optional: bool
    written: bool


class Slice(NamedTuple):
    """A part of the workspace, at a multiple of ALIGNMENT bytes."""

    name: str
    size: Expression  # bytes


class Planned(NamedTuple):
    """One kernel to launch. arguments: in the order of its parameters.

    needed_for: outputs, if any, without all of which it need not run.
    """

    recipe: Recipe
    grid: Expression
    arguments: tuple[Expression, ...]
    needed_for: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """numbers: names of those that need not be whole, in use. conditions: that all must hold."""

    problem: Problem
    target: tuple[int, int]
    tensors: tuple[Tensor, ...]
    numbers: tuple[str, ...]
    conditions: tuple[tuple[Expression, str, Expression], ...]
    workspace: tuple[Slice, ...]
    launches: tuple[Planned, ...]


class _Slopes(NamedTuple):
    """The layout of ALiBi's slopes where the text names none."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, slopes: Sequence[float]) -> _Slopes:
        return cls((len(slopes),), "float32")
