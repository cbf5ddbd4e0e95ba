"""What tests of attention need: an error measure, tolerances, a comparer, poisoned memory.

Public, so that whoever writes a mask, a bias or a backend can hold it to the same contract:

>>> import torch, limelight
>>> from limelight.testing import check
>>> q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
>>> check(q, k, v, mask=limelight.Causal())
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from limelight import reference
from limelight.api import attention, explain
from limelight.biases import DenseBias
from limelight.call import Gradients
from limelight.masks import Mask
from limelight.tile import Positions, Size

# The greatest error ‖actual - expected‖ / ‖expected‖ of a result, by the inputs' dtype.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
# Half the distance from 1 to the next number.
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Where numbers are too small for their dtype's relative precision, its steps are this wide.
STEP = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}
# The worst row may be this many times worse: a norm over a whole tensor hides a few wrong rows.
WORST_ROW = 10.0


def as_float64(array: Any) -> np.ndarray:
    """A torch tensor of any dtype and device, or an array, as float64 NumPy."""
    if hasattr(array, "detach"):
        return array.detach().cpu().double().numpy()
    return np.asarray(array, np.float64)


def as_numpy(array: Any) -> np.ndarray:
    """The same, but integers and booleans keep their dtype."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        return array.double().numpy() if array.is_floating_point() else array.numpy()
    return np.asarray(array)


def error(actual: Any, expected: Any) -> float:
    """‖actual - expected‖ / ‖expected‖; 0 for two zeros, inf for anything but zero against zero.

    >>> error(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == 1 / 34**0.5
    True
    >>> error(np.array([1e-30]), np.array([0.0]))
    inf
    """
    actual, expected = as_float64(actual), as_float64(expected)
    difference, norm = np.linalg.norm(actual - expected), np.linalg.norm(expected)
    if difference == 0:
        return 0.0
    return float(difference / norm) if norm > 0 else float("inf")


def assert_close(
    name: str,
    actual: Any,
    expected: Any,
    tolerance: float,
    *,
    slack: Any = 0.0,
    rows: bool = True,
) -> None:
    """Raises an AssertionError that shows the worst element where `actual` is not near `expected`.

    Arguments:
        name: what is compared, for the message.
        tolerance: of `error` over the whole array; the worst row may reach WORST_ROW times that,
            relative to the greater of its norm and the rows' root-mean-square norm.
        slack: what each element may be off besides, where the expected value is a small difference
            of large numbers.
        rows: whether the last axis is a row; else each element is one.

    Infinities and NaNs must stand where they are expected.
    """
    actual, expected = as_float64(actual), as_float64(expected)
    assert actual.shape == expected.shape, (
        f"{name}: shape {actual.shape}, expected {expected.shape}"
    )
    special = ~np.isfinite(expected)
    same = np.where(np.isnan(expected), np.isnan(actual), actual == expected)
    wrong = np.where(special, ~same, ~np.isfinite(actual))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements are not finite or wrongly so, "
            f"first at {at}: {actual[at]}, expected {expected[at]}"
        )
    actual, expected = np.where(special, 0.0, actual), np.where(special, 0.0, expected)
    slack = np.broadcast_to(slack, expected.shape)
    if not rows or expected.ndim < 2:
        actual, expected, slack = (array[..., None] for array in (actual, expected, slack))
    off, norms, extra = (np.linalg.norm(a, axis=-1) for a in (actual - expected, expected, slack))
    typical = np.sqrt((norms**2).mean()) if norms.size else 0.0
    row_limit = WORST_ROW * tolerance * np.maximum(norms, typical) + extra
    limit = tolerance * np.linalg.norm(expected) + np.linalg.norm(slack)
    if np.linalg.norm(off) <= limit and (off <= row_limit).all():
        return
    row = np.unravel_index((off - row_limit).argmax(), off.shape)
    flat = np.abs(actual - expected)
    at = np.unravel_index(flat.argmax(), flat.shape)
    raise AssertionError(
        f"{name}: error {error(actual, expected):.3g}, tolerance {tolerance:.3g}; "
        f"||difference|| {np.linalg.norm(off):.3g}, limit {limit:.3g}; "
        f"worst row {tuple(map(int, row))}: {off[row]:.3g}, limit {row_limit[row]:.3g}; "
        f"worst element {tuple(map(int, at))}: {actual[at]:.9g}, expected {expected[at]:.9g}"
    )


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills uninitialised torch memory with NaN (the greatest integer) inside the `with`.

    What a kernel forgets to write then shows, instead of being right by luck.
    """
    import torch

    def filled(make: Any) -> Any:
        def poison(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            if made.is_floating_point():
                made.detach().fill_(float("nan"))
            return made

        return poison

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            stack.enter_context(mock.patch.object(owner, name, filled(getattr(owner, name))))
        yield


@contextlib.contextmanager
def compiled_for(target: tuple[int, int]) -> Iterator[None]:
    """Has `flash` plan and compile for another GPU inside the `with`, and run that on the one here.

    Only the machine code is not the other GPU's: the driver assembles it for the one here from
    the other's PTX. Needs a GPU at least as new. Nothing that is compiled is kept.

    target: compute capability, such as (7, 5).
    """
    from limelight.adapters.torch.adapter import ADAPTER
    from limelight.adapters.torch.shortcuts import Shortcuts
    from limelight.kernels import fused, program, runner, torch_flash
    from limelight.launcher import Cache, Kernel, cache

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        own = Cache(Path(folder))
        for owner, name, replacement in (
            (cache, "Kernel", partial(Kernel, from_ptx=True)),
            (program, "default_cache", lambda: own),
            (runner, "default_cache", lambda: own),
            (torch_flash.RUNNER, "_prepared", OrderedDict()),
            (ADAPTER, "_choices", {}),
            (ADAPTER, "_shortcuts", Shortcuts()),
            (fused, "target", lambda call: target),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def starts(query_start: Any, mask: Mask | None, q_len: int, kv_len: int) -> Any:
    """The position of the first query, or of each batch element's, by the contract's own words."""
    if query_start is None:
        return 0
    if isinstance(query_start, str):
        lengths = () if mask is None else mask.key_lengths()
        ends = [np.clip(as_numpy(each).astype(np.int64), 0, kv_len) for each in lengths]
        return np.min(ends, axis=0) - q_len if ends else kv_len - q_len
    return query_start if isinstance(query_start, int) else as_numpy(query_start).astype(np.int64)


def oracle(query: Any, key: Any, value: Any, **options: Any) -> reference.Reference:
    """`limelight.reference.attention` for tensors of any library, with the call's own arguments."""
    start = options.pop("query_start", None)
    start = starts(start, options.get("mask"), query.shape[2], key.shape[2])
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            options[name] = options[name].map_tensors(as_numpy)
    for name in ("sinks", "d_out", "d_lse"):
        if options.get(name) is not None:
            options[name] = as_float64(options[name])
    return reference.attention(
        as_float64(query), as_float64(key), as_float64(value), query_start=start, **options
    )


def magnitudes(
    query: Any, key: Any, value: Any, d_out: Any, d_lse: Any, **options: Any
) -> dict[str, np.ndarray]:
    """How large the terms are whose differences make each gradient, by the gradient's name.

    A score's gradient is `P (dP - delta)`. Any implementation that keeps its output in the inputs'
    precision knows delta only to a rounding error of that, whatever is left of the difference; the
    sums behind the gradients of query, key, sinks and bias inherit it.
    """
    zeros = np.zeros((*query.shape[:3], key.shape[2]))
    given = options.get("bias")
    bias = DenseBias(zeros) if given is None else given.map_tensors(as_numpy) + DenseBias(zeros)

    def of_scores(d_out: Any, d_lse: Any) -> np.ndarray:
        """The gradient of a bias with an entry for each score is that of the scores."""
        found = oracle(query, key, value, d_out=d_out, d_lse=d_lse, **options | {"bias": bias})
        assert found.gradients is not None
        return found.gradients.bias[-1]

    group = query.shape[1] // key.shape[1]
    q, k, v = (np.nan_to_num(as_float64(t), posinf=0.0, neginf=0.0) for t in (query, key, value))
    k, v = (np.repeat(array, group, axis=1) for array in (k, v))
    found = oracle(query, key, value, **options)
    delta = np.abs((as_float64(d_out) * found.out).sum(axis=-1)) + np.abs(as_float64(d_lse))
    lively = np.isfinite(found.lse)
    probs = of_scores(np.zeros(found.out.shape), lively)  # dS = P where only the LSE has a gradient
    keep = 1 / (1 - options.get("dropout_p", 0.0)) if options.get("dropout_p", 0.0) < 1 else 0.0
    terms = probs * (np.abs(as_float64(d_out) @ v.swapaxes(2, 3)) * keep + delta[..., None])
    scale = abs(query.shape[3] ** -0.5 if options.get("scale") is None else options["scale"])
    by_head = scale * terms.swapaxes(2, 3) @ np.abs(q)
    sizes = {
        "query": scale * terms @ np.abs(k),
        "key": by_head.reshape(*key.shape[:2], group, *key.shape[2:]).sum(axis=2),
        "sinks": ((1 - probs.sum(axis=-1)) * delta).sum(axis=(0, 2)),
    }
    if given is not None:
        start = starts(
            options.get("query_start"), options.get("mask"), query.shape[2], key.shape[2]
        )
        batch, heads, q_len, _ = query.shape
        size = Size(batch, heads, q_len, key.shape[2])
        at = Positions.of(
            np,
            size=size,
            dtype=np.float64,
            device="cpu",
            query_start=start,
            query=np.abs(q),
            scale=scale,
        ).whole()
        resolved = given.resolved(size.q_heads, np.asarray).map_tensors(as_numpy)
        folded = [np.zeros(tensor.shape) for tensor in resolved.tensors()]
        resolved.fold(terms, at, np, folded)
        own = _of_own_tensors(given, folded)
        sizes |= {f"bias.{n}": np.abs(part) for n, part in enumerate(own)}
    return sizes


def check(
    query: Any,
    key: Any,
    value: Any,
    *,
    d_out: Any = None,
    d_lse: Any = None,
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Holds `limelight.attention` to the oracle: output, LSE and every gradient that is wanted.

    The LSE is left out where no allowed backend gives it together with gradients.

    Arguments:
        query, key, value, options: those of `limelight.attention`, as torch tensors.
        d_out, d_lse: the gradients that arrive; drawn from a normal distribution when not given.
        tolerance: by default that of the query's dtype in `TOLERANCES`.

    Raises AssertionError with the worst element, its place and both values.
    """
    import torch

    with_lse = explain(query, key, value, return_lse=True, **options).backend is not None
    found = attention(query, key, value, return_lse=with_lse, **options)
    out, lse = found if with_lse else (found, None)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = (*query.shape[:3], value.shape[3])
    assert out.dtype == query.dtype, f"out is {out.dtype}, the query {query.dtype}"
    assert out.shape == shape, f"out has shape {tuple(out.shape)}, needed {tuple(shape)}"
    if d_out is None:
        d_out = _normal(out, seed=1)
    if lse is not None:
        assert lse.dtype == wide, f"the LSE is {lse.dtype}, needed {wide}"
        d_lse = _normal(lse, seed=2) if d_lse is None else d_lse
    elif d_lse is None:
        d_lse = torch.zeros(shape[:3], dtype=wide, device=query.device)
    expected = oracle(query, key, value, d_out=d_out, d_lse=d_lse, **options)
    close = TOLERANCES[_name(query.dtype)] if tolerance is None else tolerance
    if lse is not None:
        assert_close("lse", lse, expected.lse, close, rows=False)
    # A score's rounding error is absolute, and a relative error of its weight.
    largest = np.abs(expected.lse[np.isfinite(expected.lse)]).max(initial=0.0)
    close += 2 * ROUNDING[_name(wide)] * largest
    step = STEP[_name(query.dtype)]
    assert_close("out", out, expected.out, close, slack=step)

    assert expected.gradients is not None
    bias = options.get("bias")
    parameters = tuple(bias.tensors()) if bias is not None else ()
    inputs = Gradients(query, key, value, options.get("sinks"), parameters)
    named = [
        (name, tensor, gradient)
        for name, tensor, gradient in zip(
            ("query", "key", "value", "sinks", *(f"bias.{n}" for n in range(len(parameters)))),
            (*inputs[:4], *inputs.bias),
            (*expected.gradients[:4], *_of_own_tensors(bias, expected.gradients.bias)),
            strict=True,
        )
        if getattr(tensor, "requires_grad", False)
    ]
    if not named:
        return
    results = [(out, d_out)] if lse is None else [(out, d_out), (lse, d_lse)]
    gradients = torch.autograd.grad(
        [result for result, _ in results],
        [tensor for _, tensor, _ in named],
        [arrived for _, arrived in results],
    )
    for (name, tensor, right), gradient in zip(named, gradients, strict=True):
        assert gradient.dtype == tensor.dtype, f"d_{name} is {gradient.dtype}, not {tensor.dtype}"
        # A parameter may have a narrower dtype than the query.
        limit = max(close, TOLERANCES[_name(tensor.dtype)])
        try:
            assert_close(f"d_{name}", gradient, right, limit, slack=step)
        except AssertionError:  # the magnitudes cost three times the oracle, and are seldom needed
            size = magnitudes(query, key, value, d_out, d_lse, **options).get(name, 0.0)
            slack = 2 * ROUNDING[_name(query.dtype)] * size + step
            assert_close(f"d_{name}", gradient, right, limit, slack=slack)


def _of_own_tensors(bias: Any, gradients: Any) -> list[Any]:
    """Of the gradients of all a bias's tensors, those of tensors that the caller gave."""
    rest, own = iter(gradients), []
    for part in bias.parts() if bias is not None else ():
        given = len(part.tensors())
        every = len(part.resolved(1, np.asarray).tensors())
        of_part = [next(rest) for _ in range(every)]
        own += of_part if given else []
    return own


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _normal(like: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    return drawn.to(like.device, like.dtype)
