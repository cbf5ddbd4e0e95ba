"""Binary: a compiled kernel as plain data, all that a launch needs to know of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from limelight.launcher.signature import Parameter


class DamagedBinary(ValueError):
    """Stored bytes that are not a whole binary of this version."""


class SharedMemoryError(RuntimeError):
    """A kernel needs more shared memory than its device has. needed, limit: bytes of a block."""

    def __init__(self, kernel: str, needed: int, limit: int, where: str) -> None:
        self.needed, self.limit = needed, limit
        super().__init__(
            f"{kernel} needs {needed} bytes of shared memory for a block, {where} has {limit}: "
            "smaller tiles or fewer stages are needed"
        )


@dataclass(frozen=True)
class Scratch:
    """Device memory that each thread block needs beside its arguments. size, align: bytes."""

    size: int = 0
    align: int = 1


@dataclass(frozen=True)
class Binary:
    """A kernel compiled for one target.

    cubin: machine code. ptx: the same as text, which a newer device's driver can assemble.
    entry: the function's name in both. target: compute capability, (major, minor).
    parameters: the run-time arguments in order. Two pointers to scratch follow them, always:
        global_scratch, for descriptors made in the kernel, and profile_scratch.
    threads: of a block; warp specialisation raises it above 32 times the warps asked for.
    shared: bytes of dynamic shared memory of a block. num_ctas: blocks of a cluster.
    registers: of a thread. stack: bytes of local memory of a thread; spilled registers are here.
    """

    cubin: bytes
    ptx: str
    entry: str
    target: tuple[int, int]
    parameters: tuple[Parameter, ...]
    threads: int
    shared: int
    num_ctas: int = 1
    global_scratch: Scratch = Scratch()
    profile_scratch: Scratch = Scratch()
    registers: int = 0
    stack: int = 0
    triton_version: str = ""

    @property
    def num_warps(self) -> int:
        return self.threads // 32

    def to_bytes(self) -> bytes:
        """As stored in a file: a checksum of the rest, a line of JSON, the PTX, the cubin."""
        ptx = self.ptx.encode()
        facts = asdict(self) | {"ptx": len(ptx), "cubin": len(self.cubin)}
        rest = json.dumps(facts).encode() + b"\n" + ptx + self.cubin
        return _checksum(rest) + b"\n" + rest

    @classmethod
    def from_bytes(cls, data: bytes) -> Binary:
        """The inverse of `to_bytes`. Raises DamagedBinary where the bytes are not whole."""
        checksum, _, rest = data.partition(b"\n")
        if checksum != _checksum(rest):
            raise DamagedBinary("the checksum does not match")
        line, _, images = rest.partition(b"\n")
        facts = json.loads(line)
        if facts.keys() != {field.name for field in fields(cls)}:
            raise DamagedBinary("written by another version")
        ptx_size = facts["ptx"]
        return cls(
            **facts
            | {
                "ptx": images[:ptx_size].decode(),
                "cubin": images[ptx_size:],
                "target": tuple(facts["target"]),
                "parameters": tuple(Parameter(**each) for each in facts["parameters"]),
                "global_scratch": Scratch(**facts["global_scratch"]),
                "profile_scratch": Scratch(**facts["profile_scratch"]),
            }
        )


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
