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
    for path in sorted(RESULTS.glob("*.json")):
        begin, end = (f"<!-- benchmark:{path.stem} {edge} -->" for edge in ("begin", "end"))
        block = f"{begin}\n{table(json.loads(path.read_text()))}\n{end}"
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        text = re.sub(pattern, lambda _, block=block: block, text, flags=re.DOTALL)
    readme.write_text(text)


def table(results: dict[str, Any]) -> str:
    about = results["about"]
    lines = [
        f"## Measured, on {about['device']}",
        "",
        f"{about['date']}, torch {about['torch']}, {about['threads']} threads; milliseconds, "
        f"median of {about['repeats']}, forward + backward; peak memory beyond the inputs. "
        "PyTorch is `F.scaled_dot_product_attention`, with a dense mask where a case needs one. "
        "Each time was taken after both results agreed. Times on a GPU are not measured yet.",
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


if __name__ == "__main__":
    main()
