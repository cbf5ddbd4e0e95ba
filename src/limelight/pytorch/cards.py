"""Which software still supports an old card, and what it lacks: facts, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from limelight.devices import Device
from limelight.pytorch.builds import WHEELS, spelled

_TOOLKIT = "https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/#deprecated-architectures"
_DRIVER = "https://forums.developer.nvidia.com/t/unix-graphics-feature-deprecation-schedule/60588"
_LEGACY_BUILDS = "https://github.com/pytorch/pytorch/issues/190385"
_THROUGHPUT = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"


@dataclass(frozen=True)
class Generation:
    """Cards of one or two compute capabilities, all of them before Ampere.

    last_toolkit, last_driver: the last CUDA toolkit and NVIDIA driver branch that support them;
    None where the newest do. legacy: the last PyTorch with a cu126 build, from
    download.pytorch.org, that has code for them. units: what multiplies matrices.
    """

    name: str
    capabilities: tuple[tuple[int, int], ...]
    last_toolkit: str | None
    last_driver: str | None
    legacy: str | None
    units: str
    sources: tuple[str, ...]


GENERATIONS = (
    Generation(
        "Pascal",
        ((6, 0),),
        "12.9",
        "580",
        "2.14",
        "no tensor cores; float16 at twice float32's rate; no bfloat16",
        (_TOOLKIT, _DRIVER, _LEGACY_BUILDS, _THROUGHPUT),
    ),
    Generation(
        "Pascal",
        ((6, 1), (6, 2)),
        "12.9",
        "580",
        "2.14",
        "no tensor cores; float16 arithmetic at 1/64 of float32's rate, so float16 saves memory, "
        "not time; no bfloat16",
        (_TOOLKIT, _DRIVER, _LEGACY_BUILDS, _THROUGHPUT),
    ),
    Generation(
        "Volta",
        ((7, 0), (7, 2)),
        "12.9",
        "580",
        "2.14",
        "tensor cores for float16 alone; no bfloat16",
        (_TOOLKIT, _DRIVER, _LEGACY_BUILDS, _THROUGHPUT),
    ),
    Generation(
        "Turing",
        ((7, 5),),
        None,
        None,
        None,
        "tensor cores for float16; no bfloat16, no TF32",
        (_TOOLKIT, _DRIVER, _THROUGHPUT),
    ),
)


def generation(device: Device) -> Generation | None:
    """The device's generation, where it is older than Ampere."""
    for each in GENERATIONS:
        if device.compute_capability in each.capabilities:
            return each
    return None


def last_wheel(device: Device) -> str | None:
    """The newest PyTorch, as PyPI has it, with machine code for the card."""
    capability = device.compute_capability
    assert capability is not None
    able = [build.version for build in WHEELS if build.can_run(capability)]
    return spelled(max(able)[:2]) if able else None


def notes(device: Device) -> tuple[str, ...]:
    """What the owner of an old card should know; nothing for the others."""
    card = generation(device)
    if card is None:
        return ()
    wheel = last_wheel(device)
    pypi = f"from PyPI up to {wheel}" if wheel else "not from PyPI"
    if wheel == spelled(WHEELS[-1].version[:2]):
        pypi = f"from PyPI, {wheel} included"
    builds = f"; cu126 builds of download.pytorch.org up to {card.legacy}" if card.legacy else ""
    system = "current NVIDIA drivers and CUDA toolkits support it"
    if card.last_driver is not None:
        system = f"NVIDIA drivers up to branch {card.last_driver}, CUDA up to {card.last_toolkit}"
    return (
        f"{device.name} is {card.name}: {card.units}",
        f"{system}; PyTorch {pypi}{builds}",
        "nothing of limelight was measured on such a card",
    )
