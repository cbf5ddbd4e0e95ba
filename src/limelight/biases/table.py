"""What biases have in common that are looked up in a table, one number per head and entry."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from limelight._jit import jit, tl
from limelight.biases.base import Bias, GradientKind
from limelight.errors import invalid
from limelight.terms import check_dtype
from limelight.tile import Size, Tile, device_of, on_host


class TableBias(Bias):
    """Adds `table[h, entry]`; which entry, follows from k_pos - q_pos alone, the offset.

    A subclass is a frozen dataclass with a field `table`, [heads or 1, entries] or, if it says
    `heads_last`, [entries, heads or 1]. It defines the rule twice: `entry(offset, xp)` for array
    libraries, and `rule()` for the fused kernels. Entries must lie inside the table. The gradient
    follows from the rule.
    """

    table: Any

    tensor_fields: ClassVar[tuple[str, ...]] = ("table",)
    batch_dimensions: ClassVar[tuple[int, ...] | None] = (0,)
    gradient: ClassVar[GradientKind | None] = "offset"
    heads_last: ClassVar[bool] = False

    def entry(self, offset: Any, xp: Any) -> Any:
        """The entry of each offset; both are integer arrays."""
        raise NotImplementedError(f"{type(self).__name__} does not define entry(offset, xp)")

    def rule(self) -> NamedTuple:
        """The same on the device: first a `jit` function `entry(offset, rule)`, which gets this
        very NamedTuple, then the numbers that it needs."""
        raise NotImplementedError(f"{type(self).__name__} does not define rule()")

    def entries(self, at: Tile, xp: Any) -> Any:
        """[batch or 1, 1, rows, keys]"""
        return self.entry(at.k_pos - at.q_pos, xp)

    def by_head(self, table: Any) -> Any:
        """The table or its gradient as [heads, entries]; a view."""
        return table.T if self.heads_last else table

    def check(self, size: Size) -> None:
        name = f"bias {type(self).__name__} table"
        check_dtype(name, self.table, "float")
        shape = tuple(self.table.shape)
        heads = shape[-1 if self.heads_last else 0] if shape else 0
        if len(shape) != 2 or 0 in shape or heads not in (1, size.q_heads):
            axes = f"{size.q_heads} or 1, entries"
            if self.heads_last:
                axes = f"entries, {size.q_heads} or 1"
            raise invalid(name, found=f"shape {shape}", needed=f"shape ({axes})")

    def values(self, at: Tile, xp: Any) -> Any:
        rows = xp.astype(self.by_head(self.table), at.dtype)
        if rows.shape[0] > 1:
            rows = rows[at.heads]
        entry = self.entries(at, xp)
        found = xp.take(rows, xp.reshape(entry, (-1,)), axis=1)
        batch, _, *tile = entry.shape
        return xp.permute_dims(xp.reshape(found, (rows.shape[0], batch, *tile)), (1, 0, 2, 3))

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        (gradient,) = gradients
        heads, entries = gradient.shape[::-1] if self.heads_last else gradient.shape
        entry = self.entries(at, xp)
        if entry.shape[0] == 1:
            d_scores = xp.sum(d_scores, axis=0, keepdims=True)
        if heads == 1:
            d_scores = xp.sum(d_scores, axis=1, keepdims=True)
        by_head = xp.reshape(xp.permute_dims(d_scores, (1, 0, 2, 3)), (d_scores.shape[1], -1))
        sums = _sums(xp.reshape(entry, (-1,)), by_head, entries, xp)
        own_heads = slice(None) if heads == 1 else at.heads
        if self.heads_last:
            gradient[:, own_heads] += sums.T
        else:
            gradient[own_heads] += sums

    def on_device(self) -> NamedTuple:
        return _OnDevice(_offset_fragment, _entry, self.table, *self.device_strides(), self.rule())

    def device_strides(self) -> tuple[int, int]:
        """Of heads and entries."""
        heads, entry_stride = self.table.shape[0], self.table.strides[1]
        head_stride = self.table.strides[0]
        if self.heads_last:
            heads, head_stride, entry_stride = self.table.shape[1], entry_stride, head_stride
        return 0 if heads == 1 else head_stride, entry_stride


class _OnDevice(NamedTuple):
    offset_fragment: Any
    entry: Any
    table: Any
    head_stride: int
    entry_stride: int
    rule: Any


@jit
def _offset_fragment(offset, at, own):
    row = own.table + at.head * own.head_stride
    return tl.load(row + _entry(offset, own) * own.entry_stride).to(tl.float32)


@jit
def _entry(offset, own):
    return own.rule.entry(offset, own.rule)


def _sums(index: Any, values: Any, count: int, xp: Any) -> Any:
    """[H, count]: of values [H, k] those that share an index [k], added in a fixed order."""
    device = device_of(values)
    total = xp.zeros((values.shape[0], count), dtype=values.dtype, device=device)
    if hasattr(total, "at"):  # JAX
        return total.at[:, index].add(values)
    if not hasattr(total, "scatter_add_"):  # NumPy, CuPy
        xp.add.at(total, (slice(None), index), values)
    elif on_host(total):
        total.scatter_add_(1, index.expand_as(values), values)
    else:  # the other adds in any order there
        heads = xp.arange(total.shape[0], device=device)[:, None]
        total.index_put_((heads, index), values, accumulate=True)
    return total
