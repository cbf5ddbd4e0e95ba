"""How calls are cut on Hopper, by head_dim and by what happens to the scores: data."""

from __future__ import annotations

from dataclasses import dataclass

from limelight.kernels.configs import Config as Tiled


def _max_registers(consumers: int) -> int:
    """Of a thread at the start, before the consumers take over what the producer gives up."""
    of_a_multiprocessor = 65536
    return of_a_multiprocessor // (128 * (consumers + 1)) // 8 * 8


@dataclass(frozen=True)
class Config:
    """rows, keys: queries and keys of a tile. consumers: each has 64 of the rows.

    stages: tiles of keys, and of values, in shared memory. turns: whether the consumers take turns
    at the tensor cores. source: where the line comes from.
    """

    rows: int
    keys: int
    stages: int
    consumers: int
    turns: bool
    source: str = "the fastest of two or three on an H200"

    @property
    def max_registers(self) -> int:
        return _max_registers(self.consumers)


@dataclass(frozen=True)
class BackwardConfig:
    """rows, keys: queries and keys of a tile, of which two consumers have half of the keys each.

    stages: tiles of queries, with what belongs to them, in shared memory.
    """

    rows: int
    keys: int
    stages: int
    source: str = "measured on an H200, beside no other"

    @property
    def max_registers(self) -> int:
        return _max_registers(consumers=2)


ENDS = Tiled(64, 1, 4, 1)  # of the kernels before and after

_BACKWARD = {64: BackwardConfig(128, 128, 2), 128: BackwardConfig(64, 128, 3)}
# A bias or a softcap would have the wide tiles spill 500 bytes a thread, not 30 to 100.
_SHAPED_BACKWARD = {**_BACKWARD, 64: BackwardConfig(64, 128, 4, "compiled, not measured")}


def backward(dim: int, plain: bool) -> BackwardConfig:
    """dim: the larger of head_dim and value_dim, at most 128. plain: as for the forward."""
    table = _BACKWARD if plain else _SHAPED_BACKWARD
    return table[min(served for served in table if served >= dim)]


_FORWARD = {
    64: Config(192, 128, 3, 3, False),
    128: Config(128, 128, 2, 2, True),
    256: Config(128, 64, 2, 2, True),
}
# A bias or a softcap takes registers, of which two consumers have more than three.
_SHAPED = {**_FORWARD, 64: Config(128, 128, 4, 2, True, "compiled, not measured")}


def forward(dim: int, plain: bool) -> Config:
    """dim: the larger of head_dim and value_dim. plain: there is no bias and no softcap."""
    table = _FORWARD if plain else _SHAPED
    return table[min(served for served in table if served >= dim)]
