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


def _half(problem: Problem) -> bool:
    return problem.dtype in ("float16", "bfloat16")


PREFERENCES = (
    Preference(
        "torch_cudnn",
        "flash",
        ((9, 0),),
        _half,
        "measured on an H200 at length 4096 (benchmarks/results/h200.json); PyTorch's own default "
        "since 2.11",
    ),
    Preference(
        "torch_cudnn",
        "flash",
        ((10, 0), (10, 3)),
        _half,
        "PyTorch's own default there since 2.11; not measured here",
    ),
    Preference(
        "torch_flash",
        "flash",
        ((8, 0), (8, 6), (8, 9), (12, 0), (12, 1)),
        _half,
        "FlashAttention-2 against a Triton kernel on an A100, 1.3 to 1.5 times forward and 2 times "
        "backward (arXiv:2307.08691); not measured here",
    ),
    Preference(
        "torch_efficient",
        "flash",
        ((7, 0),),
        lambda problem: problem.dtype == "float16",
        "it has this card's tensor cores; not measured here",
    ),
)
