"""PyTorch's flash attention operator for the CPU, with its faults worked around.

Seen in torch 2.13 and put right here, each with a test:
- a scale of 0 or less with `is_causal` gives NaN, and large scores lose digits between forward and
  backward: the scale goes into the query, and the operator's own is 1;
- half precision accumulates gradients in half, and is slow without native half products: the
  operator runs in float32;
- a NaN in keys or values that nothing sees reaches outputs and gradients: keys past a batch
  element's length are cut off, and others that a mask hides from every query are zeroed;
- an empty row has the LSE 0: it is set to -inf;
- a row of NaN scores gives 0 where keys are fewer than a vector holds: a mask of 0 prevents it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from limelight.call import Call, Gradients
from limelight.kernels import tiled
from limelight.tuning import TILED

if TYPE_CHECKING:
    from limelight.backends.torch_cpu import Terms

_forward = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# From this share of real keys on, hiding the padding costs less than a call for each length.
_FULL = 0.7
_VECTOR = 16  # elements of the widest vector (AVX-512, float32)


def forward(call: Call, terms: Terms) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E] in the compute dtype, and the LSE [B, H, M]."""
    query, key, value = _inputs(call, terms)
    batch, heads, q_len, _ = query.shape
    parts = list(_parts(call, terms))
    if len(parts) == 1 and parts[0].kv_len > 0:
        return _forward_part(query, key, value, parts[0])
    out = query.new_zeros((batch, q_len, heads, value.shape[3])).transpose(1, 2)
    lse = query.new_full((batch, heads, q_len), -torch.inf)
    for part in parts:
        if part.kv_len > 0:
            b = part.batches
            out[b], lse[b] = _forward_part(query[b], key[b], value[b], part)
    return out, lse


def _forward_part(query: Tensor, key: Tensor, value: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
    if part.kv_len < key.shape[2]:
        key, value = key[:, :, : part.kv_len], value[:, :, : part.kv_len]
    mask = part.mask
    if mask is None and part.kv_len < _VECTOR:
        mask = query.new_zeros((1, 1))
    out, lse = _forward(query, key, value, 0.0, part.causal, attn_mask=mask, scale=1.0)
    if part.mask is not None and bool((lse == 0).any()):
        lse = lse.masked_fill(_empty_rows(part), -torch.inf)
    return out, lse


def backward(
    call: Call,
    terms: Terms,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    """The gradients, each in its input's dtype; the operator always makes all three."""
    if d_out is None or d_lse is not None or tiled.lse_lost_digits(lse):
        # The operator has no gradient of the LSE, and wrong ones where the LSE lost its digits.
        return tiled.backward(call, TILED, out, lse, d_out, d_lse, wanted)
    nothing = lse == -torch.inf
    lse = lse.masked_fill(nothing, 0.0)
    query, key, value = _inputs(call, terms)
    d_out, out = d_out.to(query.dtype), out.to(query.dtype)
    if not _finite(d_out):
        d_out = d_out.masked_fill(nothing[..., None], 0.0)
    d_query = torch.empty_like(call.query)
    d_key, d_value = torch.empty_like(call.key), torch.empty_like(call.value)
    for part in _parts(call, terms):
        b, keys = part.batches, slice(0, part.kv_len)
        d_key[b, :, part.kv_len :] = 0
        d_value[b, :, part.kv_len :] = 0
        if part.kv_len == 0:
            d_query[b] = 0
            continue
        gradients = _backward(
            d_out[b],
            query[b],
            key[b, :, keys],
            value[b, :, keys],
            out[b],
            lse[b],
            0.0,
            part.causal,
            attn_mask=part.mask,
            scale=1.0,
        )
        d_query[b] = gradients[0] * call.scale
        d_key[b, :, keys], d_value[b, :, keys] = gradients[1:]
    return Gradients(
        d_query if wanted.query else None,
        d_key if wanted.key else None,
        d_value if wanted.value else None,
        None,
        (None,) * len(wanted.bias),
    )


class _Part:
    """Neighbouring batch elements with the same number of keys: one call of the operator."""

    def __init__(
        self, batches: slice, q_len: int, kv_len: int, causal: bool, mask: Tensor | None
    ) -> None:
        self.batches, self.q_len, self.kv_len = batches, q_len, kv_len
        self.causal, self.mask = causal, mask


def _parts(call: Call, terms: Terms) -> Iterator[_Part]:
    batch, _, q_len, kv_len = call.size
    # From the top left, queries see no more keys than they are.
    most = min(kv_len, q_len) if terms.causal else kv_len
    if terms.lengths is None and terms.mask is None and terms.bias is None:
        yield _Part(slice(0, batch), q_len, most, terms.causal, None)
        return
    lengths = [most] * batch
    if terms.lengths is not None:
        lengths = [max(0, min(most, n)) for n in terms.lengths.lengths.tolist()]
    mask = _dense_mask(call, terms)
    longest = max(lengths, default=0)
    if len(set(lengths)) > 1 and sum(lengths) >= _FULL * batch * longest:
        # Many calls for little padding: one call, which hides it.
        keys = torch.arange(kv_len, device=call.query.device)
        padding = keys >= torch.tensor(lengths, device=keys.device)[:, None, None, None]
        shown = (
            call.query.new_zeros((), dtype=tiled.compute_dtype(call.query))
            if mask is None
            else mask
        )
        mask = torch.where(padding, -torch.inf, shown)
        lengths = [longest] * batch
    start = 0
    for length, run in groupby(lengths):
        batches = slice(start, start + len(list(run)))
        start = batches.stop
        part = None
        if mask is not None:
            part = mask if mask.shape[0] == 1 else mask[batches]
            part = part if part.shape[3] == 1 else part[..., :length]
        yield _Part(batches, q_len, length, terms.causal, part)


def _dense_mask(call: Call, terms: Terms) -> Tensor | None:
    """Mask and bias as one floating-point tensor of four dimensions, as broadcast as they are."""
    dtype = tiled.compute_dtype(call.query)
    mask = None
    if terms.bias is not None:
        mask = terms.bias.tensor.to(dtype)
    if terms.mask is not None:
        shown = torch.zeros((), dtype=dtype, device=call.query.device) if mask is None else mask
        mask = torch.where(terms.mask.tensor, shown, -torch.inf)
    if mask is None:
        return None
    if terms.causal and not bool((mask < torch.inf).all()):
        # The operator adds the mask where causality hides, too: NaN and inf would come through.
        size = call.size
        mask = torch.where(_triangle(size.q_len, size.kv_len, mask.device), mask, -torch.inf)
    return mask[(None,) * (4 - mask.dim())]


def _inputs(call: Call, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """query (scaled), key and value in the compute dtype, safe for the operator."""
    dtype = tiled.compute_dtype(call.query)
    # The output takes the query's layout: (batch, length, heads, dim), to rejoin heads for free.
    query = call.query.transpose(1, 2).contiguous().to(dtype)
    query = (query * call.scale).transpose(1, 2)
    key, value = call.key.to(dtype), call.value.to(dtype)
    if terms.mask is None and terms.bias is None and terms.lengths is None:
        return query, key, value
    # What a mask hides from everything is multiplied by 0, which a NaN survives. A sum finds
    # one at a hundredth of the attention's cost.
    if not (_finite(query) and _finite(key) and _finite(value)):
        size = call.size
        mask = _dense_mask(call, terms)
        if mask is None:
            mask = query.new_zeros((1, 1, 1, 1))
        visible = (mask != -torch.inf).expand(size)
        if terms.causal:
            visible = visible & _triangle(size.q_len, size.kv_len, mask.device)
        if terms.lengths is not None:
            keys = torch.arange(size.kv_len, device=mask.device)
            visible = visible & (keys < terms.lengths.lengths[:, None, None, None])
        group = call.query.shape[1] // call.key.shape[1]
        unseen = ~visible.any(dim=2).unflatten(1, (-1, group)).any(dim=2)[..., None]
        query = query.masked_fill(~visible.any(dim=3, keepdim=True), 0.0)
        key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    return query, key, value


def _empty_rows(part: _Part) -> Tensor:
    """[B or 1, H or 1, M or 1]: rows in which the mask hides every key that causality leaves."""
    assert part.mask is not None
    visible = part.mask != -torch.inf
    if part.causal:
        visible = visible & _triangle(part.q_len, part.kv_len, visible.device)
    return ~visible.any(dim=-1)


def _triangle(q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """[M, N]: what a query sees that is aligned to the top left."""
    return torch.ones((q_len, kv_len), dtype=torch.bool, device=device).tril()


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.sum()))
