"""Reason: why a backend is not taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a backend is not taken: the rule, what was found, and what would lift it."""

    rule: str
    found: str
    lift: str

    def __str__(self) -> str:
        return (
            f"{self.rule}; found {self.found}; {self.lift}"
            if self.lift
            else f"{self.rule}; {self.found}"
        )
