"""The public functions: the only door to the adapters, to dispatch and so to the backends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from limelight.adapters import adapter_for, adapter_of
from limelight.adapters.base import Adapter, Arguments
from limelight.biases import Bias, DenseBias
from limelight.call import Gradients
from limelight.devices import CPU, Device
from limelight.dispatch import KNOWN, Choice, allowed, choose, decide
from limelight.errors import invalid, invalid_type
from limelight.masks import Causal, DenseMask, Mask
from limelight.problem import DTYPES, Problem
from limelight.terms import check_broadcastable
from limelight.tile import Size

if TYPE_CHECKING:
    from limelight.pytorch import Build, Prediction


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    query_start: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Scaled dot-product attention (Vaswani et al., arXiv:1706.03762, equation 1), fused.

    Each score is `softcap(scale * q.k) + bias`, then the mask; the softmax runs over a query's
    visible keys, then dropout, then the weighted sum of values. A query that sees no key gives 0,
    an LSE of -inf (of its sink, with sinks) and zero gradients.

    Arguments:
        query: (batch, q_heads, q_len, head_dim), float16, bfloat16, float32 or float64; any
            strides. A torch tensor, a JAX, CuPy or NumPy array; all others of the same library.
        key: (batch, kv_heads, kv_len, head_dim); q_heads is a multiple of kv_heads, and
            consecutive query heads share a head of keys and values.
        value: (batch, kv_heads, kv_len, value_dim).
        mask: which keys a query may see: `Causal()`, `KeyLengths(lengths)`, ..., joined by & and |.
        bias: what is added to the scaled scores: `ALiBi(slopes)`, ..., joined by +. Its tensors
            get gradients.
        query_start: the position of the first query among the keys: a number, "end" (the last
            query stands at the last key, of each batch element's own where `KeyLengths` is given)
            or one number per batch element. None is 0, for equal lengths or masks without order.
        scale: 1 / sqrt(head_dim) by default; zero and negative scales work.
        softcap: c in c * tanh(score / c), applied before bias and mask (Gemma 2).
        sinks: (q_heads,) logits that join each softmax's denominator (GPT-OSS); differentiable.
        dropout_p: the probability with which a weight is dropped, from 0 to 1.
        seed: an integer (or, under torch, an int64 tensor of one element) that fixes what dropout
            drops; drawn from the library's generator by default.
        return_lse: also return the natural log of each softmax's denominator, sinks included.
        deterministic: bitwise repeatable gradients; None follows the library's own switch.

    Returns:
        out (batch, q_heads, q_len, value_dim) in the query's dtype, and with `return_lse` the LSE
        (batch, q_heads, q_len), float32 (float64 for float64). Both are differentiable.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it, what was found and what
            is needed.
        NoBackendError: `limelight.backends` allows no backend that can run this.

    >>> import numpy as np
    >>> x = np.ones((1, 2, 3, 4), np.float32)
    >>> attention(x, x, x, mask=Causal()).shape
    (1, 2, 3, 4)
    """
    return adapter_of(query).attention(
        Arguments(
            query,
            key,
            value,
            mask,
            bias,
            query_start,
            scale,
            softcap,
            sinks,
            dropout_p,
            seed,
            return_lse,
            deterministic,
        )
    )


def attention_vjp(
    query: Any, key: Any, value: Any, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and, without an autograd, its gradients: the vector-Jacobian product.

    Arguments are those of `attention`. Returns what `attention` returns and a function
    `pullback(d_out, d_lse=None)`, whose result has `query`, `key`, `value`, `sinks` (None without
    sinks) and `bias` (a tuple, one gradient per tensor of the bias).

    >>> import numpy as np
    >>> x = np.ones((1, 2, 3, 4))
    >>> out, pullback = attention_vjp(x, x, x, mask=Causal())
    >>> pullback(np.ones_like(out)).value[0, 0, :, 0].round(2).tolist()
    [1.83, 0.83, 0.33]
    """
    adapter = adapter_of(query)
    a = adapter.prepared(Arguments(query, key, value, **options))
    wanted = Gradients(
        query=True,
        key=True,
        value=True,
        sinks=a.sinks is not None,
        bias=(True,) * (len(a.bias.tensors()) if a.bias is not None else 0),
    )
    plan = adapter.planned(replace(a, gradients=wanted.names()), allowed())
    with adapter.untracked():
        wide, lse = plan.forward()

    def pullback(d_out: Any, d_lse: Any = None) -> Gradients:
        with adapter.untracked():
            return plan.backward(wide, lse, d_out, d_lse, wanted)

    out = adapter.cast(wide, plan.call.query)
    return ((out, lse) if a.return_lse else out), pullback


def explain(
    query: Any,
    key: Any = None,
    value: Any = None,
    *,
    device: str | Device | None = None,
    **options: Any,
) -> Choice:
    """Which backend would run a call, and every reason against each other one. Runs nothing.

    Arguments:
        query, key, value, options: those of `attention`; or one `Problem`, alone.
        device: a GPU to ask about ("RTX 2080"; see `limelight.devices.NAMED`), or a `Device`; by
            default that of the arrays or of the problem.

    Returns:
        A `Choice`: print it, or read `.backend`, `.reasons`, `.to_dict()`. Its backend is None
        where nothing can run the call.

    >>> print(explain(Problem.of(q_len=128, dtype="float64"), device="RTX 2080").backend)
    tiled
    """
    problem, _ = _posed(query, key, value, device, options)
    return decide(problem, allowed())


def precompile(
    query: Any,
    key: Any = None,
    value: Any = None,
    *,
    device: str | Device | None = None,
    **options: Any,
) -> Choice:
    """Compiles what a call and its gradients need, so that its first run, or a capture, does not.

    Lengths, batch sizes and numbers of heads are not compiled in: one call serves others that
    differ in them alone (but for float32 on Hopper, computed another way from 512 queries and keys
    on). What is compiled is kept in memory and on disk; where the device is a GPU of this machine
    it is loaded too, and the call can then be captured in a CUDA graph at once.

    Arguments:
        query, key, value, options: those of `attention`, with `requires_grad` set as it will be; or
            one `Problem`, alone, whose `gradients` say which are wanted.
        device: a GPU to compile for, which need not be here: as `explain` takes it.

    Returns:
        The `Choice` of what will run the call. Only `flash` and `hopper` compile anything.

    Raises:
        ValueError, TypeError: as `attention`.
        NoBackendError: no allowed backend can run the call on that device.
        CaptureError (limelight.launcher): a CUDA graph is being captured, and something is missing.

    >>> precompile(Problem.of(q_len=128)).backend  # on the CPU, where nothing is compiled
    'torch_cpu'
    """
    problem, arguments = _posed(query, key, value, device, options)
    choice = choose(problem, allowed())
    backend = KNOWN[choice.backend]  # type: ignore[index]
    if backend.compiles:
        if arguments is None:
            call = adapter_for(problem.library).placeholder_call(problem)
        else:
            call = adapter_of(query).call(arguments, problem)
        backend.precompile(call)
    return choice


def _posed(
    query: Any, key: Any, value: Any, device: str | Device | None, options: dict[str, Any]
) -> tuple[Problem, Arguments | None]:
    """The problem that a call poses on a device, and its prepared arguments if it has any."""
    arguments = None
    if isinstance(query, Problem):
        if key is not None or value is not None or options:
            raise invalid_type(
                "query", found="a Problem with further arguments", needed="the Problem alone"
            )
        problem = query
    else:
        adapter = adapter_of(query)
        arguments = adapter.prepared(Arguments(query, key, value, **options))
        problem = adapter.describe(arguments)
    if device is not None:
        device = device if isinstance(device, Device) else Device.named(device)
        problem = replace(problem, device=device)
    return problem, arguments


def explain_torch(
    query: Any,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    device: str | Device | None = None,
    version: str | Build | None = None,
) -> Prediction:
    """Which backend PyTorch's own function would run, and every reason against each other one.

    Runs nothing, and needs no torch for a problem that is written by hand.

    Arguments:
        query to enable_gqa: those of `torch.nn.functional.scaled_dot_product_attention`; or one
            `Problem`, or one `limelight.pytorch.SDPA`, alone.
        device: a GPU to ask about ("RTX 2080"), or a `Device`; by default that of the tensors or
            of the problem, and then as this process is set and built.
        version: a release of PyTorch ("2.13.0"), as PyPI has it, or a `limelight.pytorch.Build`;
            by default the one that is installed, else the newest that is known.

    Returns:
        A `Prediction`: print it, or read `.backend`, `.candidates`, `.notes`, `.to_dict()`.

    >>> explain_torch(Problem.of(dtype="float16"), device="H100", version="2.13.0").backend
    'cudnn'
    """
    from limelight.pytorch import SDPA, Build, predict
    from limelight.pytorch.builds import installed

    here = device if device is None or isinstance(device, Device) else Device.named(device)
    if isinstance(query, (Problem, SDPA)):
        absent = all(each is None for each in (key, value, attn_mask, scale))
        if not absent or dropout_p != 0.0 or is_causal or enable_gqa:
            kind = type(query).__name__
            raise invalid_type(
                "query", found=f"a {kind} with further arguments", needed=f"the {kind} alone"
            )
        call = query if isinstance(query, SDPA) else SDPA.from_problem(query)
        own = query.device if isinstance(query, Problem) else CPU
    else:
        adapter = adapter_of(query)
        if adapter.library != "torch":
            raise invalid_type("query", found=adapter.array_type, needed="a torch tensor")
        from limelight.adapters.torch.prediction import described

        call = described(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        own = adapter.device(query)
    if here is None and version is None and "torch" in sys.modules:
        from limelight.adapters.torch.prediction import build_here, switches_here

        return predict(call, own, build_here(), switches_here(own))
    build = version if isinstance(version, Build) else Build.released(version or installed())
    return predict(call, here or own, build)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, with its signature and meaning.

    Arguments:
        query: (..., q_heads, q_len, head_dim); key, value: (..., heads, kv_len, dim). Two or more
            dimensions; leading ones broadcast.
        attn_mask: broadcastable to (..., q_len, kv_len); bool, where True may attend, or floating
            point, which is added to the scaled scores and gets its gradient.
        dropout_p: always applied, as PyTorch does.
        is_causal: key j is visible to query i where j <= i (top-left, also for unequal lengths).
        scale: 1 / sqrt(head_dim) by default.
        enable_gqa: q_heads may be a multiple of the heads of key and value.

    Raises ValueError for `attn_mask` together with `is_causal`, and otherwise as `attention`.
    """
    adapter = adapter_of(query)
    is_causal, enable_gqa = bool(is_causal), bool(enable_gqa)
    # With types, as True equals 1.0 and is refused where that is not.
    options = (dropout_p, type(dropout_p), is_causal, scale, type(scale), enable_gqa)
    plain = attn_mask is None
    if plain:
        shortcut = adapter.shortcut(query, key, value, options)
        if shortcut is not None:
            return shortcut(query, key, value)
    mask: Mask | None = None
    bias: Bias | None = None
    if is_causal:
        if attn_mask is not None:
            raise invalid("is_causal", found="True with an attn_mask", needed="one of the two")
        mask = Causal()
    query, key, value, attn_mask, leading = _four_dimensions(
        adapter, query, key, value, attn_mask, enable_gqa
    )
    if attn_mask is not None:
        batch, heads, q_len, _ = query.shape
        size = Size(batch, heads, q_len, key.shape[2])
        check_broadcastable("attn_mask", attn_mask.shape, size)
        if adapter.dtype(attn_mask) == "bool":
            mask = DenseMask(attn_mask)
        elif adapter.dtype(attn_mask) in DTYPES:
            bias = DenseBias(attn_mask)
        else:
            raise invalid_type(
                "attn_mask",
                found=f"dtype {adapter.dtype(attn_mask)}",
                needed="bool or a floating-point dtype",
            )
    arguments = Arguments(
        query, key, value, mask, bias, query_start=0, scale=scale, dropout_p=dropout_p
    )
    out = adapter.attention(arguments)
    if plain and leading is None:
        adapter.keep_shortcut(options, arguments)
    return out if leading is None else out.reshape(*leading, *out.shape[-2:])


def _four_dimensions(
    adapter: Adapter, query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool
) -> tuple[Any, Any, Any, Any, tuple[int, ...] | None]:
    """The arrays as (batch, heads, length, dim), and the caller's leading shape if it differs."""
    arrays = (("query", query), ("key", key), ("value", value))
    for name, array in arrays:
        if not adapter.is_array(array):
            raise invalid_type(name, found=type(array).__name__, needed=adapter.array_type)
        if len(array.shape) < 2:
            raise invalid(
                name, found=f"shape {tuple(array.shape)}", needed="at least two dimensions"
            )
    if attn_mask is not None:
        if not adapter.is_array(attn_mask):
            raise invalid_type(
                "attn_mask", found=type(attn_mask).__name__, needed=adapter.array_type
            )
        if len(attn_mask.shape) < 2:
            raise invalid(
                "attn_mask",
                found=f"shape {tuple(attn_mask.shape)}",
                needed="at least two dimensions",
            )
    heads_apart = 3 if enable_gqa else 2  # with grouped heads, only what lies before broadcasts
    same = len(query.shape) == len(key.shape) == len(value.shape) == 4
    if same and query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return query, key, value, attn_mask, None
    if same and enable_gqa and query.shape[0] == key.shape[0] == value.shape[0]:
        return query, key, value, attn_mask, None

    if enable_gqa and min(len(array.shape) for _, array in arrays) < 3:
        raise invalid("enable_gqa", found="arrays without heads", needed="three dimensions or more")
    leading = _broadcast_shape([array.shape[:-heads_apart] for _, array in arrays])
    wide = tuple(
        adapter.broadcast(array, (*leading, *array.shape[-heads_apart:])) for _, array in arrays
    )
    shape = tuple(wide[0].shape[:-2])
    if attn_mask is not None and len(shape) > 2:
        if _count(attn_mask.shape[:-2]) == 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[-2:])
        else:
            attn_mask = adapter.broadcast(attn_mask, (*shape, *attn_mask.shape[-2:]))
            attn_mask = attn_mask.reshape(_count(shape[:-1]), shape[-1], *attn_mask.shape[-2:])
    flat = tuple(
        array.reshape(_count(array.shape[:-3]), *array.shape[-3:])
        if len(array.shape) > 2
        else array[None, None]
        for array in wide
    )
    return (*flat, attn_mask, shape)


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    length = max(len(shape) for shape in shapes)
    padded = [(1,) * (length - len(shape)) + tuple(shape) for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise invalid(
                "key and value",
                found=f"leading dimensions {[tuple(shape) for shape in shapes]}",
                needed="leading dimensions that broadcast with those of query "
                "(heads too, unless enable_gqa=True)",
            )
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
