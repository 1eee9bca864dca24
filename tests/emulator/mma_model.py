"""The tensor core's arithmetic and operand layouts, slowly, in plain integers: the oracle for the emulator's MMA.

Written for plainness from the published rule (sf-tensor/tcgen05, MIT: MODEL.md) and from the CuTe canonical layouts in
the PTX ISA (9.7.16.3); it shares nothing with the C++ code. All values are raw bit patterns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WINDOW = 25  # fraction bits below the largest encoded exponent
#: Arguments of `dot` for wgmma of 8-bit floats, as an H200 computes it.
HOPPER_8_BIT = {"window": 13, "fraction_bits": 13}


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: widths of its fields and what its topmost exponent means."""

    exponent_bits: int
    mantissa_bits: int
    specials: str  # "ieee", "nan" (all ones only) or "none"
    container_bits: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


FORMATS = {
    "f16": FloatFormat(5, 10, "ieee", 16),
    "bf16": FloatFormat(8, 7, "ieee", 16),
    "tf32": FloatFormat(8, 10, "ieee", 32),
    "e4m3": FloatFormat(4, 3, "nan", 8),
    "e5m2": FloatFormat(5, 2, "ieee", 8),
    "e2m3": FloatFormat(2, 3, "none", 8),
    "e3m2": FloatFormat(3, 2, "none", 8),
    "e2m1": FloatFormat(2, 1, "none", 8),
    "f32": FloatFormat(8, 23, "ieee", 32),
}
INTEGERS = ("u8", "s8")


@dataclass(frozen=True)
class Number:
    """A decoded value: sign * significand * 2**power, and the exponent that its encoding names."""

    kind: str  # "finite", "nan" or "inf"
    negative: bool = False
    significand: int = 0
    power: int = 0
    exponent: int = 0


def decode(bits: int, name: str) -> Number:
    """Decodes a container's bits as format `name`; tf32 drops the low 13 bits of its f32 container first."""
    fmt = FORMATS[name]
    if name == "tf32":
        bits >>= 13
    bits &= 2**fmt.width - 1
    negative = bool(bits >> (fmt.width - 1))
    encoded = (bits >> fmt.mantissa_bits) % 2**fmt.exponent_bits
    fraction = bits % 2**fmt.mantissa_bits
    all_ones = encoded == 2**fmt.exponent_bits - 1
    if all_ones and fmt.specials == "ieee":
        return Number("nan" if fraction else "inf", negative)
    if all_ones and fmt.specials == "nan" and fraction == 2**fmt.mantissa_bits - 1:
        return Number("nan", negative)
    exponent = max(encoded, 1) - fmt.bias
    significand = fraction + (2**fmt.mantissa_bits if encoded else 0)
    return Number("finite", negative, significand, exponent - fmt.mantissa_bits, exponent)


def _cut(significand: int, power: int, quantum: int) -> int:
    """Whole units of 2**quantum in significand * 2**power."""
    return significand * 2 ** (power - quantum) if power >= quantum else significand // 2 ** (quantum - power)


def _encode(total: int, quantum: int, name: str) -> int:
    """total * 2**quantum as f32 (cut toward zero) or f16 (nearest even); zero results are +0."""
    fmt = FORMATS[name]
    sign = (total < 0) << (fmt.width - 1)
    magnitude = abs(total)
    if magnitude == 0:
        return 0
    smallest = 1 - fmt.bias
    exponent = magnitude.bit_length() - 1 + quantum
    power = max(exponent, smallest) - fmt.mantissa_bits
    significand = _cut(magnitude, quantum, power)
    if name == "f16" and power > quantum:
        rest, half = magnitude % 2 ** (power - quantum), 2 ** (power - quantum - 1)
        significand += rest > half or (rest == half and significand % 2 == 1)
    if significand == 0:
        return 0
    if significand == 2 ** (fmt.mantissa_bits + 1):
        significand //= 2
        power += 1
    if significand < 2**fmt.mantissa_bits:
        return sign | significand
    encoded = power + fmt.mantissa_bits + fmt.bias
    if encoded >= 2**fmt.exponent_bits - 1:
        return sign | ((2**fmt.exponent_bits - 1) << fmt.mantissa_bits)
    return sign | (encoded << fmt.mantissa_bits) | (significand - 2**fmt.mantissa_bits)


def dot(
    a: list[int],
    b: list[int],
    c: int | None,
    a_type: str,
    b_type: str,
    d_type: str = "f32",
    *,
    negate_a: bool = False,
    negate_b: bool = False,
    scale_c: int = 0,
    window: int = WINDOW,
    fraction_bits: int = 23,
) -> int:
    """One output of one K group, as bits of `d_type` ("f32" or "f16"). `c` None: D = A·B.

    An f32 result keeps `fraction_bits` bits below its leading one.
    """
    not_a_number = {"f32": 0x7FFFFFFF, "f16": 0x7FFF}[d_type]
    terms: list[tuple[int, int, int]] = []  # signed significand, power, exponent of its encoding
    infinities: set[bool] = set()
    for x_bits, y_bits in zip(a, b, strict=True):
        x, y = decode(x_bits, a_type), decode(y_bits, b_type)
        negative = x.negative ^ y.negative ^ negate_a ^ negate_b
        if "nan" in (x.kind, y.kind):
            return not_a_number
        if "inf" in (x.kind, y.kind):
            if any(v.kind == "finite" and v.significand == 0 for v in (x, y)):
                return not_a_number
            infinities.add(negative)
            continue
        product = x.significand * y.significand
        if product:
            terms.append((-product if negative else product, x.power + y.power, x.exponent + y.exponent))
    if c is not None:
        z = decode(c, d_type)
        if z.kind == "nan":
            return not_a_number
        if z.kind == "inf":
            infinities.add(z.negative)
        elif z.significand:
            terms.append((-z.significand if z.negative else z.significand, z.power - scale_c, z.exponent - scale_c))
    if len(infinities) == 2:
        return not_a_number
    if infinities:
        fmt = FORMATS[d_type]
        return (infinities.pop() << (fmt.width - 1)) | ((2**fmt.exponent_bits - 1) << fmt.mantissa_bits)
    if not terms:
        return 0
    quantum = max(exponent for _, _, exponent in terms) - window
    total = sum((1 if s > 0 else -1) * _cut(abs(s), power, quantum) for s, power, _ in terms)
    surplus = abs(total).bit_length() - 1 - fraction_bits
    if d_type == "f32" and surplus > 0:
        total = (abs(total) >> surplus << surplus) * (1 if total > 0 else -1)
    return _encode(total, quantum, d_type)


def integer_dot(a: list[int], b: list[int], c: int | None, a_type: str, b_type: str, *, saturate: bool) -> int:
    """kind::i8: exact sum, wrapped or clamped to 32 bits once."""

    def value(bits: int, name: str) -> int:
        return bits - 256 if name == "s8" and bits >= 128 else bits

    total = sum(value(x, a_type) * value(y, b_type) for x, y in zip(a, b, strict=True))
    if c is not None:
        total += c - 2**32 if c >= 2**31 else c
    if saturate:
        total = min(max(total, -(2**31)), 2**31 - 1)
    return total % 2**32


def matmul(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, a_type: str, b_type: str, d_type: str = "f32", **options
):
    """D[m, n] for A [M, K] and B [N, K] of raw containers; one K group. Returns uint32 bits."""
    out = np.zeros((len(a), len(b)), np.uint32)
    rows, columns = [[int(v) for v in r] for r in a], [[int(v) for v in r] for r in b]
    for m, row in enumerate(rows):
        for n, column in enumerate(columns):
            start = None if c is None else int(c[m, n])
            if a_type in INTEGERS:
                out[m, n] = integer_dot(row, column, start, a_type, b_type, **options)
            else:
                out[m, n] = dot(row, column, start, a_type, b_type, d_type, **options)
    return out


# ---------------------------------------------------------------- layouts


def layout_offsets(shape: tuple, stride: tuple) -> np.ndarray:
    """A CuTe layout's offsets, colexicographic in each mode: result[i, j, ...] for top-level coordinates i, j, ..."""

    def flat(extent, step) -> np.ndarray:
        if isinstance(extent, tuple):
            parts = [flat(e, s) for e, s in zip(extent, step, strict=True)]
            total = parts[-1]
            for part in reversed(parts[:-1]):
                total = (total[:, None] + part[None, :]).reshape(-1)
            return total
        return np.arange(extent) * step

    modes = [flat(e, s) for e, s in zip(shape, stride, strict=True)]
    result = modes[0]
    for mode in modes[1:]:
        result = result[..., None] + mode
    return result


def swizzle(addresses: np.ndarray, bits: int, base: int, shift: int) -> np.ndarray:
    """CuTe's Swizzle<bits, base, shift> on byte addresses."""
    mask = ((1 << bits) - 1) << (base + shift)
    return addresses ^ ((addresses & mask) >> shift)


SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B_32B": (2, 5, 2)}
SWIZZLE_CODES = {"none": 0, "128B_32B": 1, "128B": 2, "64B": 4, "32B": 6}


def canonical_addresses(
    start: int, lbo: int, sbo: int, mode: str, *, mn_major: bool, rows: int, element_bits: int
) -> np.ndarray:
    """Byte address of element [row, k] of an operand with K = 32 bytes, by the canonical layouts of PTX 9.7.16.3.3."""
    size = element_bits // 8
    t = 128 // element_bits
    k = 32 // size
    lead, step = lbo // size, sbo // size  # in elements
    width = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_32B": 8}[mode]
    if mn_major:
        # The least number of whole atoms that covers the rows; surplus rows are cut off below.
        m = -(-rows // (t * width))
        if mode == "none":
            shape, stride = ((t, 1, m), (8, max(k // 8, 1))), ((1, t, step), (t, lead))
        elif mode == "128B_32B":
            shape, stride = ((t, 8, m), (4, k // 4)), ((1, t, lead), (8 * t, step))
        else:
            shape, stride = ((t, width, m), (8, max(k // 8, 1))), ((1, t, lead), (width * t, step))
    else:
        shape, stride = ((8, rows // 8), (t, 2)), ((width * t, step), (1, lead if mode == "none" else t))
    offsets = layout_offsets(shape, stride)[:rows, :k] * size
    return swizzle(start + offsets, *SWIZZLES[mode])


def shared_descriptor(start: int, lbo: int, sbo: int, mode: str, base_offset: int = 0) -> int:
    """The 64-bit shared-memory matrix descriptor (PTX 9.7.16.4.1)."""
    enc = [(value & 0x3FFFF) >> 4 for value in (start, lbo, sbo)]
    return enc[0] | enc[1] << 16 | enc[2] << 32 | 1 << 46 | base_offset << 49 | SWIZZLE_CODES[mode] << 61


TYPE_CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
}
KINDS = {name: kind for kind, names in TYPE_CODES.items() for name in names}


def instruction_descriptor(
    m: int,
    n: int,
    a_type: str,
    b_type: str | None = None,
    d_type: str = "f32",
    *,
    mn_major_a: bool = False,
    mn_major_b: bool = False,
    negate_a: bool = False,
    negate_b: bool = False,
    saturate: bool = False,
) -> int:
    """The 32-bit instruction descriptor (PTX 9.7.16.4.2) of a dense MMA."""
    codes = TYPE_CODES[KINDS[a_type]]
    return (
        saturate << 3
        | {"f16": 0, "f32": 1, "s32": 2}[d_type] << 4
        | codes[a_type] << 7
        | codes[b_type or a_type] << 10
        | negate_a << 13
        | negate_b << 14
        | mn_major_a << 15
        | mn_major_b << 16
        | (n >> 3) << 17
        | (m >> 4) << 24
    )
