"""placeholder"""
from __future__ import annotations
from limelight.backends.base import Backend, Reason
class TorchCPU(Backend):
    name="torch_cpu"; summary=""
    def why_not(self, problem): return [Reason("x","y","z")]
