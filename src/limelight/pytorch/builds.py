"""Which PyTorch: its version, the cuDNN it runs with, and the cards it has machine code for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from limelight.devices import Device
from limelight.errors import invalid

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Build:
    """One build of PyTorch.

    cuda: the CUDA toolkit it was built with. cudnn: the version that it loads, as cuDNN counts
    (91900 is 9.19.0). architectures: what it has machine code for, `sm_80` and so on, and what it
    has PTX for, `compute_120`. flash, efficient: whether they were compiled in. source: where the
    figures come from.
    """

    version: Version
    cuda: tuple[int, int]
    cudnn: int
    architectures: tuple[str, ...]
    flash: bool = True
    efficient: bool = True
    source: str = "as PyPI has it for Linux on x86-64"

    @classmethod
    def released(cls, version: str | None = None) -> Build:
        """The build that `pip install torch==version` brings on Linux; by default the newest known.

        >>> Build.released("2.13.0").cudnn, Build.released("2.13").can_run((7, 0))
        (92000, False)
        """
        if version is None:
            return WHEELS[-1]
        wanted = parsed(version)
        first, last = WHEELS[0].version, WHEELS[-1].version
        if wanted < first:
            raise invalid("version", found=repr(version), needed=f"{spelled(first)} or newer")
        nearest = [build for build in WHEELS if build.version <= wanted][-1]
        if wanted[:2] > last[:2]:
            source = f"newer than any release that was looked at: taken to be as {spelled(last)}"
            return replace(nearest, version=wanted, source=source)
        return replace(nearest, version=wanted)

    def with_cudnn(self, version: int) -> Build:
        """The same build with another cuDNN loaded."""
        return replace(self, cudnn=version)

    @property
    def verified(self) -> bool:
        """Whether real answers of this release's CUDA build were compared with the rules."""
        return self.version[:2] in VERIFIED

    def can_run(self, capability: tuple[int, int]) -> bool:
        """Whether there is machine code, or PTX, that a card of this compute capability runs.

        Machine code serves the minor versions after its own, within the same major version.
        """
        major, minor = capability
        for name in self.architectures:
            kind, _, number = name.partition("_")
            tens, ones = divmod(int(re.sub(r"\D", "", number)), 10)
            if kind == "sm" and tens == major and ones <= minor:
                return True
            if kind == "compute" and (tens, ones) <= capability:
                return True
        return False

    def __str__(self) -> str:
        return f"PyTorch {spelled(self.version)}"


@dataclass(frozen=True)
class Switches:
    """What a process or its environment may set; the defaults are PyTorch's.

    flash, efficient, math, cudnn: `torch.backends.cuda.enable_flash_sdp` and its kin.
    deterministic: `torch.use_deterministic_algorithms(True)`, not merely to warn.
    order: the priority order that `sdpa_kernel(..., set_priority=True)` set.
    cudnn_enabled, cudnn_deprioritized, cudnn_nested: the environment variables
    TORCH_CUDNN_SDPA_ENABLED (2.2 to 2.4), TORCH_CUDNN_SDPA_DEPRIORITIZED and
    TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED.
    """

    flash: bool = True
    efficient: bool = True
    math: bool = True
    cudnn: bool = True
    deterministic: bool = False
    order: tuple[str, ...] | None = None
    cudnn_enabled: bool = False
    cudnn_deprioritized: bool = False
    cudnn_nested: bool = False

    @cached_property
    def off(self) -> frozenset[str]:
        names = ("flash", "efficient", "math", "cudnn")
        return frozenset(name for name in names if not getattr(self, name))


def installed() -> str | None:
    """The version of the torch that is installed, without importing it."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms to import

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def parsed(version: str) -> Version:
    """
    >>> parsed("2.11.0+cu130"), parsed("2.9")
    ((2, 11, 0), (2, 9, 0))
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version) if isinstance(version, str) else None
    if found is None:
        raise invalid("version", found=repr(version), needed='a version of PyTorch, as "2.13.0"')
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)


def spelled(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def cudnn_spelled(cudnn: int) -> str:
    """
    >>> cudnn_spelled(91002)
    '9.10.2'
    """
    major, rest = divmod(cudnn, 10_000) if cudnn >= 90_000 else divmod(cudnn, 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def named_architectures(text: str) -> tuple[str, ...]:
    return tuple(f"sm_{number}" for number in text.split())


_LEGACY = named_architectures("50 60 70 75 80 86 90")
_WITH_VOLTA = named_architectures("70 75 80 86 90 100 120")
_TURING_ON = named_architectures("75 80 86 90 100 120")

# Of 2.10 and 2.12: read from the wheels (torch.version, torch._C._cuda_getArchFlags, cuDNN's own
# version). The others: from PyTorch's RELEASE.md and release notes; before 2.9 the rules were not
# checked.
WHEELS = (
    Build((2, 0, 0), (11, 7), 8500, named_architectures("37 50 60 70 75 80 86")),
    Build((2, 1, 0), (12, 1), 8902, _LEGACY),
    Build((2, 2, 0), (12, 1), 8902, _LEGACY),
    Build((2, 3, 0), (12, 1), 8902, _LEGACY),
    Build((2, 4, 0), (12, 1), 90100, _LEGACY),
    Build((2, 5, 0), (12, 4), 90100, _LEGACY),
    Build((2, 6, 0), (12, 4), 90100, _LEGACY),
    Build((2, 7, 0), (12, 6), 90501, _LEGACY),
    Build((2, 8, 0), (12, 8), 91002, _WITH_VOLTA),
    Build((2, 9, 0), (12, 8), 91002, _WITH_VOLTA),
    Build((2, 10, 0), (12, 8), 91002, _WITH_VOLTA),
    Build((2, 11, 0), (13, 0), 91900, _TURING_ON),
    Build((2, 12, 0), (13, 0), 92000, _TURING_ON),
    Build((2, 13, 0), (13, 0), 92000, _TURING_ON),
    Build((2, 14, 0), (13, 0), 92400, _TURING_ON),
    Build((2, 15, 0), (13, 0), 92600, _TURING_ON),
)
VERIFIED = {(2, minor) for minor in range(9, 16)}


def machine_code(build: Build, device: Device) -> str | None:
    """What is missing where the build has no machine code for the card; None where it has some."""
    if device.compute_capability is None or build.can_run(device.compute_capability):
        return None
    return f"{build} has code for {', '.join(build.architectures)}, not for {device.architecture}"
