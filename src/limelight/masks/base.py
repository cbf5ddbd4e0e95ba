"""The contract of a mask: a boolean that says which keys a query may see.

A mask is one file with one frozen dataclass: `values`, its meaning, written once for any array
library; `tile_state`, which lets whole tiles be skipped; `check`, if it has tensors; `on_device`,
the same for the fused kernels. Masks compose with `&` and `|`.

On the device a mask is a NamedTuple of three `jit` functions, then whatever they read (pointers,
strides, numbers), which they get back as `own`:

`fragment(scores, at, own)` returns the scores with -inf where hidden. `at` has q_pos and k_pos,
which broadcast against the scores in whichever orientation a kernel keeps them, and what `matrix`
has.

`key_range(q_start, q_stop, matrix, own)` takes the positions of a tile's queries and returns
`start, full_start, full_stop, stop`: keys outside [start, stop) are hidden from all these queries,
keys inside [full_start, full_stop) are visible to all. `matrix` has batch, head (query heads),
q_len, kv_len and query_start. `query_range(k_start, k_stop, matrix, own)` returns the same of the
positions of queries for a tile of keys. Both may leave the matrix: kernels clamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.errors import invalid_type
from limelight.terms import Composite, Term
from limelight.tile import Tile, TileState


class Mask(Term):
    """Base class of masks. `a & b` sees what both see, `a | b` what either sees."""

    argument: ClassVar[str] = "mask"

    # Whether the mask compares positions of queries with positions of keys. Such a mask has no
    # obvious meaning for unequal lengths until `query_start` is given.
    ordered: ClassVar[bool] = False

    # Whether a key inside the key range of a tile may still be hidden from all the tile's queries.
    gaps: ClassVar[bool] = True

    def values(self, at: Tile, xp: Any) -> Any:
        """Booleans that broadcast against the tile (batch, heads, rows, keys); True is visible."""
        raise NotImplementedError(f"{type(self).__name__} does not define values(at, xp)")

    def tile_state(self, at: Tile) -> TileState:
        """EMPTY only if no query of the tile sees any of its keys, FULL only if all see all.

        PARTIAL is always right, and slower.
        """
        return TileState.PARTIAL

    def on_device(self) -> NamedTuple:
        """The mask as a kernel takes it. Called on the form that holds device arrays."""
        raise NotImplementedError(f"{type(self).__name__} does not define on_device()")

    def has_gaps(self) -> bool:
        return type(self).gaps

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
        return reduce(
            lambda left, right: left & right, (c.evaluated(at, xp) for c in self.children)
        )

    def tile_state(self, at: Tile) -> TileState:
        return min(child.tile_state(at) for child in self.children)

    def key_lengths(self) -> tuple[Any, ...]:
        return tuple([each for child in self.children for each in child.key_lengths()])

    def on_device(self) -> NamedTuple:
        children = tuple(child.on_device() for child in self.children)
        return MaskOfMasks(_both, _both_keys, _both_queries, children)

    def has_gaps(self) -> bool:
        return any(child.has_gaps() for child in self.children)

    def __repr__(self) -> str:
        return " & ".join(_wrapped(child) for child in self.children)


@dataclass(frozen=True)
class Or(Composite, Mask):
    """Visible where any child says so. Written `a | b`."""

    children: tuple[Mask, ...]

    def values(self, at: Tile, xp: Any) -> Any:
        return reduce(
            lambda left, right: left | right, (c.evaluated(at, xp) for c in self.children)
        )

    def tile_state(self, at: Tile) -> TileState:
        return max(child.tile_state(at) for child in self.children)

    def on_device(self) -> NamedTuple:
        children = tuple(child.on_device() for child in self.children)
        return MaskOfMasks(_either, _either_keys, _either_queries, children)

    def __repr__(self) -> str:
        return " | ".join(_wrapped(child) for child in self.children)


def _wrapped(child: Mask) -> str:
    return f"({child!r})" if isinstance(child, (And, Or)) else repr(child)


class MaskOfMasks(NamedTuple):
    """A composite on the device; the children are masks on the device themselves."""

    fragment: Any
    key_range: Any
    query_range: Any
    children: tuple[Any, ...]


@jit
def all_keys(q_start, q_stop, matrix, own):
    """The key range of a mask that knows none: any key may be visible, none surely is."""
    return 0, 0, 0, matrix.kv_len


@jit
def all_queries(k_start, k_stop, matrix, own):
    """The query range of such a mask."""
    start = matrix.query_start
    return start, start, start, start + matrix.q_len


@jit
def _both(scores, at, own):
    for i in tl.static_range(len(own.children)):
        scores = own.children[i].fragment(scores, at, own.children[i])
    return scores


@jit
def _both_keys(q_start, q_stop, matrix, own):
    start, full_start, full_stop, stop = own.children[0].key_range(
        q_start, q_stop, matrix, own.children[0]
    )
    for i in tl.static_range(1, len(own.children)):
        a, b, c, d = own.children[i].key_range(q_start, q_stop, matrix, own.children[i])
        start, full_start = max(start, a), max(full_start, b)
        full_stop, stop = min(full_stop, c), min(stop, d)
    return start, full_start, full_stop, stop


@jit
def _both_queries(k_start, k_stop, matrix, own):
    start, full_start, full_stop, stop = own.children[0].query_range(
        k_start, k_stop, matrix, own.children[0]
    )
    for i in tl.static_range(1, len(own.children)):
        a, b, c, d = own.children[i].query_range(k_start, k_stop, matrix, own.children[i])
        start, full_start = max(start, a), max(full_start, b)
        full_stop, stop = min(full_stop, c), min(stop, d)
    return start, full_start, full_stop, stop


@jit
def _either(scores, at, own):
    shown = own.children[0].fragment(scores, at, own.children[0])
    for i in tl.static_range(1, len(own.children)):
        other = own.children[i].fragment(scores, at, own.children[i])
        shown = tl.where(shown == float("-inf"), other, shown)
    return shown


@jit
def _either_keys(q_start, q_stop, matrix, own):
    start, _, _, stop = own.children[0].key_range(q_start, q_stop, matrix, own.children[0])
    for i in tl.static_range(1, len(own.children)):
        a, _, _, d = own.children[i].key_range(q_start, q_stop, matrix, own.children[i])
        start, stop = _hull(start, stop, a, d)
    return start, start, start, stop


@jit
def _either_queries(k_start, k_stop, matrix, own):
    start, _, _, stop = own.children[0].query_range(k_start, k_stop, matrix, own.children[0])
    for i in tl.static_range(1, len(own.children)):
        a, _, _, d = own.children[i].query_range(k_start, k_stop, matrix, own.children[i])
        start, stop = _hull(start, stop, a, d)
    return start, start, start, stop


@jit
def _hull(start, stop, other_start, other_stop):
    """The least range that holds both; an empty one does not count."""
    stretched_start = min(start, tl.where(other_start < other_stop, other_start, start))
    stretched_stop = max(stop, tl.where(other_start < other_stop, other_stop, stop))
    first_is_empty = start >= stop
    return (
        tl.where(first_is_empty, other_start, stretched_start),
        tl.where(first_is_empty, other_stop, stretched_stop),
    )
