"""Triton decides when it is first imported whether it interprets; here it does."""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton is imported already, and does not interpret: run tests/kernels alone"
    )
os.environ["TRITON_INTERPRET"] = "1"
