"""Writes docs/which-kernel.md from the rules: `PYTHONPATH=src python docs/which_kernel.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from limelight import ALiBi, Causal, Device, KeyLengths, Problem, explain, explain_torch
from limelight.problem import Layout
from limelight.pytorch import SDPA, Build, Operand, Prediction, cards, predict
from limelight.pytorch.builds import WHEELS, cudnn_spelled, spelled
from limelight.pytorch.faults import FAULTS

FILE = Path(__file__).with_name("which-kernel.md")
CHART = Path(__file__).with_name("which-kernel.svg")
TIMES = Path(__file__).parents[1] / "benchmarks/results/h200.json"
FAMILIES = {
    "GTX 1080": "Pascal: GTX 10, P4, P40 (sm_61)",
    "V100": "Volta: V100, Titan V (sm_70)",
    "RTX 2080": "Turing: RTX 20, GTX 16, T4 (sm_75)",
    "A100": "Ampere: A100, A30 (sm_80)",
    "RTX 3090": "Ampere: RTX 30, A10, A40 (sm_86)",
    "RTX 4090": "Ada: RTX 40, L4, L40 (sm_89)",
    "H100": "Hopper: H100, H200 (sm_90)",
    "B200": "Blackwell: B200 (sm_100)",
    "RTX 5090": "Blackwell: RTX 50 (sm_120)",
}
CHECKED = [build for build in WHEELS if build.verified]


def mask(*shape: int, **options: bool) -> Operand:
    return Operand(Layout.contiguous(shape, "float16"), **options)


def calls() -> dict[str, SDPA]:
    """What people ask about, in PyTorch's words."""
    shape = (2, 8, 1024, 64)
    wide, most = (2, 8, 1024, 200), (2, 8, 1024, 256)
    return {
        "float16": SDPA.of(shape),
        "bfloat16": SDPA.of(shape, dtype="bfloat16"),
        "float32": SDPA.of(shape, dtype="float32"),
        "float64": SDPA.of(shape, dtype="float64"),
        "`is_causal`": SDPA.of(shape, is_causal=True),
        "`is_causal`, other number of keys": SDPA.of(shape, (2, 8, 2048, 64), is_causal=True),
        "a mask or bias": SDPA.of(shape, attn_mask=mask(1024, 1024)),
        "a mask of three dimensions": SDPA.of(shape, attn_mask=mask(8, 1024, 1024)),
        "a learned bias": SDPA.of(shape, attn_mask=mask(1024, 1024, requires_grad=True)),
        "`enable_gqa`": SDPA.of(shape, (2, 2, 1024, 64), enable_gqa=True),
        "`enable_gqa` and a mask": SDPA.of(
            shape, (2, 2, 1024, 64), enable_gqa=True, attn_mask=mask(1024, 1024)
        ),
        "head_dim 100": SDPA.of((2, 8, 1024, 100)),
        "head_dim 256": SDPA.of(most),
        "head_dim 512": SDPA.of((2, 8, 1024, 512)),
        "training, head_dim 200": SDPA.of(wide, requires_grad=True),
        "training, head_dim 256": SDPA.of(most, requires_grad=True),
        "dropout 0.1": SDPA.of(shape, dropout_p=0.1),
        "one query (decoding)": SDPA.of((2, 8, 1, 64), shape),
        "three dimensions": SDPA.of((8, 1024, 64)),
    }


def asked(call: SDPA, device: str, build: Build) -> Prediction:
    return predict(call, Device.named(device), build)


def newest_choices() -> list[str]:
    build = CHECKED[-1]
    lines = [
        f"PyTorch {spelled(build.version)} from PyPI, with cuDNN {cudnn_spelled(build.cudnn)}. "
        "An asterisk: it has no machine code for the card, so the call fails whatever is selected.",
        "",
        "| call | " + " | ".join(FAMILIES) + " |",
        "|---|" + "---|" * len(FAMILIES),
    ]
    for name, call in calls().items():
        cells = []
        for device in FAMILIES:
            found = asked(call, device, build)
            cells.append(f"{found.backend}{'' if found.has_code else '*'}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def changes() -> list[str]:
    """What another release answers differently from the one before it."""
    lines = []
    for before, build in pairwise(CHECKED):
        found: dict[tuple[str, str], dict[str, list[str]]] = {}
        for name, call in calls().items():
            for device in FAMILIES:
                old, new = asked(call, device, before), asked(call, device, build)
                if old.backend != new.backend:
                    step = (str(old.backend), str(new.backend))
                    found.setdefault(step, {}).setdefault(name, []).append(device)
        lines += [
            "",
            f"**{spelled(build.version[:2])}** (cuDNN {cudnn_spelled(build.cudnn)}"
            f", code for {', '.join(build.architectures)})",
            "",
        ]
        for (old_name, new_name), by_call in found.items():
            grouped: dict[tuple[str, ...], list[str]] = {}
            for name, devices in by_call.items():
                grouped.setdefault(tuple(devices), []).append(name)
            for devices, names in grouped.items():
                where = ", ".join(devices)
                lines.append(f"- {old_name} → {new_name} on {where}: {'; '.join(names)}")
        if not found:
            lines.append("- none of these calls changed")
    return lines[1:]


def ours() -> list[str]:
    """What limelight runs, by family."""
    lengths = KeyLengths(Layout.contiguous((2,), "int64"))
    problems = {
        "float16": Problem.of(dtype="float16"),
        "float16, causal, training": Problem.of(dtype="float16", mask=Causal(), training=True),
        "bfloat16": Problem.of(),
        "float32": Problem.of(dtype="float32"),
        "padding": Problem.of(batch=2, dtype="float16", mask=lengths),
        "ALiBi, causal": Problem.of(dtype="float16", mask=Causal(), bias=ALiBi()),
        "head_dim 100": Problem.of(dtype="float16", head_dim=100),
    }
    lines = ["| problem | " + " | ".join(FAMILIES) + " |", "|---|" + "---|" * len(FAMILIES)]
    for name, problem in problems.items():
        problem = replace(problem, library_version=spelled(CHECKED[-1].version))
        found = [explain(problem, device=device).backend for device in FAMILIES]
        lines.append(f"| {name} | {' | '.join(map(str, found))} |")
    return lines


def old_cards() -> list[str]:
    lines = []
    for name in ("GTX 1080", "P100", "V100", "T4", "RTX 2080"):
        device = Device.named(name)
        card = cards.generation(device)
        assert card is not None
        wheel = cards.last_wheel(device)
        theirs = explain_torch(Problem.of(dtype="float16"), device=name, version=wheel)
        lines += [f"- {note}" for note in cards.notes(device)[:2]]
        lines.append(f"- PyTorch {wheel} selects {theirs.backend} there for float16")
        lines += ["- sources: " + " ".join(card.sources), ""]
    return lines


def questions() -> list[str]:
    newest = spelled(CHECKED[-1].version[:2])
    nine, eleven = Build.released("2.9.1"), Build.released("2.11.0")
    plain = calls()["bfloat16"]
    masked = asked(calls()["a mask or bias"], "A100", CHECKED[-1])
    old = asked(calls()["float16"], "GTX 1080", CHECKED[-1])
    grouped = [
        build for build in CHECKED if asked(calls()["`enable_gqa` and a mask"], "A100", build).backend
        == "efficient"
    ]  # fmt: skip
    return [
        "**Which one did my call get?** `print(limelight.explain_torch(query, key, value, ...))` says, "
        "before it runs; `torch.profiler` shows it afterwards, as "
        "`aten::_scaled_dot_product_flash_attention` and so on.",
        "",
        "**Why is it not flash attention, although `torch.backends.cuda.flash_sdp_enabled()` is True?** "
        "That switch says that flash is not forbidden. Whether it can run your call is decided by the "
        "rules that `explain_torch` lists.",
        "",
        f"**I pass a mask. Do I get flash?** No: {masked.candidates['flash'].reasons[0].rule}; on an "
        f"A100 you get {masked.backend}. If the mask is causal, leave it out and set `is_causal=True`.",
        "",
        f"**Is cuDNN the default on an H100?** PyTorch 2.9 runs "
        f"{asked(plain, 'H100', nine).backend}, PyTorch 2.11 and newer "
        f"{asked(plain, 'H100', eleven).backend}: since 2.10 it comes first on Hopper and data-center "
        "Blackwell if the cuDNN that is loaded is newer than 9.15.0. A cuDNN of the system's that hides "
        "the wheel's own changes the answer.",
        "",
        "**Does `enable_gqa` cost me the fused kernel?** Flash and cuDNN take it. With a mask on a card "
        f"whose masks go to efficient, it is math before PyTorch {spelled(grouped[0].version[:2])}.",
        "",
        f"**I have a GTX 1080. Which kernel?** PyTorch {newest} selects {old.backend}, but PyPI's build "
        f"has no machine code for the card, so the call fails; "
        f"{cards.last_wheel(Device.named('GTX 1080'))} is the last that has some. See below.",
        "",
        "**And an RTX 2080 or T4?** float16 and float32 go to efficient, bfloat16 to math, which keeps "
        "the whole matrix of scores. Cast to float16.",
        "",
        "**`1Torch was not compiled with flash attention`: does it hurt?** It says that this build of "
        "PyTorch lacks the flash kernel (as builds for Windows did); the call runs on another backend, "
        "right but slower. Installing the flash-attn package changes nothing: PyTorch does not look "
        "for it.",
        "",
        "**`No available kernel. Aborting execution.`** Every backend that you allowed refused the call. "
        "PyTorch prints one reason for each; `explain_torch` prints all of them, and what lifts them.",
        "",
        "**My inputs have three dimensions.** Before 2.14 that alone meant math; "
        "`query.unsqueeze(0)` lifts it.",
        "",
        "**`is_causal` with fewer queries than keys?** PyTorch aligns it to the top left: query 0 sees "
        "key 0 alone. For decoding with a cache that is not what you want; flash-attn aligns to the "
        'bottom right. In limelight: `mask=Causal(), query_start="end"`.',
        "",
        "**Key and value of different lengths?** Nobody checks; the result is undefined. limelight "
        "refuses.",
    ]


COLOURS = {
    "limelight": "#3b7d4f",
    "torch cudnn": "#7a7a7a",
    "torch flash": "#a5a5a5",
    "torch efficient": "#cfcfcf",
}


def chart() -> str:
    """Milliseconds of forward and backward by backend, as bars: an SVG."""
    measured = json.loads(TIMES.read_text())
    about = measured["about"]
    bars, top = [], 34
    rows = [row for row in measured["rows"] if all("forward ms" in row.get(n, {}) for n in COLOURS)]
    longest = max(_total(row[name]) for row in rows for name in COLOURS)
    for row in rows:
        bars.append(f'<text x="0" y="{top + 12}" font-weight="bold">{row["case"]}</text>')
        for name, colour in COLOURS.items():
            top += 18
            width = 420 * _total(row[name]) / longest
            said = row.get("backend") if name == "limelight" else None
            label = f"{name} ({said})" if said else name
            bars.append(f'<text x="10" y="{top + 12}">{label}</text>')
            bars.append(
                f'<rect x="150" y="{top + 1}" width="{width:.1f}" height="14" fill="{colour}"/>'
            )
            bars.append(
                f'<text x="{155 + width:.1f}" y="{top + 12}">{_total(row[name]):.2f}</text>'
            )
        top += 28
    title = f"Milliseconds, forward and backward, {about['device']}, torch {about['torch']}"
    shape = "batch 4, 16 heads, length 4096, bfloat16"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{top}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="0" y="14" font-weight="bold">{title}: {shape}</text>\n'
        + "\n".join(bars)
        + "\n</svg>\n"
    )


def _total(times: dict[str, float]) -> float:
    return times["forward ms"] + times["backward ms"]


def page() -> str:
    parts = [
        "# Which kernel?",
        "",
        "<!-- Written by docs/which_kernel.py from the rules; do not edit. -->",
        "",
        "What PyTorch's `scaled_dot_product_attention` runs, what limelight runs, and why. For your own "
        "problem, card and release:",
        "",
        "```console",
        '$ limelight explain --torch --device "RTX 2080" --torch-version 2.13.0 --mask causal',
        '$ limelight explain --device "RTX 2080" --mask causal',
        "```",
        "",
        f"The rules of PyTorch {spelled(CHECKED[0].version[:2])} to {spelled(CHECKED[-1].version[:2])} "
        "agree with the answers of its own CUDA builds in every verdict and first reason that was "
        "compared; those of 2.0 to 2.8 were read from the source, and are marked unverified.",
        "",
        "## Questions",
        "",
        *questions(),
        "",
        "## What PyTorch runs",
        "",
        *newest_choices(),
        "",
        "## What changed from release to release",
        "",
        *changes(),
        "",
        "## What limelight runs",
        "",
        "In the order of preference that `limelight explain` gives with its source.",
        "",
        *ours(),
        "",
        "![Measured times by backend](which-kernel.svg)",
        "",
        "## Old cards",
        "",
        "Nothing here was measured on such a card.",
        "",
        *old_cards(),
        "## Faults of PyTorch's kernels",
        "",
        "Problems that its rules let through. limelight does not hand these over.",
        "",
        *[
            f"- {', '.join(fault.backends)}: {fault.what}: {fault.result}"
            f" ({fault.report + '; ' if fault.report else ''}seen on {fault.seen})"
            for fault in FAULTS
        ],
    ]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    FILE.write_text(page())
    CHART.write_text(chart())
