"""JAX's own settings, made before it starts. On the CPU programs are compiled, not made fast."""

import os

import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if not torch.cuda.is_available():
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ.setdefault("XLA_FLAGS", quick)
