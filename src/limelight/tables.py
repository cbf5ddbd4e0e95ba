"""Tables and lines of text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from limelight.reason import Reason

WIDTH = 110


def new_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def reason_lines(reasons: Sequence[Reason]) -> Text:
    """A line for each rule with what was found, and under it what would lift the rule."""
    from rich.text import Text

    text = Text()
    for n, reason in enumerate(reasons):
        text.append("\n" if n else "")
        text.append(reason.rule)
        if reason.found:
            text.append(f": {reason.found}")
        place = getattr(reason, "place", "")
        if place:
            text.append(f"  [{place.rpartition('/')[2]}]", style="dim")
        if reason.lift:
            text.append(f"\n  -> {reason.lift}", style="dim")
    return text


def head_lines(verdict: str, good: bool, where: str, words: Mapping[str, str]) -> Text:
    """What is asked: the verdict, where, and the question in words."""
    from rich.text import Text

    width = max(map(len, words))
    head = Text.assemble((verdict, "bold green" if good else "bold red"), f" on {where}")
    for name, value in words.items():
        head.append(f"\n  {name:{width}}  ", style="dim")
        head.append(value)
    return head


def note_lines(notes: Sequence[str]) -> list[Text]:
    from rich.text import Text

    return [Text(f"note: {note}") for note in notes]


def plain_text(*parts: Table | Text) -> str:
    """The parts as they are printed, without colours."""
    from rich.console import Console

    console = Console(
        width=WIDTH, no_color=True, highlight=False, force_terminal=False, legacy_windows=False
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)
