"""Choices and records as text: tables for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from limelight.backends import Reason
    from limelight.dispatch import Choice, Record

WIDTH = 110


def choice_table(choice: Choice) -> Table:
    """A row for each backend, in the order of preference."""
    from limelight.dispatch import KNOWN

    table = _table("backend", "runs", "why")
    for name in choice.order:
        reasons = choice.reasons[name]
        if name == choice.backend:
            cut = choice.config
            why = KNOWN[name].summary
            if cut is not None:
                why += f"\ntiles of {cut.rows} queries x {cut.keys} keys ({cut.source})"
            table.add_row(name, "yes", why, style="bold green")
        else:
            table.add_row(name, "no", _reasons(reasons))
    return table


def _reasons(reasons: tuple[Reason, ...]) -> Text:
    """A line for each rule with what was found, and under it what would lift the rule."""
    from rich.text import Text

    text = Text()
    for n, reason in enumerate(reasons):
        text.append("\n" if n else "")
        text.append(reason.rule)
        if reason.found:
            text.append(f": {reason.found}")
        if reason.lift:
            text.append(f"\n  -> {reason.lift}", style="dim")
    return text


def choice_text(choice: Choice) -> str:
    """The explanation that `print(limelight.explain(...))` shows."""
    return _plain(choice_head(choice), choice_table(choice), *choice_notes(choice))


def choice_head(choice: Choice) -> Text:
    """What is asked: the verdict, the device and the problem."""
    from rich.text import Text

    from limelight.dispatch import describe

    verdict = choice.backend or "no backend"
    words = describe(choice.problem)
    width = max(map(len, words))
    head = Text.assemble(
        (verdict, "bold green" if choice.backend else "bold red"), f" on {choice.problem.device}"
    )
    for name, value in words.items():
        head.append(f"\n  {name:{width}}  ", style="dim")
        head.append(value)
    return head


def choice_notes(choice: Choice) -> list[Text]:
    from rich.text import Text

    return [Text(f"note: {note}") for note in choice.notes]


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
    table = _table("calls", "stage", "backend", *columns)
    table.columns[0].justify = "right"
    for row, count in counted.items():
        table.add_row(str(count), *row)
    return table


def record_text(record: Record) -> str:
    """The table that `print` shows of a record."""
    return _plain(record_table(record))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain(*parts: Table | Text) -> str:
    from rich.console import Console

    console = Console(
        width=WIDTH, no_color=True, highlight=False, force_terminal=False, legacy_windows=False
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)
