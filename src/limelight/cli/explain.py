"""`limelight explain`: which kernel a problem would get, here or on a machine you do not have."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Annotated, Any

import typer

from limelight.cli.console import console, options, refused

_OPTIONS = {
    "query": "--head-dim",
    "key": "--kv-heads",
    "value": "--value-dim",
    "query_start": "--query-start",
    "softcap": "--softcap",
    "scale": "--scale",
    "dropout_p": "--dropout",
    "bias": "--bias",
    "device": "--device",
    "version": "--torch-version",
}


class DType(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def explain(
    q_len: Annotated[int, typer.Option(min=0, help="Queries.")] = 1024,
    kv_len: Annotated[
        int | None, typer.Option(min=0, help="Keys; by default as many as queries.")
    ] = None,
    batch: Annotated[int, typer.Option(min=0, help="Batch elements.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads of queries.")] = 8,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of keys and values; must divide --heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=256, help="Numbers in a query and key.")] = 64,
    value_dim: Annotated[
        int | None, typer.Option(min=1, max=256, help="Numbers in a value; by default --head-dim.")
    ] = None,
    dtype: Annotated[DType, typer.Option(help="Of queries, keys and values.")] = DType.bfloat16,
    mask: Annotated[
        str | None,
        typer.Option(help='Names joined by & and |: "causal & sliding_window(512)". See `show`.'),
    ] = None,
    bias: Annotated[str | None, typer.Option(help='Names joined by +: "alibi".')] = None,
    training: Annotated[
        bool, typer.Option("--training", help="With gradients of everything.")
    ] = False,
    dropout: Annotated[
        float, typer.Option(min=0, max=1, help="Probability of dropping a weight.")
    ] = 0.0,
    softcap: Annotated[float | None, typer.Option(help="Cap c in c * tanh(score / c).")] = None,
    query_start: Annotated[
        str | None, typer.Option(help='Position of the first query: a number, or "end".')
    ] = None,
    device: Annotated[
        str | None, typer.Option(help='A device to ask about: "RTX 2080"; this one by default.')
    ] = None,
    torch: Annotated[
        bool, typer.Option("--torch", help="Ask what PyTorch's own function would run.")
    ] = False,
    torch_version: Annotated[
        str | None, typer.Option(help="Of PyTorch, for --torch: 2.13.0; by default the installed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernel would run a problem, and every reason against each other one.

    Example: limelight explain --mask "causal & sliding_window(512)" --device "RTX 2080"
    """
    from limelight import Device, Problem, explain_torch
    from limelight import explain as explain_problem
    from limelight.grammar import parse_bias, parse_mask
    from limelight.problem import Layout
    from limelight.tile import Size

    size = Size(batch, heads, q_len, q_len if kv_len is None else kv_len)

    def layout(array: Any) -> Layout:
        floating = array.dtype.startswith("float")
        return Layout.contiguous(array.shape, dtype.value if floating else array.dtype)

    terms: dict[str, Any] = {}
    bias_of = partial(parse_bias, head_dim=head_dim)
    for name, text, parse in (("mask", mask, parse_mask), ("bias", bias, bias_of)):
        if text is not None:
            with options({}, f"--{name}"):
                terms[name] = parse(text, size).map_tensors(layout)
    with options(_OPTIONS, "--mask"):
        problem = Problem.of(
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype.value,
            training=training,
            dropout_p=dropout,
            softcap=softcap,
            query_start=start_option(query_start),
            **terms,
        )
        place = Device.named(device) if device is not None else this_device()
        problem = replace(problem, device=place)
        if torch or torch_version is not None:
            found = explain_torch(
                problem, device=None if device is None else place, version=torch_version
            )
        else:
            found = explain_problem(problem)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    for part in _parts(found):
        console().print(part)


def start_option(text: str | None) -> Any:
    """The value of `--query-start`."""
    if text is None or text == "end":
        return text
    try:
        return int(text)
    except ValueError:
        raise refused("--query-start", f'found {text!r}, needed a number or "end"') from None


def this_device() -> Any:
    """The GPU at hand, where torch is installed and sees one; else the CPU."""
    from importlib.util import find_spec

    from limelight.devices import CPU

    if find_spec("torch") is None:
        return CPU
    import torch

    if not torch.cuda.is_available():
        return CPU
    from limelight.adapters.torch.adapter import ADAPTER

    return ADAPTER.device(torch.empty(0, device="cuda"))


def _parts(found: Any) -> list[Any]:
    """What is printed of a choice or of a prediction."""
    from limelight import report
    from limelight.dispatch import Choice
    from limelight.pytorch import text

    if isinstance(found, Choice):
        return [report.choice_head(found), report.choice_table(found), *report.choice_notes(found)]
    head, table = text.prediction_head(found), text.prediction_table(found)
    return [head, table, *text.prediction_notes(found)]
