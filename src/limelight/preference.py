"""Which backend goes first where several can run a problem: data, with where each entry is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from limelight.problem import Problem

Capability = tuple[int, int]


@dataclass(frozen=True)
class Preference:
    """On cards of these compute capabilities, `first` goes before `before` for some problems."""

    first: str
    before: str
    capabilities: tuple[Capability, ...]
    applies: Callable[[Problem], bool]
    source: str


class Order(NamedTuple):
    """names: the backends as they are tried. source: why, where a preference changed the usual."""

    names: tuple[str, ...]
    source: str | None


def order(problem: Problem, usual: Sequence[str]) -> Order:
    """The order for a problem; `usual` is the one without any preference."""
    names, sources = list(usual), []
    for preference in PREFERENCES:
        if problem.device.compute_capability not in preference.capabilities:
            continue
        if preference.before in names and preference.first in names and preference.applies(problem):
            names.remove(preference.first)
            names.insert(names.index(preference.before), preference.first)
            sources.append(f"{preference.first} before {preference.before}: {preference.source}")
    return Order(tuple(names), "; ".join(sources) or None)


HALF = ("float16", "bfloat16")
_MEASURED = "measured on an H200, benchmarks/results/never-slower.json"


def _half(problem: Problem) -> bool:
    return problem.dtype in HALF


def _few_queries(problem: Problem) -> bool:
    """Too few programs for a GPU, unless the keys are split among them."""
    return _half(problem) and problem.q_len <= 16 and problem.kv_len >= 1024


def _odd_head_dim(problem: Problem) -> bool:
    return _half(problem) and problem.head_dim % 8 != 0


PREFERENCES: tuple[Preference, ...] = (
    Preference(
        "torch_cudnn",
        "flash",
        ((9, 0),),
        _half,
        _MEASURED,
    ),
    Preference(
        "torch_flash",
        "flash",
        ((9, 0),),
        _odd_head_dim,
        _MEASURED,
    ),
    Preference(
        "torch_flash",
        "flash",
        ((9, 0),),
        _few_queries,
        "not measured: it splits the keys among programs, which flash does not",
    ),
    Preference(
        "torch_efficient",
        "flash",
        ((9, 0),),
        lambda problem: problem.dtype == "float32" and problem.head_dim > 64,
        _MEASURED,
    ),
    Preference(
        "torch_cudnn",
        "flash",
        ((10, 0), (10, 3)),
        _half,
        "not measured here: on a B200 cuDNN is twice as fast as Triton or more, arXiv:2603.05451",
    ),
    Preference(
        "torch_flash",
        "flash",
        ((8, 0), (8, 6), (8, 7), (8, 9)),
        _half,
        "not measured here: on an A100 FlashAttention-2 is 1.3 to 2.5 times as fast as Triton, "
        "arXiv:2307.08691, section 4.1",
    ),
    Preference(
        "torch_flash",
        "flash",
        ((12, 0), (12, 1)),
        _half,
        "not measured here: PyTorch's own choice is kept",
    ),
)
