"""What masks and biases share: a term is a frozen dataclass, some of whose fields are tensors.

The same term exists in three forms: with the caller's tensors; with a `Layout` in the place of
each tensor (in a `Problem`, which holds no data); and as canonical text beside a list of tensors,
which is how a compiled graph carries it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

from limelight.errors import invalid, invalid_type
from limelight.tile import Size, Tile

if TYPE_CHECKING:
    from typing_extensions import Self


class Term:
    """A mask or a bias. Subclasses are frozen dataclasses and name their tensor fields."""

    tensor_fields: ClassVar[tuple[str, ...]] = ()
    plain_fields: ClassVar[tuple[str, ...]] = ()
    # Of each tensor field, with how many dimensions its first one is the batch; 0 for never. Where
    # that is not said, calls under jax.vmap run in turn. shares_batch: that dimension may be 1.
    batch_dimensions: ClassVar[tuple[int, ...] | None] = None
    shares_batch: ClassVar[bool] = False
    argument: ClassVar[str]  # "mask" or "bias": what error messages call it
    kinds: ClassVar[dict[str, type[Term]]] = {}
    kind: ClassVar[str]  # what `spec` calls the class

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # The full name, as two libraries may each have a bias called Relative; numbered where it is
        # taken, as a notebook defines its classes again and again.
        name = f"{cls.__module__}.{cls.__qualname__}"
        cls.kind = name if name not in Term.kinds else f"{name}#{len(Term.kinds)}"
        Term.kinds[cls.kind] = cls

    # Composite terms (And, Or, Sum) override these three.

    def tensors(self) -> list[Any]:
        """The tensors of this term and its children, in a fixed order; absent ones left out."""
        values = [getattr(self, name) for name in self.tensor_fields]
        return [value for value in values if value is not None]

    def with_tensors(self, tensors: Iterator[Any]) -> Self:
        """The same term with its tensors taken, in the order of `tensors()`, from an iterator."""
        if not self.tensor_fields:
            return self
        fields = {name: getattr(self, name) for name in self.plain_fields}
        for name in self.tensor_fields:
            fields[name] = None if getattr(self, name) is None else next(tensors)
        return type(self)._restored(fields)

    def spec(self) -> str:
        """The term as canonical JSON text, without the tensors."""
        # Formatted by hand: torch.compile traces this, and cannot trace the json module.
        present = [
            f'"{name}":{"false" if getattr(self, name) is None else "true"}'
            for name in self.tensor_fields
        ]
        plain = [f'"{name}":{_literal(getattr(self, name))}' for name in self.plain_fields]
        return f'["{self.kind}",{{{",".join(present + plain)}}}]'

    def parts(self) -> tuple[Term, ...]:
        """The leaves of the term: itself, or the leaves of its children."""
        return (self,)

    def map_tensors(self, change: Callable[[Any], Any]) -> Self:
        """The same term with `change` applied to every tensor."""
        if not self.tensor_fields:
            return self
        return self.with_tensors(iter([change(tensor) for tensor in self.tensors()]))

    def evaluated(self, at: Tile, xp: Any) -> Any:
        """`values(at, xp)` of a mask or bias; a TypeError with the class for what is none."""
        values = self.values(at, xp)  # type: ignore[attr-defined]
        shape = getattr(values, "shape", None)
        if (
            shape is None
            or len(shape) != 4
            or (self.argument == "mask" and values.dtype != xp.bool)
        ):
            found = type(values).__name__ if shape is None else f"{values.dtype} {tuple(shape)}"
            kind = "booleans" if self.argument == "mask" else "numbers"
            needed = f"{kind} that broadcast to (batch, heads, rows, keys), all four dimensions"
            raise invalid_type(f"{type(self).__name__}.values", found=found, needed=needed)
        return values

    @classmethod
    def check_fields(cls) -> None:
        """Raises TypeError for a dataclass some of whose fields are in neither list."""
        named = {*cls.tensor_fields, *cls.plain_fields}
        missing = [f.name for f in fields(cls) if f.name not in named] if is_dataclass(cls) else []
        if missing:
            raise invalid_type(
                cls.__name__,
                found=f"the fields {', '.join(missing)}",
                needed="every field in tensor_fields or in plain_fields",
            )

    def check(self, size: Size) -> None:
        """Raises a ValueError that names the argument where a tensor's shape or dtype is wrong.

        Called on the form that holds layouts: `tensor.shape` and `tensor.dtype` (a string).
        """

    def resolved(self, q_heads: int, asarray: Callable[[Sequence[float]], Any]) -> Self:
        """The term with its default tensors filled in; `asarray` makes them on the device."""
        return self

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> Self:
        """An instance with these fields, past the constructor: they were checked once already."""
        term = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(term, name, value)
        return term


@dataclass(frozen=True)
class Composite(Term):
    """A term made of others: `children`."""

    children: tuple[Any, ...]

    def __post_init__(self) -> None:
        for child in self.children:
            if not isinstance(child, Term) or child.argument != self.argument:
                found = type(child).__name__
                raise invalid_type(type(self).__name__, found=found, needed=f"a {self.argument}")
        if not self.children:
            raise invalid(type(self).__name__, found="no children", needed="one or more")

    def tensors(self) -> list[Any]:
        return [tensor for child in self.children for tensor in child.tensors()]

    def with_tensors(self, tensors: Iterator[Any]) -> Self:
        return type(self)(tuple([child.with_tensors(tensors) for child in self.children]))

    def map_tensors(self, change: Callable[[Any], Any]) -> Self:
        return type(self)(tuple([child.map_tensors(change) for child in self.children]))

    def spec(self) -> str:
        return f'["{self.kind}",[{",".join([child.spec() for child in self.children])}]]'

    def parts(self) -> tuple[Term, ...]:
        return tuple([part for child in self.children for part in child.parts()])

    def check(self, size: Size) -> None:
        for child in self.children:
            child.check(size)

    def resolved(self, q_heads: int, asarray: Callable[[Sequence[float]], Any]) -> Self:
        return type(self)(tuple([child.resolved(q_heads, asarray) for child in self.children]))

    @classmethod
    def joined(cls, first: Term, second: Term) -> Self:
        """Both terms under one composite; composites of the same kind are flattened."""
        left = first.children if isinstance(first, cls) else (first,)
        right = second.children if isinstance(second, cls) else (second,)
        return cls((*left, *right))


def _literal(value: Any) -> str:  # what from_spec reads again
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    number: Any = value
    if not isinstance(value, (int, float, Integral)):
        raise invalid_type("plain_fields", found=repr(value), needed="numbers, text, bool or None")
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    # Tracing may hold a number as a symbol, which has no text; as a key of a dictionary it becomes
    # a constant of the graph.
    return str(next(iter({number: None})))


@lru_cache(maxsize=4096)
def _template(spec: str) -> Term:
    def build(node: list[Any]) -> Term:
        kind, content = node
        cls = Term.kinds[kind]
        if isinstance(content, list):
            return cls(tuple(build(child) for child in content))  # type: ignore[call-arg]
        fields = dict(content)
        for name in cls.tensor_fields:
            # A placeholder where a tensor belongs; with_tensors replaces it.
            fields[name] = ... if fields[name] else None
        return cls._restored(fields)

    return build(json.loads(spec))


def from_spec(spec: str, tensors: Iterator[Any]) -> Term:
    """The term whose `spec()` this is, with its tensors from an iterator."""
    return _template(spec).with_tensors(tensors)


# Checks of a term's tensors, shared by the files of masks and biases.


def check_broadcastable(name: str, shape: Sequence[int], size: Size) -> None:
    """A dense tensor: two to four dimensions, each equal to the scores' or 1."""
    needed = f"a shape that broadcasts to (batch, q_heads, q_len, kv_len) = {tuple(size)}"
    if not 2 <= len(shape) <= 4:
        raise invalid(name, found=f"shape {tuple(shape)}", needed=needed)
    for found, full in zip(reversed(shape), reversed(size), strict=False):
        if found not in (1, full):
            raise invalid(name, found=f"shape {tuple(shape)}", needed=needed)


def broadcast_strides(tensor: Any) -> tuple[int, int, int, int]:
    """Strides along (batch, head, row, key), in elements; 0 where the tensor is broadcast."""
    strides = [
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.strides, strict=True)
    ]
    return (*([0] * (4 - len(strides))), *strides)  # type: ignore[return-value]


def check_dtype(name: str, tensor: Any, kind: str) -> None:
    """`kind` is "bool", "int" or "float"; the tensor is a layout."""
    dtype = getattr(tensor, "dtype", type(tensor).__name__)
    if dtype not in _DTYPES[kind]:
        names = {"bool": "bool", "int": "an integer dtype", "float": "a floating-point dtype"}
        raise invalid(name, found=f"dtype {dtype}", needed=names[kind])


def check_offset(name: str, offset: int | None) -> None:
    """One that kernels can add to positions, which are 32-bit numbers."""
    if offset is not None and abs(offset) > 2**30:
        raise invalid(name, found=offset, needed="an offset within 30 bits")


_DTYPES = {
    "bool": ("bool",),
    "int": ("int8", "int16", "int32", "int64", "uint8"),
    "float": ("float16", "bfloat16", "float32", "float64"),
}
