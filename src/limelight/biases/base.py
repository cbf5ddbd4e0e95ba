"""The contract of a bias: a number added to the scaled score.

A bias is one file with one frozen dataclass: `values`, its meaning, written once for any array
library; `fold`, which reduces the gradient of a tile of scores to the gradient of its parameters;
`check` for its tensors; `on_device`, the same for the fused kernels. Biases compose with `+`.

On the device a bias is a NamedTuple of a `jit` function and of whatever that reads (pointers,
strides, numbers; those named in capitals are compiled in), which it gets back as `own`. Where a
bias depends on k_pos - q_pos alone, the offset, the function is best `offset_fragment(offset, at,
own)`, which returns the bias at a line of offsets: a kernel asks for each once a tile. Else it is
`fragment(scores, at, own)`, which returns the scores with `at.unit` times the bias added (the
scores may still wait for their scale). `at` has batch, head (query heads), q_len, kv_len and
query_start. For a fragment it has q_pos and k_pos, which broadcast against the scores in whichever
orientation a kernel keeps them; q_near and k_near, which are positions as float32, counted from a
place nearby: quick where their difference is all; and side, which is -1 in a tile where no key
comes after any query, 1 where none comes before any, else 0.

A bias that makes a product of its own has `product_fragment(scores, at, own, precision)` instead,
whose precision is for `tl.dot`. One that reads the query (`query_dim`) finds the tile's queries
[rows, head_dim] in `at.query`, and has `add_to_query(d_query, d_scores, at, own, precision)` too.
A tile of its keys begins at a multiple of its length.

The functions are `triton.jit`'s, or `limelight.biases.jit`'s with `limelight.biases.tl`, which are
the same and import Triton on first use only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from limelight.errors import invalid_type
from limelight.terms import Composite, Term
from limelight.tile import Tile

GradientKind = Literal["head", "dense", "offset", "pair", "rows", "vectors"]


class Bias(Term):
    """Base class of biases. `a + b` adds both. Every tensor field is a differentiable parameter."""

    argument: ClassVar[str] = "bias"

    # Whether values may be -inf, which hides a key as a mask does.
    may_hide: ClassVar[bool] = False

    # Whether it has a `product_fragment` on the device.
    multiplies: ClassVar[bool] = False

    # Whether its function on the device takes scores as [queries, keys] only, never transposed.
    upright: ClassVar[bool] = False

    # How the fused kernels make the gradient of the tensor.
    # "head": one number for each (batch, head), the sum over a matrix of scores of d_scores times
    #     `slope(at, own)`, a field on the device, elementwise; it costs no product.
    # "dense": every score has an entry (dimensions of size 1 are shared); walked tile by tile.
    # "offset": a TableBias, whose `entry(offset, own)` says what shares an entry; all biases of
    #     this kind share one walk along diagonals.
    # "pair": a TableBias with `entry(q_pos, k_pos, own)`, negative where there is none; takes
    #     memory for a few matrices of scores, of all heads and one batch element.
    # "rows": every row of scores has its own entries, added up on the way along it. On the device
    #     `no_rows(own, rows, keys)` starts the sums, `add_rows(sums, d_scores, at, own, precision)`
    #     adds a tile's [rows, keys], `store_rows(sums, row, matrix, own)` writes them; own then has
    #     gradients in the place of tensors.
    # "vectors": a vector for each offset, times the query; see kernels/vector_gradient.py.
    gradient: ClassVar[GradientKind | None] = None

    def values(self, at: Tile, xp: Any) -> Any:
        """Numbers that broadcast against the tile's scores (batch, heads, rows, keys)."""
        raise NotImplementedError(f"{type(self).__name__} does not define values(at, xp)")

    def on_device(self) -> NamedTuple:
        """The bias as a kernel takes it. Called on the form that holds device arrays."""
        raise NotImplementedError(f"{type(self).__name__} does not define on_device()")

    def hides(self) -> bool:
        return any(type(part).may_hide for part in self.parts() if isinstance(part, Bias))

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        """Adds this tile's part to the gradients of the tensors, in the order of `tensors()`.

        d_scores: [batch, heads, rows, keys] of the tile, float32 or float64. gradients: one
        accumulator per tensor, of its shape, or None where no gradient is wanted. It adds by
        `gradient[index] += part` and by nothing else, as it may be an `Accumulator`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define fold(...)")

    # A bias whose values depend on the query too defines these two, and finds it in `at.query`.

    def query_dim(self) -> int | None:
        """The head_dim that the query must have; None where the bias does not read it."""
        return None

    def fold_query(self, d_scores: Any, at: Tile, xp: Any) -> Any:
        """What the gradient of the tile's queries, [batch, heads, rows, head_dim], gains."""
        raise NotImplementedError(f"{type(self).__name__} does not define fold_query(...)")

    def reads_query(self) -> bool:
        return any(part.query_dim() is not None for part in self.parts() if isinstance(part, Bias))

    def makes_products(self) -> bool:
        return any(type(part).multiplies for part in self.parts() if isinstance(part, Bias))

    def __add__(self, other: Bias) -> Bias:
        if not isinstance(other, Bias):
            raise invalid_type("bias", found=type(other).__name__, needed="another limelight bias")
        return Sum.joined(self, other)


class Accumulator:
    """A gradient that tiles add to, over an array that may never change itself, as JAX's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __setitem__(self, index: Any, part: Any) -> None:
        if hasattr(self.value, "at"):
            self.value = self.value.at[index].set(part)
        else:
            self.value[index] = part


@dataclass(frozen=True)
class Sum(Composite, Bias):
    """The sum of its children. Written `a + b`."""

    children: tuple[Bias, ...]

    def values(self, at: Tile, xp: Any) -> Any:
        # Each in the scores' dtype: a sum in half precision would lose digits of both.
        first, *others = (xp.astype(child.evaluated(at, xp), at.dtype) for child in self.children)
        return sum(others, start=first)

    def fold(self, d_scores: Any, at: Tile, xp: Any, gradients: list[Any]) -> None:
        start = 0
        for child in self.children:
            stop = start + len(child.tensors())
            if any(gradient is not None for gradient in gradients[start:stop]):
                child.fold(d_scores, at, xp, gradients[start:stop])
            start = stop

    def fold_query(self, d_scores: Any, at: Tile, xp: Any) -> Any:
        return sum(c.fold_query(d_scores, at, xp) for c in self.children if c.reads_query())

    def __repr__(self) -> str:
        return " + ".join(repr(child) for child in self.children)
