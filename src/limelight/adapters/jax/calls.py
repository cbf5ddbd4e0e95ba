"""A call as JAX takes it: a differentiable function of arrays, with all else in a hashable shell.

Python runs when a call is made, or traced into a program that is compiled; so calls are recorded
then, and dispatch happens then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from limelight.adapters.base import Plan
from limelight.adapters.jax import batching
from limelight.backends.math import Math
from limelight.call import Call, Gradients
from limelight.devices import CPU
from limelight.dispatch import KNOWN, Choice, allowed, choose, note
from limelight.problem import Layout, Problem

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Shell:
    """A call without its arrays.

    start, seed: numbers; None where there is none, or an array among the call's. restriction: the
    backends that were allowed. is_traced: the program may be compiled for another platform than
    the problem's device.
    """

    problem: Problem
    start: int | None
    seed: int | None
    restriction: tuple[str, ...] | None
    is_traced: bool

    @classmethod
    def of(cls, plan: Plan, restriction: tuple[str, ...] | None) -> Shell:
        call = plan.call
        return cls(
            plan.choice.problem,
            call.query_start if isinstance(call.query_start, int) else None,
            call.seed if isinstance(call.seed, int) else None,
            restriction,
            isinstance(call.query, Tracer),
        )

    @property
    def choice(self) -> Choice:
        return choose(self.problem, self.restriction)

    @property
    def differentiable(self) -> list[str]:
        """The names of the arrays that can have a gradient, which come first."""
        sinks = [] if self.problem.sinks is None else ["sinks"]
        parameters = [] if self.problem.bias is None else self.problem.bias.tensors()
        return ["query", "key", "value", *sinks, *(f"bias.{n}" for n in range(len(parameters)))]

    def wanting(self, names: Sequence[str]) -> Shell:
        return replace(self, problem=replace(self.problem, gradients=tuple(names)))

    def call(self, arrays: Sequence[Any]) -> Call:
        """arrays: as `Call.tensors()` has them, or more."""
        p = self.problem
        seed = ... if self.seed is None and p.dropout_p > 0 else self.seed
        assert p.scale is not None  # Problem fills it in
        empty = Call(
            p,
            query=...,
            key=...,
            value=...,
            mask=p.mask,
            bias=p.bias,
            sinks=p.sinks,
            query_start=... if self.start is None else self.start,
            scale=p.scale,
            softcap=p.softcap,
            dropout_p=p.dropout_p,
            seed=seed,
        )
        return empty.with_tensors(arrays)


class JAXPlan(Plan):
    """Runs compiled programs, which are kept from one call to the next."""

    def forward(self) -> tuple[Any, Any]:
        note(self.choice, "forward")
        return forward_program(self._shell())(*self.call.tensors())

    def _shell(self) -> Shell:
        """The backward's too: it runs on the backend of its forward."""
        assert self.choice.backend is not None  # choose() raises otherwise
        return replace(Shell.of(self, (self.choice.backend,)), is_traced=False)

    def backward(self, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients) -> Gradients:
        note(self.choice, "backward")
        shell = self._shell().wanting(wanted.names())
        found = iter(_gradients(shell, self.call.tensors(), out, lse, d_out, d_lse))
        plain, bias = wanted[:4], wanted.bias
        return Gradients(
            *(next(found) if want else None for want in plain),
            bias=tuple(next(found) if want else None for want in bias),
        )


def attention(plan: Plan, *, heads_last: bool) -> Any:
    """out, or (out, lse) where the problem asks for it.

    heads_last: query, key and value lie in memory as (B, M, H, D), where they are traced.
    """
    problem = plan.choice.problem
    shell = Shell.of(plan, allowed())
    asked = replace(problem, return_lse=True)
    if heads_last and shell.is_traced:
        rows = {name: getattr(asked, name) for name in ("query", "key", "value")}
        rows = {name: Layout.heads_last(each.shape, each.dtype) for name, each in rows.items()}
        asked = replace(asked, **rows)
    results: Any = _attention(replace(shell, problem=asked), tuple(plan.call.tensors()))
    wide, lse = results
    out = wide.astype(plan.call.query.dtype)
    return (out, lse) if problem.return_lse else out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(shell: Shell, arrays: Arrays) -> Any:
    """The output, which may be wider than the query, and the LSE."""
    note(shell.choice, "forward")
    return forward_program(shell)(*arrays)


@partial(
    jax.tree_util.register_dataclass, data_fields=("arrays", "out", "lse"), meta_fields=("shell",)
)
@dataclass
class _Saved:
    """What the backward gets. shell: with the names of the gradients that are wanted."""

    shell: Shell
    arrays: Arrays
    out: Any
    lse: Any


def _attention_forward(shell: Shell, primals: Any) -> tuple[Any, _Saved]:
    arrays = tuple([primal.value for primal in primals])
    pairs = zip(shell.differentiable, primals, strict=False)
    wanting = shell.wanting([name for name, primal in pairs if primal.perturbed])
    results: Any = _attention(wanting, arrays)  # a second derivative goes this way again
    return results, _Saved(wanting, arrays, *results)


def _attention_backward(_: Shell, saved: _Saved, arrived: Any) -> tuple[Any]:
    shell = saved.shell
    d_out, d_lse = (None if isinstance(each, SymbolicZero) else each for each in arrived)
    note(shell.choice, "backward")
    found = iter(_gradients(shell, saved.arrays, saved.out, saved.lse, d_out, d_lse))
    wanted = shell.problem.gradients
    gradients = [next(found) if name in wanted else None for name in shell.differentiable]
    return ((*gradients, *[None] * (len(saved.arrays) - len(gradients))),)


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)


def _gradients(
    shell: Shell, arrays: Sequence[Any], out: Any, lse: Any, d_out: Any, d_lse: Any
) -> Arrays:
    """The gradients that the shell's problem names, in order."""
    arrived = tuple(each for each in (d_out, d_lse) if each is not None)
    if not arrived:
        named = dict(zip(shell.differentiable, arrays, strict=False))
        return tuple(jnp.zeros_like(named[name]) for name in shell.problem.gradients)
    gives = (d_out is not None, d_lse is not None)
    return _differentiable_gradients(shell, gives, (*arrays, out, lse, *arrived))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable_gradients(shell: Shell, gives: tuple[bool, bool], operands: Arrays) -> Arrays:
    return backward_program(shell, gives)(*operands)


def _gradients_forward(
    shell: Shell, gives: tuple[bool, bool], operands: Arrays
) -> tuple[Arrays, Arrays]:
    return backward_program(shell, gives)(*operands), operands


def _gradients_backward(
    shell: Shell, gives: tuple[bool, bool], operands: Arrays, d_gradients: Arrays
) -> tuple[Any]:
    """The second derivative, by differentiating `math` twice."""
    note(shell.choice, "double backward")
    _, pull = jax.vjp(partial(_dense_gradients, shell, gives), operands)
    return pull(d_gradients)


_differentiable_gradients.defvjp(_gradients_forward, _gradients_backward)


def _dense_gradients(shell: Shell, gives: tuple[bool, bool], operands: Arrays) -> Arrays:
    *arrays, _, _ = operands[: len(operands) - sum(gives)]
    arrived = iter(operands[len(arrays) + 2 :])
    names = shell.differentiable
    wanted = [names.index(name) for name in shell.problem.gradients]

    def dense(*given: Any) -> Any:
        replaced = dict(zip(wanted, given, strict=True))
        return Math().forward(shell.call([replaced.get(n, a) for n, a in enumerate(arrays)]))

    results, pull = jax.vjp(dense, *(arrays[n] for n in wanted))
    return pull(
        tuple(
            next(arrived).astype(result.dtype) if given else jnp.zeros_like(result)
            for result, given in zip(results, gives, strict=True)
        )
    )


# Compiled programs, by all that decides them but their arrays' values.


@lru_cache(maxsize=4096)
def forward_program(shell: Shell) -> Any:
    """A function of a call's arrays: the output, which may be wider than the query, and the LSE."""

    def forward(problem: Problem, *arrays: Any) -> Any:
        out, lse = _backend(shell, problem).forward(replace(shell, problem=problem).call(arrays))
        if shell.is_traced:  # whatever it runs on
            out = out.astype(arrays[0].dtype)
        return out, lse if problem.return_lse or problem.gradients else None

    return _compiled(shell, forward, forward_program, of_gradients=False)


@lru_cache(maxsize=4096)
def backward_program(shell: Shell, gives: tuple[bool, bool]) -> Any:
    """A function of a call's arrays, output, LSE and what arrived of their gradients."""

    def backward(problem: Problem, *operands: Any) -> Any:
        *arrays, out, lse = operands[: len(operands) - sum(gives)]
        arrived = iter(operands[len(arrays) + 2 :])
        d_out, d_lse = (next(arrived) if given else None for given in gives)
        call = replace(shell, problem=problem).call(arrays)
        wanted = Gradients.named(problem.gradients, call.bias)
        found = _backend(shell, problem).backward(call, out, lse, d_out, d_lse, wanted)
        return tuple(each for each in (*found[:4], *found.bias) if each is not None)

    return _compiled(shell, backward, partial(backward_program, gives=gives), of_gradients=True)


def _backend(shell: Shell, problem: Problem) -> Any:
    return KNOWN[choose(problem, shell.restriction).backend]  # type: ignore[index]


def _compiled(shell: Shell, function: Any, program: Any, *, of_gradients: bool) -> Any:
    """The function of a problem and arrays as one of arrays, compiled where it is first called.

    program: the same of another shell.
    """
    run = partial(function, shell.problem)
    if shell.is_traced and shell.problem.device.kind == "cuda":
        elsewhere = partial(function, replace(shell.problem, device=CPU))
        run = partial(_on_platform, run, elsewhere)
    return jax.jit(batching.mapped(run, shell, program, of_gradients=of_gradients))


def _on_platform(cuda: Any, elsewhere: Any, *arrays: Any) -> Any:
    return jax.lax.platform_dependent(*arrays, cuda=cuda, default=elsewhere)
