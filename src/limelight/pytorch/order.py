"""In which order PyTorch tries its backends."""

from __future__ import annotations

from limelight.pytorch.builds import cudnn_spelled
from limelight.pytorch.rule import Situation

FLASH_FIRST = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")


def order(s: Situation) -> tuple[tuple[str, ...], str]:
    """The order, and where it comes from. A backend after `math` is reached only if math is off."""
    if s.device.kind == "cpu":
        return ("flash", "math"), "fixed on the CPU, whatever set_priority says"
    if s.device.kind != "cuda":
        return ("math",), "no fused backend was looked at for this device"
    usual, source = _usual(s)
    if s.switches.order in (None, usual):
        return usual, source
    return (
        s.switches.order,
        "as this process holds it: set_priority=True, or another GPU came first",
    )


def _usual(s: Situation) -> tuple[tuple[str, ...], str]:
    if not s.since(2, 2):
        return _first_releases(s)
    if s.build.version == (2, 5, 0) and s.capability == (9, 0):
        return CUDNN_FIRST, "cuDNN first on Hopper, in 2.5.0 alone"
    if s.since(2, 10):
        return _by_cudnn(s)
    return FLASH_FIRST, "PyTorch's default before 2.10"


def _by_cudnn(s: Situation) -> tuple[tuple[str, ...], str]:
    """Since 2.10: `check_prefer_cudnn_attention`. The device that counts is the first one that the
    process used, and the cuDNN is the one loaded, not the one built with."""
    where = "sdp_utils.cpp: check_prefer_cudnn_attention"
    major, minor = s.capability
    card = major in (9, 10) and (s.build.cuda >= (13, 0) or minor in (0, 3))
    found = f"cuDNN {cudnn_spelled(s.build.cudnn)}"
    if not card:
        return FLASH_FIRST, f"PyTorch's default for {s.device}"
    if s.switches.cudnn_deprioritized:
        return FLASH_FIRST, "TORCH_CUDNN_SDPA_DEPRIORITIZED is set"
    if s.build.cudnn <= 91_500:
        return FLASH_FIRST, f"{found}: it comes first from 9.15.1 on ({where})"
    return CUDNN_FIRST, f"{found} on Hopper or data-center Blackwell ({where})"


def _first_releases(s: Situation) -> tuple[tuple[str, ...], str]:
    sdpa = s.sdpa
    few = sdpa.four_dimensional and sdpa.query.shape[0] * sdpa.query.shape[1] < 60
    if sdpa.nested or (few and sdpa.query.shape[-2] >= 128) or sdpa.query.shape[-1] == 128:
        return ("efficient", "flash", "math"), "the rule of thumb of 2.0 and 2.1"
    return ("flash", "efficient", "math"), "PyTorch's default"
