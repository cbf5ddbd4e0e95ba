"""The fused kernels on tensors that have addresses: allocates, and runs programs made once per
problem."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from limelight.call import Call, Gradients
from limelight.kernels import fused, plan
from limelight.kernels.fused import Planned, Work
from limelight.kernels.launch import Array
from limelight.kernels.program import Program, recipe
from limelight.launcher import default_cache

_PROGRAMS = 4096


class Memory:
    """One library's tensors, as the kernels need them."""

    def dtype(self, name: str) -> Any:
        """The library's own."""
        raise NotImplementedError

    def empty(self, like: Any, shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
        """Memory on the device of `like`. Strides count elements. dtype: the library's own."""
        raise NotImplementedError

    def empty_like(self, tensor: Any) -> Any:
        raise NotImplementedError

    def zeros_like(self, tensor: Any) -> Any:
        raise NotImplementedError

    def address(self, tensor: Any) -> int:
        raise NotImplementedError

    def strides(self, tensor: Any) -> tuple[int, ...]:
        """In elements."""
        raise NotImplementedError

    def dtype_name(self, tensor: Any) -> str:
        raise NotImplementedError

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """The tensor itself where it has the dtype."""
        raise NotImplementedError

    def contiguous(self, tensor: Any) -> Any:
        """The tensor itself where it is."""
        raise NotImplementedError

    def device(self, tensor: Any) -> int:
        """The driver's index."""
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """The handle of the caller's current one."""
        raise NotImplementedError

    def loads_on(self, call: Call) -> int | None:
        """The index of the GPU on which what is compiled for a call is to be loaded, if any."""
        raise NotImplementedError


class _Made(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


class Prepared(NamedTuple):
    """What stays from one call to the next of the same problem. made: the tensors to allocate."""

    program: Program
    made: tuple[_Made, ...]


class Runner:
    """The kernels on the tensors of one library."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()

    def forward(self, call: Call, planned: Planned = plan.forward) -> tuple[Any, Any]:
        """out [B, H, M, E], laid out as (B, M, H, E), and the LSE [B, H, M], float32, if wanted.

        planned: which kernel, by its plan.
        """
        prepared = self.prepared_forward(call, planned)
        made = self._allocated(prepared.made, call.query)
        self._run(prepared.program, [*call.tensors(), *made])
        return made[0], made[1] if fused.wants_lse(call) else None

    def prepared_forward(self, call: Call, planned: Planned) -> Prepared:
        key = (planned, *_key(call))
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._keep(key, call, self._forward_work(call, planned))
        return prepared

    def backward(
        self,
        call: Call,
        out: Any,
        lse: Any,
        d_out: Any,
        d_lse: Any,
        wanted: Gradients,
        planned: Any = plan,
    ) -> Gradients:
        """The wanted gradients, each in its input's dtype. planned: the module that plans them."""
        memory = self.memory
        out = self._unit(memory.cast(out, call.query.dtype))
        d_out = memory.zeros_like(out) if d_out is None else self._unit(d_out)
        given = [out, memory.contiguous(lse), d_out]
        if d_lse is not None:
            given.append(memory.contiguous(memory.cast(d_lse, memory.dtype("float32"))))
        filled = self._to_fill(call, wanted)

        layouts = (*map(memory.strides, (out, d_out)), memory.address(d_out) & 15, d_lse is None)
        key = (planned.__name__, (*wanted[:4], *wanted.bias), layouts, *_key(call))
        prepared = self._prepared.get(key)
        if prepared is None:
            work = self._backward_work(call, given, filled, wanted, planned)
            prepared = self._keep(key, call, work)
        scratch = self._allocated(prepared.made, call.query)
        self._run(prepared.program, [*call.tensors(), *given, *filled, *scratch])
        return fused.spread(filled, wanted)

    def precompile(
        self, call: Call, planned: Planned = plan.forward, backward_planned: Any = plan
    ) -> None:
        """Compiles what the forward needs, and the gradients that the problem names.

        Loads it too where the library has the problem's device. planned, backward_planned: as the
        forward and the backward take them.
        """
        launches, made = self._forward_work(call, planned)
        names = call.problem.gradients
        if names:
            out, lse = self._allocated([self._made(each) for each in made[:2]], call.query)
            wanted = Gradients.named(names, call.bias)
            filled = self._to_fill(call, wanted)
            # Where the caller gets the LSE, a gradient of it may arrive or not.
            for d_lse in ([], [lse]) if call.problem.return_lse else ([],):
                given = [out, lse, out, *d_lse]
                work = self._backward_work(call, given, filled, wanted, backward_planned)
                launches += work.launches
        device = self.memory.loads_on(call)
        for launch in launches:
            kernel = recipe(launch, fused.target(call))
            if device is None:
                default_cache().binary(kernel)
            else:
                stream = self.memory.stream(device)
                default_cache().kernel(kernel, device=device, stream=stream)

    def _run(self, program: Program, tensors: Sequence[Any]) -> None:
        memory = self.memory
        device = memory.device(tensors[0])
        addresses = [memory.address(tensor) for tensor in tensors]
        program.run(addresses, device, memory.stream(device), self.allocate(tensors[0]))

    def allocate(self, like: Any) -> Any:
        """Memory for a launch on the current stream, which the allocator may reuse behind it."""
        memory = self.memory
        return lambda size: memory.address(memory.empty(like, (size,), (1,), memory.dtype("uint8")))

    def _allocated(self, made: Sequence[_Made], like: Any) -> list[Any]:
        return [self.memory.empty(like, *each) for each in made]

    def _forward_work(self, call: Call, planned: Planned) -> Work:
        return fused.forward(call.with_tensors(self._arrays(call.tensors())), planned)

    def _backward_work(
        self,
        call: Call,
        given: Sequence[Any],
        filled: Sequence[Any],
        wanted: Gradients,
        planned: Any,
    ) -> Work:
        arrays = self._arrays([*call.tensors(), *given, *filled])
        own = len(arrays) - len(given) - len(filled)
        gradients = fused.spread(arrays[own + len(given) :], wanted)
        arrived = arrays[own : own + len(given)]
        return fused.backward(call.with_tensors(arrays), arrived, gradients, planned)

    def _to_fill(self, call: Call, wanted: Gradients) -> list[Any]:
        return [self.memory.empty_like(tensor) for tensor in fused.inputs(call, wanted)]

    def _keep(self, key: Hashable, call: Call, work: Work) -> Prepared:
        memory, device = self.memory, self.memory.device(call.query)
        program = Program(work.launches, fused.target(call), device, memory.stream(device))
        prepared = Prepared(program, tuple(map(self._made, work.made)))
        if len(self._prepared) >= _PROGRAMS:
            self._prepared.popitem(last=False)
        self._prepared[key] = prepared
        return prepared

    def _made(self, array: Array) -> _Made:
        return _Made(array.shape, array.strides, self.memory.dtype(array.dtype))

    def _arrays(self, tensors: Sequence[Any]) -> list[Array]:
        memory = self.memory
        return [
            fused.array(
                slot,
                tuple(tensor.shape),
                memory.strides(tensor),
                memory.dtype_name(tensor),
                memory.address(tensor),
            )
            for slot, tensor in enumerate(tensors)
        ]

    def _unit(self, tensor: Any) -> Any:
        return tensor if self.memory.strides(tensor)[-1] == 1 else self.memory.contiguous(tensor)


def _key(call: Call) -> tuple[Hashable, ...]:
    """What a program depends on beside the problem: the numbers that it holds."""
    start = call.query_start if isinstance(call.query_start, int) else None
    seed = call.seed if isinstance(call.seed, int) else None
    return call.problem, start, seed
