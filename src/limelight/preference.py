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


# None yet: PyTorch's kernels and `hopper` are offered behind `flash` until their tests, and a table
# of times, have come from a card of the kind.
PREFERENCES: tuple[Preference, ...] = ()
