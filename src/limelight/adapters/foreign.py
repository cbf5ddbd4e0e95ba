"""Lists, numbers and arrays of other libraries, on their way into one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from limelight.errors import invalid_type

if TYPE_CHECKING:
    import numpy as np


def numbers_of(value: Any, name: str, *, wide: bool) -> np.ndarray:
    """The value as a NumPy array. wide: float64 stays; else it becomes float32.

    Raises TypeError, with the name of the argument, for what is no numbers or booleans.
    """
    import numpy as np

    found = np.asarray(value)
    if found.dtype.kind not in "biuf":
        raise invalid_type(name, found=f"{value!r}", needed="numbers or booleans")
    return found if wide or found.dtype != np.float64 else found.astype(np.float32)
