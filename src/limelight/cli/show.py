"""`limelight show`: what a mask or bias looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from limelight.cli.console import console, options, refused


def show(
    name: Annotated[
        str | None,
        typer.Argument(
            help='A mask or bias: "causal", "causal & sliding_window(8)", "alibi". None: the list.'
        ),
    ] = None,
    q_len: Annotated[int, typer.Option(min=1, max=1024, help="Queries.")] = 32,
    kv_len: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Keys; by default as many as queries.")
    ] = None,
    heads: Annotated[
        int, typer.Option(min=1, max=64, help="Heads to draw, where they differ.")
    ] = 1,
    mask: Annotated[str | None, typer.Option(help="With a bias: a mask to draw over it.")] = None,
    query_start: Annotated[
        str, typer.Option(help='Position of the first query: a number, or "end".')
    ] = "end",
    png: Annotated[Path | None, typer.Option(help="Write a picture to this file too.")] = None,
) -> None:
    """Draw a mask or a bias in the terminal; without a name, list them.

    Tensors that a mask or bias needs (lengths, documents, slopes) are made up.
    """
    if name is None:
        _list()
        return
    import numpy as np

    from limelight.cli.explain import start_option
    from limelight.grammar import parse_mask, parse_term
    from limelight.masks import Mask
    from limelight.picture import dense
    from limelight.tile import Size

    kv_len = q_len if kv_len is None else kv_len
    start = start_option(query_start)
    start = kv_len - q_len if start == "end" else start
    # A row of heads is shown of a model with eight, so that one head is a typical one.
    size = Size(1, max(8, heads), q_len, kv_len)

    def drawn(option: str, text: str, parse: Any) -> tuple[Any, np.ndarray]:
        with options({}, option):
            described = parse(text, size)
            described.check(size)
            term = described.map_tensors(lambda array: array.values())
            return term, dense(term, q_len, kv_len, heads=size.q_heads, query_start=start)

    term, values = drawn("NAME", name, parse_term)
    title = name
    if mask is not None:
        if isinstance(term, Mask):
            raise refused(
                "--mask", "found a mask in NAME too, needed a bias there; join masks with &"
            )
        _, visible = drawn("--mask", mask, parse_mask)
        values = np.where(visible, values, -np.inf)
        title = f"{name}, under {mask}"
    if all(np.array_equal(values[0], head) for head in values):
        panels = [("every head", values[0])]
    else:
        panels = [(f"head {n} of {size.q_heads}", values[n]) for n in range(heads)]
    if start or q_len != kv_len:
        title += f", query_start={start}"
    _draw(title, panels)
    if png is not None:
        _save(panels, png, title)


def _draw(title: str, panels: list[tuple[str, Any]]) -> None:
    import numpy as np
    from rich.columns import Columns
    from rich.text import Text

    from limelight.picture import legend, limits_of, terminal

    out = console()
    colour = out.color_system is not None and not out.no_color
    every = np.stack([values for _, values in panels])
    limits = None if every.dtype == bool else limits_of(every)
    pictures = [
        Text.assemble((label, "bold"), "\n").append_text(
            terminal(values, colour=colour, limits=limits, width=out.width)
        )
        for label, values in panels
    ]
    out.print(Text(title, style="bold"))
    out.print(Columns(pictures, padding=(0, 3)) if len(pictures) > 1 else pictures[0])
    out.print(legend(every, colour=colour, limits=limits))


def _save(panels: list[tuple[str, Any]], png: Path, title: str) -> None:
    from limelight.picture import save_png

    try:
        save_png(panels, png, title=title)
    except ImportError:
        raise refused("--png", "found no matplotlib, needed: pip install matplotlib") from None
    except OSError as error:
        raise refused("--png", f"found a file that cannot be written: {error}") from None
    typer.echo(f"wrote {png}")


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from limelight.biases import Bias
    from limelight.examples import kinds
    from limelight.masks import Mask

    out = console()
    for heading, base, joined in (
        ("masks", Mask, "& and |, with parentheses"),
        ("biases", Bias, "+"),
    ):
        table = Table.grid(padding=(0, 2))
        for name, kind in kinds(base).items():
            arguments = ", ".join(kind.plain_fields)
            first = (kind.__doc__ or "").split("\n")[0]
            table.add_row(f"  {name}{f'({arguments})' if arguments else ''}", Text(first))
        out.print(f"[bold]{heading}[/bold], joined by {joined}")
        out.print(table)
    out.print('\nTry: limelight show "causal & sliding_window(8)"')
