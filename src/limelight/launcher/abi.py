"""What a compiled kernel really takes, read from its PTX and its machine code.

The launcher packs arguments by the signature that it was compiled from. A difference would be
silent: wrong numbers, not an error. So each compiled kernel is checked against both.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from limelight.launcher.signature import Parameter

SCRATCH_POINTERS = 2  # after the arguments: global scratch, profile scratch

_PTX_TYPES = {"Q": "u64", "q": "u64", "i": "u32", "I": "u32", "f": "f32", "d": "f64"}
_SYMBOL_TABLE = 2  # ELF section type
_SIZED = 4  # attribute format: the size in bytes, then the value; others are four bytes in all
_KPARAM_INFO, _REGCOUNT, _FRAME_SIZE = 0x17, 0x2F, 0x11


class AbiError(RuntimeError):
    """A compiled kernel does not take what its signature says."""


@dataclass(frozen=True)
class Entry:
    """A kernel's head in PTX. types: of its parameters, such as u64 or f32. threads: of a block."""

    name: str
    types: tuple[str, ...]
    threads: int

    @classmethod
    def read(cls, ptx: str) -> Entry:
        head = re.search(r"\.entry\s+(\w+)\((.*?)\)(.*?)\{", ptx, re.DOTALL)
        if head is None:
            raise AbiError("the PTX holds no kernel")
        types = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", head[2])
        threads = re.search(r"\.reqntid\s+(\d+)", head[3])
        if threads is None:
            raise AbiError(f"the PTX of {head[1]} does not fix the size of a block")
        return cls(head[1], tuple(types), int(threads[1]))


@dataclass(frozen=True)
class Resources:
    """What the machine code tells of a kernel.

    registers: of a thread. stack: bytes of local memory of a thread.
    layout: offset and size in bytes of each parameter.
    """

    registers: int
    stack: int
    layout: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, cubin: bytes, entry: str) -> Resources:
        """Read from the `.nv.info` sections of the ELF file."""
        sections = dict(_sections(cubin))
        symbol = _symbol(sections, entry)
        registers = stack = 0
        for attribute, value in _attributes(sections[".nv.info"][1]):
            if attribute not in (_REGCOUNT, _FRAME_SIZE):
                continue
            owner, number = struct.unpack_from("<II", value)
            if owner == symbol and attribute == _REGCOUNT:
                registers = number
            elif owner == symbol:
                stack = number
        layout = {}
        for attribute, value in _attributes(sections[f".nv.info.{entry}"][1]):
            if attribute == _KPARAM_INFO:
                _, ordinal, offset, bits = struct.unpack("<IHHI", value)
                layout[ordinal] = (offset, bits >> 18)
        return cls(registers, stack, tuple(layout[ordinal] for ordinal in sorted(layout)))


def reordered(ptx: str, order: Sequence[int]) -> str:
    """PTX whose kernel takes its parameters in another order: the body knows them by their names.

    order: the parameter that comes first, the one that comes second, and so on.
    """
    head = re.search(r"(\.entry\s+\w+\()(.*?)(\n\))", ptx, re.DOTALL)
    if head is None:
        raise AbiError("the PTX holds no kernel")
    parameters = head[2].split(",")
    if sorted(order) != list(range(len(parameters))):
        raise AbiError(f"found the order {order} for {len(parameters)} parameters")
    moved = ",".join([parameters[index] for index in order])
    return f"{ptx[: head.start(2)]}{moved}{ptx[head.end(2) :]}"


def struct_format(parameters: Sequence[Parameter]) -> str:
    """How the parameters and the two scratch pointers lie in memory, for `struct`."""
    return "@" + "".join(each.code for each in parameters) + "Q" * SCRATCH_POINTERS


def check(parameters: Sequence[Parameter], entry: Entry, resources: Resources) -> None:
    """Raises AbiError unless PTX and machine code take exactly these parameters."""
    codes = struct_format(parameters)[1:]
    wanted = tuple(_PTX_TYPES[code] for code in codes)
    if entry.types != wanted:
        raise AbiError(f"{entry.name}: the PTX takes {entry.types}, the signature says {wanted}")
    layout, offset = [], 0
    for code in codes:
        size = struct.calcsize(code)
        offset = -(-offset // size) * size
        layout.append((offset, size))
        offset += size
    if resources.layout != tuple(layout):
        raise AbiError(
            f"{entry.name}: the machine code lays its parameters out as {resources.layout} "
            f"(offset, size), the signature as {tuple(layout)}"
        )


def _sections(elf: bytes) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """Name, and type and contents, of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    width, count, names_index = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + width * n) for n in range(count)]
    names_start = heads[names_index][4]
    for name, kind, _, _, start, size in heads:
        begin = names_start + name
        text = elf[begin : elf.index(b"\0", begin)].decode()
        yield text, (kind, elf[start : start + size])


def _symbol(sections: dict[str, tuple[int, bytes]], name: str) -> int:
    """The index of a named symbol."""
    (symbols,) = (data for kind, data in sections.values() if kind == _SYMBOL_TABLE)
    names = sections[".strtab"][1]
    for index in range(len(symbols) // 24):
        (start,) = struct.unpack_from("<I", symbols, 24 * index)
        if names[start : names.index(b"\0", start)].decode() == name:
            return index
    raise AbiError(f"the machine code holds no kernel {name}")


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each attribute of an `.nv.info` section."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        length = size if form == _SIZED else 0
        yield attribute, info[at : at + length]
        at += length
