"""Writes one attention with ALiBi under a causal mask, and what must come of it, as plain files.

    python examples/attention_case.py FOLDER

Programs in other languages check themselves with it. `sizes.txt` has a name and a number a line.
NAME.bin are the inputs, float16 (slopes, d_lse float32); expected_NAME.bin is what must come out,
computed in float64 and written as float32. Arrays of four dimensions lie as (batch, length, heads,
head_dim) in memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from limelight import ALiBi, Causal, reference

SIZES = {"batch": 2, "q_heads": 8, "kv_heads": 2, "q_len": 333, "kv_len": 400, "head_dim": 64}


def main(folder: Path) -> None:
    batch, q_heads, kv_heads, q_len, kv_len, dim = SIZES.values()
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float16)

    inputs = {
        "query": normal(batch, q_heads, q_len, dim),
        "key": normal(batch, kv_heads, kv_len, dim),
        "value": normal(batch, kv_heads, kv_len, dim),
        "d_out": normal(batch, q_heads, q_len, dim),
        "d_lse": normal(batch, q_heads, q_len).astype(np.float32),
        "slopes": np.array(ALiBi.paper_slopes(q_heads), np.float32),
    }
    found = reference.attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        mask=Causal(),
        bias=ALiBi(inputs["slopes"]),
        query_start=kv_len - q_len,
        d_out=inputs["d_out"],
        d_lse=inputs["d_lse"],
    )
    assert found.gradients is not None
    outputs = {
        "out": found.out,
        "lse": found.lse,
        "d_query": found.gradients.query,
        "d_key": found.gradients.key,
        "d_value": found.gradients.value,
        "d_slopes": found.gradients.bias[0],
    }
    folder.mkdir(parents=True, exist_ok=True)
    sizes = "".join(f"{name} {size}\n" for name, size in SIZES.items())
    (folder / "sizes.txt").write_text(sizes)
    for name, array in inputs.items():
        _write(folder / f"{name}.bin", array)
    for name, array in outputs.items():
        _write(folder / f"expected_{name}.bin", array.astype(np.float32))


def _write(path: Path, array: np.ndarray) -> None:
    path.write_bytes((array.swapaxes(1, 2) if array.ndim == 4 else array).tobytes())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
