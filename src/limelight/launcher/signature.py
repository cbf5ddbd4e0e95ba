"""A kernel's signature: what is an argument, what is a constant, and in which order they arrive.

A signature maps each parameter of the kernel to a type, a constant, or a tuple of them:

    {"query": "*bf16:16", "biases": (ALiBi(alibi_fragment, "*fp32"),), "scale": "fp32", "ROWS": 64}

A string is the type of a run-time argument, in Triton's own notation: `*fp16` a pointer, `i32`,
`i64`, `u32`, `u64`, `fp32`, `fp64` numbers; `:16` behind it promises that the address or the number
is a multiple of 16. Anything else is a constant: a number, a flag, None, a `@triton.jit` function;
a string that is one goes into a `Constant`.

Tuples may be nested, and a NamedTuple keeps its field names in the kernel. The compiled kernel sees
the arguments depth first, in the order of its Python parameters; constants leave no trace.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[int, ...]

NUMBER_CODES = {"i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
POINTER_CODE = "Q"


@dataclass(frozen=True)
class Constant:
    """A value that is compiled into the kernel; needed for strings, allowed for all."""

    value: Any


@dataclass(frozen=True)
class Parameter:
    """One run-time argument of a compiled kernel.

    name: where it stands in the signature, such as `scale` or `biases.0.slopes`. kind: its type,
    such as `*fp16` or `i32`. multiple_of: what divides the address or number, 1 if unknown.
    """

    name: str
    kind: str
    multiple_of: int = 1

    @property
    def code(self) -> str:
        """The letter that packs it with `struct`, at its own size: a fp32 is four bytes."""
        return POINTER_CODE if self.kind.startswith("*") else NUMBER_CODES[self.kind]

    @property
    def size(self) -> int:
        """Bytes; its alignment too."""
        return struct.calcsize(self.code)

    def describe(self) -> str:
        return f"{self.name} ({'pointer' if self.kind.startswith('*') else self.kind})"


@dataclass(frozen=True)
class Signature:
    """A signature in the three parts that Triton's compiler wants, and the flat list that we want.

    types: the signature with "constexpr" in the place of each constant. constants: by path, the
    index of the parameter followed by indices into its tuples. hints: paths of promised divisors.
    """

    types: dict[str, Any]
    constants: dict[Path, Any]
    hints: dict[Path, list[list[Any]]]
    parameters: tuple[Parameter, ...]

    @classmethod
    def read(cls, names: Sequence[str], signature: Mapping[str, Any]) -> Signature:
        """The signature, as above, of a kernel whose parameters are `names`.

        Raises ValueError for a parameter that is missing or unknown, and for a type that cannot be
        passed.
        """
        if missing := [name for name in names if name not in signature]:
            raise ValueError(f"the signature lacks {', '.join(missing)}")
        if unknown := signature.keys() - set(names):
            raise ValueError(f"the kernel has no parameter {', '.join(sorted(unknown))}")

        result = cls({}, {}, {}, ())
        parameters: list[Parameter] = []
        for index, name in enumerate(names):
            result.types[name] = _types(signature[name])
            for label, path, leaf in _leaves(name, (index,), signature[name]):
                if not isinstance(leaf, str):
                    result.constants[path] = leaf.value if isinstance(leaf, Constant) else leaf
                    continue
                parameter = _parameter(label, leaf)
                parameters.append(parameter)
                if parameter.multiple_of > 1:
                    result.hints[path] = [["tt.divisibility", parameter.multiple_of]]
        return cls(result.types, result.constants, result.hints, tuple(parameters))


def _types(node: Any) -> Any:
    if isinstance(node, tuple):
        parts = [_types(part) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node.partition(":")[0] if isinstance(node, str) else "constexpr"


def _leaves(label: str, path: Path, node: Any) -> Iterator[tuple[str, Path, Any]]:
    if not isinstance(node, tuple):
        yield label, path, node
        return
    fields = getattr(node, "_fields", range(len(node)))
    for index, (field, part) in enumerate(zip(fields, node, strict=True)):
        yield from _leaves(f"{label}.{field}", (*path, index), part)


def _parameter(label: str, text: str) -> Parameter:
    kind, _, divisor = text.partition(":")
    if not (kind.startswith("*") and len(kind) > 1) and kind not in NUMBER_CODES:
        known = ", ".join(NUMBER_CODES)
        raise ValueError(
            f"{label}: found type {text!r}, needed a pointer such as *fp16, or {known}"
        )
    if divisor and not divisor.isdecimal():
        raise ValueError(
            f"{label}: found {text!r}, needed a number after the colon, as in {kind}:16"
        )
    return Parameter(label, kind, int(divisor or 1))
