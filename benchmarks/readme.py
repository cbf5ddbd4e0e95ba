"""Writes the README's tables from benchmarks/results/.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, table in (("h200", gpu_table), ("h200-learned", learned_table), ("cpu", cpu_table)):
        begin, end = (f"<!-- benchmark:{name} {edge} -->" for edge in ("begin", "end"))
        results = json.loads((RESULTS / f"{name}.json").read_text())
        block = f"{begin}\n{table(results)}\n{end}"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    readme.write_text(text)


def cpu_table(results: dict[str, Any]) -> str:
    about = results["about"]
    lines = [
        f"## Measured, on {about['device']}",
        "",
        f"{about['date']}, torch {about['torch']}, {about['threads']} threads; milliseconds, "
        f"median of {about['repeats']}, forward + backward; peak memory beyond the inputs. "
        "PyTorch is `F.scaled_dot_product_attention`, with a dense mask where a case needs one. "
        "Each time was taken after both results agreed.",
        "",
        "| case | ran on | limelight, ms | PyTorch, ms | limelight, MB | PyTorch, MB |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        times = [
            f"{row[f'{way} forward']:.1f} + {row[f'{way} backward']:.1f}"
            for way in ("limelight", "torch")
        ]
        peaks = [f"{row[f'{way} peak MB']}" for way in ("limelight", "torch")]
        lines.append(f"| {' | '.join([row['case'], row['backend'], *times, *peaks])} |")
    return "\n".join(lines)


def learned_table(results: dict[str, Any]) -> str:
    return gpu_table(results, "Learned biases, on one NVIDIA H200")


def gpu_table(results: dict[str, Any], title: str = "Measured, on one NVIDIA H200") -> str:
    about, cost = results["about"], results.get("call cost us")
    peers = (
        *("limelight", "hopper", "torch flash", "torch cudnn", "torch efficient"),
        *("torch dense bias", "flex"),
    )
    peers = [
        peer for peer in peers if any("forward ms" in row.get(peer, {}) for row in results["rows"])
    ]
    lines = [
        f"## {title}",
        "",
        f"{about['date']}, commit {about['commit'][:7]}, torch {about['torch']}, Triton "
        f"{about['triton']}; milliseconds of "
        f"forward + backward, medians of {about['repeats']}, interleaved; batch 4 (float32: 2), "
        "16 heads, length 4096, bfloat16 unless said. Each way was checked against float64 first. "
        "limelight is the backend flash.",
        "",
        f"| case | {' | '.join(peers)} |",
        f"|---|{'---|' * len(peers)}",
    ]
    for row in results["rows"]:
        cells = [
            f"{found['forward ms']:.2f} + {found['backward ms']:.2f}"
            if "forward ms" in (found := row.get(peer, {}))
            else ""
            for peer in peers
        ]
        lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    words = []
    if cost is not None:
        small = "limelight's choice" if "limelight's choice forward" in cost else "limelight"
        words.append(
            "CPU time of a small eager call, microseconds: forward "
            f"{cost[f'{small} forward']:.0f} (PyTorch {cost['torch default forward']:.0f}), "
            f"forward and backward {cost[f'{small} forward and backward']:.0f} "
            f"(PyTorch {cost['torch default forward and backward']:.0f})."
        )
    if "left out" in about:
        words.append(f"Left out: {about['left out']}.")
    words.append("Speed on every other GPU is not measured.")
    lines += ["", " ".join(words)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
