"""Choices and records as text: tables for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from limelight.tables import head_lines, new_table, note_lines, plain_text, reason_lines

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from limelight.dispatch import Choice, Record


def choice_table(choice: Choice) -> Table:
    """A row for each backend, in the order of preference."""
    from limelight.dispatch import KNOWN

    table = new_table("backend", "runs", "why")
    for name in choice.order:
        reasons = choice.reasons[name]
        if name == choice.backend:
            cut = choice.config
            why = KNOWN[name].summary
            if cut is not None:
                why += f"\ntiles of {cut.rows} queries x {cut.keys} keys ({cut.source})"
            table.add_row(name, "yes", why, style="bold green")
        else:
            table.add_row(name, "no", reason_lines(reasons))
    return table


def choice_text(choice: Choice) -> str:
    """The explanation that `print(limelight.explain(...))` shows."""
    return plain_text(choice_head(choice), choice_table(choice), *choice_notes(choice))


def choice_head(choice: Choice) -> Text:
    """What is asked: the verdict, the device and the problem."""
    from limelight.dispatch import describe

    verdict = choice.backend or "no backend"
    return head_lines(
        verdict, choice.backend is not None, str(choice.problem.device), describe(choice.problem)
    )


def choice_notes(choice: Choice) -> list[Text]:
    return note_lines(choice.notes)


def record_table(record: Record) -> Table:
    """A row for each different call, with how often it ran."""
    from limelight.dispatch import describe

    described = [describe(call.choice.problem) for call in record.calls]
    optional = [name for name in ("mask", "bias") if any(name in words for words in described)]
    columns = ["query", "key", *optional]
    counted: Counter[tuple[str, ...]] = Counter()
    for call, words in zip(record.calls, described, strict=True):
        shown = (words.get(name, "") for name in columns)
        counted[(call.stage, call.backend, *shown)] += 1
    table = new_table("calls", "stage", "backend", *columns)
    table.columns[0].justify = "right"
    for row, count in counted.items():
        table.add_row(str(count), *row)
    return table


def record_text(record: Record) -> str:
    """The table that `print` shows of a record."""
    return plain_text(record_table(record))
