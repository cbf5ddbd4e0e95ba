"""The checks of `limelight doctor`: small problems, each on each backend, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

import limelight
from limelight import reference
from limelight.backends import BACKENDS

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


@dataclass(frozen=True)
class Check:
    """One backend, one dtype. out, gradients: relative errors; gradients is the worst of them."""

    backend: str
    library: str
    device: str
    dtype: str
    out: float
    gradients: float
    tolerance: float

    @property
    def passed(self) -> bool:
        # Written so that NaN fails.
        return self.out <= self.tolerance and self.gradients <= self.tolerance


@dataclass(frozen=True)
class Idle:
    """A backend that can run nothing here, and why not even the plainest case."""

    backend: str
    why: str


@dataclass(frozen=True)
class Case:
    """One problem in float64 NumPy; the last query stands at the last key, as "end" means.

    lengths: what the mask's `KeyLengths` holds, or the number of keys.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    d_out: np.ndarray
    mask: Any
    bias: Any
    lengths: Any


def cases() -> list[Case]:
    """From what asks most of a backend to what asks least; each backend runs the first it can."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    def case(kv_heads: int, q_len: int, mask: Any, bias: Any, lengths: Any = 80) -> Case:
        query, d_out = draw(2, 4, q_len, 32), draw(2, 4, q_len, 32)
        key, value = draw(2, kv_heads, 80, 32), draw(2, kv_heads, 80, 32)
        return Case(query, key, value, d_out, mask, bias, lengths)

    causal, lengths = limelight.Causal(), np.array([57, 80])
    padded = causal & limelight.KeyLengths(lengths)
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    return [
        case(2, 75, padded, limelight.ALiBi(slopes), lengths),
        case(2, 75, padded, None, lengths),
        case(2, 80, causal, None),
        case(4, 80, None, None),
    ]


def checks() -> Iterator[Check | Idle]:
    """Every backend on every array library and device that is here."""
    places: list[tuple[str, str]] = [("numpy", "cpu")]
    if find_spec("torch") is not None:
        import torch

        cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
        places = [("torch", f"cuda:{n}") for n in range(cuda)] + [("torch", "cpu"), *places]
    problems = cases()
    for backend in BACKENDS:
        why: list[str] = []
        ran = False
        for library, device in places:
            for dtype in TOLERANCES:
                if (library, dtype) == ("numpy", "bfloat16"):  # NumPy has no bfloat16
                    continue
                found = _first(backend.name, library, device, dtype, problems)
                if isinstance(found, Check):
                    ran = True
                    yield found
                else:
                    why.append(found)
        if not ran:
            yield Idle(backend.name, why[0])


def _first(
    backend: str, library: str, device: str, dtype: str, problems: list[Case]
) -> Check | str:
    """The check on the first case that the backend can run, or why it runs not even the last."""
    why = ""
    for case in problems:
        run = _Torch(case, device, dtype) if library == "torch" else _NumPy(case, dtype)
        with limelight.backends(backend):
            choice = limelight.explain(*run.arrays, **run.options)
            if choice.backend is None:
                why = "; ".join(reason.rule for reason in choice.reasons[backend])
                continue
            out, gradients = run.forward_and_backward()
        want = _reference(case, run)
        errors = [_error(got, ref) for got, ref in zip(gradients, want[1:], strict=True)]
        tolerance = TOLERANCES[dtype]
        worst = max(errors, key=lambda error: (np.isnan(error), error))
        return Check(backend, library, device, dtype, _error(out, want[0]), worst, tolerance)
    return why


class _NumPy:
    """A case as NumPy arrays."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.arrays = [array.astype(dtype) for array in (case.query, case.key, case.value)]
        self.d_out = case.d_out.astype(dtype)
        self.options = {"mask": case.mask, "bias": case.bias, "query_start": "end"}

    def forward_and_backward(self) -> tuple[np.ndarray, list[np.ndarray]]:
        out, pullback = limelight.attention_vjp(*self.arrays, **self.options)
        gradients = pullback(self.d_out)
        return out, [gradients.query, gradients.key, gradients.value, *gradients.bias]

    def rounded(self) -> list[np.ndarray]:
        """query, key, value and the gradient of the output, as this library holds them."""
        return [*self.arrays, self.d_out]


class _Torch:
    """A case as torch tensors that want gradients."""

    def __init__(self, case: Case, device: str, dtype: str) -> None:
        import torch

        def tensor(array: np.ndarray) -> Any:
            return torch.tensor(array, dtype=getattr(torch, dtype), device=device)

        self.arrays = [tensor(a).requires_grad_() for a in (case.query, case.key, case.value)]
        self.d_out = tensor(case.d_out)
        mask, bias = (
            term and term.map_tensors(lambda a: torch.tensor(a, device=device))
            for term in (case.mask, case.bias)
        )
        self.parameters = bias.tensors() if bias is not None else []
        for parameter in self.parameters:
            parameter.requires_grad_()
        self.options = {"mask": mask, "bias": bias, "query_start": "end"}

    def forward_and_backward(self) -> tuple[np.ndarray, list[np.ndarray]]:
        import torch

        with torch.enable_grad():
            out = limelight.attention(*self.arrays, **self.options)
            gradients = torch.autograd.grad(out, [*self.arrays, *self.parameters], self.d_out)
        return _host(out), [_host(gradient) for gradient in gradients]

    def rounded(self) -> list[np.ndarray]:
        return [_host(tensor) for tensor in (*self.arrays, self.d_out)]


def _host(tensor: Any) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def _reference(case: Case, run: _NumPy | _Torch) -> list[np.ndarray]:
    """The oracle's out and gradients, from the numbers that the backend was given."""
    query, key, value, d_out = run.rounded()
    found = reference.attention(
        query,
        key,
        value,
        mask=case.mask,
        bias=case.bias,
        query_start=case.lengths - query.shape[2],
        d_out=d_out,
    )
    grads = found.gradients
    assert grads is not None  # d_out was given
    return [found.out, grads.query, grads.key, grads.value, *grads.bias]


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
