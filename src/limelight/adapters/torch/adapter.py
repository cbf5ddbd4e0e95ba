"""PyTorch tensors: eager calls by `eager` or `native`, compiled graphs by an `operator`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # type: ignore[import]
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[import]
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from limelight.adapters.base import Adapter, Arguments, Plan
from limelight.adapters.torch import eager, looks, native, operator, shortcuts
from limelight.adapters.torch.plan import TorchPlan, autocasts, kind_of, rounded
from limelight.devices import CPU, Device
from limelight.dispatch import KNOWN, Choice, allowed
from limelight.errors import invalid, invalid_type
from limelight.masks import Mask
from limelight.problem import Layout, row_alignment

_NO_TRANSFORMS = "limelight does not run under torch.func transforms"
_MOST = 4096
_MASK = (Mask, type(None))


class TorchAdapter(Adapter):
    library = "torch"
    array_type = "a torch tensor"
    plan_type = TorchPlan

    def __init__(self) -> None:
        # By what a call looks like, before a Problem is even made: 100 us less.
        self._choices: dict[Hashable, Choice] = {}
        self._shortcuts = shortcuts.Shortcuts()

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
        return looks.allows_tf32()

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

    def choice(self, a: Arguments, restriction: looks.Restriction) -> Choice:
        choice = self._known(a, restriction)
        if choice is None:
            choice = super().choice(a, restriction)  # which raises where anything is wrong
            if len(self._choices) >= _MOST:
                self._choices.clear()
            self._choices[looks.of_call(a, restriction)] = choice
        return choice

    def _known(self, a: Arguments, restriction: looks.Restriction) -> Choice | None:
        """The choice for prepared arguments of before that looked like these."""
        try:
            return self._choices.get(looks.of_call(a, restriction))
        except looks.MISFITS:
            return None  # checks will say which

    def shortcut(
        self, query: Any, key: Any, value: Any, options: Hashable
    ) -> shortcuts.Shortcut | None:
        return self._shortcuts.find(query, key, value, options, allowed())

    def keep_shortcut(self, options: Hashable, arguments: Arguments) -> None:
        a, restriction = arguments, allowed()  # once, as other threads may change it
        run = self._shortcuts.find(a.query, a.key, a.value, looks.of_numbers(a), restriction)
        if run is not None:
            self._shortcuts.keep(a.query, a.key, a.value, options, run, restriction)

    def attention(self, arguments: Arguments) -> Any:
        a, restriction = arguments, allowed()
        if _is_traced(a.query):
            out, lse = operator.attention(self, self.prepared(a))
            return (out, lse) if a.return_lse else out
        options = None
        if a.bias is a.sinks is a.seed is None and isinstance(a.mask, _MASK):
            options = looks.of_numbers(a)
            run = self._shortcuts.find(a.query, a.key, a.value, options, restriction)
            if run is not None:
                return run(a.query, a.key, a.value)
        if forward_ad._current_level >= 0:
            raise NotImplementedError("limelight has no forward-mode derivative")
        choice = self._known(a, restriction) if a.seed is None else None
        if choice is None:
            if is_functorch_wrapped_tensor(a.query):  # has no address, so it is never known
                raise NotImplementedError(_NO_TRANSFORMS)
            plan = self.planned(self.prepared(a), restriction)
        else:  # what looks like prepared arguments needs no preparing
            plan = self.plan_type(self.call(a, choice.problem), choice)
            run = None if options is None else shortcuts.made(plan)
            if run is not None:
                self._shortcuts.keep(a.query, a.key, a.value, options, run, restriction)
        out, lse = _run(plan)
        out = rounded(out, plan.call.query)
        return (out, lse) if a.return_lse else out


def _run(plan: Plan) -> tuple[Tensor, Tensor | None]:
    """out, and the LSE where there is one, connected to autograd if a gradient is wanted."""
    call, choice = plan
    if not choice.problem.gradients:
        return plan.forward()
    if not KNOWN[choice.backend].native:  # type: ignore[index]
        return eager.attention(plan)
    out, lse = plan.forward()
    native.follower(shortcuts.shell(call), choice)(out)
    return out, lse


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
