"""An example of every mask and bias, for pictures, `limelight show` and `limelight explain`.

A class whose fields all have defaults needs no entry. Tensors are described before they are made,
so that one can be asked about at any size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from limelight import biases, masks
from limelight.biases import Bias
from limelight.errors import invalid
from limelight.masks import Mask
from limelight.terms import Composite, Term
from limelight.tile import Size


@dataclass(frozen=True)
class Array:
    """A tensor that `values()` would make."""

    shape: tuple[int, ...]
    dtype: str
    values: Callable[[], np.ndarray]


def _key_lengths(size: Size) -> dict[str, Any]:
    spread = np.linspace(0.65, 1.0, size.batch)
    lengths = np.maximum(1, (size.kv_len * spread).astype(np.int64))
    return {"lengths": Array((size.batch,), "int64", lambda: lengths)}


def _documents(size: Size) -> dict[str, Any]:
    """Four documents of different lengths, and some padding at the end."""
    ends = np.array([0.2, 0.5, 0.62, 0.92])

    def ids(length: int) -> np.ndarray:
        place = (np.arange(length) + 0.5) / max(length, 1)
        found = np.searchsorted(ends, place)
        return np.where(found == len(ends), -1, found)

    arrays = {"ids": Array((size.kv_len,), "int64", lambda: ids(size.kv_len))}
    if size.q_len != size.kv_len:
        arrays["query_ids"] = Array((size.q_len,), "int64", lambda: ids(size.q_len))
    return arrays


def _packed(size: Size) -> dict[str, Any]:
    """Three sequences of different lengths, and some padding at the end."""
    ends = np.array([0.0, 0.35, 0.55, 0.95])

    def bounds(length: int) -> Array:
        return Array(ends.shape, "int32", lambda: (ends * length).astype(np.int32))

    arrays = {"cu_seqlens": bounds(size.kv_len)}
    if size.q_len != size.kv_len:
        arrays["query_cu_seqlens"] = bounds(size.q_len)
    return arrays


def _block_sparse(size: Size) -> dict[str, Any]:
    """The blocks at the diagonal, the first column of blocks, and some others, as BigBird has."""
    block = next((b for b in (128, 64, 32, 16, 8) if 8 * b <= size.kv_len), 4)
    shape = (1, size.q_heads, -(-size.q_len // block), -(-size.kv_len // block))

    def blocks() -> np.ndarray:
        row, key = np.indices(shape[2:])
        return (_random(shape) > 1.3) | (abs(row - key) <= 1) | (key == 0)

    return {"block_mask": Array(shape, "bool", blocks), "q_block": block, "kv_block": block}


def _dense_mask(size: Size) -> dict[str, Any]:
    shape = (1, 1, size.q_len, size.kv_len)
    return {"tensor": Array(shape, "bool", lambda: _random(shape) > -0.4)}


def _dense_bias(size: Size) -> dict[str, Any]:
    return {"tensor": _normal((1, size.q_heads, size.q_len, size.kv_len))}


def _decomposed(size: Size) -> dict[str, Any]:
    """The most nearly square grid of lines that the keys fill, but for a few."""
    lines = max(1, int(size.kv_len**0.5))
    row = size[:3]
    return {
        "rel_h": _normal((*row, lines)),
        "rel_w": _normal((*row, max(1, size.kv_len // lines))),
    }


def _shaw_relative(size: Size, head_dim: int) -> dict[str, Any]:
    return {"key_table": _waves((2 * max(1, size.kv_len // 5) + 1, head_dim))}


def _transformer_xl(size: Size, head_dim: int) -> dict[str, Any]:
    offsets = size.q_len + size.kv_len - 1
    return {
        "position_keys": _waves((size.q_heads, offsets, head_dim)),
        "position_scores": _normal((size.q_heads, offsets)),
        "first": 1 - size.q_len,
    }


def _waves(shape: tuple[int, ...]) -> Array:
    """Of each offset and dimension a cosine, the dimensions with ever longer waves."""

    def values() -> np.ndarray:
        offset = np.arange(shape[-2]) - shape[-2] // 2
        waves = np.cos(offset[:, None] * 0.01 ** np.linspace(0, 1, shape[-1])) / shape[-1]
        return np.array(np.broadcast_to(waves, shape), np.float32)

    return Array(shape, "float32", values)


def _normal(shape: tuple[int, ...]) -> Array:
    return Array(shape, "float32", lambda: _random(shape).astype(np.float32))


def _relative(size: Size) -> dict[str, Any]:
    reach = max(1, size.kv_len // 4)
    shape = (size.q_heads, 2 * reach + 1)
    return {"table": Array(shape, "float32", lambda: _random(shape).astype(np.float32))}


def _t5(size: Size) -> dict[str, Any]:
    shape = (32, size.q_heads)
    return {"table": Array(shape, "float32", lambda: _random(shape).astype(np.float32))}


def _relative_2d(size: Size) -> dict[str, Any]:
    """A window as near to a square as the number of keys allows."""
    height = max(
        n for n in range(1, size.kv_len + 1) if size.kv_len % n == 0 and n**2 <= size.kv_len
    )
    width = size.kv_len // height
    shape = ((2 * height - 1) * (2 * width - 1), size.q_heads)
    table = Array(shape, "float32", lambda: _random(shape).astype(np.float32))
    return {"table": table, "height": height, "width": width}


def _random(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


EXAMPLES: dict[type[Term], Callable[[Size], dict[str, Any]]] = {
    masks.SlidingWindow: lambda size: {"left": max(1, size.kv_len // 5)},
    masks.PrefixLM: lambda size: {"prefix_length": max(1, size.kv_len // 3)},
    masks.KeyLengths: _key_lengths,
    masks.Packed: _packed,
    masks.BlockSparse: _block_sparse,
    masks.Documents: _documents,
    masks.DenseMask: _dense_mask,
    biases.DenseBias: _dense_bias,
    biases.RelativeBias: _relative,
    biases.T5Bias: _t5,
    biases.RelativeBias2D: _relative_2d,
    biases.DecomposedBias: _decomposed,
}
# Of biases that read the query: its head_dim is needed too.
READING: dict[type[Term], Callable[[Size, int], dict[str, Any]]] = {
    biases.ShawRelative: _shaw_relative,
    biases.TransformerXLBias: _transformer_xl,
}


def kinds(base: type[Term]) -> dict[str, type[Term]]:
    """limelight's own masks (or biases) by the names of the command line.

    >>> [name for name in kinds(Bias) if name.startswith(("a", "d"))]
    ['alibi', 'decomposed_bias', 'dense_bias']
    """
    module = masks if issubclass(base, Mask) else biases
    found = [getattr(module, name) for name in module.__all__]
    return {
        spelled(kind): kind
        for kind in found
        if kind is not base and issubclass(kind, base) and not issubclass(kind, Composite)
    }


def spelled(kind: type[Term]) -> str:
    """`KeyLengths` as `key_lengths`; a run of capitals is one word.

    >>> spelled(masks.KeyLengths), spelled(biases.ALiBi)
    ('key_lengths', 'alibi')
    """
    if kind is biases.ALiBi:
        return "alibi"
    name = kind.__name__
    words = ""
    for before, letter, after in zip(" " + name, name, name[1:] + " ", strict=False):
        starts = letter.isupper() and (before.islower() or after.islower()) and words
        words += f"_{letter.lower()}" if starts else letter.lower()
    return words


def example(
    kind: type[Term], size: Size, given: dict[str, Any] | None = None, head_dim: int = 64
) -> Mask | Bias:
    """A term of this kind for a problem of this size, with an `Array` in the place of each tensor.

    given: plain fields with values to use instead of the example's. Raises ValueError where a
    field without default has neither.
    """
    values = EXAMPLES[kind](size) if kind in EXAMPLES else {}
    if kind in READING:
        values = READING[kind](size, head_dim)
    if given and any(name in kind.plain_fields for name in values):
        # The example's numbers belong together: one that is given replaces them all.
        values = {name: value for name, value in values.items() if name in kind.tensor_fields}
    values |= given or {}
    missing = [
        field.name
        for field in fields(kind)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
        if field.name not in values
    ]
    if missing:
        raise invalid(
            spelled(kind), found=f"no {' and no '.join(missing)}", needed="a value for it"
        )
    return kind(**values)  # type: ignore[return-value]
