"""The `torch_cpu` backend: PyTorch's own flash attention for the CPU, where it says what we say.

The operator checks little: lengths of 0 kill the process, unequal lengths of key and value corrupt
the heap, and it has faults of its own (the list, with versions, is in docs/architecture.md). So
everything here is either refused by `why_not` or put right in `kernels/torch_cpu.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from limelight.backends.base import Backend, Reason
from limelight.biases import Bias, DenseBias
from limelight.call import Call, Gradients
from limelight.masks import And, Causal, DenseMask, KeyLengths, Mask
from limelight.problem import Problem


class Terms(NamedTuple):
    """What PyTorch's operator can be told: causal from the top left, lengths, dense mask, bias."""

    causal: bool = False
    lengths: KeyLengths | None = None
    mask: DenseMask | None = None
    bias: DenseBias | None = None


def terms_of(mask: Mask | None, bias: Bias | None) -> Terms | None:
    """Mask and bias in the operator's words; None where it has no words for them."""
    terms = Terms()
    for part in mask.children if isinstance(mask, And) else () if mask is None else (mask,):
        if isinstance(part, Causal):
            terms = terms._replace(causal=True)
        elif isinstance(part, KeyLengths) and terms.lengths is None:
            terms = terms._replace(lengths=part)
        elif isinstance(part, DenseMask) and terms.mask is None:
            terms = terms._replace(mask=part)
        else:
            return None
    if bias is None:
        return terms
    return terms._replace(bias=bias) if isinstance(bias, DenseBias) else None


class TorchCPU(Backend):
    name = "torch_cpu"
    summary = "PyTorch's flash attention for the CPU, corrected where it is wrong, O(L) memory"

    def why_not(self, problem: Problem) -> list[Reason]:
        p = problem
        terms = terms_of(p.mask, p.bias)
        words = "Causal, KeyLengths, DenseMask joined by &, and one DenseBias"
        last_query = p.start == p.kv_len - 1 and p.q_len == 1
        rules = (
            (p.library != "torch", "runs on PyTorch tensors", p.library, "pass torch tensors"),
            (p.device.kind != "cpu", "runs on the CPU", str(p.device), "move the tensors"),
            (
                p.head_dim != p.value_dim,
                "needs head_dim and value_dim to be equal",
                f"{p.head_dim} and {p.value_dim}",
                "",
            ),
            (
                0 in (p.q_len, p.kv_len),
                "needs at least one query and one key",
                f"{p.q_len} and {p.kv_len}",
                "",
            ),
            (p.mask is not None and terms_of(p.mask, None) is None, f"takes {words}", p.mask, ""),
            (p.bias is not None and terms_of(None, p.bias) is None, f"takes {words}", p.bias, ""),
            (
                terms is not None and terms.causal and p.start != 0 and not last_query,
                "aligns Causal to the top left only",
                f"query_start {p.query_start}",
                "",
            ),
            (p.softcap is not None, "has no softcap", p.softcap, "leave softcap out"),
            (p.sinks is not None, "has no sinks", p.sinks, "leave sinks out"),
            (p.dropout_p > 0, "has no dropout", f"dropout_p {p.dropout_p}", "set dropout_p=0"),
            (
                any(name.startswith("bias.") for name in p.gradients),
                "gives no gradient of a bias",
                ", ".join(p.gradients),
                "detach the bias if its gradient is not needed",
            ),
        )
        return [Reason(rule, str(found), lift) for against, rule, found, lift in rules if against]

    def forward(self, call: Call) -> tuple[Any, Any]:
        from limelight.kernels import torch_cpu

        return torch_cpu.forward(call, _terms(call))

    def backward(
        self, call: Call, out: Any, lse: Any, d_out: Any, d_lse: Any, wanted: Gradients
    ) -> Gradients:
        from limelight.kernels import torch_cpu

        return torch_cpu.backward(call, _terms(call), out, lse, d_out, d_lse, wanted)


def _terms(call: Call) -> Terms:
    terms = terms_of(call.mask, call.bias)
    assert terms is not None  # why_not refuses the rest
    # A single query at the last key sees every key; the operator would align it to the first.
    size = call.size
    return terms._replace(causal=terms.causal and (size.q_len > 1 or call.query_start == 0))
