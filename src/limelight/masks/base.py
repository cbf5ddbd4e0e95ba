"""The contract of a mask: a boolean that says which keys a query may see.

A mask is one file with one frozen dataclass: `values`, its meaning, written once for any array
library; `tile_state`, which lets whole tiles be skipped; `check`, if it has tensors. Masks compose
with `&` and `|`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from limelight.errors import invalid_type
from limelight.terms import Composite, Term
from limelight.tile import Tile, TileState


class Mask(Term):
    """Base class of masks. `a & b` sees what both see, `a | b` what either sees."""

    argument: ClassVar[str] = "mask"

    # Whether the mask compares positions of queries with positions of keys. Such a mask has no
    # obvious meaning for unequal lengths until `query_start` is given.
    ordered: ClassVar[bool] = False

    def values(self, at: Tile, xp: Any) -> Any:
        """Booleans that broadcast against the tile (batch, heads, rows, keys); True is visible."""
        raise NotImplementedError(f"{type(self).__name__} does not define values(at, xp)")

    def tile_state(self, at: Tile) -> TileState:
        """EMPTY only if no query of the tile sees any of its keys, FULL only if all see all.

        PARTIAL is always right, and slower.
        """
        return TileState.PARTIAL

    def is_ordered(self) -> bool:
        return any(type(part).ordered for part in self.parts() if isinstance(part, Mask))

    def key_lengths(self) -> tuple[Any, ...]:
        """The per-batch lengths under which every visible key lies: one entry per KeyLengths."""
        return ()

    def __and__(self, other: Mask) -> Mask:
        return And.joined(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or.joined(self, _mask(other))


def _mask(other: object) -> Mask:
    if not isinstance(other, Mask):
        raise invalid_type("mask", found=type(other).__name__, needed="another limelight mask")
    return other


@dataclass(frozen=True)
class And(Composite, Mask):
    """Visible where every child says so. Written `a & b`."""

    children: tuple[Mask, ...]

    def values(self, at: Tile, xp: Any) -> Any:
        return reduce(lambda left, right: left & right, (c.values(at, xp) for c in self.children))

    def tile_state(self, at: Tile) -> TileState:
        return min(child.tile_state(at) for child in self.children)

    def key_lengths(self) -> tuple[Any, ...]:
        return tuple([each for child in self.children for each in child.key_lengths()])

    def __repr__(self) -> str:
        return " & ".join(_wrapped(child) for child in self.children)


@dataclass(frozen=True)
class Or(Composite, Mask):
    """Visible where any child says so. Written `a | b`."""

    children: tuple[Mask, ...]

    def values(self, at: Tile, xp: Any) -> Any:
        return reduce(lambda left, right: left | right, (c.values(at, xp) for c in self.children))

    def tile_state(self, at: Tile) -> TileState:
        return max(child.tile_state(at) for child in self.children)

    def __repr__(self) -> str:
        return " | ".join(_wrapped(child) for child in self.children)


def _wrapped(child: Mask) -> str:
    return f"({child!r})" if isinstance(child, (And, Or)) else repr(child)
