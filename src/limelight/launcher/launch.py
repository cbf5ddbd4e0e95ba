"""Kernel: a compiled kernel that can be launched, in a few microseconds and from any thread.

All that one launch passes to the driver lies in one buffer, the thread's own: CUDA's launch
configuration, the arguments behind it, and pointers to each of them. A kernel whose arguments are
known but for a few addresses is bound to them once: a launch then writes those addresses and the
stream, and calls the driver.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Sequence

from limelight.launcher import abi
from limelight.launcher.binary import Binary, Scratch, SharedMemoryError
from limelight.launcher.driver import Driver, driver

Allocate = Callable[[int], int]
"""Bytes to the address of as many, on the launch's device, free until the launch's work has run."""

_CONFIG = "7I4xQQI4x"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
_STREAM_WORD = 4  # of 8 bytes, in it
_FREE_SHARED_MEMORY = 48 * 1024  # bytes that need no permission
_PORTABLE_CLUSTER = 8  # blocks that need no permission

_ATTRIBUTE = "I4x3I52x"  # CUlaunchAttribute: its number, its value
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_CLUSTER_POLICY, _SPREAD = 5, 1  # ..._CLUSTER_SCHEDULING_POLICY_PREFERENCE, to different SMs


class _Buffer:
    """What one thread passes to the driver for one kernel."""

    __slots__ = ("arguments", "begins", "config", "context", "context_address", "memory", "words")

    def __init__(self, codes: str) -> None:
        """codes: of the arguments, as the struct module's."""
        size = struct.calcsize("@" + _CONFIG + codes)
        words = ctypes.c_uint64 * -(-size // 8)
        self.memory = ctypes.create_string_buffer(ctypes.sizeof(words))
        self.words = words.from_buffer(self.memory)
        # An argument begins where a struct of all before it and itself ends, less its own size.
        ends = [struct.calcsize("@" + _CONFIG + codes[: n + 1]) for n in range(len(codes))]
        self.begins = [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]
        address = ctypes.addressof(self.memory)
        self.config = ctypes.c_void_p(address)
        self.arguments = (ctypes.c_void_p * len(codes))(*(address + each for each in self.begins))
        self.context = ctypes.c_void_p()  # where the driver writes the thread's current context
        self.context_address = ctypes.c_void_p(ctypes.addressof(self.context))


class Kernel:
    """A binary that can be launched on any of its driver's devices.

    on: the driver, if not this machine's. from_ptx: have the driver assemble the PTX for the device
    that is there, which need not be the binary's target.
    """

    def __init__(self, binary: Binary, on: Driver | None = None, *, from_ptx: bool = False) -> None:
        self.binary = binary
        self._driver = driver() if on is None else on
        self._image = binary.ptx.encode() + b"\0" if from_ptx else binary.cubin
        self._library: ctypes.c_void_p | None = None
        self._functions: dict[int, tuple[ctypes.c_void_p, int]] = {}  # with its context, by device
        self._lock = threading.Lock()
        self._threads = threading.local()
        self._has_scratch = bool(binary.global_scratch.size or binary.profile_scratch.size)
        self._attributes = _cluster_attributes(binary.num_ctas)
        self._codes = abi.struct_format(binary.parameters)[1:]
        self._pack_into = struct.Struct("@" + _CONFIG + self._codes).pack_into
        count = 2 if binary.num_ctas > 1 else 0
        self._fixed = (binary.threads, 1, 1, binary.shared)
        self._attribute_list = (ctypes.addressof(self._attributes) if count else 0, count)

    def __call__(
        self,
        device: int,
        stream: int,
        grid: tuple[int, int, int],
        args: Sequence[int | float],
        allocate: Allocate | None = None,
    ) -> None:
        """Launch. An empty grid launches nothing.

        device: the driver's index; its context need not be current, and is not afterwards if it was
            not before. stream: the handle, 0 the default stream.
        grid: blocks (clusters, where the binary has them). args: the values of
            `binary.parameters`, in that order; addresses as integers, 0 for a null pointer.
        allocate: device memory for a binary that needs scratch.

        Raises TypeError or ValueError, naming the parameter, for an argument that does not fit;
        DriverError; and what `load` raises if the device has not got the kernel yet.
        """
        function, context = self._functions.get(device) or self.load(device, stream)
        try:
            buffer = self._threads.buffer
        except AttributeError:
            buffer = self._threads.buffer = _Buffer(self._codes)
        if 0 in grid:
            return
        scratch = self._allocate(grid, allocate) if self._has_scratch else (0, 0)
        self._pack(buffer, stream, grid, args, scratch)
        self._start(buffer, function, context)

    def bind(
        self,
        grid: tuple[int, int, int],
        args: Sequence[int | float],
        places: Sequence[tuple[int, int, int]] = (),
    ) -> Bound:
        """The kernel with its grid and arguments set.

        places: (argument, n, offset) for each argument that is the n-th of the addresses to come,
            `offset` bytes further on; what args has there does not matter.

        Raises TypeError or ValueError as a launch does.
        """
        return Bound(self, grid, args, places)

    def _pack(
        self,
        buffer: _Buffer,
        stream: int,
        grid: tuple[int, int, int],
        args: Sequence[int | float],
        scratch: tuple[int, int],
    ) -> None:
        x, y, z = grid
        x *= self.binary.num_ctas
        try:
            self._pack_into(
                buffer.memory,
                0,
                *(x, y, z),
                *self._fixed,
                stream,
                *self._attribute_list,
                *args,
                *scratch,
            )
        except (struct.error, TypeError, OverflowError):
            raise self._explain(grid, stream, args) from None

    def _start(self, buffer: _Buffer, function: ctypes.c_void_p, context: int) -> None:
        run, current = self._driver, buffer.context
        failed = run.get_context(buffer.context_address)
        if failed == 0 and current.value == context:
            failed = run.launch(buffer.config, function, buffer.arguments, None)
        elif failed == 0:
            # The thread's own is put back: it decides what a framework takes for its device.
            failed = run.set_context(ctypes.c_void_p(context)) or run.launch(
                buffer.config, function, buffer.arguments, None
            )
            run.set_context(current)
        if failed:
            grid = struct.unpack_from("3I", buffer.memory)
            raise run.error(failed, f"launch {self.binary.entry} with grid {grid}")

    def load(self, device: int, stream: int = 0) -> tuple[ctypes.c_void_p, int]:
        """Make the kernel ready on a device: its function there and the device's context.

        stream: the one whose capture forbids it. Does nothing if the kernel is ready.

        Raises CaptureError, SharedMemoryError if the device has too little, and DriverError.
        """
        with self._lock:
            if device not in self._functions:
                self._driver.refuse_capture(device, stream, f"load {self.binary.entry}")
                self._check_shared_memory(device)
                with self._driver.current(device):
                    function = self._load_function()
                self._functions[device] = function, self._driver.context(device)
            return self._functions[device]

    def _load_function(self) -> ctypes.c_void_p:
        """The function in the current context, with the permissions that a launch needs."""
        run, entry = self._driver, self.binary.entry
        if run.has_libraries:
            if self._library is None:
                self._library = run.load_library(self._image, entry)
            function = run.kernel_function(self._library, entry)
        else:
            function = run.module_function(self._image, entry)
        if self.binary.shared > _FREE_SHARED_MEMORY:
            run.allow_shared_memory(function, self.binary.shared, entry)
        if self.binary.num_ctas > _PORTABLE_CLUSTER:
            run.allow_wide_clusters(function, entry)
        run.finish_loading(function, entry)
        return function

    def _check_shared_memory(self, device: int) -> None:
        if self.binary.shared > _FREE_SHARED_MEMORY:
            limit = self._driver.max_shared_memory(device)
            if self.binary.shared > limit:
                raise SharedMemoryError(
                    self.binary.entry, self.binary.shared, limit, f"device {device}"
                )

    def _allocate(self, grid: tuple[int, int, int], allocate: Allocate | None) -> tuple[int, int]:
        """Addresses of the grid's global and profile scratch."""
        if allocate is None:
            raise TypeError(f"{self.binary.entry} needs scratch memory: found allocate=None")
        blocks = math.prod(grid) * self.binary.num_ctas
        return (
            self._scratch(self.binary.global_scratch, blocks, allocate),
            self._scratch(self.binary.profile_scratch, blocks, allocate),
        )

    def _scratch(self, scratch: Scratch, blocks: int, allocate: Allocate) -> int:
        if not scratch.size:
            return 0
        address = allocate(scratch.size * blocks)
        if address % scratch.align:
            raise ValueError(
                f"allocate: found address {address:#x}, "
                f"{self.binary.entry} needs a multiple of {scratch.align}"
            )
        return address

    def _explain(self, grid: object, stream: object, args: Sequence[object]) -> Exception:
        """Why packing failed."""
        entry, parameters = self.binary.entry, self.binary.parameters
        if len(args) != len(parameters):
            names = ", ".join(each.name for each in parameters)
            return TypeError(
                f"{entry}: found {len(args)} arguments, needed {len(parameters)}: {names}"
            )
        for parameter, value in zip(parameters, args, strict=True):
            try:
                struct.pack(parameter.code, value)
            except (struct.error, TypeError, OverflowError) as error:
                return _misfit(f"{entry}: {parameter.describe()}: found {value!r}, {error}", value)
        return _misfit(f"{entry}: found grid {grid!r} and stream {stream!r}, needed integers", grid)


class Bound:
    """A kernel with its grid and arguments set, but for some addresses. Made by `Kernel.bind`."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        args: Sequence[int | float],
        places: Sequence[tuple[int, int, int]],
    ) -> None:
        self._kernel, self._grid, self._args = kernel, grid, args
        self._threads = threading.local()
        first = self._new_buffer()
        # Addresses and scratch are words of 8 bytes, and lie as such.
        self._places = tuple((first.begins[place] // 8, n, offset) for place, n, offset in places)
        self._scratch = tuple(begin // 8 for begin in first.begins[-2:])

    def __call__(
        self,
        device: int,
        stream: int,
        addresses: Sequence[int] = (),
        allocate: Allocate | None = None,
    ) -> None:
        """Launch, with these addresses in their places; the rest as for the kernel itself."""
        kernel = self._kernel
        function, context = kernel._functions.get(device) or kernel.load(device, stream)
        if 0 in self._grid:
            return
        try:
            buffer = self._threads.buffer
        except AttributeError:
            buffer = self._threads.buffer = self._new_buffer()
        words = buffer.words
        words[_STREAM_WORD] = stream
        for word, n, offset in self._places:
            words[word] = addresses[n] + offset
        if kernel._has_scratch:
            for word, address in zip(
                self._scratch, kernel._allocate(self._grid, allocate), strict=True
            ):
                words[word] = address
        kernel._start(buffer, function, context)

    def _new_buffer(self) -> _Buffer:
        buffer = _Buffer(self._kernel._codes)
        self._kernel._pack(buffer, 0, self._grid, self._args, (0, 0))
        return buffer


def _misfit(message: str, value: object) -> Exception:
    return ValueError(message) if isinstance(value, (int, float, tuple)) else TypeError(message)


def _cluster_attributes(blocks: int) -> ctypes.Array[ctypes.c_char]:
    """Two launch attributes: clusters of so many blocks along x, spread over the SMs."""
    size = struct.pack("@" + _ATTRIBUTE, _CLUSTER_DIMENSION, blocks, 1, 1)
    policy = struct.pack("@" + _ATTRIBUTE, _CLUSTER_POLICY, _SPREAD, 0, 0)
    return ctypes.create_string_buffer(size + policy)
