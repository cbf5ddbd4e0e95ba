"""Triton decides when it is first imported whether it interprets, so these tests need a process of
their own: `TRITON_INTERPRET=1 pytest tests/kernels`, as `make test` does."""

import os

collect_ignore = (
    []
    if os.environ.get("TRITON_INTERPRET") == "1"
    else ["test_interpreter.py", "test_jax_steps.py"]
)
