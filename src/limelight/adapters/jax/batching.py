"""jax.vmap: a mapped axis joins the batch where every array allows it; else calls run in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from limelight.problem import Layout

if TYPE_CHECKING:
    from limelight.adapters.jax.calls import Shell


def mapped(
    function: Callable[..., Any],
    shell: Shell,
    program: Callable[[Shell], Any],
    *,
    of_gradients: bool,
) -> Any:
    """The function of arrays, with a rule for vmap.

    function: its arrays are those of the shell's call, then others with the batch first. program:
    the same for another shell. of_gradients: its results are the gradients that the problem names;
    else they have the batch first.
    """
    function = custom_vmap(function)

    def rule(size: int, is_mapped: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        folds = _folds(shell, size, is_mapped, arrays)
        if folds is None:
            results = _in_turn(program(shell), is_mapped, arrays)
        else:
            wide = [fold(array) for fold, array in zip(folds, arrays, strict=True)]
            results = program(_widened(shell, wide))(*wide)
            if of_gradients:
                places = map(shell.differentiable.index, shell.problem.gradients)
                pairs = zip(places, results, strict=True)
                results = tuple([folds[n].gradient(each, arrays[n]) for n, each in pairs])
            else:
                apart = (size, shell.problem.batch)
                results = jax.tree.map(lambda each: each.reshape(*apart, *each.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    function.def_vmap(rule)
    return function


def _in_turn(function: Any, is_mapped: Sequence[bool], arrays: Sequence[Any]) -> Any:
    def one(own: list[Any]) -> Any:
        rest = iter(own)
        pairs = zip(is_mapped, arrays, strict=True)
        return function(*[next(rest) if mapped else array for mapped, array in pairs])

    pairs = zip(is_mapped, arrays, strict=True)
    return lax.map(one, [array for mapped, array in pairs if mapped])


class _Fold(NamedTuple):
    """How an array joins the mapped axis with the batch.

    size: of the mapped axis, which the array may have or get first. batch: of the problem.
    dimensions: with which an element of that axis has the batch first; 0 for an array that stays as
    it is.
    """

    size: int
    batch: int
    dimensions: int
    is_mapped: bool

    def __call__(self, array: Any) -> Any:
        return self.folded(self.mapped(array)) if self.dimensions else array

    def mapped(self, array: Any) -> Any:
        return array if self.is_mapped else jnp.broadcast_to(array, (self.size, *array.shape))

    def folded(self, array: Any) -> Any:
        lead = (1,) * (self.dimensions - (len(array.shape) - 1))
        array = array.reshape(self.size, *lead, *array.shape[1:])
        array = jnp.broadcast_to(array, (self.size, self.batch, *array.shape[2:]))
        return array.reshape(self.size * self.batch, *array.shape[2:])

    def gradient(self, gradient: Any, array: Any) -> Any:
        """That of the array, one for each element of the mapped axis."""
        shape = array.shape if self.is_mapped else (self.size, *array.shape)
        like = jax.ShapeDtypeStruct(shape, array.dtype)
        (gradient,) = jax.linear_transpose(self.folded, like)(gradient)
        return gradient


def _folds(
    shell: Shell, size: int, is_mapped: Sequence[bool], arrays: Sequence[Any]
) -> list[_Fold] | None:
    """Of each array; None where one has no place for the batch, or all must see the same one."""
    problem = shell.problem
    if problem.dropout_p > 0 or problem.batch == 0:  # the batch element decides what is dropped
        return None
    dimensions = [4, 4, 4, *([] if problem.sinks is None else [0])]
    shares = [False] * len(dimensions)
    for term in (problem.bias, problem.mask):
        for part in term.parts() if term is not None else ():
            of_part = part.batch_dimensions
            if of_part is None and part.tensor_fields:
                return None
            for field, count in zip(part.tensor_fields, of_part or (), strict=True):
                if getattr(part, field) is not None:
                    dimensions.append(count)
                    shares.append(part.shares_batch)
    if shell.start is None:
        dimensions.append(1)
    names = shell.differentiable
    folds = []
    for n, (array, mapped) in enumerate(zip(arrays, is_mapped, strict=True)):
        shape = array.shape[1:] if mapped else array.shape
        count = dimensions[n] if n < len(dimensions) else len(shape)
        shared = shares[n] if n < len(shares) else False
        wanted = n < len(names) and names[n] in problem.gradients
        if count == 0 and (mapped or wanted):
            return None
        has_batch = len(shape) == count and not (shared and shape[0] == 1)
        folds.append(
            _Fold(size, problem.batch, count if mapped or wanted or has_batch else 0, mapped)
        )
    return folds


def _widened(shell: Shell, arrays: Sequence[Any]) -> Shell:
    """The shell of a call of these arrays."""
    layouts = [Layout.contiguous(array.shape, array.dtype.name) for array in arrays]
    if not shell.problem.query.is_contiguous:
        layouts[:3] = [Layout.heads_last(each.shape, each.dtype) for each in layouts[:3]]
    call = shell.call(layouts)
    start = shell.problem.query_start
    problem = replace(
        shell.problem,
        query=call.query,
        key=call.key,
        value=call.value,
        mask=call.mask,
        bias=call.bias,
        query_start=call.query_start if isinstance(start, Layout) else start,
    )
    return replace(shell, problem=problem)
