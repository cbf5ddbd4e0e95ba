"""Kernels for GPUs that are not here, run on the one that is: its driver assembles their PTX."""

from __future__ import annotations

import pytest
import torch
from inputs import normal, qkv

from limelight import ALiBi, Causal, DenseBias, KeyLengths, RelativeBias, backends, explain
from limelight.testing import check, compiled_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

pytest.importorskip("triton")

CASES = {
    "plain": lambda: {},
    "alibi": lambda: {
        "bias": ALiBi(normal(4, device="cuda")),
        "mask": Causal(),
        "query_start": "end",
    },
    "padding": lambda: {"mask": KeyLengths(torch.tensor([0, 190], device="cuda"))},
    "dense": lambda: {"bias": DenseBias(normal(4, 197, 230, device="cuda"))},
    "relative": lambda: {"bias": RelativeBias(normal(4, 101, device="cuda"))},
}


@pytest.mark.parametrize("target", [(6, 1), (7, 0), (7, 5), (8, 0)], ids="sm_{0[0]}{0[1]}".format)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_is_right_on_this_gpu(nan_memory, target, dtype, case):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    q, k, v = qkv(kv_heads=2, q_len=197, kv_len=230, head_dim=64, device="cuda", dtype=dtype)
    options = CASES[case]()
    with backends("flash"), compiled_for(target):
        assert explain(q, k, v, **options).backend == "flash"
        check(q, k, v, **options)
