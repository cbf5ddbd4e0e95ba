"""Recipe: all that decides the machine code of a kernel, and the digest that names the result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from limelight._version import __version__
from limelight.launcher.signature import Signature

_UNSUPPORTED_OPTIONS = ("launch_cooperative_grid", "launch_pdl")  # the launcher does not pass them


@dataclass(frozen=True, eq=False, kw_only=True)
class Recipe:
    """A kernel to compile for a target.

    function: `@triton.jit` or `@gluon.jit`. signature: of all its parameters, see `signature.py`.
    target: compute capability, (major, minor). num_warps, num_stages: as Triton's.
    options: Triton's further ones, such as maxnreg, num_ctas or ptx_version.
    """

    function: Any
    signature: Mapping[str, Any]
    target: tuple[int, int]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    def read_signature(self) -> Signature:
        """Raises ValueError where the signature does not fit the function."""
        return Signature.read(self.function.arg_names, self.signature)

    def all_options(self) -> dict[str, Any]:
        """The options as Triton takes them.

        Raises ValueError for one that Triton would ignore, or that the launcher would.
        """
        from triton.backends.nvidia.compiler import CUDAOptions

        known = {option.name for option in fields(CUDAOptions)}
        for name, value in self.options.items():
            if name not in known or name in ("num_warps", "num_stages"):
                raise ValueError(f"options: found {name!r}, which is not an option of Triton's")
            if name in _UNSUPPORTED_OPTIONS and value:
                raise ValueError(f"options: found {name}=True, which the launcher does not support")
        own = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Triton 3.9 warns where this is left to a default, as 3.10 will have the other one.
        return {"enable_fp_fusion": True, **self.options, **own}

    def source(self) -> Any:
        """The kernel as Triton's compiler takes it, under our digest.

        Triton keys its own disk cache by the source's hash, in which a tuple of constants counts by
        its text: an edited function inside one would give a stale kernel.
        """
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        signature = self.read_signature()
        kind = GluonASTSource if self.function.is_gluon() else ASTSource
        source = kind(self.function, signature.types, signature.constants, signature.hints)
        constants = [(path, _content(value)) for path, value in sorted(signature.constants.items())]
        digest = _sha256(source.hash(), constants)
        source.hash = lambda: digest
        return source

    def digest(self) -> str:
        """64 hexadecimal digits that change with anything that could change the machine code.

        That is the source of the function, of all it calls and of every function among the
        constants, the signature, target, options, and the versions of Triton and limelight.
        """
        import triton

        return _sha256(
            self.source().hash(),
            self.target,
            sorted(self.all_options().items()),
            triton.__version__,
            __version__,
        )


def _content(value: Any) -> Any:
    """A constant by what it says, not by its name: a function counts by its source."""
    if hasattr(value, "cache_key"):
        return value.cache_key
    if isinstance(value, (tuple, list)):
        return type(value).__qualname__, [_content(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: _content(getattr(value, each.name)) for each in fields(value)}
        return type(value).__qualname__, parts
    return type(value).__qualname__, str(value)


def _sha256(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
