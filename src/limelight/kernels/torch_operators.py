"""PyTorch's attention operators for CUDA, called directly: no selection in between.

A backward gets zeros for the state of the generator, which no dropout reads. The operators have no
gradient of the LSE: where one arrives, `tiled` runs instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from limelight.call import Call, Gradients
from limelight.kernels import tiled
from limelight.pytorch import handover
from limelight.tuning import TILED

# Those with a binding in `torch` are called through it, which parses arguments 3 us faster.
_flash = torch._scaled_dot_product_flash_attention  # type: ignore[attr-defined]
_efficient = torch._scaled_dot_product_efficient_attention  # type: ignore[attr-defined]
_cudnn = torch._scaled_dot_product_cudnn_attention  # type: ignore[attr-defined]
_aten = torch.ops.aten
_flash_backward = _aten._scaled_dot_product_flash_attention_backward.default
_efficient_backward = _aten._scaled_dot_product_efficient_attention_backward.default
_cudnn_backward = _aten._scaled_dot_product_cudnn_attention_backward.default


def forward(kind: str, call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E] and the LSE [B, H, M], float32. kind: "flash", "efficient" or "cudnn".

    Autograd follows it.
    """
    inputs, scale = _inputs(call), call.scale
    causal = handover.is_causal(kind, call.problem)
    if kind == "flash":
        value_dim = call.value.shape[3]
        query, key, value = map(_padded_columns, inputs)
        out, lse, *_ = _flash(query, key, value, 0.0, causal, scale=scale)
        out = out[..., :value_dim] if value_dim % 8 else out
    elif kind == "efficient":
        out, lse, *_ = _efficient(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse[:, :, : call.size.q_len]  # its rows are padded
    else:
        out, lse, *_ = _cudnn(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse.squeeze(-1)
    return out, lse


def shortcut(kind: str, call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`out` of calls like this one, with nothing in between.

    PyTorch's own function is the quickest way to its operator, where it selects that itself.
    """
    causal, scale, grouped = handover.is_causal(kind, call.problem), call.scale, call.group > 1
    switches = _switches()
    selected = torch._fused_sdp_choice(  # type: ignore[attr-defined]
        call.query, call.key, call.value, None, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    same = call.size.q_len == call.size.kv_len or not causal
    if not same or _NUMBERS[kind] != selected:
        return lambda q, k, v: forward(kind, call.with_tensors((q, k, v)))[0]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if _switches() != switches:  # another may be selected now
            return forward(kind, call.with_tensors((query, key, value)))[0]
        return _attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)

    return run


# Not by its public name, which a program may have given to limelight's own.
_attention = torch._C._nn.scaled_dot_product_attention  # type: ignore[attr-defined]
_NUMBERS = {"flash": 1, "efficient": 2, "cudnn": 3}  # torch.nn.attention.SDPBackend's


def _switches() -> tuple[object, ...]:
    """What PyTorch's selection depends on beside the call."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_sdp_priority_order(),
    )


def backward(
    kind: str,
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients. kind: as for the forward."""
    if d_out is None or d_lse is not None:
        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
    out, d_out = regular(out.to(call.query.dtype)), regular(d_out)
    inputs, scale = _inputs(call), call.scale
    lengths = (inputs[0].shape[2], inputs[1].shape[2])
    causal = handover.is_causal(kind, call.problem)
    states = (_no_state(call.query.device),) * 2
    if kind == "flash":
        wide = map(_padded_columns, (d_out, *inputs, out))
        found = _flash_backward(*wide, lse, None, None, *lengths, 0.0, causal, *states, scale=scale)
        found = [
            gradient[..., : tensor.shape[3]]
            for gradient, tensor in zip(found, inputs, strict=False)
        ]
    elif kind == "efficient":
        lse, needed = _padded_rows(lse), [True, True, True, False]
        found = _efficient_backward(
            d_out, *inputs, None, out, lse, *states, 0.0, needed, causal, scale=scale
        )
    else:
        lse, nothing = lse.unsqueeze(-1), (None, None, None)
        found = _cudnn_backward(
            d_out, *inputs, out, lse, *states, *nothing, *lengths, 0.0, causal, scale=scale
        )
    unseen = call.size.kv_len - lengths[1]
    query, key, value = (
        gradient if want else None for gradient, want in zip(found[:3], wanted[:3], strict=True)
    )
    if unseen:
        key, value = (
            None if each is None else torch.nn.functional.pad(each, (0, 0, 0, unseen))
            for each in (key, value)
        )
    return Gradients(query, key, value, None, (None,) * len(wanted.bias))


def _inputs(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, and the keys and values that any query sees."""
    seen = handover.visible_keys(call.problem)
    if seen >= call.size.kv_len:
        return call.query, call.key, call.value
    return call.query, call.key[:, :, :seen], call.value[:, :, :seen]


def regular(tensor: Tensor) -> Tensor:
    """The tensor with rows side by side, at multiples of 16 bytes: others come out wrong."""
    strides, item = tensor.stride(), tensor.element_size()
    rows = all(step > 0 and step * item % 16 == 0 for step in strides[:-1])
    if strides[-1] == 1 and rows and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _padded_columns(tensor: Tensor) -> Tensor:
    """FlashAttention takes head dims that 8 divides; columns of zeros change nothing."""
    width = tensor.shape[3]
    return torch.nn.functional.pad(tensor, (0, -width % 8)) if width % 8 else tensor


def _padded_rows(lse: Tensor) -> Tensor:
    """The efficient kernel reads the LSE in rows of a multiple of 32."""
    length = lse.shape[2]
    if length % 32 == 0:
        return lse.contiguous()
    return torch.nn.functional.pad(lse, (0, -length % 32), value=torch.inf)


@cache
def _no_state(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)
