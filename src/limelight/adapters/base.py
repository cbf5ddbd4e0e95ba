"""The contract of an adapter: one array library, seen by the rest as layouts and devices.

`Adapter.plan` is the way of every call: prepare the arguments, describe them, choose a backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, ClassVar, NamedTuple

from limelight.call import Call, Gradients
from limelight.devices import Device
from limelight.dispatch import KNOWN, Choice, allowed, choose, note
from limelight.errors import invalid, invalid_type, is_integer
from limelight.namespace import namespace
from limelight.problem import Layout, Problem, check_kinds
from limelight.terms import Term


@dataclass(slots=True, eq=False)  # never changed; frozen would cost 3 us at each call
class Arguments:
    """What the caller gave to `attention`, before anything is looked at."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    bias: Any = None
    query_start: Any = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Any = None
    dropout_p: float = 0.0
    seed: Any = None
    return_lse: bool = False
    deterministic: bool | None = None
    gradients: tuple[str, ...] | None = None  # None: what the library's autograd will ask for


class Plan(NamedTuple):
    """A call that is ready to run, and the choice of what runs it."""

    call: Call
    choice: Choice

    def forward(self) -> tuple[Any, Any]:
        note(self.choice, "forward")
        return KNOWN[self.choice.backend].forward(self.call)  # type: ignore[index]

    def backward(self, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients) -> Gradients:
        note(self.choice, "backward")
        backend = KNOWN[self.choice.backend]  # type: ignore[index]
        return backend.backward(self.call, out, lse, d_out, d_lse, wanted)


class Adapter:
    """One array library."""

    library: ClassVar[str]
    array_type: ClassVar[str]  # what error messages call its arrays
    plan_type: ClassVar[type[Plan]] = Plan

    def attention(self, arguments: Arguments) -> Any:
        """out, or (out, lse) where asked for; differentiable where the library is."""
        raise NotImplementedError

    def shortcut(
        self, query: Any, key: Any, value: Any, options: Hashable
    ) -> Callable[[Any, Any, Any], Any] | None:
        """What runs a call without checking it, where one that looked the same was kept."""
        return None

    def keep_shortcut(self, options: Hashable, arguments: Arguments) -> None:
        """Keeps what ran a call for others with the same options: the rest of its arguments."""

    def is_array(self, value: Any) -> bool:
        raise NotImplementedError

    def asarray(self, value: Any, like: Any, name: str) -> Any:
        """A list or foreign array as an array on the device of `like`; own arrays as they are.

        Raises TypeError or ValueError, with the name of the argument, for what is neither.
        """
        raise NotImplementedError

    def dtype(self, array: Any) -> str:
        raise NotImplementedError

    def layout(self, array: Any) -> Layout:
        raise NotImplementedError

    def device(self, array: Any) -> Device:
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def gradients(self, arguments: Arguments) -> tuple[str, ...]:
        """The names of what a gradient will be wanted for: see `Problem`."""
        return ()

    def deterministic(self) -> bool:
        """What the library's own switch says."""
        return False

    def allow_tf32(self) -> bool:
        """Whether the library's switch lets float32 products round to TF32."""
        return False

    def cudnn_version(self, array: Any) -> int | None:
        """The cuDNN that the library would run the array's call with; None where there is none."""
        return None

    def contiguous(self, array: Any) -> Any:
        raise NotImplementedError

    def cast(self, array: Any, like: Any) -> Any:
        """The array in the dtype of `like`."""
        raise NotImplementedError

    def untracked(self) -> AbstractContextManager[Any]:
        """A context in which the library's autograd, if it has one, does not look."""
        return nullcontext()

    def draw_seed(self, like: Any) -> Any:
        """A seed from the library's own generator, on the device of `like`."""
        raise NotImplementedError

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The array expanded to a shape, without a copy."""
        raise NotImplementedError

    def placeholder(self, layout: Layout) -> Any:
        """An array without memory, for a backend that compiles."""
        raise NotImplementedError

    # The steps of a call.

    def prepared(self, a: Arguments) -> Arguments:
        """The same arguments with every array an array of this library, on one device."""
        for name in ("key", "value"):
            found = getattr(a, name)
            if not self.is_array(found):
                raise invalid_type(
                    name, found=type(found).__name__, needed=f"{self.array_type}, as query is"
                )

        def convert(name: str) -> Callable[[Any], Any]:
            return lambda value: self.asarray(value, a.query, name)

        check_kinds(a.mask, a.bias)
        changes: dict[str, Any] = {}
        if a.mask is not None and a.mask.tensors():
            changes["mask"] = a.mask.map_tensors(convert("mask"))
        if a.bias is not None:
            heads = a.query.shape[1] if len(a.query.shape) == 4 else 1  # Problem refuses the rest
            bias = a.bias.resolved(heads, convert("bias"))
            changes["bias"] = bias.map_tensors(convert("bias"))
        if a.sinks is not None:
            changes["sinks"] = convert("sinks")(a.sinks)
        if _is_sequence(a.query_start):
            changes["query_start"] = convert("query_start")(a.query_start)
        if a.seed is not None:
            changes["seed"] = self._checked_seed(a.seed, a.query)
        return replace(a, **changes) if changes else a

    def _checked_seed(self, seed: Any, query: Any) -> Any:
        """The seed as a signed 64-bit number, or as the int64 array of one element that it is."""
        needed = "an integer of 64 bits, or an int64 array of one element"
        if self.is_array(seed):
            seed = self.asarray(seed, query, "seed")
            if self.dtype(seed) != "int64":
                raise invalid_type("seed", found=f"dtype {self.dtype(seed)}", needed=needed)
            if math.prod(seed.shape) != 1:
                raise invalid("seed", found=f"shape {tuple(seed.shape)}", needed=needed)
            return seed.reshape(1)
        if not is_integer(seed):
            raise invalid_type("seed", found=repr(seed), needed=needed)
        if not -(2**63) <= seed < 2**64:
            raise invalid("seed", found=seed, needed=needed)
        return int(seed) - 2**64 if seed >= 2**63 else int(seed)

    def describe(self, a: Arguments) -> Problem:
        """The problem that prepared arguments pose. Raises where they do not fit together."""

        def described(term: Any) -> Any:
            return term.map_tensors(self.layout) if isinstance(term, Term) else term

        start = a.query_start
        return Problem(
            query=self.layout(a.query),
            key=self.layout(a.key),
            value=self.layout(a.value),
            mask=described(a.mask),
            bias=described(a.bias),
            query_start=self.layout(start) if self.is_array(start) else start,
            scale=a.scale,
            softcap=a.softcap,
            sinks=None if a.sinks is None else self.layout(a.sinks),
            dropout_p=a.dropout_p,
            gradients=self.gradients(a) if a.gradients is None else a.gradients,
            return_lse=a.return_lse,
            deterministic=self.deterministic() if a.deterministic is None else a.deterministic,
            library=self.library,
            library_version=self.version(),
            device=self.device(a.query),
            triton_version=_triton_version(),
            allow_tf32=self.allow_tf32(),
            cudnn_version=self.cudnn_version(a.query),
        )

    def choice(self, a: Arguments, restriction: tuple[str, ...] | None) -> Choice:
        return choose(self.describe(a), restriction)

    def plan(self, arguments: Arguments) -> Plan:
        return self.planned(self.prepared(arguments), allowed())

    def planned(self, a: Arguments, restriction: tuple[str, ...] | None) -> Plan:
        """The plan for prepared arguments, with these backends allowed."""
        choice = self.choice(a, restriction)
        return self.plan_type(self.call(a, choice.problem), choice)

    def call(self, a: Arguments, problem: Problem) -> Call:
        """The call that a backend receives: nothing left to look up or to fill in."""
        fixed = {name: self.contiguous(getattr(a, name)) for name in problem.copies}
        a = replace(a, **fixed) if fixed else a
        seed = None
        if problem.dropout_p > 0:
            seed = self.draw_seed(a.query) if a.seed is None else a.seed
        assert problem.scale is not None  # Problem fills it in
        return Call(
            problem=problem,
            query=a.query,
            key=a.key,
            value=a.value,
            mask=a.mask,
            bias=a.bias,
            sinks=None if a.sinks is None else self.contiguous(a.sinks),
            query_start=self._start(a, problem),
            scale=problem.scale,
            softcap=problem.softcap,
            dropout_p=problem.dropout_p,
            seed=seed,
        )

    def placeholder_call(self, problem: Problem) -> Call:
        """The problem's call, on arrays without memory."""

        def placed(value: Any) -> Any:
            if isinstance(value, Term):
                return value.map_tensors(self.placeholder)
            return self.placeholder(value) if isinstance(value, Layout) else value

        names = ("query", "key", "value", "mask", "bias", "query_start", "sinks")
        arrays = {name: placed(getattr(problem, name)) for name in names}
        return self.call(Arguments(**arrays), problem)

    def _start(self, a: Arguments, problem: Problem) -> Any:
        """The position of the first query: a number, or an array with one per batch element."""
        if problem.start is not None:
            return problem.start
        if self.is_array(a.query_start):
            return a.query_start
        # "end" with a length for each batch element.
        lengths = a.mask.key_lengths()
        xp = namespace(lengths[0])
        counted = [xp.clip(xp.astype(each, xp.int64), 0, problem.kv_len) for each in lengths]
        return reduce(xp.minimum, counted) - problem.q_len


@lru_cache(maxsize=1)
def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms to import

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _is_sequence(start: Any) -> bool:
    """Whether a query_start holds one position per batch element. What else it is, Problem says."""
    if start is None or isinstance(start, (int, str)):
        return False
    return isinstance(start, (list, tuple)) or (
        hasattr(start, "__array__") and not is_integer(start)
    )
