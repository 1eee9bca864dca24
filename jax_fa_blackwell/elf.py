"""Reads what a cubin says about its kernels: parameter table, registers, local memory.

A cubin is an ELF64 file. ``.nv.info`` holds attributes of all its functions and ``.nv.info.<kernel>`` those of one, as
records of a format byte, an attribute byte and 16 bits that are the value, or for format 4 the payload's size. The
numbers below can be seen in the output of ``cuobjdump -elf``, which the tests compare with.
"""

from __future__ import annotations

import dataclasses
import re
import struct

_PAYLOAD = 4
_PARAM_CBANK = 0x0A
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_KPARAM_INFO = 0x17
_REGCOUNT = 0x2F


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """One kernel of a cubin.

    Attributes:
      symbol: entry point.
      parameters: (offset, size) in bytes of each parameter in order.
      parameter_base: where the parameters begin in the constant bank, in bytes.
      registers: 32-bit registers of a thread.
      local_bytes: stack and spills of a thread.
      shared_bytes: static shared memory of a block.
      block: threads of a block in x, y, z, where the kernel requires one size, else None.
    """

    symbol: str
    parameters: tuple[tuple[int, int], ...]
    parameter_base: int
    registers: int
    local_bytes: int
    shared_bytes: int
    block: tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class CubinInfo:
    """A cubin's kernels, the architecture it was compiled for, and the CUDA version of the assembler that made it."""

    kernels: tuple[KernelInfo, ...]
    arch: str
    cuda: str


@dataclasses.dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    size: int
    info: int


def read(cubin: bytes) -> CubinInfo:
    """Reads a cubin; ValueError says why the bytes are not one."""
    try:
        sections = _sections(cubin)
        symbols = _symbol_names(sections)
        common = {}
        for attribute, payload in _attributes(sections.get(".nv.info")):
            if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
                symbol, value = struct.unpack("<II", payload)
                common[attribute, symbols[symbol]] = value
        kernels = tuple(
            _kernel(name.removeprefix(".text."), sections, common) for name in sections if name.startswith(".text.")
        )
    except (struct.error, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a cubin, or a damaged one: {error!r}") from error
    return CubinInfo(kernels, *_target(cubin, sections))


def _target(cubin: bytes, sections: dict[str, _Section]) -> tuple[str, str]:
    """Architecture and CUDA version: in the header up to ABI 7, in the assembler's note from ABI 8 on."""
    abi = cubin[8]
    if abi <= 7:
        (version,) = struct.unpack_from("<I", cubin, 0x14)
        (flags,) = struct.unpack_from("<I", cubin, 0x30)
        return f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}", f"{version // 10}.{version % 10}"
    note = sections[".note.nv.tkinfo"].data
    arch, release = re.search(rb"-arch (sm_\w+)", note), re.search(rb"release (\d+\.\d+)", note)
    if arch is None or release is None:
        raise ValueError(f"not a cubin, or a damaged one: its note names no architecture or release: {note!r}")
    return arch[1].decode(), release[1].decode()


def _sections(cubin: bytes) -> dict[str, _Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no 64-bit ELF header")
    programs, table = struct.unpack_from("<QQ", cubin, 0x20)
    program_size, program_count, entry_size, count, names_index = struct.unpack_from("<HHHHH", cubin, 0x36)
    if programs + program_size * program_count > len(cubin):
        raise ValueError(f"damaged cubin: its program headers end after the file's {len(cubin)} bytes")
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_size) for i in range(count)]
    names_at, names_size = headers[names_index][4:6]
    names = cubin[names_at : names_at + names_size]
    sections = {}
    for name_at, kind, _, _, offset, size, _, info, _, _ in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        no_bits = kind == 8
        data = b"" if no_bits else cubin[offset : offset + size]
        if not no_bits and len(data) != size:
            raise ValueError(f"damaged cubin: section {name!r} ends after the file's {len(cubin)} bytes")
        sections[name] = _Section(name, kind, data, size, info)
    return sections


def _symbol_names(sections: dict[str, _Section]) -> list[str]:
    table, names = sections[".symtab"].data, sections[".strtab"].data
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [names[at : names.index(b"\0", at)].decode() for at in starts]


def _attributes(section: _Section | None):
    """Yields (attribute, payload); a value that fits the record is its two bytes."""
    data = section.data if section else b""
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _PAYLOAD:
            if at + value > len(data):
                raise ValueError(f"damaged cubin: attribute {attribute:#x} ends after its section")
            yield attribute, data[at : at + value]
            at += value
        else:
            yield attribute, struct.pack("<H", value)


def _kernel(symbol: str, sections: dict[str, _Section], common: dict[tuple[int, str], int]) -> KernelInfo:
    parameters, base, block = {}, 0, None
    for attribute, payload in _attributes(sections.get(f".nv.info.{symbol}")):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", payload)
            parameters[ordinal] = (offset, flags >> 18)
        elif attribute == _PARAM_CBANK:
            base = struct.unpack("<IHH", payload)[1]
        elif attribute == _REQUIRED_THREADS:
            block = struct.unpack("<III", payload)
    local, shared = sections.get(f".nv.local.{symbol}"), sections.get(f".nv.shared.{symbol}")
    return KernelInfo(
        symbol=symbol,
        parameters=tuple(parameters[ordinal] for ordinal in range(len(parameters))),
        parameter_base=base,
        registers=common[_REGCOUNT, symbol],
        local_bytes=max(
            common.get((_FRAME_SIZE, symbol), 0),
            common.get((_MIN_STACK_SIZE, symbol), 0),
            local.size if local else 0,
        ),
        shared_bytes=shared.size if shared else 0,
        block=block,
    )
