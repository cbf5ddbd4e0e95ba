"""How the forward on Hopper is cut, by head_dim and by what happens to the scores: data."""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536  # of a multiprocessor


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
        """Of a thread at the start, before the consumers take over what the producer gives up."""
        return _REGISTERS // (128 * (self.consumers + 1)) // 8 * 8


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
