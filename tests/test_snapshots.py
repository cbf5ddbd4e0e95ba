"""What every named device gets for ten telling problems, as it was last looked at.

`PYTHONPATH=src python tests/test_snapshots.py` writes the file anew; read the difference.
"""

from __future__ import annotations

from pathlib import Path

from limelight import ALiBi, Causal, KeyLengths, Problem, explain, explain_torch
from limelight.devices import NAMED
from limelight.problem import Layout

FILE = Path(__file__).parent / "snapshots" / "choices.txt"
TORCH = "2.13.0"


def problems():
    lengths = KeyLengths(Layout.contiguous((2,), "int64"))
    half = {"batch": 2, "dtype": "float16", "library_version": TORCH}
    return {
        "plain": Problem.of(**half),
        "bfloat16, training": Problem.of(**{**half, "dtype": "bfloat16"}, training=True),
        "causal, head_dim 128, training": Problem.of(
            **half, head_dim=128, mask=Causal(), training=True
        ),
        "float32, causal": Problem.of(**{**half, "dtype": "float32"}, mask=Causal()),
        "float64": Problem.of(**{**half, "dtype": "float64"}),
        "decode, grouped heads": Problem.of(
            **half, heads=32, kv_heads=8, q_len=1, kv_len=4096, query_start="end", mask=Causal()
        ),
        "padding": Problem.of(**half, mask=lengths),
        "ALiBi, causal, training": Problem.of(**half, mask=Causal(), bias=ALiBi(), training=True),
        "head_dim 100": Problem.of(**half, head_dim=100),
        "dropout 0.1": Problem.of(**half, dropout_p=0.1),
    }


def snapshot():
    """By device, a line for each problem: what runs, what could too, what PyTorch itself selects."""
    lines = [
        "What runs, and after > what else could run it, in the order of preference;",
        f"then what PyTorch {TORCH} itself selects (!: without machine code for the card).",
    ]
    for device in NAMED:
        lines += ["", str(device)]
        for name, problem in problems().items():
            choice = explain(problem, device=device)
            later = [
                other
                for other in choice.order
                if other == choice.backend
                or choice.reasons[other][0].rule.startswith("can run it, and comes later")
            ]
            theirs = explain_torch(problem, device=device, version=TORCH)
            selected = theirs.backend + ("" if theirs.has_code or device.kind == "cpu" else "!")
            lines.append(f"  {name:31} {' > '.join(later):70} {selected}".rstrip())
    return "\n".join(lines) + "\n"


def test_choices():
    assert snapshot() == FILE.read_text()


def test_every_problem_runs_everywhere():
    for device in NAMED:
        for name, problem in problems().items():
            assert explain(problem, device=device).backend, f"{name} on {device}"


if __name__ == "__main__":
    FILE.write_text(snapshot())
