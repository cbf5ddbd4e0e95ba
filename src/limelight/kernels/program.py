"""A program: launches that were planned and compiled once, and run again with other tensors.

Planning a call costs a millisecond of Python; filling in addresses costs microseconds. So the plan
is made for tensors without memory: an address is a `Slot`, which names a tensor to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from limelight.kernels.launch import Array, Launch, Scalar
from limelight.launcher import Allocate, Bound, Constant, Recipe, default_cache


class Slot(NamedTuple):
    """The address of a tensor that is not known yet, and bytes beyond it."""

    tensor: int
    offset: int = 0

    def __add__(self, offset: int) -> Slot:  # type: ignore[override]
        return Slot(self.tensor, self.offset + offset)


class Program:
    """Compiled launches. `run` fills in the addresses of the tensors that the slots named."""

    def __init__(
        self, launches: Sequence[Launch], target: tuple[int, int], device: int, stream: int
    ) -> None:
        self._launches = tuple(_bound(launch, target, device, stream) for launch in launches)

    def run(
        self,
        addresses: Sequence[int],
        device: int,
        stream: int,
        allocate: Allocate | None = None,
    ) -> None:
        """allocate: memory for kernels that need scratch, see `Kernel`."""
        for launch in self._launches:
            launch(device, stream, addresses, allocate)


def _bound(launch: Launch, target: tuple[int, int], device: int, stream: int) -> Bound:
    kernel = default_cache().kernel(recipe(launch, target), device=device, stream=stream)
    values = [value for _, value in launch.values()]
    return kernel.bind(
        grid=(launch.grid, 1, 1),
        args=[0 if isinstance(value, Slot) else value for value in values],
        places=[
            (position, value.tensor, value.offset)
            for position, value in enumerate(values)
            if isinstance(value, Slot)
        ],
    )


def recipe(launch: Launch, target: tuple[int, int]) -> Recipe:
    """The launch as the compiler takes it. target: compute capability, (major, minor)."""
    signature = {name: _typed(argument) for name, argument in launch.arguments.items()}
    return Recipe(
        function=launch.kernel,
        signature={**signature, **launch.constants},
        target=target,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        options={} if launch.max_registers is None else {"maxnreg": launch.max_registers},
    )


def _typed(node: Any) -> Any:
    """A tree of arguments as a signature: types at run-time leaves, constants at the others."""
    if isinstance(node, (Array, Scalar)):
        return f"{node.type}:{node.divisor}" if node.divisor > 1 else node.type
    if isinstance(node, tuple):
        children = [_typed(child) for child in node]
        return type(node)(*children) if hasattr(node, "_fields") else tuple(children)
    return Constant(node)
