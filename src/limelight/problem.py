"""Problem: everything about a call that can decide a kernel, and no tensor data.

A problem is checked when it is made, whether it describes real tensors or was written by hand, so a
backend never sees a wrong one, and a wrong call ends here, before any launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Literal

from limelight.biases import Bias
from limelight.devices import CPU, Device
from limelight.errors import invalid, invalid_type, is_integer
from limelight.masks import Mask
from limelight.tile import Size

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MAX_HEAD_DIM = 256


def row_alignment(
    address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> int:
    """Bytes, the largest power of two up to 16 that divides the address of every row."""
    steps = [s for s, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    return math.gcd(16, address, *(item_bytes * step for step in steps))


@dataclass(frozen=True)
class Layout:
    """One tensor without its data. Strides count elements.

    alignment: bytes, the largest power of two up to 16 that divides the address of every row.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = 16

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], dtype: str) -> Layout:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        row_bytes = ITEM_BYTES.get(dtype, 1) * shape[-1] if shape else 16
        return cls(shape, tuple(reversed(strides)), dtype, math.gcd(row_bytes, 16) or 16)

    @classmethod
    def heads_last(cls, shape: tuple[int, ...], dtype: str) -> Layout:
        """(batch, heads, length, dim) that lies in memory as (batch, length, heads, dim)."""
        batch, heads, length, dim = shape
        own = cls.contiguous((batch, length, heads, dim), dtype)
        outer, row, head, last = own.strides
        return cls(shape, (outer, head, row, last), dtype, own.alignment)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == Layout.contiguous(self.shape, self.dtype).strides

    @property
    def unit_stride(self) -> bool:
        """Whether the elements of a row lie side by side."""
        return self.strides[-1] == 1 or self.shape[-1] <= 1

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Problem:
    """One attention, described. `Problem.of` writes one by hand.

    query, key, value: layouts of (batch, heads, length, head_dim).
    mask, bias: the call's own, with a Layout in the place of each tensor.
    gradients: names of what a gradient is wanted for: "query", "key", "value", "sinks" and, for the
        n-th tensor of the bias, "bias.n".
    library: the array library ("torch", "jax", "cupy", "numpy"), with its version.
    triton_version: None where Triton is not installed; "" where that is not known.
    allow_tf32: whether the library's switch lets float32 products round to TF32.
    cudnn_version: the cuDNN that the library has loaded, 91900 for 9.19.0; None where that is not
        known.

    Raises ValueError or TypeError, naming the argument, where the parts do not fit together.
    """

    query: Layout
    key: Layout
    value: Layout
    mask: Mask | None = None
    bias: Bias | None = None
    query_start: int | Literal["end"] | Layout | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Layout | None = None
    dropout_p: float = 0.0
    gradients: tuple[str, ...] = ()
    return_lse: bool = False
    deterministic: bool = False
    library: str = "torch"
    library_version: str = ""
    device: Device = CPU
    triton_version: str | None = ""
    allow_tf32: bool = False
    cudnn_version: int | None = None

    @classmethod
    def of(
        cls,
        *,
        batch: int = 1,
        heads: int = 8,
        kv_heads: int | None = None,
        q_len: int = 1024,
        kv_len: int | None = None,
        head_dim: int = 64,
        value_dim: int | None = None,
        dtype: str = "bfloat16",
        training: bool = False,
        **others: Any,
    ) -> Problem:
        """A problem of contiguous tensors; keys are as many as queries unless `kv_len` is given.

        training: wants the gradients of query, key, value and of every parameter of the bias.
        others: further fields of Problem.

        >>> Problem.of(heads=32, kv_heads=8, q_len=4096, head_dim=128).group
        4
        """
        dtype = str(dtype).removeprefix("torch.")
        kv_heads = heads if kv_heads is None else kv_heads
        kv_len = q_len if kv_len is None else kv_len
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len,
            "kv_len": kv_len, "head_dim": head_dim, "value_dim": value_dim,
        }  # fmt: skip
        for name, found in sizes.items():
            if not is_integer(found) or found < 0:
                raise invalid(name, found=repr(found), needed="an integer, 0 or more")
        bias = others.get("bias")
        if training:
            parameters = len(bias.tensors()) if bias is not None else 0
            sinks = ("sinks",) if others.get("sinks") is not None else ()
            names = ("query", "key", "value", *sinks, *(f"bias.{n}" for n in range(parameters)))
            others["gradients"] = names
        return cls(
            query=Layout.contiguous((batch, heads, q_len, head_dim), dtype),
            key=Layout.contiguous((batch, kv_heads, kv_len, head_dim), dtype),
            value=Layout.contiguous((batch, kv_heads, kv_len, value_dim), dtype),
            **others,
        )

    def __post_init__(self) -> None:
        self._check_tensors()
        self._check_numbers()
        self._check_terms()
        self._check_gradients()
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        object.__setattr__(self, "scale", float(scale))
        object.__setattr__(self, "dropout_p", float(self.dropout_p))
        if self.softcap is not None:
            object.__setattr__(self, "softcap", float(self.softcap))

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __hash__(self) -> int:  # asked at every call
        return self._hash

    def __getstate__(self) -> dict[str, Any]:  # hashes differ between processes
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    # Sizes, by the names used everywhere.

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def q_heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one head of keys and values."""
        return self.q_heads // self.kv_heads

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def dtype(self) -> str:
        return self.query.dtype

    @property
    def size(self) -> Size:
        return Size(self.batch, self.q_heads, self.q_len, self.kv_len)

    @cached_property
    def start(self) -> int | None:
        """The position of the first query; None where it differs between batch elements."""
        if self.query_start is None:
            return 0
        if self.query_start == "end":
            per_batch = self.mask is not None and self.mask.key_lengths()
            return None if per_batch else self.kv_len - self.q_len
        return int(self.query_start) if is_integer(self.query_start) else None

    @cached_property
    def copies(self) -> tuple[str, ...]:
        """The inputs whose rows are not contiguous, so that they are copied first."""
        named = (("query", self.query), ("key", self.key), ("value", self.value))
        return tuple(name for name, layout in named if not layout.unit_stride)

    # Checks.

    def _check_tensors(self) -> None:
        query, key, value = self.query, self.key, self.value
        for name, layout in (("query", query), ("key", key), ("value", value)):
            if len(layout.shape) != 4:
                raise invalid(
                    name,
                    found=f"shape {layout.shape}",
                    needed="four dimensions (batch, heads, length, head_dim)",
                )
            if layout.dtype not in DTYPES:
                raise invalid_type(
                    name, found=f"dtype {layout.dtype}", needed=f"one of {', '.join(DTYPES)}"
                )
            if layout.dtype != query.dtype:
                raise invalid_type(
                    name, found=f"dtype {layout.dtype}", needed=f"that of query, {query.dtype}"
                )
            if layout.shape[0] != query.shape[0]:
                raise invalid(
                    name,
                    found=f"batch {layout.shape[0]}",
                    needed=f"that of query, {query.shape[0]}",
                )
            if layout.shape[1] < 1:
                raise invalid(name, found=f"{layout.shape[1]} heads", needed="at least one head")
            if not 1 <= layout.shape[3] <= MAX_HEAD_DIM:
                raise invalid(
                    name, found=f"head_dim {layout.shape[3]}", needed=f"1 to {MAX_HEAD_DIM}"
                )
        if key.shape[3] != query.shape[3]:
            raise invalid(
                "key", found=f"head_dim {key.shape[3]}", needed=f"that of query, {query.shape[3]}"
            )
        for axis, what in ((1, "heads"), (2, "length")):
            if value.shape[axis] != key.shape[axis]:
                raise invalid(
                    "value",
                    found=f"{what} {value.shape[axis]}",
                    needed=f"that of key, {key.shape[axis]}",
                )
        if query.shape[1] % key.shape[1]:
            raise invalid(
                "key",
                found=f"{key.shape[1]} heads",
                needed=f"a number that divides the {query.shape[1]} heads of query",
            )

    def _check_numbers(self) -> None:
        for name, number in (("scale", self.scale), ("softcap", self.softcap)):
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, Real):
                raise invalid_type(name, found=type(number).__name__, needed="a number or None")
            if not math.isfinite(number):
                raise invalid(name, found=number, needed="a finite number")
        if self.softcap is not None and self.softcap <= 0:
            raise invalid(
                "softcap", found=self.softcap, needed="a positive number, or None for no cap"
            )
        if isinstance(self.dropout_p, bool) or not isinstance(self.dropout_p, Real):
            raise invalid_type("dropout_p", found=type(self.dropout_p).__name__, needed="a number")
        for name, switch in (
            ("return_lse", self.return_lse),
            ("deterministic", self.deterministic),
        ):
            if not isinstance(switch, bool):
                raise invalid_type(name, found=repr(switch), needed="True or False")
        if not 0.0 <= self.dropout_p <= 1.0:
            raise invalid("dropout_p", found=self.dropout_p, needed="a probability from 0 to 1")
        if self.sinks is not None:
            if self.sinks.dtype not in DTYPES:
                raise invalid_type(
                    "sinks", found=f"dtype {self.sinks.dtype}", needed="a floating-point dtype"
                )
            if self.sinks.shape != (self.q_heads,):
                raise invalid(
                    "sinks",
                    found=f"shape {self.sinks.shape}",
                    needed=f"one logit per query head, shape ({self.q_heads},)",
                )

    def _check_terms(self) -> None:
        check_kinds(self.mask, self.bias)
        for term in (self.mask, self.bias):
            if term is not None:
                for part in term.parts():
                    type(part).check_fields()
                term.check(self.size)
        for part in self.bias.parts() if self.bias is not None else ():
            dim = part.query_dim()  # type: ignore[attr-defined]
            if dim not in (None, self.head_dim):
                raise invalid(
                    f"bias {type(part).__name__}",
                    found=f"a last dimension of {dim}",
                    needed=f"the head_dim of query, {self.head_dim}",
                )
        start = self.query_start
        if isinstance(start, Layout):
            if not start.dtype.startswith(("int", "uint")):
                raise invalid_type("query_start", found=f"dtype {start.dtype}", needed="integers")
            if start.shape != (self.batch,):
                raise invalid(
                    "query_start",
                    found=f"shape {start.shape}",
                    needed=f"one position per batch element, shape ({self.batch},)",
                )
        elif start is not None and start != "end" and not is_integer(start):
            raise invalid_type(
                "query_start",
                found=repr(start),
                needed='None, an integer, "end" or one per batch element',
            )
        if is_integer(start) and abs(start) > 2**62:
            raise invalid("query_start", found=start, needed="a position within 62 bits")
        if start is None and self.q_len != self.kv_len and self.mask and self.mask.is_ordered():
            raise invalid(
                "query_start",
                found=f"None, with {self.q_len} queries, {self.kv_len} keys and {self.mask!r}",
                needed="to say where the queries stand: query_start=0 (top-left: query 0 at "
                'key 0) or "end" (bottom-right: the last query at the last key)',
            )

    def _check_gradients(self) -> None:
        parameters = 0 if self.bias is None else len(self.bias.tensors())
        sinks = () if self.sinks is None else ("sinks",)
        known = ("query", "key", "value", *sinks, *(f"bias.{n}" for n in range(parameters)))
        if not isinstance(self.gradients, tuple) or any(n not in known for n in self.gradients):
            raise invalid(
                "gradients", found=repr(self.gradients), needed=f"a tuple of {', '.join(known)}"
            )


def check_kinds(mask: object, bias: object) -> None:
    """Raises TypeError for a mask that is no Mask, or a bias that is no Bias."""
    for name, term, base, dense in (
        ("mask", mask, Mask, "DenseMask"),
        ("bias", bias, Bias, "DenseBias"),
    ):
        if term is not None and not isinstance(term, base):
            raise invalid_type(
                name,
                found=term.__name__ if isinstance(term, type) else type(term).__name__,
                needed=f"an instance of limelight.{base.__name__}; "
                f"a tensor goes into limelight.{dense}",
            )
