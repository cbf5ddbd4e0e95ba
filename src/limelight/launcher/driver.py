"""The CUDA driver, through ctypes: contexts, loading and errors. Opened on first use.

Short calls keep the interpreter's lock (PyDLL), launches among them. Giving it up on each launch
cost 0.3 us with nobody waiting, and 22 us on average beside another Python thread at work (two
cores). The price is that a launch which finds the device's queue of about a thousand full holds
other threads up. Calls that load code or make a context give the lock up (CDLL).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

LIBRARY = "libcuda.so.1"

_MAX_SHARED_MEMORY = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_FUNCTION_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_FUNCTION_WIDE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_STREAM_CAPTURE_IMPLICIT = 906  # asked of the default stream while another is under capture

Pointer = ctypes.c_void_p


class DriverNotFound(RuntimeError):
    """There is no usable CUDA driver."""


class DriverError(RuntimeError):
    """A call of the driver failed. name, code: the CUDA error's. doing: what it was for."""

    def __init__(self, name: str, code: int, meaning: str, doing: str) -> None:
        self.name, self.code, self.doing = name, code, doing
        super().__init__(f"cannot {doing}: {name} ({code}), {meaning}")


class CaptureError(RuntimeError):
    """A kernel was not ready when a graph was captured, and cannot be made ready then."""

    def __init__(self, doing: str) -> None:
        super().__init__(
            f"cannot {doing} while a CUDA graph is captured: make the same call once before, or "
            "hand its arguments to limelight.precompile"
        )


class Driver:
    """The driver's calls that a launch needs. One per process; threads may share it.

    path: the library to open. Raises DriverNotFound where it is not there or older than CUDA 11.8,
    DriverError where it does not start, as without a GPU.
    """

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._quick, self._slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        except OSError as error:
            raise DriverNotFound(
                f"{path} cannot be opened ({error}): limelight's GPU kernels need NVIDIA's driver"
            ) from None
        if not hasattr(self._quick, "cuLaunchKernelEx"):
            raise DriverNotFound(f"{path} is older than CUDA 11.8, the oldest that limelight takes")
        self.launch = self._quick.cuLaunchKernelEx
        self.get_context = self._quick.cuCtxGetCurrent
        self.set_context = self._quick.cuCtxSetCurrent
        self.has_libraries = hasattr(self._quick, "cuLibraryLoadData")  # CUDA 12.0
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._check(self._slow.cuInit(0), "start the CUDA driver")

    def context(self, device: int) -> int:
        """The handle of a device's primary context, the one that every framework shares."""
        with self._lock:
            if device not in self._contexts:
                context, doing = Pointer(), f"make a context on device {device}"
                handle = ctypes.c_int()
                self._check(self._quick.cuDeviceGet(ctypes.byref(handle), device), doing)
                retain = self._slow.cuDevicePrimaryCtxRetain
                self._check(retain(ctypes.byref(context), handle), doing)
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """The device's context made this thread's, and the thread's own put back behind it."""
        wanted, before = self.context(device), Pointer()
        self._check(self.get_context(ctypes.byref(before)), "read the current context")
        self._check(self.set_context(Pointer(wanted)), f"use device {device}")
        try:
            yield
        finally:
            self.set_context(before)

    def refuse_capture(self, device: int, stream: int, doing: str) -> None:
        """Raises CaptureError, which says what it was about to do, if the stream is captured."""
        status = ctypes.c_int()
        with self.current(device):
            code = self._quick.cuStreamIsCapturing(Pointer(stream), ctypes.byref(status))
        if code == _STREAM_CAPTURE_IMPLICIT or status.value:
            raise CaptureError(doing)
        self._check(code, doing)

    def max_shared_memory(self, device: int) -> int:
        """Bytes that one block may use, when it asks for them."""
        limit = ctypes.c_int()
        code = self._quick.cuDeviceGetAttribute(ctypes.byref(limit), _MAX_SHARED_MEMORY, device)
        self._check(code, f"read the shared memory of device {device}")
        return limit.value

    def load_library(self, image: bytes, entry: str) -> Pointer:
        """A kernel for every device. image: a cubin, or PTX with a zero byte behind it."""
        library, kernel, doing = Pointer(), Pointer(), f"load {entry}"
        load = self._slow.cuLibraryLoadData
        self._check(load(ctypes.byref(library), image, None, None, 0, None, None, 0), doing)
        get = self._slow.cuLibraryGetKernel
        self._check(get(ctypes.byref(kernel), library, entry.encode()), doing)
        return kernel

    def kernel_function(self, kernel: Pointer, entry: str) -> Pointer:
        """The kernel's function in the current context."""
        function, get = Pointer(), self._slow.cuKernelGetFunction
        self._check(get(ctypes.byref(function), kernel), f"load {entry}")
        return function

    def module_function(self, image: bytes, entry: str) -> Pointer:
        """The function of an image loaded into the current context: the way before CUDA 12.0."""
        module, function, doing = Pointer(), Pointer(), f"load {entry}"
        self._check(self._slow.cuModuleLoadData(ctypes.byref(module), image), doing)
        get = self._slow.cuModuleGetFunction
        self._check(get(ctypes.byref(function), module, entry.encode()), doing)
        return function

    def finish_loading(self, function: Pointer, entry: str) -> None:
        """Load now what the driver would load on the first launch, perhaps during a capture."""
        if hasattr(self._slow, "cuFuncLoad"):  # CUDA 12.4
            self._check(self._slow.cuFuncLoad(function), f"load {entry}")

    def allow_shared_memory(self, function: Pointer, size: int, entry: str) -> None:
        """Let a function be launched with `size` bytes of shared memory, over 48 KiB."""
        code = self._slow.cuFuncSetAttribute(function, _FUNCTION_SHARED_MEMORY, size)
        self._check(code, f"give {entry} {size} bytes of shared memory")

    def allow_wide_clusters(self, function: Pointer, entry: str) -> None:
        """Let a function be launched in clusters of more than 8 blocks."""
        code = self._slow.cuFuncSetAttribute(function, _FUNCTION_WIDE_CLUSTER, 1)
        self._check(code, f"give {entry} clusters of more than 8 blocks")

    def error(self, code: int, doing: str) -> DriverError:
        """The exception for a result other than 0."""
        return DriverError(
            self._text(self._quick.cuGetErrorName, code) or "an unknown error",
            code,
            self._text(self._quick.cuGetErrorString, code) or "which the driver does not explain",
            doing,
        )

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise self.error(code, doing)

    @staticmethod
    def _text(ask: ctypes._NamedFuncPointer, code: int) -> str:
        text = ctypes.c_char_p()
        ask(code, ctypes.byref(text))
        return (text.value or b"").decode()


@cache
def driver() -> Driver:
    """This machine's."""
    return Driver()
