"""limelight as an attention implementation of Hugging Face transformers.

    from limelight.integrations import transformers
    transformers.register()
    model = AutoModel.from_pretrained(name, attn_implementation="limelight")

Outputs and gradients are those of `attn_implementation="sdpa"`, and models that "sdpa" cannot run
(soft-capped scores, attention sinks) run too. Two functions are registered, since transformers asks
for both: one that makes the mask, once a forward, and one that each layer calls. Without the first,
models drop padding silently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from limelight.api import attention
from limelight.biases import Bias, DenseBias
from limelight.errors import invalid, invalid_type
from limelight.masks import And, Causal, DenseMask, KeyLengths, Mask
from limelight.tile import Positions, Size

logger = logging.get_logger(__name__)


def register(name: str = "limelight") -> None:
    """Makes `attn_implementation=name` run on limelight. Calling it again changes nothing.

    Raises ValueError for a name with "flash" in it: transformers treats every such name as the
    flash-attn package.
    """
    if "flash" in name:
        raise invalid("name", found=repr(name), needed='a name without "flash"')
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What each attention layer calls. Returns out [B, M, H, E], contiguous, and no weights.

    query: [B, H, M, D]; key, value: [B, G, N, D and E], with heads that are not repeated.
    attention_mask: what `attention_mask` (the function below) or the user made; see `_terms`.
    dropout: 0 when the module is not training: models see to that.
    is_causal: causal where there is no mask; by default what the module says of itself.
    s_aux: [H] logits of attention sinks. position_bias: broadcasts to [B, H, M, N], is added.
    others: among them `sliding_window`, which needs no attention as the mask has it in it.
    """
    if others.get("output_attentions"):
        logger.warning_once(
            "`limelight` attention never makes the matrix of attention weights, so "
            '`output_attentions=True` gives none. Set `attn_implementation="eager"` to get them.'
        )
    if query.shape[0] == 1 and key.shape[0] > 1:  # learned queries, shared by the whole batch
        query = query.expand(key.shape[0], -1, -1, -1)
    mask, bias, query_start = _terms(attention_mask, query.shape[0])
    if attention_mask is None and query.shape[2] > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = Causal() if causal else None
    if position_bias is not None:
        position = DenseBias(_unexpanded(position_bias))
        bias = position if bias is None else position + bias
    out = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        query_start=query_start,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout,
    )
    return out.transpose(1, 2).contiguous(), None


def _terms(attention_mask: Tensor | None, batch: int) -> tuple[Mask | None, Bias | None, int]:
    """A tensor given as mask, as limelight's mask, bias and position of the first query."""
    if attention_mask is None:
        return None, None, 0
    if isinstance(attention_mask, LazyMask):
        return attention_mask.mask, None, attention_mask.query_start
    if not isinstance(attention_mask, Tensor):
        raise invalid_type(
            "attention_mask", found=type(attention_mask).__name__, needed="a torch tensor or None"
        )
    tensor = _unexpanded(attention_mask)
    if attention_mask.ndim == 2:  # transformers' (batch, kv_len): 1 for a token, 0 for padding
        if attention_mask.shape[0] != batch:
            raise invalid(
                "attention_mask",
                found=f"shape {tuple(attention_mask.shape)}",
                needed=f"(batch, kv_len) with batch {batch}, or four dimensions",
            )
        return DenseMask(attention_mask.bool()[:, None, None, :]), None, 0
    if tensor.is_floating_point():
        return None, DenseBias(tensor), 0
    return DenseMask(tensor), None, 0


def _unexpanded(tensor: Tensor) -> Tensor:
    """The tensor with size 1 in each dimension that was only expanded: less to read and fold."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask of a model's forward: that of transformers' `sdpa_mask`, element by element.

    Plain causal and bidirectional masks, with padding or without, come as a `LazyMask`, so that
    nothing of size q_length * kv_length is made; bidirectional padding in a traced graph comes as
    an expanded tensor. All others (sliding windows, chunks, packed sequences, functions of the
    user, causal masks in traced graphs) come from `sdpa_mask` itself.

    attention_mask: [batch, tokens] bool, False for padding. Returns None where nothing is hidden,
    or nothing but what `is_causal` says.
    """
    causal = mask_function is causal_mask_function
    tracing = is_tracing(attention_mask)
    plain = (
        (causal or mask_function is bidirectional_mask_function)
        and not use_vmap
        and local_size is None
        and isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and (attention_mask is None or attention_mask.ndim == 2)
    )
    if not plain or (tracing and (causal or attention_mask is None)):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
            **others,
        )
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
        if tracing:  # a graph holds no LazyMask, and has no values to look at
            return padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
        if bool(padding.all()):  # waits for the device once a forward, as sdpa_mask does
            padding = None
    if padding is None:
        if not causal and allow_is_bidirectional_skip:
            return None
        # The last query sees every key, and `is_causal` aligns the first query with the first key.
        if causal and allow_is_causal_skip and (q_length == 1 or q_length == kv_length):
            return None
    parts: list[Mask] = [Causal()] if causal else []
    if padding is not None:
        parts.append(_padding(padding))
    if not parts:
        parts.append(DenseMask(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)))
    shape = (batch_size, 1, q_length, kv_length)
    return LazyMask(reduce(And.joined, parts), q_offset - kv_offset, shape, device)


def _padding(padding: Tensor) -> Mask:
    """Padding [batch, kv_len], False for what is padding, in the form that is cheapest to apply."""
    if padding.device.type == "cpu":  # elsewhere, looking at the values would wait for the device
        lengths = padding.sum(dim=1)
        before = torch.arange(padding.shape[1]) < lengths[:, None]
        if torch.equal(padding, before):
            return KeyLengths(lengths)
    return DenseMask(padding[:, None, None, :])


class LazyMask(Tensor):
    """A bool tensor (batch, 1, q_len, kv_len) that is held as a limelight mask.

    To a model it is a tensor like that of `sdpa_mask`: it may be sliced, joined, moved and cast.
    Such an operation makes the values and returns plain tensors. Most models only pass it on.
    """

    mask: Mask
    query_start: int

    @staticmethod
    def __new__(
        cls, mask: Mask, query_start: int, shape: tuple[int, ...], device: torch.device | str
    ) -> LazyMask:
        lazy = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=torch.device(device)
        )
        lazy.mask = mask
        lazy.query_start = query_start
        return lazy

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def dense(self) -> Tensor:
        """The values, expanded over the dimensions that they do not depend on."""
        batch, _, q_len, kv_len = self.shape
        at = Positions.of(
            xp,
            size=Size(batch, 1, q_len, kv_len),
            dtype=torch.float32,
            device=self.device,
            query_start=self.query_start,
        ).whole()
        return self.mask.values(at, xp).expand(self.shape)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def made(value: Any) -> Any:
            if isinstance(value, LazyMask):
                return value.dense()
            if isinstance(value, (list, tuple)):
                return type(value)(made(each) for each in value)
            return value

        return func(*made(args), **{name: made(value) for name, value in (kwargs or {}).items()})

    def __repr__(self, **_: Any) -> str:
        return f"LazyMask({self.mask!r}, query_start={self.query_start}, shape={tuple(self.shape)})"
