"""The C++ matrix-multiply library (native/mma_capi.cc) for tests, without the machine around it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from emulator.library import library

ELEMENTS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8")
ACCUMULATORS = ("f16", "f32", "s32")
KINDS = ("f16", "tf32", "f8f6f4", "i8")
CONTAINER_BITS = {"tf32": 32, "f16": 16, "bf16": 16}  # 8 for the others


class RefusedError(Exception):
    """The library threw a verdict: "fault: message"."""


def container_dtype(element: str):
    return {32: np.uint32, 16: np.uint16, 8: np.uint8}[CONTAINER_BITS.get(element, 8)]


def _call(name: str, *arguments):
    error = ctypes.create_string_buffer(1024)
    if getattr(library(), name)(*arguments, error, ctypes.c_size_t(len(error))):
        raise RefusedError(error.value.decode())


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def multiply(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    a_type: str,
    b_type: str,
    d_type: str = "f32",
    *,
    negate_a: bool = False,
    negate_b: bool = False,
    scale_c: int = 0,
    saturate: bool = False,
    portable: bool = False,
    inner_a: bool = False,
    window: int = 25,
    fraction_bits: int = 23,
) -> np.ndarray:
    """D = A·Bᵀ + C for A [M, K], B [N, K] raw containers, C [M, N] words; uint32 words."""
    a = np.ascontiguousarray(a, container_dtype(a_type))
    b = np.ascontiguousarray(b, container_dtype(b_type))
    (m, k), (n, _) = a.shape, b.shape
    d = np.zeros((m, n), np.uint32) if c is None else np.ascontiguousarray(c, np.uint32).copy()
    types = ELEMENTS.index(a_type), ELEMENTS.index(b_type), ACCUMULATORS.index(d_type)
    flags = int(negate_a), int(negate_b), int(c is not None), scale_c, int(saturate), int(portable), int(inner_a)
    precision = window, fraction_bits
    _call("emu_mma_multiply", *types, m, n, k, _pointer(a), _pointer(b), _pointer(d), *flags, *precision)
    return d


def gather(descriptor: int, element: str, *, mn_major: bool, rows: int, shared: np.ndarray) -> np.ndarray:
    """The operand's containers [rows, K], read from the bytes `shared` through a descriptor."""
    packed = np.zeros((rows, 32), np.uint8)
    _call(
        "emu_mma_gather",
        ctypes.c_uint64(descriptor),
        ELEMENTS.index(element),
        int(mn_major),
        rows,
        _pointer(shared),
        ctypes.c_uint32(shared.size),
        _pointer(packed),
    )
    return packed.view(container_dtype(element))


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction descriptor."""

    a: str
    b: str
    d: str
    saturate: bool
    negate_a: bool
    negate_b: bool
    mn_major_a: bool
    mn_major_b: bool
    m: int
    n: int
    k: int
    max_shift: int
    layout: str
    columns: int


def instruction(bits: int, kind: str, *, cta_group: int = 1, ws: bool = False) -> Instruction:
    """Decodes an instruction descriptor, or raises RefusedError."""
    f = (ctypes.c_int * 14)()
    _call("emu_mma_instruction", ctypes.c_uint32(bits), KINDS.index(kind), cta_group, int(ws), f)
    values = list(f)
    flags = dict(
        zip(("saturate", "negate_a", "negate_b", "mn_major_a", "mn_major_b"), map(bool, values[3:8]), strict=True)
    )
    sizes = dict(zip(("m", "n", "k", "max_shift"), values[8:12], strict=True))
    a, b, d = ELEMENTS[values[0]], ELEMENTS[values[1]], ACCUMULATORS[values[2]]
    return Instruction(a=a, b=b, d=d, **flags, **sizes, layout=chr(values[12]), columns=values[13])


def place(
    bits: int, kind: str, *, rows: int, n: int, cta_group: int = 1, ws: bool = False, lane: int = 0
) -> np.ndarray:
    """(lane, column) of every D[row, n] that one CTA holds: int32 [rows, n, 2]."""
    out = np.full((rows, n, 2), -1, np.int32)
    _call("emu_mma_place", ctypes.c_uint32(bits), KINDS.index(kind), cta_group, int(ws), lane, _pointer(out))
    return out


def has_vector_path() -> bool:
    return bool(library().emu_mma_has_vector_path())
