"""mma.sync with C not zero: random operands, exponent gaps to C, cancellation, subnormals, NaN, infinity.

On sm_90a m16n8k16 of f16 and bf16, m16n8k8 of f16, bf16 and tf32 and m16n8k4 of tf32 are one step of the tensor core
each. 8-bit floats are not: the assembler converts them to f16, multiplies in two steps of 16 without C and adds C in
fp32.
"""

from dataclasses import dataclass

import numpy as np

from .micro import PROLOGUE, Micro, Pointer, entry, poison
from .values import generator


@dataclass(frozen=True)
class Form:
    """One shape of mma.sync; bits is the size of an A or B element, c_words the registers of C and D of a thread."""

    name: str
    opcode: str
    k: int
    bits: int
    kind: str
    c_words: int = 4

    @property
    def a_words(self) -> int:
        return 16 * self.k * self.bits // 32 // 32

    @property
    def b_words(self) -> int:
        return 8 * self.k * self.bits // 32 // 32


FORMS = (
    Form("bf16_k16", "m16n8k16.row.col.f32.bf16.bf16.f32", 16, 16, "bf16"),
    Form("bf16_k8", "m16n8k8.row.col.f32.bf16.bf16.f32", 8, 16, "bf16"),
    Form("f16_k16", "m16n8k16.row.col.f32.f16.f16.f32", 16, 16, "f16"),
    Form("f16_k8", "m16n8k8.row.col.f32.f16.f16.f32", 8, 16, "f16"),
    Form("f16_k16_f16", "m16n8k16.row.col.f16.f16.f16.f16", 16, 16, "f16", 2),
    Form("tf32_k8", "m16n8k8.row.col.f32.tf32.tf32.f32", 8, 32, "tf32"),
    Form("tf32_k4", "m16n8k4.row.col.f32.tf32.tf32.f32", 4, 32, "tf32"),
    Form("e4m3_k32", "m16n8k32.row.col.f32.e4m3.e4m3.f32", 32, 8, "e4m3"),
    Form("e5m2_k32", "m16n8k32.row.col.f32.e5m2.e5m2.f32", 32, 8, "e5m2"),
)
#: Exponent field: bits of mantissa, bits of exponent.
LAYOUT = {"bf16": (7, 8), "f16": (10, 5), "tf32": (23, 8), "e4m3": (3, 4), "e5m2": (2, 5)}
WARPS = 24


def encode(form: Form, sign: np.ndarray, exponent: np.ndarray, mantissa: np.ndarray) -> np.ndarray:
    m, e = LAYOUT[form.kind]
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[form.bits]
    field = np.clip(exponent, 0, (1 << e) - 2).astype(np.uint64)
    return ((sign.astype(np.uint64) << np.uint64(m + e)) | (field << np.uint64(m)) | mantissa.astype(np.uint64)).astype(
        dtype
    )


def operands(form: Form, count: int, spread: int, seed: int) -> np.ndarray:
    """`count` elements around 1, their exponents uniform in ±spread."""
    rng = generator(seed)
    m, e = LAYOUT[form.kind]
    bias = (1 << (e - 1)) - 1
    exponent = bias + rng.integers(-spread, spread + 1, count)
    return encode(form, rng.integers(0, 2, count), exponent, rng.integers(0, 1 << m, count))


def specials(form: Form) -> np.ndarray:
    m, e = LAYOUT[form.kind]
    top = 1 << (m + e)
    inf = ((1 << e) - 1) << m
    if form.kind == "e4m3":
        values = [0, top, 1, top | 1, 7, 8, 0x7E, top | 0x7E, 0x7F, top | 0x7F, 0x38, top | 0x38]
    else:
        values = [
            0,
            top,
            1,
            top | 1,
            (1 << m) - 1,
            1 << m,
            inf - 1,
            top | (inf - 1),
            inf,
            top | inf,
            inf | 1 << (m - 1),
            inf | 1,
        ]
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[form.bits]
    return np.array(values, np.uint64).astype(dtype)


def _data(form: Form, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Register images of A, B, C for every warp. The place of an element in the matrix does not matter here."""
    m, e = LAYOUT[form.kind]
    a_count, b_count, c_count = (
        form.a_words * 32 * 32 // form.bits,
        form.b_words * 32 * 32 // form.bits,
        form.c_words * 32,
    )
    widest = min((1 << (e - 1)) - 2, 40)
    a_all, b_all, c_all = [], [], []
    for warp in range(WARPS):
        rng = generator(seed + warp)
        spread = (0, 2, 4, min(8, widest), min(16, widest), widest)[warp % 6]
        a, b = operands(form, a_count, spread, seed + 100 + warp), operands(form, b_count, spread, seed + 200 + warp)
        # C: zero, near the products, far above, far below, and of any exponent
        gap = (None, 0, 12, -12, 23, -23, 26, -26, 40)[warp % 9]
        c = rng.standard_normal(c_count).astype(np.float32)
        if form.c_words == 2:
            c16 = (rng.standard_normal(2 * c_count) * 2.0 ** (0 if gap is None else np.clip(gap, -10, 10) / 2)).astype(
                np.float16
            )
            c = c16.view(np.uint32)
        elif gap is None:
            c = (c * 0).view(np.uint32)
        elif gap == 40:
            c = np.ldexp(c, rng.integers(-60, 60, c_count)).astype(np.float32).view(np.uint32)
        else:
            c = np.ldexp(c, gap).astype(np.float32).view(np.uint32)
        if warp >= WARPS - 8:  # special values among the operands, rarely and often
            share = (0.01, 0.01, 0.03, 0.03, 0.1, 0.1, 0.5, 0.5)[warp - WARPS + 8]
            table = specials(form)
            finite = table[:8]
            # every other of these warps has no NaN or infinity
            table = finite if warp % 2 else table
            a = np.where(rng.random(a_count) < share, rng.choice(table, a_count), a)
            b = np.where(rng.random(b_count) < share, rng.choice(table, b_count), b)
            if form.c_words == 4:
                odd = np.array(
                    [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF], np.uint32
                )
                c = np.where(rng.random(c_count) < share, rng.choice(odd[:4] if warp % 2 else odd, c_count), c)
        elif warp in (3, 10):  # cancellation: the second half of A repeats the first with the other sign
            half = a_count // 2
            a[half:] = a[:half] ^ a.dtype.type(1 << (m + e))
            b[b_count // 2 :] = b[: b_count // 2]
        elif warp == 5:  # tiny products: subnormals of the operand type
            a = encode(form, rng.integers(0, 2, a_count), np.zeros(a_count, int), rng.integers(0, 1 << m, a_count))
        elif warp == 11 and form.kind in ("bf16", "tf32"):  # sums that overflow fp32
            a = encode(form, rng.integers(0, 2, a_count), np.full(a_count, 254), rng.integers(0, 1 << m, a_count))
            b = encode(form, rng.integers(0, 2, b_count), np.full(b_count, 127), rng.integers(0, 1 << m, b_count))
        elif warp == 12 and form.kind in ("bf16", "tf32"):  # products below the smallest normal fp32
            a = encode(
                form, rng.integers(0, 2, a_count), rng.integers(1, 30, a_count), rng.integers(0, 1 << m, a_count)
            )
            b = encode(
                form, rng.integers(0, 2, b_count), rng.integers(90, 110, b_count), rng.integers(0, 1 << m, b_count)
            )
            c = (
                np.ldexp(rng.standard_normal(c_count), rng.integers(-149, -120, c_count))
                .astype(np.float32)
                .view(np.uint32)
            )
        a_all.append(np.ascontiguousarray(a).view(np.uint32))
        b_all.append(np.ascontiguousarray(b).view(np.uint32))
        c_all.append(np.ascontiguousarray(c).view(np.uint32))
    return np.concatenate(a_all), np.concatenate(b_all), np.concatenate(c_all)


def group(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"


def _loads(pointer: str, first: int, count: int) -> str:
    """Thread t of block b loads words (b·32 + t)·count ... of a buffer; %index is b·32 + t."""
    text = f"    mad.lo.u64 d0, %index, {4 * count}, {pointer};\n"
    return text + "".join(f"    ld.global.b32 r{first + i}, [d0+{4 * i}];\n" for i in range(count))


def _micro(form: Form, seed: int) -> Micro:
    a, b, c = _data(form, seed)
    n = form.c_words
    body = PROLOGUE + "    .reg .b64 %index;\n    mad.lo.u32 r0, %blk, 32, %t;\n    cvt.u64.u32 %index, r0;\n"
    body += _loads("%a", 10, form.a_words) + _loads("%b", 20, form.b_words) + _loads("%c", 30, n)
    operands = (group("r", 40, n), group("r", 10, form.a_words), group("r", 20, form.b_words), group("r", 30, n))
    body += f"    mma.sync.aligned.{form.opcode} {', '.join(operands)};\n"
    body += f"    mad.lo.u64 d0, %index, {4 * n}, %out;\n"
    body += "".join(f"    st.global.b32 [d0+{4 * i}], r{40 + i};\n" for i in range(n))
    return Micro(
        name=f"mma_{form.name}",
        ptx=entry("u64 a, u64 b, u64 c, u64 out", body),
        buffers={"a": a, "b": b, "c": c, "out": poison(WARPS * 32 * n)},
        params=[Pointer("a"), Pointer("b"), Pointer("c"), Pointer("out")],
        grid=(WARPS, 1, 1),
    )


def cases() -> list[Micro]:
    return [_micro(form, 1000 * (k + 1)) for k, form in enumerate(FORMS)]
