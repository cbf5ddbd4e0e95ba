"""PyTorch's attention operators for CUDA, called directly: no selection in between.

A backward gets zeros for the state of the generator, which no dropout reads. The operators have no
gradient of the LSE: where one arrives, `tiled` runs instead.
"""

from __future__ import annotations

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


def flash_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E] and the LSE [B, H, M], float32; of the others here too."""
    causal = handover.is_causal("flash", call.problem)
    found = _flash(call.query, call.key, call.value, 0.0, causal, scale=call.scale)
    return found[0], found[1]


def flash_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    if d_out is None or d_lse is not None:
        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
    state = _no_state(call.query.device)
    size = call.size
    causal = handover.is_causal("flash", call.problem)
    gradients = _flash_backward(
        *_arrived(call, out, d_out),
        lse,
        None,
        None,
        size.q_len,
        size.kv_len,
        0.0,
        causal,
        state,
        state,
        scale=call.scale,
    )
    return _gradients(gradients, wanted)


def efficient_forward(call: Call) -> tuple[Tensor, Tensor]:
    causal = handover.is_causal("efficient", call.problem)
    found = _efficient(call.query, call.key, call.value, None, True, 0.0, causal, scale=call.scale)
    return found[0], found[1][:, :, : call.size.q_len]  # the LSE's rows are padded


def efficient_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    if d_out is None or d_lse is not None:
        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
    d_out, query, key, value, out = _arrived(call, out, d_out)
    state = _no_state(call.query.device)
    causal = handover.is_causal("efficient", call.problem)
    gradients = _efficient_backward(
        d_out,
        query,
        key,
        value,
        None,
        out,
        _padded_rows(lse),
        state,
        state,
        0.0,
        [True, True, True, False],
        causal,
        scale=call.scale,
    )
    return _gradients(gradients[:3], wanted)


def cudnn_forward(call: Call) -> tuple[Tensor, Tensor]:
    causal = handover.is_causal("cudnn", call.problem)
    found = _cudnn(call.query, call.key, call.value, None, True, 0.0, causal, scale=call.scale)
    return found[0], found[1].squeeze(-1)


def cudnn_backward(
    call: Call,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    if d_out is None or d_lse is not None:
        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
    state = _no_state(call.query.device)
    size = call.size
    causal = handover.is_causal("cudnn", call.problem)
    gradients = _cudnn_backward(
        *_arrived(call, out, d_out),
        lse.unsqueeze(-1),
        state,
        state,
        None,
        None,
        None,
        size.q_len,
        size.kv_len,
        0.0,
        causal,
        scale=call.scale,
    )
    return _gradients(gradients, wanted)


def _arrived(
    call: Call, out: Tensor, d_out: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """d_out, query, key, value and out, each as the kernels need them laid out."""
    out = _regular(out.to(call.query.dtype))
    return _regular(d_out), call.query, call.key, call.value, out


def _regular(tensor: Tensor) -> Tensor:
    """The tensor with rows side by side, at multiples of 16 bytes: others come out wrong."""
    strides = tensor.stride()
    item = tensor.element_size()
    rows = all(step > 0 and step * item % 16 == 0 for step in strides[:-1])
    if strides[-1] == 1 and rows and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _padded_rows(lse: Tensor) -> Tensor:
    """The efficient kernel reads the LSE in rows of a multiple of 32."""
    length = lse.shape[2]
    if length % 32 == 0:
        return lse.contiguous()
    return torch.nn.functional.pad(lse, (0, -length % 32), value=torch.inf)


def _gradients(found: tuple[Tensor, ...], wanted: Gradients) -> Gradients:
    query, key, value = (
        gradient if want else None for gradient, want in zip(found, wanted[:3], strict=False)
    )
    return Gradients(query, key, value, None, (None,) * len(wanted.bias))


@cache
def _no_state(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)
