"""Launch: one kernel with its grid and arguments, for whoever launches it. Imports no compiler.

The arguments of a kernel are a tree of tuples. Its leaves are `Array` (a pointer), `Scalar` (a
number passed at run time) and anything else, which is compiled into the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

POINTER_TYPES = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
    "bool": "*i1",
    "uint8": "*u8",
    "int8": "*i8",
    "int16": "*i16",
    "int32": "*i32",
    "int64": "*i64",
}
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor on the device. Strides count elements.

    alignment: bytes, the largest power of two up to 16 that divides the address of every row.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 1

    @property
    def type(self) -> str:
        return POINTER_TYPES[self.dtype]

    @property
    def divisor(self) -> int:
        return self.alignment if self.alignment == 16 else 1


def null(dtype: str) -> Array:
    """An optional tensor that is absent; the type of the pointer stays the same."""
    return Array(0, (), (), dtype)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number passed at run time. divisor: what the kernel may take it to be a multiple of."""

    value: int | float
    type: str
    divisor: int = 1


def i32(value: int) -> Scalar:
    return Scalar(value, "i32")


def i64(value: int) -> Scalar:
    return Scalar(value, "i64")


def f32(value: float) -> Scalar:
    return Scalar(value, "fp32")


class Shape(NamedTuple):
    """Scratch memory to allocate, contiguous."""

    shape: tuple[int, ...]
    dtype: str


Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel to run.

    kernel: the `triton.jit` function. grid: programs, in one dimension. arguments: by parameter, in
    the kernel's order. constants: its compile-time parameters.
    """

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    constants: dict[str, int]
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """Every leaf of the arguments with its path, the first step of which is the parameter."""
        for position, argument in enumerate(self.arguments.values()):
            yield from _leaves((position,), argument)

    def values(self) -> list[tuple[str, int | float]]:
        """What a launcher packs, in order: the type ("*fp16", "i32", "fp32", …) and the value.

        Triton's own scratch pointers follow in the compiled kernel and are not listed here.
        """
        return [
            (leaf.type, leaf.address if isinstance(leaf, Array) else leaf.value)
            for _, leaf in self.leaves()
            if isinstance(leaf, (Array, Scalar))
        ]

    # What triton.compiler.ASTSource needs.

    def signature(self) -> dict[str, Any]:
        types = {name: _types(argument) for name, argument in self.arguments.items()}
        return {**types, **dict.fromkeys(self.constants, "constexpr")}

    def compiled_in(self) -> dict[Path, Any]:
        static = {
            path: leaf for path, leaf in self.leaves() if not isinstance(leaf, (Array, Scalar))
        }
        first = len(self.arguments)
        return static | {(first + n,): value for n, value in enumerate(self.constants.values())}

    def hints(self) -> dict[Path, list[list[Any]]]:
        return {
            path: [["tt.divisibility", leaf.divisor]]
            for path, leaf in self.leaves()
            if isinstance(leaf, (Array, Scalar)) and leaf.divisor > 1
        }


def _leaves(path: Path, node: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, tuple):
        for position, child in enumerate(node):
            yield from _leaves((*path, position), child)
    else:
        yield path, node


def _types(node: Any) -> Any:
    if isinstance(node, tuple):
        children = [_types(child) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return node.type if isinstance(node, (Array, Scalar)) else "constexpr"
