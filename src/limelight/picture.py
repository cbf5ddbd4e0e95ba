"""Masks and biases as pictures: text for docstrings and terminals, PNG for documents.

Queries run down, keys across, as in the papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limelight.biases import Bias
from limelight.masks import Mask
from limelight.tile import Positions, Size

if TYPE_CHECKING:
    from rich.text import Text

# Colours of a value from 0 to 1, evenly spaced (matplotlib's viridis), and of keys.
SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
HIDDEN = (38, 38, 44)
VISIBLE = (190, 242, 60)
SHADES = " ░▒▓█"  # where there is no colour, for values from least to greatest


def dense(
    term: Mask | Bias, q_len: int, kv_len: int, *, heads: int = 1, query_start: int = 0
) -> np.ndarray:
    """The values [heads, q_len, kv_len] of a mask or bias for one batch element.

    For a bias that reads the query, of queries that are all ones, with a scale of 1.
    """
    size = Size(1, heads, q_len, kv_len)
    term = term.resolved(heads, np.asarray).map_tensors(np.asarray)
    query = None
    if isinstance(term, Bias) and term.reads_query():
        dims = [part.query_dim() for part in term.parts()]  # type: ignore[attr-defined]
        query = np.ones((1, heads, q_len, next(dim for dim in dims if dim is not None)))
    positions = Positions.of(
        np, size=size, dtype=np.float64, device="cpu", query_start=query_start, query=query
    )
    return np.broadcast_to(term.values(positions.whole(), np), (1, heads, q_len, kv_len))[0]


def matrix(term: Mask | Bias, q_len: int, kv_len: int) -> str:
    """The first head's values as rows of numbers: queries down, keys across."""
    values = dense(term, q_len, kv_len)[0]
    if values.dtype == bool:
        return "\n".join(" ".join(str(int(seen)) for seen in row) for row in values)
    cells = [[f"{value + 0.0:.1f}" for value in row] for row in values]
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)


def terminal(
    values: np.ndarray,
    *,
    colour: bool = True,
    limits: tuple[float, float] | None = None,
    width: int = 100,
) -> Text:
    """One head's values [q_len, kv_len] drawn with half blocks, a cell for each query and key.

    values: bool, or numbers, of which those that are not finite are drawn as hidden. colour:
    without it, numbers become shades, a whole character each. limits: the values at the ends of
    the colour scale. width: columns to fit into; of wider matrices only every n-th key and query
    is drawn.

    >>> print(terminal(np.tri(4, 8, 4, dtype=bool), colour=False))
    queries ↓  keys →
          0
        0 █████▄
        2 ███████▄
    """
    from rich.text import Text

    values = np.asarray(values)
    step = max(1, -(-values.shape[1] // max(width - 9, 1)), -(-values.shape[0] // 128))
    values = values[::step, ::step]
    q_len, kv_len = values.shape
    text = Text("queries ↓  keys →")
    if step > 1:
        text.append(f"  (every {_nth(step)} of each)", style="dim")
    ticks = "".join(str(key * step).ljust(10) for key in range(0, kv_len, 10))
    text.append(f"\n      {ticks}".rstrip(), style="dim")
    half = colour or values.dtype == bool
    cells = _colours(values, limits)
    rows = range(0, q_len, 2 if half else 1)
    for row in rows:
        labelled = row % 8 == 0 or len(rows) <= 8
        text.append(f"\n{row * step if labelled else '':>5} ", style="dim")
        if not half:
            text.append(_shades(values[row], limits))
        elif colour:
            for key in range(kv_len):
                top = _hex(cells[row, key])
                if row + 1 < q_len:
                    text.append("▀", style=f"{top} on {_hex(cells[row + 1, key])}")
                else:
                    text.append("▀", style=top)
        else:
            below = values[row + 1] if row + 1 < q_len else np.zeros(kv_len, bool)
            blocks = (
                " ▄▀█"[2 * int(up) + int(down)] for up, down in zip(values[row], below, strict=True)
            )
            text.append("".join(blocks))
    if not colour:
        text = Text("\n".join(line.rstrip() for line in text.plain.split("\n")))
    return text


def legend(
    values: np.ndarray, *, colour: bool = True, limits: tuple[float, float] | None = None
) -> Text:
    """What the colours (or, without colour, the characters) of `terminal` mean."""
    from rich.text import Text

    if values.dtype == bool:
        if colour:
            swatches = (("  ", f"on {_hex(VISIBLE)}"), " visible   ", ("  ", f"on {_hex(HIDDEN)}"))
            return Text.assemble(*swatches, " hidden")
        return Text("█ visible, blank hidden")
    low, high = limits or limits_of(values)
    text = Text(f"{low:.4g} ")
    if colour:
        for place in np.linspace(0.0, 1.0, 24):
            text.append(" ", style=f"on {_hex(_scaled(np.array(place)))}")
    else:
        text.append(f"[{SHADES}]")
    text.append(f" {high:.4g}")
    if not np.isfinite(values).all():
        if colour:
            text.append("   ").append("  ", style=f"on {_hex(HIDDEN)}").append(" hidden")
        else:
            text.append("   · hidden")
    return text


def save_png(
    panels: Sequence[tuple[str, np.ndarray]], path: str | Path, *, title: str = ""
) -> None:
    """Writes matrices side by side as one heat map with axes and a scale. Needs matplotlib.

    panels: a name and values [q_len, kv_len] for each; they share one colour scale.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(4.2 * len(panels) + 0.8, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    every = np.stack([values for _, values in panels])
    hidden, visible = _hex(HIDDEN), _hex(VISIBLE)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    shown = None
    for axis, (name, values) in zip(axes, panels, strict=True):
        if values.dtype == bool:
            shown = axis.imshow(values, cmap=ListedColormap([hidden, visible]), vmin=0, vmax=1)
        else:
            low, high = limits_of(every)
            finite = np.ma.masked_invalid(values)
            shown = axis.imshow(
                finite, cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
            )
            axis.set_facecolor(hidden)
        axis.set_title(name)
        axis.set_xlabel("keys")
        axis.set_ylabel("queries")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    if every.dtype == bool:
        patches = [Patch(color=visible, label="visible"), Patch(color=hidden, label="hidden")]
        figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    elif shown is not None:
        figure.colorbar(shown, ax=list(axes), label="added to the score", shrink=0.8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png")


def limits_of(values: np.ndarray) -> tuple[float, float]:
    """The least and the greatest finite value; zeros where there is none."""
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _unit(values: np.ndarray, limits: tuple[float, float] | None) -> np.ndarray:
    """Values brought into 0 to 1 between the limits; one half where the limits are equal."""
    low, high = limits or limits_of(values)
    if high <= low:
        return np.full(values.shape, 0.5)
    return np.clip((np.nan_to_num(values, posinf=low, neginf=low) - low) / (high - low), 0.0, 1.0)


def _scaled(unit: np.ndarray) -> np.ndarray:
    """Colours [..., 3] on the scale."""
    places = np.linspace(0.0, 1.0, len(SCALE))
    return np.stack([np.interp(unit, places, channel) for channel in np.array(SCALE).T], axis=-1)


def _colours(values: np.ndarray, limits: tuple[float, float] | None) -> np.ndarray:
    """[q_len, kv_len, 3], each from 0 to 255."""
    if values.dtype == bool:
        return np.where(values[..., None], np.array(VISIBLE), np.array(HIDDEN))
    return np.where(
        np.isfinite(values)[..., None], _scaled(_unit(values, limits)), np.array(HIDDEN)
    )


def _hex(colour: Any) -> str:
    red, green, blue = (int(part) for part in colour)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _shades(row: np.ndarray, limits: tuple[float, float] | None) -> str:
    places = np.minimum((_unit(row, limits) * len(SHADES)).astype(int), len(SHADES) - 1)
    return "".join(
        SHADES[place] if finite else "·"
        for place, finite in zip(places, np.isfinite(row), strict=True)
    )


def _nth(step: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
