"""Choices and records as text: tables for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from limelight.dispatch import Choice, Record

WIDTH = 110


def choice_table(choice: Choice) -> Table:
    """A row for each backend, in the order of preference."""
    from rich.table import Table

    table = Table("backend", "runs?", "why", title_justify="left")
    for name in choice.order:
        reasons = choice.reasons[name]
        if name == choice.backend:
            cut = choice.config
            how = f"tiles of {cut.rows} x {cut.keys} ({cut.source})" if cut is not None else ""
            table.add_row(name, "chosen", how, style="bold green")
        else:
            text = "\n".join(f"- {reason}" for reason in reasons)
            table.add_row(name, "no", text)
    return table


def choice_text(choice: Choice) -> str:
    """The explanation that `print(limelight.explain(...))` shows."""
    from limelight.dispatch import describe

    words = ", ".join(f"{name} {value}" for name, value in describe(choice.problem).items())
    notes = [f"note: {note}" for note in choice.notes]
    return "\n".join([f"on {choice.problem.device}: {words}", _plain(choice_table(choice)), *notes])


def record_table(record: Record) -> Table:
    """A row for each different call, with how often it ran."""
    from rich.table import Table

    from limelight.dispatch import describe

    table = Table("calls", "stage", "backend", "query", "mask", "bias")
    counted: Counter[tuple[str, ...]] = Counter()
    for call in record.calls:
        words = describe(call.choice.problem)
        shown = (words["query"], words.get("mask", ""), words.get("bias", ""))
        counted[(call.stage, call.backend, *shown)] += 1
    for row, count in counted.items():
        table.add_row(str(count), *row)
    return table


def record_text(record: Record) -> str:
    return _plain(record_table(record))


def _plain(table: Table) -> str:
    from rich.console import Console

    console = Console(width=WIDTH, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
