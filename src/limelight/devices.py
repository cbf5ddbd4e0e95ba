"""Devices: the one at hand, or one to ask about by name. Plain data.

Figures are NVIDIA's: shared memory is what one thread block may use (opt-in), per the compute
capability's table in the CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass

from limelight.errors import invalid, invalid_type

_KIB = 1024
SHARED_MEMORY = {  # bytes of one block, by compute capability
    (6, 0): 48 * _KIB,
    (6, 1): 48 * _KIB,
    (7, 0): 96 * _KIB,
    (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
}


@dataclass(frozen=True)
class Device:
    """What can decide a kernel about a device.

    kind: "cpu" or "cuda". compute_capability: (major, minor). sms: streaming multiprocessors.
    shared_memory: bytes of one thread block.
    """

    name: str
    kind: str
    compute_capability: tuple[int, int] | None = None
    sms: int | None = None
    shared_memory: int | None = None

    @classmethod
    def cuda(cls, name: str, compute_capability: tuple[int, int], sms: int) -> Device:
        """A GPU; its shared memory follows from its compute capability, where that is known."""
        shared = SHARED_MEMORY.get(compute_capability)
        return cls(name, "cuda", compute_capability, sms, shared)

    @classmethod
    def named(cls, name: str) -> Device:
        """One of `NAMED`, whatever the case and spaces.

        Raises ValueError, which lists the names, for another one.

        >>> Device.named("rtx2080").compute_capability
        (7, 5)
        """
        if not isinstance(name, str):
            raise invalid_type("device", found=repr(name), needed="a name or a Device")
        wanted = _plain(name)
        for device in NAMED:
            if _plain(device.name) == wanted:
                return device
        known = ", ".join(device.name for device in NAMED)
        raise invalid("device", found=repr(name), needed=f"one of {known}")

    @property
    def architecture(self) -> str | None:
        """`sm_75` and so on; None on a CPU."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})" if self.architecture else self.name


def _plain(name: str) -> str:
    return "".join(name.lower().split())


CPU = Device("CPU", "cpu")

NAMED = (
    Device.cuda("GTX 1080", (6, 1), sms=20),
    Device.cuda("P100", (6, 0), sms=56),
    Device.cuda("V100", (7, 0), sms=80),
    Device.cuda("T4", (7, 5), sms=40),
    Device.cuda("RTX 2080", (7, 5), sms=46),
    Device.cuda("A100", (8, 0), sms=108),
    Device.cuda("A10", (8, 6), sms=72),
    Device.cuda("RTX 3090", (8, 6), sms=82),
    Device.cuda("L4", (8, 9), sms=58),
    Device.cuda("RTX 4090", (8, 9), sms=128),
    Device.cuda("H100", (9, 0), sms=132),
    Device.cuda("H200", (9, 0), sms=132),
    Device.cuda("B200", (10, 0), sms=148),
    Device.cuda("RTX 5090", (12, 0), sms=170),
    CPU,
)
