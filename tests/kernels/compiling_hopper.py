"""Compiles the Hopper forward without a GPU and prints what ptxas made of it, as JSON."""

from __future__ import annotations

import json
import sys

from compiling import array, problem

from limelight.kernels.hopper import plan
from limelight.kernels.program import recipe
from limelight.launcher import compile_kernel


def main(dim: int) -> None:
    call = problem("bfloat16", dim)
    out, lse = array(call.query.shape, "bfloat16"), array(call.query.shape[:3], "float32")
    (launch,) = plan.forward(call, out, lse, {}, capability=90, programs=132)
    binary = compile_kernel(recipe(launch, (9, 0)))
    found = {name: getattr(binary, name) for name in ("registers", "stack", "shared", "threads")}
    print(json.dumps(found | {"wgmma": binary.ptx.count("wgmma.mma_async")}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
