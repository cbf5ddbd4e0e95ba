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
    inputs, scale = (call.query, call.key, call.value), call.scale
    causal = handover.is_causal(kind, call.problem)
    if kind == "flash":
        value_dim = call.value.shape[3]
        out, lse, *_ = _flash(*map(_padded_columns, inputs), 0.0, causal, scale=scale)
        out = out[..., :value_dim] if value_dim % 8 else out
    elif kind == "efficient":
        out, lse, *_ = _efficient(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse[:, :, : call.size.q_len]  # its rows are padded
    else:
        out, lse, *_ = _cudnn(*inputs, None, True, 0.0, causal, scale=scale)
        lse = lse.squeeze(-1)
    return out, lse


def shortcut(kind: str, call: Call) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """`out` of calls like this one: the operator itself, with nothing in between."""
    causal, scale = handover.is_causal(kind, call.problem), call.scale
    learns = bool(call.problem.gradients)
    if kind == "cudnn":
        return lambda q, k, v: _cudnn(q, k, v, None, learns, 0.0, causal, scale=scale)[0]
    if kind == "efficient":
        return lambda q, k, v: _efficient(q, k, v, None, learns, 0.0, causal, scale=scale)[0]
    if call.query.shape[3] % 8:
        return lambda q, k, v: forward(kind, call.with_tensors((q, k, v)))[0]
    return lambda q, k, v: _flash(q, k, v, 0.0, causal, scale=scale)[0]


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
    inputs, scale = (call.query, call.key, call.value), call.scale
    lengths = (call.size.q_len, call.size.kv_len)
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
    query, key, value = (
        gradient if want else None for gradient, want in zip(found[:3], wanted[:3], strict=True)
    )
    return Gradients(query, key, value, None, (None,) * len(wanted.bias))


def regular(tensor: Tensor) -> Tensor:
    """The tensor with rows side by side, at multiples of 16 bytes: others come out wrong."""
    strides = tensor.stride()
    item = tensor.element_size()
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
