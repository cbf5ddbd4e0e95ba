"""Prediction: what PyTorch's `scaled_dot_product_attention` would run, and what is said of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from limelight.devices import Device
from limelight.pytorch import cpu, cudnn, efficient, faults, flash
from limelight.pytorch.builds import Build, Switches, machine_code
from limelight.pytorch.order import order
from limelight.pytorch.rule import Rule, Situation, TorchReason, Verdict, allowed, reasons, rule
from limelight.pytorch.sdpa import SDPA, mask_bytes

BACKENDS = ("flash", "efficient", "cudnn", "math")


@rule("select_sdp_backend", "", kind=Verdict.OFF)
def _math_enabled(s: Situation) -> tuple[str, str, str] | None:
    if s.switches.math:
        return None
    return "must not be switched off", "off", "torch.backends.cuda.enable_math_sdp(True)"


@rule("select_sdp_backend", "", kind=Verdict.NOT_BUILT)
def _cuda_only(s: Situation) -> tuple[str, str, str] | None:
    return "runs on CUDA devices", str(s.device), "move the tensors to a GPU"


def rules(name: str, device: Device) -> tuple[Rule, ...]:
    """PyTorch's checks of a backend on a device, in its order."""
    if name == "math":
        return (_math_enabled,)
    if device.kind == "cuda":
        return {"flash": flash.RULES, "efficient": efficient.RULES, "cudnn": cudnn.RULES}[name]
    return cpu.RULES if name == "flash" and device.kind == "cpu" else (_cuda_only,)


@dataclass(frozen=True)
class Candidate:
    """One backend of PyTorch's. reasons: all that PyTorch's own rules have against it, in order."""

    verdict: Verdict
    reasons: tuple[TorchReason, ...]


@dataclass(frozen=True)
class Prediction:
    """What PyTorch would run.

    backend: the one that PyTorch selects: "flash", "efficient", "cudnn" or "math"; None where it
    selects none. raises: the error that PyTorch ends with instead of a result. notes: what nobody
    checks, and what is known to go wrong.
    """

    situation: Situation
    backend: str | None
    order: tuple[str, ...]
    order_source: str
    candidates: Mapping[str, Candidate]
    raises: str | None
    notes: tuple[str, ...]

    @property
    def has_code(self) -> bool:
        """Whether the build has machine code for the card: else the launch fails."""
        return machine_code(self.situation.build, self.situation.device) is None

    @property
    def verified(self) -> bool:
        """Whether the rules of this release were compared with its own answers."""
        return self.situation.build.verified and not self.situation.sdpa.nested

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, ready for JSON."""
        build = self.situation.build
        return {
            "call": describe(self.situation.sdpa),
            "device": str(self.situation.device),
            "torch": ".".join(map(str, build.version)),
            "cudnn": build.cudnn,
            "build": build.source,
            "backend": self.backend,
            "raises": self.raises,
            "has_code": self.has_code,
            "verified": self.verified,
            "order": list(self.order),
            "order_source": self.order_source,
            "candidates": {
                name: {
                    "verdict": candidate.verdict.name.lower(),
                    "reasons": [
                        {
                            "rule": reason.rule,
                            "found": reason.found,
                            "lift": reason.lift,
                            "check": reason.check,
                            "place": reason.place,
                        }
                        for reason in candidate.reasons
                    ],
                }
                for name, candidate in self.candidates.items()
            },
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from limelight.pytorch.text import prediction_text

        return prediction_text(self)


def selected(s: Situation) -> str | None:
    """What PyTorch's selection alone answers, whether or not an error comes before or after it."""
    return next((name for name in order(s)[0] if allowed(rules(name, s.device), s)), None)


def predict(
    sdpa: SDPA, device: Device, build: Build, switches: Switches | None = None
) -> Prediction:
    """PyTorch's choice for a call, on a device, by a build, with the process's switches."""
    seen = sdpa.batched() if build.version >= (2, 14) else sdpa
    s = Situation(seen, device, build, switches or Switches())
    tried, source = order(s)
    against = {name: reasons(rules(name, device), s) for name in BACKENDS}
    raises = _input_error(s)
    backend = None
    if raises is None:
        backend = next((name for name in tried if not against[name]), None)
        raises = _later_error(s, backend)
    missing = machine_code(build, device)
    candidates = {}
    for name in (*tried, *(name for name in BACKENDS if name not in tried)):
        if against[name]:
            verdict = against[name][0].kind
        elif name != backend:
            verdict = Verdict.LOWER
        else:
            verdict = Verdict.CHOSEN if missing is None else Verdict.NO_CODE
        candidates[name] = Candidate(verdict, against[name])
    return Prediction(
        situation=replace(s, sdpa=sdpa),
        backend=backend,
        order=tried,
        order_source=source,
        candidates=candidates,
        raises=raises,
        notes=() if raises is not None else _notes(s, backend, missing),
    )


def _input_error(s: Situation) -> str | None:
    """What PyTorch refuses before it looks at any backend."""
    sdpa, mask = s.sdpa, s.sdpa.attn_mask
    if len({operand.dtype for operand in sdpa.operands}) > 1:
        found = ", ".join(operand.dtype for operand in sdpa.operands)
        return f"query, key and value must have one dtype, found {found}"
    if any(operand.dims < 2 for operand in sdpa.operands):
        return "query, key and value need two dimensions or more"
    if mask is not None and mask.dtype not in ("bool", "float32", sdpa.query.dtype):
        return f"attn_mask must be bool, float32 or {sdpa.query.dtype}, found {mask.dtype}"
    if mask is not None and mask.dtype == "float32" and sdpa.query.dtype == "float64":
        return f"attn_mask must be bool or float64, found {mask.dtype}"
    if mask is not None and sdpa.is_causal and s.since(2, 14):
        return "attn_mask must not be given together with is_causal"
    return None


def _later_error(s: Situation, backend: str | None) -> str | None:
    """What PyTorch finds out once it has, or has not, chosen."""
    sdpa = s.sdpa
    if backend is None:
        off = [name for name in order(s)[0] if name in s.switches.off]
        return f"no backend can run it, with {', '.join(off)} switched off"
    if backend == "math" and sdpa.attn_mask is not None and sdpa.is_causal:
        return "attn_mask must not be given together with is_causal"
    return None


def _notes(s: Situation, backend: str | None, missing: str | None) -> tuple[str, ...]:
    sdpa = s.sdpa
    found = []
    if missing is not None:
        found.append(f"{missing}: the launch fails with 'no kernel image is available'")
    if not s.build.verified:
        found.append(f"unverified: the rules of {s.build} were read, not compared with its answers")
    if sdpa.nested:
        found.append("unverified: the rules for nested tensors were read, not compared")
    if sdpa.empty:
        found.append("an empty input: the result is zeros, and no kernel runs")
    if sdpa.key.shape[-2] != sdpa.value.shape[-2]:
        lengths = f"{sdpa.key.shape[-2]} keys and {sdpa.value.shape[-2]} values"
        found.append(f"{lengths}: no backend checks this, and the result is undefined")
    if not 0 <= sdpa.dropout_p <= 1:
        found.append(f"dropout_p {sdpa.dropout_p}: on CUDA nobody checks that it is a probability")
    if sdpa.attn_mask is not None and sdpa.is_causal:
        found.append("attn_mask with is_causal: applied together without a word before 2.14")
    if sdpa.attn_mask is not None and backend == "efficient":
        found += _mask_notes(s)
    if backend == "math" and s.device.kind == "cuda":
        found.append("math keeps the whole matrix of scores: O(L^2) memory")
    found += [str(fault) for fault in faults.of(backend, s)]
    return tuple(found)


def _mask_notes(s: Situation) -> list[str]:
    mask = s.sdpa.attn_mask
    assert mask is not None
    full = (*s.sdpa.query.shape[:-1], s.sdpa.key.shape[-2])
    shape = (*([1] * (len(full) - mask.dims)), *mask.shape)
    if len(shape) != len(full) or any(
        size not in (1, wide) for size, wide in zip(shape, full, strict=True)
    ):
        return [
            f"attn_mask {list(mask.shape)} does not broadcast to {list(full)}: an error follows"
        ]
    return []


def describe(sdpa: SDPA) -> dict[str, str]:
    """A call in words, for people and for JSON. Only what departs from the default is said."""
    mask = sdpa.attn_mask
    optional = {
        "attn_mask": None if mask is None else f"{mask.layout}, {mask_bytes(mask) / 2**20:.1f} MiB",
        "is_causal": "True" if sdpa.is_causal else None,
        "scale": None if sdpa.scale is None else f"{sdpa.scale:g}",
        "dropout_p": str(sdpa.dropout_p) if sdpa.dropout_p else None,
        "enable_gqa": "True" if sdpa.enable_gqa else None,
        "requires_grad": "True" if sdpa.training else None,
        "nested": "True" if sdpa.nested else None,
    }
    words = {
        "query": str(sdpa.query.layout),
        "key": str(list(sdpa.key.shape)),
        "value": str(list(sdpa.value.shape)),
    }
    return words | {name: value for name, value in optional.items() if value is not None}
