"""Rule: one check of PyTorch's, as a function of plain data, with its versions and its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from limelight.devices import Device
from limelight.pytorch.builds import Build, Switches
from limelight.pytorch.lines import line
from limelight.pytorch.sdpa import SDPA
from limelight.reason import Reason

HEADER = "aten/src/ATen/native/transformers/sdp_utils_cpp.h"
CUDA = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
CPU = "aten/src/ATen/native/transformers/sdp_utils_cpp.cpp"


class Verdict(str, Enum):
    """What is said of a backend, from best to worst."""

    CHOSEN = "chosen"
    NO_CODE = "chosen, without machine code for this card"
    LOWER = "could run it, lower in the order"
    ILLEGAL = "cannot run it"
    OFF = "switched off"
    NOT_BUILT = "not built"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Situation:
    """All that decides: the call, where it runs, by which build, with which switches."""

    sdpa: SDPA
    device: Device
    build: Build
    switches: Switches

    @property
    def capability(self) -> tuple[int, int]:
        return self.device.compute_capability or (0, 0)

    @property
    def half(self) -> bool:
        return self.sdpa.query.dtype in ("float16", "bfloat16")

    def since(self, *version: int) -> bool:
        return self.build.version >= version


@dataclass(frozen=True)
class TorchReason(Reason):
    """A reason of PyTorch's against a backend.

    check: PyTorch's function. place: file and, where it is known for the release, line. kind: the
    verdict that it makes. silent: whether PyTorch refuses without a message.
    """

    check: str = ""
    place: str = ""
    kind: Verdict = Verdict.ILLEGAL
    silent: bool = False


Broken = tuple[str, str, str]  # the rule in words, what was found, what would lift it


@dataclass(frozen=True)
class Rule:
    """broken: what it says about a situation that breaks the rule, None where it is kept.

    check, file: PyTorch's function, and the file that it is in. message: tells several messages of
    one function apart. dense, nested: for inputs of which kind the rule is asked; four: whether it
    needs four dimensions. since, before: the releases that have it.
    """

    broken: Callable[[Situation], Broken | None]
    check: str
    file: str
    message: str = ""
    kind: Verdict = Verdict.ILLEGAL
    silent: bool = False
    dense: bool = True
    nested: bool = True
    four: bool = False
    since: tuple[int, int] = (2, 0)
    before: tuple[int, int] = (99, 0)

    def applies(self, s: Situation) -> bool:
        if not self.since <= s.build.version[:2] < self.before:
            return False
        if self.four and not s.sdpa.four_dimensional:
            return False
        return self.nested if s.sdpa.nested else self.dense

    def against(self, s: Situation) -> TorchReason | None:
        broken = self.broken(s) if self.applies(s) else None
        if broken is None:
            return None
        number = line(self.check, self.message, s.build.version)
        place = f"{self.file}:{number}" if number else self.file
        return TorchReason(
            *broken, check=self.check, place=place, kind=self.kind, silent=self.silent
        )


Test = Callable[[Situation], "Broken | None"]


def rule(
    check: str,
    file: str = HEADER,
    message: str = "",
    *,
    kind: Verdict = Verdict.ILLEGAL,
    silent: bool = False,
    dense: bool = True,
    nested: bool = True,
    four: bool = False,
    since: tuple[int, int] = (2, 0),
    before: tuple[int, int] = (99, 0),
) -> Callable[[Test], Rule]:
    """Makes a function a rule; the arguments are `Rule`'s."""

    def made(broken: Test) -> Rule:
        return Rule(broken, check, file, message, kind, silent, dense, nested, four, since, before)

    return made


def reasons(rules: tuple[Rule, ...], s: Situation) -> tuple[TorchReason, ...]:
    """Every reason against, in PyTorch's order: the first is the one at which PyTorch stops."""
    found = (each.against(s) for each in rules)
    return tuple(reason for reason in found if reason is not None)


def allowed(rules: tuple[Rule, ...], s: Situation) -> bool:
    """Whether no rule is broken; stops at the first that is, as PyTorch does."""
    return all(rule.against(s) is None for rule in rules)


def sizes(s: Situation, axis: int) -> str:
    """The sizes of query, key and value along an axis."""
    return ", ".join(str(operand.shape[axis]) for operand in s.sdpa.operands)


def in_range(s: Situation, least: tuple[int, int], most: tuple[int, int]) -> bool:
    return least <= s.capability <= most
