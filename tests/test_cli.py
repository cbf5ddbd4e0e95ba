"""The command line, through its own parser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

typer = pytest.importorskip("typer")

from typer.testing import CliRunner

import limelight as ll
from limelight.biases import Bias
from limelight.cli import app, checks, cold_start
from limelight.devices import NAMED
from limelight.examples import kinds
from limelight.grammar import parse_bias, parse_mask
from limelight.masks import And, Mask, Or
from limelight.tile import Size

SIZE = Size(1, 2, 16, 16)


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def explained(*arguments):
    found = run("explain", "--device", "H200", "--json", *arguments)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


# Grammar.


def test_and_binds_closer_than_or():
    mask = parse_mask("causal | sliding_window(2) & causal", SIZE)
    assert mask == Or((ll.Causal(), And((ll.SlidingWindow(2), ll.Causal()))))
    mask = parse_mask("(causal | sliding_window(2)) & causal", SIZE)
    assert mask == And((Or((ll.Causal(), ll.SlidingWindow(2))), ll.Causal()))


@pytest.mark.parametrize(
    "name", ["sliding_window", "SlidingWindow", "sliding-window", "slidingwindow"]
)
def test_names_in_any_spelling(name):
    assert parse_mask(f"{name}(3, right=0)", SIZE) == ll.SlidingWindow(3, 0)


def test_none_is_no_limit():
    assert parse_mask("sliding_window(none, right=2)", SIZE) == ll.SlidingWindow(None, 2)


def test_biases_add_up():
    assert len(parse_bias("alibi + dense_bias + alibi()", SIZE).parts()) == 3


WRONG = [
    "",
    "causal &",
    "& causal",
    "causal causal",
    "causal)",
    "(causal",
    "causal + causal",
    "causal(1)",
    "sliding_window(-1)",
    "sliding_window(1.5)",
    "sliding_window(1, 2, 3)",
    "sliding_window(left=1, left=2)",
    "sliding_window(1, left=2)",
    "sliding_window(middle=2)",
    "sliding_window(one)",
    "sliding_window(1",
    "key_lengths(3)",
    "__import__('os')",
    "causal; causal",
    "alibi",
    "mask",
    "(" * 10_000,
]


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_wrong_texts_are_value_errors(text):
    with pytest.raises(ValueError, match="found"):
        parse_mask(text, SIZE)


# explain


def test_explain_is_the_librarys_own():
    problem = ll.Problem.of(
        batch=2,
        heads=8,
        kv_heads=2,
        q_len=128,
        kv_len=256,
        head_dim=80,
        value_dim=96,
        dtype="float16",
        training=True,
        softcap=30.0,
        dropout_p=0.1,
        query_start="end",
        mask=ll.Causal() & ll.SlidingWindow(64),
        bias=ll.ALiBi(),
    )
    shown = explained(
        *("--batch", "2", "--heads", "8", "--kv-heads", "2", "--q-len", "128", "--kv-len", "256"),
        *("--head-dim", "80", "--value-dim", "96", "--dtype", "float16", "--training"),
        *("--softcap", "30", "--dropout", "0.1", "--query-start", "end"),
        *("--mask", "causal & sliding_window(64)", "--bias", "alibi"),
    )
    assert shown == ll.explain(problem, device="H200").to_dict()


@pytest.mark.parametrize("name", kinds(Mask))
def test_explain_every_mask(name):
    assert explained("--mask", name, "--q-len", "20")["problem"]["mask"].startswith(
        kinds(Mask)[name].__name__
    )


@pytest.mark.parametrize("name", kinds(Bias))
def test_explain_every_bias(name):
    assert explained("--bias", name)["problem"]["bias"].startswith(kinds(Bias)[name].__name__)


def test_explain_torch_is_the_librarys_own():
    asked = ("--torch", "--torch-version", "2.13.0", "--dtype", "float16", "--mask", "causal")
    problem = ll.Problem.of(dtype="float16", mask=ll.Causal())
    there = ll.explain_torch(problem, device="H200", version="2.13.0")
    assert explained(*asked) == there.to_dict()
    shown = " ".join(run("explain", "--device", "GTX 1080", *asked).stdout.split())
    assert "PyTorch selects efficient, and fails on GTX 1080" in shown
    assert "sdp_utils.cpp:443" in shown


def test_explain_torch_here():
    assert "PyTorch runs flash on CPU" in run("explain", "--torch").stdout


def test_explain_makes_no_tensor():
    shown = explained("--mask", "dense_mask", "--bias", "dense_bias", "--q-len", "1000000")
    assert "[1, 8, 1000000, 1000000]" in shown["problem"]["bias"]


@pytest.mark.parametrize("device", NAMED, ids=lambda device: device.name)
def test_explain_every_device(device):
    found = run("explain", "--device", device.name.lower())
    assert found.exit_code == 0
    assert str(device) in found.stdout


def test_explain_here_gives_every_backend_a_row():
    found = run("explain", "--mask", "causal")
    assert found.exit_code == 0
    for name in ll.explain(ll.Problem.of()).order:
        assert f"│ {name} " in found.stdout


# show


@pytest.mark.parametrize("name", [*kinds(Mask), *kinds(Bias)])
def test_show_everything(name, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "picture.png"
    found = run("show", name, "--q-len", "12", "--heads", "2", "--png", str(png))
    assert found.exit_code == 0, found.output
    assert "queries ↓  keys →" in found.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


def test_show_draws_the_mask():
    lines = run("show", "causal", "--q-len", "4").stdout.split("\n")
    assert [line.rstrip() for line in lines[4:6]] == ["    0 █▄", "    2 ███▄"]


def test_show_unequal_lengths_stand_at_the_end():
    lines = run("show", "causal", "--q-len", "2", "--kv-len", "6").stdout.split("\n")
    assert "query_start=4" in lines[0]
    assert lines[4].rstrip() == "    0 █████▄"
    first = run("show", "causal", "--q-len", "2", "--kv-len", "6", "--query-start", "0").stdout
    assert "    0 █▄" in first


def test_show_a_bias_under_a_mask():
    found = run("show", "alibi", "--mask", "causal", "--q-len", "4")
    assert found.exit_code == 0
    assert "···" in found.stdout


def test_show_lists_all_names():
    found = run("show")
    assert found.exit_code == 0
    for name in (*kinds(Mask), *kinds(Bias)):
        assert name in found.stdout


# doctor


def test_doctor_passes():
    found = run("doctor")
    assert found.exit_code == 0, found.output
    assert "all checks passed" in found.stdout
    assert np.__version__ in found.stdout


def test_doctor_says_what_pytorch_itself_would_run():
    shown = run("doctor").stdout
    assert "PyTorch runs" in shown
    assert "PyTorch's backend" in shown


def test_doctor_fails_for_a_wrong_kernel(monkeypatch):
    from limelight.backends.math import Math

    right = Math.forward

    def wrong(self, call):
        out, lse = right(self, call)
        return out * 1.1, lse

    monkeypatch.setattr(Math, "forward", wrong)
    found = run("doctor")
    assert found.exit_code == 1
    assert "FAILED" in found.stdout


def test_doctor_fails_for_nan(monkeypatch):
    from limelight.backends.math import Math

    monkeypatch.setattr(
        Math, "forward", lambda self, call: (call.query * np.nan, call.query[..., 0])
    )
    assert run("doctor").exit_code == 1


def test_doctor_times_a_cold_start_when_asked(monkeypatch):
    asked = []

    def measured(target, folder):
        asked.append((target, folder))
        return [7.25, 0.5][len(asked) - 1]

    monkeypatch.setattr(cold_start, "_ready", measured)
    monkeypatch.setattr(cold_start, "find_spec", lambda name: name)
    monkeypatch.setattr(checks, "checks", list)
    assert "cold start" not in run("doctor").stdout
    found = " ".join(run("doctor", "--cold-start").stdout.split())
    assert "7.2 s until" in found
    assert "0.5 s in the next process" in found
    (target, folder), again = asked
    assert again == (target, folder)
    assert not Path(folder).exists()

    monkeypatch.setattr(cold_start, "find_spec", lambda name: None if name == "triton" else name)
    assert "triton, which compiles, is not installed" in run("doctor", "--cold-start").stdout


@pytest.mark.slow
def test_a_cold_start_is_slower_than_a_warm_one():
    pytest.importorskip("triton")
    found = cold_start.cold_start((8, 0))
    assert found.empty > found.from_disk > 0


def test_doctor_without_torch(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    found = list(checks.checks())
    ran = {(check.backend, check.library) for check in found if isinstance(check, checks.Check)}
    assert ran == {("math", "numpy")}
    assert any(isinstance(check, checks.Idle) and check.backend == "tiled" for check in found)


# What every command does with bad input.

BAD = [
    (["explain", "--head-dim", "300"], "--head-dim"),
    (["explain", "--kv-heads", "3"], "--kv-heads"),
    (["explain", "--mask", "circular"], "--mask"),
    (["explain", "--mask", "causal &"], "--mask"),
    (["explain", "--bias", "causal"], "--bias"),
    (["explain", "--device", "GTX 999"], "--device"),
    (["explain", "--device", "GTX 999"], "RTX 2080"),
    (["explain", "--dtype", "int8"], "--dtype"),
    (["explain", "--dropout", "2"], "--dropout"),
    (["explain", "--softcap", "-1"], "--softcap"),
    (["explain", "--softcap", "nan"], "--softcap"),
    (["explain", "--torch", "--softcap", "2"], "--softcap"),
    (["explain", "--torch-version", "new"], "--torch-version"),
    (["explain", "--query-start", "middle"], "--query-start"),
    (["explain", "--mask", "causal", "--kv-len", "2000"], "--query-start"),
    (["explain", "--q-len", "8", "--kv-len", "x"], "--kv-len"),
    (["explain", "--nonsense"], "--nonsense"),
    (["show", "zebra"], "zebra"),
    (["show", "causal", "--heads", "0"], "--heads"),
    (["show", "causal", "--mask", "causal"], "--mask"),
    (["show", "alibi", "--mask", "alibi"], "--mask"),
    (["show", "causal", "--png", "/nowhere/at/all.png"], "--png"),
    (["demo", "--sentences", "0"], "--sentences"),
    (["demo", "--sentences", "100000"], "--sentences"),
    (["demo", "--question", " "], "--question"),
    (["dance"], "dance"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=lambda value: str(value)[:50])
def test_bad_input_is_one_line_that_names_the_option(arguments, named):
    found = run(*arguments)
    assert found.exit_code == 2
    assert named in found.stderr
    assert found.stderr.count("\n") == 1
    assert "Traceback" not in found.output


def test_help_and_version():
    assert run().exit_code == 0
    assert "doctor" in run("--help").stdout
    assert run("--version").stdout == f"limelight {ll.__version__}\n"


def test_help_imports_no_framework():
    code = (
        "import sys; sys.argv = ['limelight', 'explain', '--help']\n"
        "from limelight.cli import app\n"
        "try: app()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)


def test_runs_as_a_module():
    command = [
        sys.executable,
        "-m",
        "limelight",
        "explain",
        "--device",
        "gtx1080",
        "--mask",
        "causal",
    ]
    found = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    assert "GTX 1080 (sm_61)" in found.stdout
