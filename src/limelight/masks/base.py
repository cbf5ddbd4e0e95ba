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

A mask whose visible tiles are no interval adds two functions, with which a kernel skips the tiles
in between: `key_states(q_start, k_start, matrix, own, ROWS, KEYS)` returns the `TileState` of tiles
of ROWS queries and KEYS keys as a number, for a vector of `k_start`, the first keys of tiles that
share their queries; `query_states`, the same for a vector of `q_start`. Tiles start at multiples of
their size, counted in rows and keys, and the last one may end past the matrix. A kernel that knows
ranges alone is right without them, and slower.
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
        children = tuple(with_states(child.on_device()) for child in self.children)
        ranges, states = (_both_keys, _both_queries), (_both_key_states, _both_query_states)
        return MaskOfMasks(_both, *ranges, *states, children)

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
        children = tuple(with_states(child.on_device()) for child in self.children)
        ranges, states = (_either_keys, _either_queries), (_either_key_states, _either_query_states)
        return MaskOfMasks(_either, *ranges, *states, children)

    def __repr__(self) -> str:
        return " | ".join(_wrapped(child) for child in self.children)


def _wrapped(child: Mask) -> str:
    return f"({child!r})" if isinstance(child, (And, Or)) else repr(child)


class MaskOfMasks(NamedTuple):
    """A composite on the device; the children are masks on the device themselves."""

    fragment: Any
    key_range: Any
    query_range: Any
    key_states: Any
    query_states: Any
    children: tuple[Any, ...]


class RangeWithStates(NamedTuple):
    """A mask on the device that has no states of its own, with those that follow from its range."""

    fragment: Any
    key_range: Any
    query_range: Any
    key_states: Any
    query_states: Any
    mask: Any


def with_states(mask: Any) -> Any:
    """A mask on the device, with `key_states` and `query_states`."""
    if has_states(mask):
        return mask
    return RangeWithStates(
        _of_range, _keys_of_range, _queries_of_range, _key_states, _query_states, mask
    )


def has_states(mask: Any) -> bool:
    return hasattr(mask, "key_states")


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
def _of_range(scores, at, own):
    return own.mask.fragment(scores, at, own.mask)


@jit
def _keys_of_range(q_start, q_stop, matrix, own):
    return own.mask.key_range(q_start, q_stop, matrix, own.mask)


@jit
def _queries_of_range(k_start, k_stop, matrix, own):
    return own.mask.query_range(k_start, k_stop, matrix, own.mask)


@jit
def _key_states(q_start, k_start, matrix, own, ROWS, KEYS):
    q_stop = min(q_start + ROWS, matrix.query_start + matrix.q_len)
    start, full_start, full_stop, stop = own.mask.key_range(q_start, q_stop, matrix, own.mask)
    return _states(k_start, k_start + KEYS, start, full_start, full_stop, stop)


@jit
def _query_states(q_start, k_start, matrix, own, ROWS, KEYS):
    k_stop = min(k_start + KEYS, matrix.kv_len)
    start, full_start, full_stop, stop = own.mask.query_range(k_start, k_stop, matrix, own.mask)
    return _states(q_start, q_start + ROWS, start, full_start, full_stop, stop)


@jit
def _states(first, last, start, full_start, full_stop, stop):
    """Of tiles from each first to each last, by what a range says of them."""
    seen = (first < stop) & (last > start) & (start < stop)
    full = (first >= full_start) & (last <= full_stop)
    return tl.where(seen, tl.where(full, 2, 1), 0)


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
def _both_key_states(q_start, k_start, matrix, own, ROWS, KEYS):
    states = k_start * 0 + 2
    for i in tl.static_range(len(own.children)):
        of_child = own.children[i].key_states(q_start, k_start, matrix, own.children[i], ROWS, KEYS)
        states = tl.minimum(states, of_child)
    return states


@jit
def _both_query_states(q_start, k_start, matrix, own, ROWS, KEYS):
    states = q_start * 0 + 2
    for i in tl.static_range(len(own.children)):
        of_child = own.children[i].query_states(
            q_start, k_start, matrix, own.children[i], ROWS, KEYS
        )
        states = tl.minimum(states, of_child)
    return states


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
def _either_key_states(q_start, k_start, matrix, own, ROWS, KEYS):
    states = k_start * 0
    for i in tl.static_range(len(own.children)):
        of_child = own.children[i].key_states(q_start, k_start, matrix, own.children[i], ROWS, KEYS)
        states = tl.maximum(states, of_child)
    return states


@jit
def _either_query_states(q_start, k_start, matrix, own, ROWS, KEYS):
    states = q_start * 0
    for i in tl.static_range(len(own.children)):
        of_child = own.children[i].query_states(
            q_start, k_start, matrix, own.children[i], ROWS, KEYS
        )
        states = tl.maximum(states, of_child)
    return states


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
