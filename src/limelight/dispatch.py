"""Which backend runs a problem, and why no other: one code path for running and for explaining."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from limelight import preference
from limelight.backends import BACKENDS, Backend, Reason
from limelight.errors import NoBackendError, invalid
from limelight.problem import ITEM_BYTES, Problem
from limelight.tuning import TileConfig

KNOWN = {backend.name: backend for backend in BACKENDS}


@dataclass(frozen=True)
class Choice:
    """What runs a problem, and every reason against the rest.

    backend: the name of the chosen backend; None if none can run. reasons: for each backend, what
    speaks against it: nothing for the chosen one. order: the backends as they are preferred.
    config: how the chosen backend cuts the problem into tiles, where it does.
    """

    problem: Problem
    backend: str | None
    reasons: Mapping[str, tuple[Reason, ...]]
    order: tuple[str, ...]
    config: TileConfig | None
    order_source: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a user should know about how the problem runs."""
        from limelight.pytorch import cards

        notes = [*cards.notes(self.problem.device)]
        if notes:
            notes += _on_an_old_card(self.problem, self.backend)
        if self.order_source is not None:
            notes.append(self.order_source)
        if self.problem.copies:
            names = " and ".join(self.problem.copies)
            notes.append(f"{names}: last dimension is not contiguous, so a copy is made first")
        if self.problem.gradients:
            notes.append("a second derivative re-runs math, with O(L^2) memory")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """The choice as plain data, ready for JSON."""
        config = self.config
        return {
            "problem": describe(self.problem),
            "device": str(self.problem.device),
            "backend": self.backend,
            "config": None if config is None else {"rows": config.rows, "keys": config.keys},
            "config_source": None if config is None else config.source,
            "order": list(self.order),
            "order_source": self.order_source,
            "reasons": {
                name: [{"rule": r.rule, "found": r.found, "lift": r.lift} for r in reasons]
                for name, reasons in self.reasons.items()
            },
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from limelight.report import choice_text

        return choice_text(self)


def _on_an_old_card(problem: Problem, backend: str | None) -> list[str]:
    """How much memory the scores take or would take, and what PyTorch's own function would do."""
    from limelight.pytorch import SDPA, Build, predict

    scores = math.prod(problem.size) * ITEM_BYTES[problem.dtype] / 2**20
    notes = [f"memory grows with the length; all scores at once would take {scores:.0f} MiB"]
    if backend == "math":
        notes = [f"all scores are kept at once: {scores:.0f} MiB"]
    if problem.library == "torch" and problem.softcap is None and problem.sinks is None:
        build = Build.released(problem.library_version or None)
        found = predict(SDPA.from_problem(problem), problem.device, build)
        fails = ", and fail, as all its operations do: it has no machine code for the card"
        notes.append(
            f"{build} itself would select {found.backend}{'' if found.has_code else fails}"
        )
    return notes


def describe(problem: Problem) -> dict[str, str]:
    """A problem in words, for people and for JSON. Only what departs from the default is said."""
    p = problem
    words = {
        "query": f"{p.dtype} {list(p.query.shape)}",
        "key": f"{list(p.key.shape)}",
        "value": f"{list(p.value.shape)}",
    }
    optional = {
        "mask": p.mask,
        "bias": p.bias,
        "query_start": p.query_start,
        "softcap": p.softcap,
        "sinks": p.sinks,
        "dropout_p": p.dropout_p or None,
        "gradients": ", ".join(p.gradients) or None,
        "deterministic": "yes" if p.deterministic else None,
    }
    words |= {name: str(value) for name, value in optional.items() if value is not None}
    return words | {"library": f"{p.library} {p.library_version}".strip()}


IN_ORDER = "in order"  # a compiled graph carries a restriction as a list of texts

# Process-wide, as torch.nn.attention.sdpa_kernel is: autograd runs backwards in threads of its own,
# which no thread-local or context variable reaches, and torch.compile guards on a plain global.
_allowed: tuple[str, ...] | None = None
_restrictions: tuple[list[tuple[str, ...]], ...] = ()
_records: tuple[Record, ...] = ()
_lock = threading.Lock()


def allowed() -> tuple[str, ...] | None:
    """The backends that `limelight.backends` restricts to; None when it does not.

    IN_ORDER before them says that they are preferred in the order in which they stand.
    """
    return _allowed


@contextlib.contextmanager
def backends(*names: str, in_order: bool = False) -> Iterator[None]:
    """Allows only these backends inside the `with`, for the whole process.

    in_order: also prefer them in the order in which they are named, not in limelight's.
    A backward runs on the backend of its forward, wherever it is started. The innermost `with`
    counts. Raises ValueError for an unknown name, and `NoBackendError`, at the call, where none
    of the names can run it.
    """
    global _allowed, _restrictions
    for name in names:
        if not isinstance(name, str) or name not in KNOWN:
            raise invalid("backends", found=repr(name), needed=f"one of {', '.join(KNOWN)}")
    if not names:
        raise invalid("backends", found="no name", needed=f"one or more of {', '.join(KNOWN)}")
    if in_order:
        names = (IN_ORDER, *names)
    opened = [names]  # a list, as identity tells it from another restriction to the same names
    with _lock:
        _restrictions = (*_restrictions, opened)
        _allowed = names
    try:
        yield
    finally:
        with _lock:
            _restrictions = tuple(each for each in _restrictions if each is not opened)
            _allowed = _restrictions[-1][0] if _restrictions else None


@lru_cache(maxsize=4096)
def decide(problem: Problem, allowed: tuple[str, ...] | None) -> Choice:
    """The choice for a problem; `Choice.backend` is None where nothing can run it."""
    order = preference.order(problem, tuple(KNOWN))
    if allowed is not None and allowed[0] == IN_ORDER:
        allowed = allowed[1:]
        rest = [name for name in KNOWN if name not in allowed]
        order = preference.Order((*allowed, *rest), "in the order given to limelight.backends")
    reasons: dict[str, tuple[Reason, ...]] = {}
    chosen: Backend | None = None
    for backend in map(KNOWN.__getitem__, order.names):
        against = backend.why_not(problem)
        if allowed is not None and backend.name not in allowed:
            names = ", ".join(allowed)
            against.append(
                Reason("not among the allowed backends", names, "allow it in limelight.backends")
            )
        if not against and chosen is not None:
            against.append(
                Reason(
                    "can run it, and comes later in the order",
                    f"{chosen.name} before {backend.name}",
                    f'ask for it with limelight.backends("{backend.name}")',
                )
            )
        elif not against:
            chosen = backend
        reasons[backend.name] = tuple(against)
    return Choice(
        problem=problem,
        backend=None if chosen is None else chosen.name,
        reasons=reasons,
        order=order.names,
        order_source=order.source,
        config=None if chosen is None else chosen.config(problem),
    )


def choose(problem: Problem, restriction: tuple[str, ...] | None) -> Choice:
    """The choice for a problem that is about to run.

    Raises NoBackendError, with every reason, where none of the allowed backends can run it.
    """
    choice = decide(problem, restriction)
    if choice.backend is None:
        raise NoBackendError(choice)
    return choice


@dataclass(frozen=True)
class RecordedCall:
    """One attention that ran. stage: "forward", "backward" or "double backward"."""

    choice: Choice
    stage: str

    @property
    def backend(self) -> str:
        assert self.choice.backend is not None  # choose() raises otherwise
        return self.choice.backend if self.stage != "double backward" else "math"


@dataclass(eq=False)
class Record:
    """The calls that ran while it was open, in order. `print` shows them as a table."""

    calls: list[RecordedCall] = field(default_factory=list)

    @property
    def backends(self) -> Counter[str]:
        """How many calls each backend ran."""
        return Counter(call.backend for call in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[RecordedCall]:
        return iter(self.calls)

    def __getitem__(self, index: int) -> RecordedCall:
        return self.calls[index]

    def __str__(self) -> str:
        from limelight.report import record_text

        return record_text(self)


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Collects every attention that the process runs inside the `with`, backwards included.

    >>> with record() as calls:
    ...     pass
    >>> len(calls)
    0
    """
    global _records
    opened = Record()
    with _lock:
        _records = (*_records, opened)
    try:
        yield opened
    finally:
        with _lock:
            _records = tuple(each for each in _records if each is not opened)


def note(choice: Choice, stage: str) -> None:
    """Tells the open records that a call runs."""
    for opened in _records:
        opened.calls.append(RecordedCall(choice, stage))
