"""Variant: the launches of one kind of attention on one target, for all sizes, strides and numbers.

They are what `kernels.plan` makes of a call whose sizes, strides, addresses and numbers are traced
(`traced.py`): there is no second plan that could differ from the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from limelight.backends.flash import Flash
from limelight.call import Call, Gradients
from limelight.devices import Device
from limelight.errors import invalid
from limelight.export.expression import Expression, names
from limelight.export.traced import Number, Trace, Unknown, Whole, expression_of
from limelight.grammar import parse_bias, parse_mask, written
from limelight.kernels import plan
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape
from limelight.kernels.program import recipe
from limelight.launcher import Recipe
from limelight.problem import Layout
from limelight.problem import Problem as Described
from limelight.tile import Size

ALIGNMENT = 256  # bytes, of the workspace and of each slice of it
FAR = 2**23  # elements or entries: a limit that few problems reach
PTX_VERSIONS = {60: 70, 90: 80, 100: 86, 120: 87}  # by the least target; older drivers take older

# No two are equal, and none is a head_dim: a dimension of a mask's or bias's tensor is known by it.
_EXAMPLE = Size(batch=1013, q_heads=1042, q_len=2003, kv_len=3001)
_SIZES = (*Size._fields, "kv_heads")


@dataclass(frozen=True)
class Problem:
    """What decides an exported kernel. mask, bias: as on the command line, or "none".

    softcap: whether scores are capped. gradients: "none" for a forward; of a backward "inputs", or
    "all", the tensors of the bias among them.
    """

    dtype: str
    head_dim: int
    value_dim: int
    mask: str = "none"
    bias: str = "none"
    softcap: bool = False
    gradients: str = "none"

    @property
    def operation(self) -> str:
        return "forward" if self.gradients == "none" else "backward"

    @classmethod
    def of(cls, dtype: str, head_dim: int, *, mask: str, bias: str, **others: Any) -> Problem:
        """With equal dimensions, and the masks and biases in the spelling that manifests have."""
        mask = mask if mask == "none" else written(parse_mask(mask, _EXAMPLE))
        bias = bias if bias == "none" else written(parse_bias(bias, _EXAMPLE, head_dim))
        return cls(dtype, head_dim, head_dim, mask, bias, **others)

    def terms(self) -> tuple[Any, Any]:
        """The mask and the bias, or None, with examples in the place of tensors."""
        mask = None if self.mask == "none" else parse_mask(self.mask, _EXAMPLE)
        bias = None if self.bias == "none" else parse_bias(self.bias, _EXAMPLE, self.head_dim)
        return mask, bias and bias.resolved(_EXAMPLE.q_heads, _Slopes.of)


class Tensor(NamedTuple):
    """shape, strides: of each dimension an expression; a free one is a name of its own.

    Strides count elements. optional: may be null. written: an output.
    """

    name: str
    dtype: str
    shape: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    optional: bool
    written: bool


class Slice(NamedTuple):
    """A part of the workspace, at a multiple of ALIGNMENT bytes."""

    name: str
    size: Expression  # bytes


class Planned(NamedTuple):
    """One kernel to launch. arguments: in the order of its parameters.

    needed_for: outputs, if any, without all of which it need not run.
    """

    recipe: Recipe
    grid: Expression
    arguments: tuple[Expression, ...]
    needed_for: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """numbers: names of those that need not be whole, in use. conditions: that all must hold."""

    problem: Problem
    target: tuple[int, int]
    tensors: tuple[Tensor, ...]
    numbers: tuple[str, ...]
    conditions: tuple[tuple[Expression, str, Expression], ...]
    workspace: tuple[Slice, ...]
    launches: tuple[Planned, ...]


def plan_variant(problem: Problem, target: tuple[int, int]) -> Variant:
    """Raises ValueError, which says why, for what cannot be exported."""
    _refuse(problem, target)
    fixed: set[str] = set()
    while True:
        tracer = _Tracer(problem, target, fixed)
        try:
            return tracer.variant()
        except Unknown as error:
            # Entries of a table may be left to the caller, but where the plan depends on them.
            own = {name for name in error.names if ".shape." in name}
            if not own:
                raise invalid(
                    f"{problem}",
                    found=f"a plan for which {error}",
                    needed="one that is the same for all sizes",
                ) from None
            fixed |= own


class _Tracer:
    """The traced call, and what is declared on the way. fixed: names with their example's value."""

    def __init__(self, problem: Problem, target: tuple[int, int], fixed: set[str]) -> None:
        self.problem, self.target, self.fixed = problem, target, fixed
        self.trace = Trace()
        self.known: dict[str, Whole] = {}
        self.tensors: list[Tensor] = []
        self.slices: list[Slice] = []
        sizes = {**_EXAMPLE._asdict(), "kv_heads": _EXAMPLE.q_heads // 2}
        self.size = {name: self._whole(name, sizes[name]) for name in _SIZES}
        self.by_example = {sizes[name]: self.size[name] for name in _SIZES}

    def variant(self) -> Variant:
        call = self._call()
        launches = self._forward(call) if self.is_forward else self._backward(call)
        numbers = ["scale"] + ["softcap"] * self.problem.softcap
        self._check_conditions(numbers)
        return Variant(
            self.problem,
            self.target,
            tuple(self.tensors),
            tuple(numbers),
            tuple(self.trace.conditions),
            tuple(self.slices),
            tuple(self._planned(launches)),
        )

    @property
    def is_forward(self) -> bool:
        return self.problem.operation == "forward"

    @property
    def capability(self) -> int:
        major, minor = self.target
        return 10 * major + minor

    def _call(self) -> Call:
        p, of = self.problem, self.size
        batch, q_len, kv_len = of["batch"], of["q_len"], of["kv_len"]
        query = self._matrix("query", (batch, of["q_heads"], q_len, p.head_dim))
        key = self._matrix("key", (batch, of["kv_heads"], kv_len, p.head_dim))
        value = self._matrix("value", (batch, of["kv_heads"], kv_len, p.value_dim))
        sinks = self._plain_tensor("sinks", (of["q_heads"],), "float32", optional=True)
        mask, bias = p.terms()
        softcap = Number("softcap", 30.0, self.trace) if p.softcap else None
        if softcap is not None:
            self.trace.decide(softcap, ">", 0, True)
        return Call(
            None,  # type: ignore[arg-type]  # for backends, which take no part
            query,
            key,
            value,
            self._term("mask", mask),
            self._term("bias", bias),
            sinks,
            self._whole("query_start", 7),
            Number("scale", p.head_dim**-0.5, self.trace),
            softcap,
            0.0,
            None,
        )

    def _forward(self, call: Call) -> list[Launch]:
        out, lse = self._outputs(call, written=True)
        memory = self._workspace(plan.forward_scratch(call, self.capability))
        return plan.forward(call, out, lse, memory, capability=self.capability)

    def _backward(self, call: Call) -> list[Launch]:
        out, lse = self._outputs(call, written=False)
        d_out = self._matrix("d_out", out.shape)
        d_lse = self._plain_tensor("d_lse", lse.shape, "float32", optional=True)
        parameters = [] if self.problem.gradients == "inputs" else self._of_bias()
        bias = call.bias.tensors() if call.bias is not None else []
        query, key, value = (
            self._matrix(f"d_{name}", getattr(call, name).shape, optional=True, written=True)
            for name in ("query", "key", "value")
        )
        sinks = self._gradient("sinks")
        of_bias = tuple(map(self._gradient, parameters)) or (None,) * len(bias)
        gradients = Gradients(query, key, value, sinks, of_bias)
        memory = self._workspace(plan.scratch(call, gradients, self.capability))
        return plan.backward(
            call, out, lse, d_out, d_lse, gradients, memory, capability=self.capability
        )

    def _outputs(self, call: Call, *, written: bool) -> tuple[Array, Array]:
        batch, heads, q_len, _ = call.query.shape
        out = self._matrix("out", (batch, heads, q_len, self.problem.value_dim), written=written)
        lse = self._plain_tensor(
            "lse", (batch, heads, q_len), "float32", optional=written, written=written
        )
        return out, lse

    def _of_bias(self) -> list[str]:
        return [tensor.name for tensor in self.tensors if tensor.name.startswith("bias.")]

    def _gradient(self, name: str) -> Array:
        """A tensor like the one of this name."""
        (like,) = (tensor for tensor in self.tensors if tensor.name == name)
        shape = tuple(self.known.get(size, size) for size in like.shape)  # type: ignore[arg-type]
        return self._plain_tensor(f"d_{name}", shape, like.dtype, optional=True, written=True)

    def _term(self, role: str, term: Any) -> Any:
        """The mask or bias with a traced array in the place of each tensor."""
        if term is None:
            return None
        taken: list[str] = []

        def placed(part: Any) -> Any:
            fields = iter([n for n in part.tensor_fields if getattr(part, n) is not None])
            return part.map_tensors(lambda tensor: self._of_term(role, next(fields), tensor, taken))

        parts = [placed(part) for part in term.parts()]
        return term.with_tensors(iter([t for part in parts for t in part.tensors()]))

    def _of_term(self, role: str, field: str, tensor: Any, taken: list[str]) -> Array:
        taken.append(field)
        again = taken.count(field)
        name = f"{role}.{field}" + (f"_{again}" if again > 1 else "")
        shape = tuple(self._dimension(name, axis, n) for axis, n in enumerate(tensor.shape))
        return self._plain_tensor(name, shape, tensor.dtype)

    def _dimension(self, name: str, axis: int, example: int) -> Any:
        if example in (1, self.problem.head_dim):
            return example
        own = f"{name}.shape.{axis}"
        if example in self.by_example:
            return self.by_example[example]
        return example if own in self.fixed else self._whole(own, example)

    def _matrix(
        self, name: str, shape: tuple[Any, ...], *, optional: bool = False, written: bool = False
    ) -> Array:
        """One of query's kind: rows at multiples of 16 bytes, wherever they lie."""
        item = ITEM_BYTES[self.problem.dtype]
        strides = [
            self._whole(f"{name}.stride.{axis}", 4096, multiple_of=16 // item) for axis in range(3)
        ]
        return self._declared(name, shape, (*strides, 1), self.problem.dtype, 16, optional, written)

    def _plain_tensor(
        self,
        name: str,
        shape: tuple[Any, ...],
        dtype: str,
        *,
        optional: bool = False,
        written: bool = False,
    ) -> Array:
        """A contiguous one."""
        return self._declared(name, shape, _contiguous(shape), dtype, 1, optional, written)

    def _declared(
        self,
        name: str,
        shape: tuple[Any, ...],
        strides: tuple[Any, ...],
        dtype: str,
        alignment: int,
        optional: bool,
        written: bool,
    ) -> Array:
        found = [tuple(map(expression_of, each)) for each in (shape, strides)]
        self.tensors.append(Tensor(name, dtype, found[0], found[1], optional, written))
        return Array(self._whole(name, 4096), shape, strides, dtype, alignment)

    def _workspace(self, needed: dict[str, Shape]) -> dict[str, Array]:
        memory = {}
        for name, (shape, dtype) in needed.items():
            item, row = ITEM_BYTES.get(dtype, 4), shape[-1]
            size = math.prod(shape) * item
            self.slices.append(Slice(f"workspace.{name}", expression_of(size)))
            aligned = not isinstance(row, Whole) and row * item % 16 == 0
            address = self._whole(f"workspace.{name}", 4096)
            memory[name] = Array(address, shape, _contiguous(shape), dtype, 16 if aligned else 1)
        return memory

    def _planned(self, launches: list[Launch]) -> list[Planned]:
        planned, filled = [], set[str]()
        outputs = {tensor.name for tensor in self.tensors if tensor.written}
        slices = {each.name for each in self.slices}
        for launch in launches:
            self._check(launch)
            arguments = tuple(expression_of(value) for _, value in launch.values())
            used = {name for argument in arguments for name in names(argument)}
            # What it touches first, it fills for others.
            fills = used & slices - filled
            filled |= fills
            own = () if fills else tuple(sorted(used & outputs))
            planned.append(
                Planned(self._recipe(launch), expression_of(launch.grid), arguments, own)
            )
        return planned

    def _check(self, launch: Launch) -> None:
        for _, leaf in launch.leaves():
            if isinstance(leaf, (Whole, Number)):
                raise Unknown(leaf.expression, f"is compiled into {launch.kernel.__name__}")

    def _check_conditions(self, numbers: list[str]) -> None:
        """Bounds are for the caller to keep; other decisions would take variants of their own."""
        for left, operator, right in self.trace.conditions:
            of_numbers = not {*names(left), *names(right)}.isdisjoint(numbers)
            is_bound = isinstance(right, int) and (operator, right >= FAR) == ("<", True)
            if not (of_numbers or is_bound or (operator, right) == (">=", 0)):
                raise Unknown(("-", left, right), "is decided by")

    def _recipe(self, launch: Launch) -> Recipe:
        made = recipe(launch, self.target)
        least = max(known for known in PTX_VERSIONS if known <= self.capability)
        return replace(made, options={**made.options, "ptx_version": PTX_VERSIONS[least]})

    def _whole(self, name: str, example: int, multiple_of: int = 1) -> Whole:
        self.known[name] = Whole(name, example, self.trace, multiple_of)
        return self.known[name]


class _Slopes(NamedTuple):
    """The layout of ALiBi's slopes where the text names none."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, slopes: Sequence[float]) -> _Slopes:
        return cls((len(slopes),), "float32")


def _refuse(problem: Problem, target: tuple[int, int]) -> None:
    """Raises ValueError for what the kernels refuse in any call."""
    mask, bias = (
        term and term.map_tensors(lambda each: Layout.contiguous(each.shape, each.dtype))
        for term in problem.terms()
    )
    described = Described.of(
        batch=_EXAMPLE.batch,
        heads=_EXAMPLE.q_heads,
        q_len=_EXAMPLE.q_len,
        kv_len=_EXAMPLE.kv_len,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        dtype=problem.dtype,
        mask=mask,
        bias=bias,
        query_start=0,
        device=Device.cuda("the target", target, sms=0),
    )
    if reasons := Flash().why_not(described):
        raise ValueError("; ".join(map(str, reasons)))


def _contiguous(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
