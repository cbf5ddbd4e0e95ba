"""PyTorch tensors: eager calls through autograd.Function, compiled graphs through an operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[import]
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from limelight.adapters.base import Adapter, Arguments, Plan
from limelight.adapters.torch import eager, native, operator
from limelight.adapters.torch.plan import TorchPlan, autocasts, kind_of, rounded
from limelight.call import Call
from limelight.devices import CPU, Device
from limelight.dispatch import KNOWN, Choice, allowed, note
from limelight.errors import invalid, invalid_type
from limelight.problem import Layout, row_alignment

_NO_TRANSFORMS = "limelight does not run under torch.func transforms"
Restriction = tuple[str, ...] | None
Shortcut = Callable[[Tensor, Tensor, Tensor], Tensor]
_PLANS = 4096


class TorchAdapter(Adapter):
    library = "torch"
    array_type = "a torch tensor"
    plan_type = TorchPlan

    def __init__(self) -> None:
        # By what is seen of a call's arguments, before a Problem is even made: 100 us less.
        self._seen: dict[Hashable, _Seen] = {}
        self._shortcuts: dict[Hashable, Shortcut] = {}

    # What the rest of limelight may ask about a tensor.

    def is_array(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def asarray(self, value: Any, like: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            try:
                tensor = torch.tensor(value, device=like.device)  # a copy: arrays may change
            except (TypeError, ValueError, RuntimeError) as error:
                raise invalid_type(name, found=f"{value!r}", needed=f"a tensor ({error})") from None
            if isinstance(value, (list, tuple)) and tensor.is_floating_point():
                # Python's numbers have no dtype, and torch's default may be half precision.
                wide = torch.float64 if like.dtype == torch.float64 else torch.float32
                return torch.tensor(value, dtype=wide, device=like.device)
            value = tensor
        self._check_tensor(name, value, like)
        if value.dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64):
            return value.to(torch.int64)  # unsigned numbers wrap around when subtracted
        return value

    def _check_tensor(self, name: str, tensor: Any, like: Any) -> None:
        if not isinstance(tensor, Tensor):
            raise invalid_type(
                name, found=type(tensor).__name__, needed=f"{self.array_type}, as query is"
            )
        if tensor.is_nested:
            raise invalid_type(name, found="a nested tensor", needed="a strided tensor")
        if tensor.layout != torch.strided:
            raise invalid_type(
                name, found=f"a tensor of layout {tensor.layout}", needed="a strided tensor"
            )
        if tensor.device != like.device:
            raise invalid(
                name,
                found=f"a tensor on {tensor.device}",
                needed=f"one on {like.device}, as query is",
            )

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def layout(self, array: Any) -> Layout:
        strides = array.stride()
        shape = tuple(array.shape)
        if is_fake(array):  # no address, and sizes that may be symbols
            return Layout(shape, strides, self.dtype(array))
        if is_functorch_wrapped_tensor(array):  # no address either
            raise NotImplementedError(_NO_TRANSFORMS)
        alignment = row_alignment(array.data_ptr(), shape, strides, array.element_size())
        return Layout(shape, strides, self.dtype(array), alignment)

    def device(self, array: Any) -> Device:
        if array.device.type != "cuda":
            return CPU if array.device.type == "cpu" else Device(str(array.device), "other")
        return _cuda_device(array.device.index)

    def version(self) -> str:
        return torch.__version__

    def gradients(self, arguments: Arguments) -> tuple[str, ...]:
        if not torch.is_grad_enabled():
            return ()
        a = arguments
        named = [("query", a.query), ("key", a.key), ("value", a.value), ("sinks", a.sinks)]
        if a.bias is not None:
            named += [(f"bias.{n}", tensor) for n, tensor in enumerate(a.bias.tensors())]
        return tuple(
            [name for name, tensor in named if tensor is not None and tensor.requires_grad]
        )

    def deterministic(self) -> bool:
        return torch.are_deterministic_algorithms_enabled()

    def allow_tf32(self) -> bool:
        return _allows_tf32()

    def cudnn_version(self, array: Any) -> int | None:
        return torch.backends.cudnn.version() if array.is_cuda else None

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def cast(self, array: Any, like: Any) -> Any:
        return array.to(like.dtype)

    def untracked(self) -> Any:
        return torch.no_grad()

    def draw_seed(self, like: Any) -> Any:
        return torch.randint(2**62, (1,), device=like.device)

    def broadcast(self, array: Any, shape: tuple[int, ...]) -> Any:
        return array.expand(shape)

    def placeholder(self, layout: Layout) -> Any:
        dtype = getattr(torch, layout.dtype)
        return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device="meta")

    # The way of a call.

    def prepared(self, a: Arguments) -> Arguments:
        for name in ("query", "key", "value"):
            self._check_tensor(name, getattr(a, name), a.query)
        kind = kind_of(a.query)
        if autocasts(kind):
            dtype = torch.get_autocast_dtype(kind)
            cast = {
                name: getattr(a, name).to(dtype)
                for name in ("query", "key", "value")
                if getattr(a, name).dtype in (torch.float32, torch.float16, torch.bfloat16)
            }
            a = replace(a, **cast)
        return super().prepared(a)

    def choice(self, a: Arguments, restriction: Restriction) -> Choice:
        known = self._known(a, restriction)
        if known is not None:
            return known.choice
        choice = super().choice(a, restriction)  # which raises where anything is wrong
        if len(self._seen) >= _PLANS:
            self._seen.clear()
        self._seen[_looks(a, restriction)] = _Seen(choice)
        return choice

    def _known(self, a: Arguments, restriction: Restriction) -> _Seen | None:
        """What is known of prepared arguments that looked like these."""
        try:
            return self._seen.get(_looks(a, restriction))
        except (AttributeError, RuntimeError, TypeError):
            return None  # something else stands where a tensor or number belongs

    def shortcut(self, query: Any, key: Any, value: Any, options: Hashable) -> Shortcut | None:
        if torch.compiler.is_compiling():
            return None
        try:
            return self._shortcuts.get((_looks_of_tensors(query, key, value, allowed()), options))
        except (AttributeError, RuntimeError, TypeError):
            return None  # something else stands where a tensor or number belongs

    def keep_shortcut(self, options: Hashable, arguments: Arguments) -> None:
        if _is_traced(arguments.query):
            return
        known = self._known(arguments, allowed())
        if known is not None and known.shortcut is not None:
            tensors = (arguments.query, arguments.key, arguments.value)
            looks = _looks_of_tensors(*tensors, allowed())
            self._shortcuts[looks, options] = known.shortcut

    def attention(self, arguments: Arguments) -> Any:
        a, restriction = arguments, allowed()
        if _is_traced(a.query):
            out, lse = operator.attention(self, self.prepared(a))
            return (out, lse) if a.return_lse else out
        if forward_ad._current_level >= 0:
            raise NotImplementedError("limelight has no forward-mode derivative")
        known = self._known(a, restriction) if a.seed is None else None
        if known is None:
            if is_functorch_wrapped_tensor(a.query):  # has no address, so it is never known
                raise NotImplementedError(_NO_TRANSFORMS)
            plan = self.planned(self.prepared(a), restriction)
        elif known.shortcut is not None:
            return known.shortcut(a.query, a.key, a.value)
        else:  # what looks like prepared arguments needs no preparing
            plan = self.plan_type(self.call(a, known.choice.problem), known.choice)
            known.shortcut = _shortcut(plan)
        out, lse = _run(plan)
        out = rounded(out, plan.call.query)
        return (out, lse) if a.return_lse else out


@dataclass(slots=True)
class _Seen:
    """What is kept of a call for others that look the same. shortcut: runs them, where one can."""

    choice: Choice
    shortcut: Shortcut | None = None


def _shortcut(plan: Plan) -> Shortcut | None:
    """The plan's call as a function of query, key and value, where it depends on nothing else."""
    call, choice = plan
    problem, backend = choice.problem, KNOWN[choice.backend]  # type: ignore[index]
    learns = bool(problem.gradients)
    bare = len(call.tensors()) == 3 and not problem.copies and not problem.dropout_p
    run = None
    if bare and not problem.return_lse and (backend.native or not learns):
        run = backend.shortcut(call)
    if run is None:
        return None
    follow = native.follower(_shell(call), choice) if learns else None

    def shortcut(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        note(choice, "forward")
        out = run(query, key, value)
        if follow is not None:
            follow(out)
        return out

    return shortcut


def _run(plan: Plan) -> tuple[Tensor, Tensor | None]:
    """out, and the LSE where there is one, connected to autograd if a gradient is wanted."""
    call, choice = plan
    if not choice.problem.gradients:
        return plan.forward()
    if not KNOWN[choice.backend].native:  # type: ignore[index]
        return eager.attention(plan)
    out, lse = plan.forward()
    native.follower(_shell(call), choice)(out)
    return out, lse


def _shell(call: Call) -> Call:
    """The call with `...` where its tensors were, so that autograd alone holds them."""
    return call.with_tensors([...] * len(call.tensors()))


def _looks(a: Arguments, restriction: Restriction) -> Hashable:
    """All that preparing and describing look at, as a key. Each call makes it, so it is quick."""
    start, grad = a.query_start, torch.is_grad_enabled()
    # Numbers with their types, as True equals 1 and is refused where 1 is not.
    key = (
        _looks_of_tensors(a.query, a.key, a.value, restriction),
        a.scale,
        type(a.scale),
        a.softcap,
        type(a.softcap),
        a.dropout_p,
        type(a.dropout_p),
        a.return_lse,
        type(a.return_lse),
        a.deterministic,
        type(a.deterministic),
        None if isinstance(start, Tensor) else start,
        type(start),
        a.gradients,
    )
    if a.mask is None and a.bias is None and a.sinks is None and not isinstance(start, Tensor):
        return key
    rest: list[Any] = [a.sinks is None]
    tensors = [each for each in (a.sinks, start) if isinstance(each, Tensor)]
    for term in (a.mask, a.bias):
        rest.append(None if term is None else term.spec())
        tensors += () if term is None else term.tensors()
    for t in tensors:
        rest += (type(t), t.device, t.dtype, t.shape, t.stride(), t.data_ptr() & 15)
        rest.append(grad and t.requires_grad)
    return (*key, *rest)


def _looks_of_tensors(q: Tensor, k: Tensor, v: Tensor, restriction: Restriction) -> Hashable:
    """With what the process is set to. Flat, as each tuple within costs."""
    dtype, is_cuda = q.dtype, q.is_cuda
    kind = "cuda" if is_cuda else q.device.type  # the latter takes ten times as long
    return (
        restriction,
        q.device,
        k.device,
        v.device,
        dtype,
        k.dtype,
        v.dtype,
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.data_ptr() & 15 | (k.data_ptr() & 15) << 4 | (v.data_ptr() & 15) << 8,
        torch.is_grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad),
        type(q),
        type(k),
        type(v),
        torch.are_deterministic_algorithms_enabled(),
        _len_torch_dispatch_stack(),
        forward_ad._current_level,
        is_cuda and dtype is torch.float32 and _allows_tf32(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
    )


def _allows_tf32() -> bool:
    # What torch.backends.cuda.matmul.fp32_precision and torch.backends.fp32_precision read, slowly;
    # `allow_tf32` raises once the newer switch was used.
    setting = torch._C._get_fp32_precision_getter("cuda", "matmul")
    if setting == "none":
        setting = torch._C._get_fp32_precision_getter("generic", "all")
    return setting == "tf32"


_CUDA_DEVICES: dict[int, Device] = {}


def _cuda_device(index: int) -> Device:
    device = _CUDA_DEVICES.get(index)
    if device is None:
        found = torch.cuda.get_device_properties(index)
        device = Device.cuda(found.name, (found.major, found.minor), found.multi_processor_count)
        _CUDA_DEVICES[index] = device
    return device


def _is_traced(query: Tensor) -> bool:
    """Whether the call is being recorded (compiled, exported, faked) rather than run."""
    if torch.compiler.is_compiling() or query.is_meta:
        return True
    return _len_torch_dispatch_stack() > 0


ADAPTER = TorchAdapter()
