"""Two masks on the device that differ in their fragment alone, for the test of the cache's key.

Run as a program: prints the digests under which a forward with each is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import compiling

from limelight._jit import jit, tl
from limelight.kernels.program import recipe
from limelight.masks.base import Mask, all_keys, all_queries


class _OnDevice(NamedTuple):
    fragment: Any
    key_range: Any
    query_range: Any


@jit
def _before(scores, at, own):
    return tl.where(at.k_pos <= at.q_pos, scores, float("-inf"))


@jit
def _after(scores, at, own):
    return tl.where(at.k_pos < at.q_pos, scores, float("-inf"))


class Before(Mask):
    def on_device(self) -> NamedTuple:
        return _OnDevice(_before, all_keys, all_queries)


class After(Mask):
    def on_device(self) -> NamedTuple:
        return _OnDevice(_after, all_keys, all_queries)


if __name__ == "__main__":
    for mask in (Before(), After(), Before()):
        call = replace(compiling.problem("float16", 64), mask=mask)
        print(recipe(compiling.launches(call, 80)[0], (8, 0)).digest())
