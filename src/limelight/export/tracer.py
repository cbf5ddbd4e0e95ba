"""From a problem to a variant, by way of the plan that runs at each call.

`kernels.plan` is given a call whose sizes, strides, addresses and numbers are traced (`traced.py`),
and what it returns is the variant: there is no second plan that could differ from the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from limelight.backends.flash import Flash
from limelight.call import Call, Gradients
from limelight.devices import Device
from limelight.errors import invalid
from limelight.export.expression import names
from limelight.export.traced import Number, Trace, Unknown, Whole, expression_of
from limelight.export.variant import (
    EXAMPLE,
    OTHER_EXAMPLE,
    Planned,
    Problem,
    Slice,
    Tensor,
    Variant,
)
from limelight.kernels import plan
from limelight.kernels.launch import ITEM_BYTES, Array, Launch, Shape
from limelight.kernels.program import recipe
from limelight.launcher import Recipe
from limelight.problem import Layout
from limelight.problem import Problem as Described

FAR = 2**23  # elements or entries: a limit that few problems reach
PTX_VERSIONS = {60: 70, 90: 80, 100: 86, 120: 87}  # by the least target; older drivers take older


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
            own = error.names & tracer.entries.keys()
            if not own or any(tracer.entries[name] is None for name in own):
                needed = "one that is the same for all sizes"
                raise invalid(
                    str(problem), found=f"a plan for which {error}", needed=needed
                ) from None
            fixed |= own


class _Tracer:
    """The traced call, and what is declared on the way. fixed: names with their example's value.

    entries: of sizes that tensors of the mask and bias alone have, by name; None where examples
    differ.
    """

    def __init__(self, problem: Problem, target: tuple[int, int], fixed: set[str]) -> None:
        self.problem, self.target, self.fixed = problem, target, fixed
        self.trace = Trace()
        self.known: dict[str, Whole] = {}
        self.entries: dict[str, int | None] = {}
        self.tensors: list[Tensor] = []
        self.slices: list[Slice] = []
        sizes = {**EXAMPLE._asdict(), "kv_heads": EXAMPLE.q_heads // 2}
        self.size = {name: self._whole(name, example) for name, example in sizes.items()}
        self.by_example = {int(size): size for size in self.size.values()}

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
        mask, bias = map(self._term, p.terms(), p.terms(OTHER_EXAMPLE))
        softcap = Number("softcap", 30.0, self.trace) if p.softcap else None
        if softcap is not None:
            self.trace.decide(softcap, ">", 0, True)
        return Call(
            None,  # type: ignore[arg-type]  # for backends, which take no part
            query,
            key,
            value,
            mask,
            bias,
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

    def _term(self, term: Any, other: Any) -> Any:
        """The mask or bias with a traced array in the place of each tensor. other: its example."""
        if term is None:
            return None
        named = zip(_tensor_names(term), other.tensors(), strict=True)
        return term.map_tensors(lambda tensor: self._of_term(*next(named), tensor))

    def _of_term(self, name: str, other: Any, tensor: Any) -> Array:
        shape = tuple(
            self._dimension(f"{name}.shape.{axis}", *examples)
            for axis, examples in enumerate(zip(tensor.shape, other.shape, strict=True))
        )
        return self._plain_tensor(name, shape, tensor.dtype)

    def _dimension(self, name: str, example: int, other: int) -> Any:
        if example in (1, self.problem.head_dim):
            return example
        if example in self.by_example:
            return self.by_example[example]
        self.entries[name] = example if example == other else None
        return example if name in self.fixed else self._whole(name, example)

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
                raise Unknown(("-", left, right), "decides")

    def _recipe(self, launch: Launch) -> Recipe:
        made = recipe(launch, self.target)
        least = max(known for known in PTX_VERSIONS if known <= self.capability)
        return replace(made, options={**made.options, "ptx_version": PTX_VERSIONS[least]})

    def _whole(self, name: str, example: int, multiple_of: int = 1) -> Whole:
        self.known[name] = Whole(name, example, self.trace, multiple_of)
        return self.known[name]


def _refuse(problem: Problem, target: tuple[int, int]) -> None:
    """Raises ValueError for what the kernels refuse in any call."""
    mask, bias = (
        term and term.map_tensors(lambda each: Layout.contiguous(each.shape, each.dtype))
        for term in problem.terms()
    )
    described = Described.of(
        batch=EXAMPLE.batch,
        heads=EXAMPLE.q_heads,
        q_len=EXAMPLE.q_len,
        kv_len=EXAMPLE.kv_len,
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


def _tensor_names(term: Any) -> Iterator[str]:
    """Of a mask's or bias's tensors, in their order: mask.lengths, and mask.lengths_2 behind it."""
    taken: list[str] = []
    for part in term.parts():
        for field in part.tensor_fields:
            if getattr(part, field) is not None:
                taken.append(field)
                again = taken.count(field)
                yield f"{term.argument}.{field}" + (f"_{again}" if again > 1 else "")


def _contiguous(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
