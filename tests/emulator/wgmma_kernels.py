"""One warpgroup's wgmma for tests: operands laid out in shared memory or registers, the kernel, the expected result.

The kernel is the one that a GPU recorded (silicon/wgmma.py), so that a test may break one line of its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import emulator
from emulator import mma_model, mma_native
from emulator.silicon.wgmma import BITS, THREADS, Form, descriptor, kernel

BASE = 1024  # address of the first static shared variable


@dataclass(frozen=True)
class Case:
    """What is multiplied: a form of the instruction, and the swizzle of both operands."""

    form: Form
    swizzle: str = "none"

    @property
    def k(self) -> int:
        return 256 // BITS[self.form.a]

    def __str__(self) -> str:
        form = self.form
        source = "RS" if form.registers else "SS"
        majors = "".join("MN" if major else "K" for major in (form.mn_major_a, form.mn_major_b))
        return f"{form.a}-{form.b_type}-{form.d}-{form.n}-{source}-{majors}-{self.swizzle}-{form.steps}"


def rows_of_d() -> np.ndarray:
    """Row of D of a thread's first register; registers 2 and 3 (f16: the second) lie 8 rows below."""
    thread = np.arange(THREADS)
    return 16 * (thread // 32) + thread % 32 // 4


def to_fragments(d: np.ndarray, d_type: str) -> np.ndarray:
    """Registers [thread, words] of an accumulator of bit patterns [64, N]."""
    thread = np.arange(THREADS)
    n = d.shape[1]
    column = 2 * (thread % 4)[:, None, None, None] + 8 * np.arange(n // 8)[:, None, None] + np.arange(2)
    row = rows_of_d()[:, None, None, None] + 8 * np.arange(2)[:, None]
    pairs = d[row, column].astype(np.uint32)  # [thread, N / 8, upper or lower row, neighbour]
    if d_type == "f16":
        pairs = pairs[..., 0] | pairs[..., 1] << np.uint32(16)
    return np.ascontiguousarray(pairs.reshape(THREADS, -1))


def from_fragments(registers: np.ndarray, n: int, d_type: str) -> np.ndarray:
    """The accumulator [64, N] of registers [thread, words]."""
    place = to_fragments(np.arange(64 * n, dtype=np.uint32).reshape(64, n), "f32")  # where each element lies
    if d_type == "f16":
        registers = np.stack([registers & 0xFFFF, registers >> 16], -1)
    d = np.zeros(64 * n, np.uint32)
    d[place.ravel()] = registers.reshape(-1)
    return d.reshape(64, n)


def a_fragments(a: np.ndarray) -> np.ndarray:
    """Registers [thread, 4] of A [64, K], raw containers."""
    words = np.ascontiguousarray(a).view(np.uint32)  # [64, 8]
    thread = np.arange(THREADS)[:, None]
    j = np.arange(4)
    return words[rows_of_d()[:, None] + 8 * (j % 2), thread % 4 + 4 * (j // 2)]


def strides(swizzle: str, rows: int, mn_major: bool, bits: int) -> tuple[int, int, int]:
    """Leading and stride offset and size in bytes of one operand, with a gap wherever one offset could hide another."""
    row_bytes = 16 if swizzle == "none" else int(swizzle[:-1])
    if not mn_major:
        return (16 * rows + 128, 128, 32 * rows + 128) if swizzle == "none" else (16, 8 * row_bytes, rows * row_bytes)
    atoms = -(-rows * bits // 8 // row_bytes)
    if swizzle == "none":  # the stride offset leads along M or N, the leading one along K
        return 128 * atoms + 256, 128, 2 * (128 * atoms + 256)
    return 8 * row_bytes, 8 * row_bytes * atoms + 1024, 2 * (8 * row_bytes * atoms + 1024)


@dataclass
class Inputs:
    """Host side of one run: raw operands a step, and what the kernel is given."""

    case: Case
    a: list[np.ndarray]  # [64, K] a step
    b: list[np.ndarray]  # [N, K]
    start: np.ndarray  # the accumulator before, bit patterns [64, N]
    image: np.ndarray  # bytes of shared memory
    descriptors: np.ndarray  # uint64 [steps, 2]
    fragments: np.ndarray  # A in registers [thread, 4 * steps]

    @property
    def text(self) -> str:
        return kernel(self.case.form, self.image.size)

    def expected(self) -> np.ndarray:
        """The accumulator afterwards, from the arithmetic that test_mma.py tests on its own."""
        form, d = self.case.form, self.start
        for step, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            c = d if step or form.accumulate else None
            d = mma_native.multiply(a, b, c, form.a, form.b_type, form.d, **self.options())
        return d

    def modelled(self, row: int, column: int) -> int:
        """One element of it, from the slow model."""
        form, d = self.case.form, int(self.start[row, column])
        for step, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            c = d if step or form.accumulate else None
            x, y = ([int(v) for v in operand] for operand in (a[row], b[column]))
            d = mma_model.dot(x, y, c, form.a, form.b_type, form.d, **self.options())
        return d

    def options(self) -> dict:
        """How the hardware computes, for `mma_native.multiply` and `mma_model.dot` alike."""
        form = self.case.form
        precision = mma_model.HOPPER_8_BIT if BITS[form.a] == 8 else {}
        return {"negate_a": form.negate_a, "negate_b": form.negate_b, **precision}


def make_inputs(case: Case, a: list[np.ndarray], b: list[np.ndarray], start: np.ndarray) -> Inputs:
    """Lays out raw operands, one pair for each step; whatever is no operand is NaN in every type."""
    form, image = case.form, np.zeros(0, np.uint8)
    descriptors = np.zeros((form.steps, 2), np.uint64)
    for step in range(form.steps):
        for operand, (raw, kind, mn_major) in enumerate(
            ((a[step], form.a, form.mn_major_a), (b[step], form.b_type, form.mn_major_b))
        ):
            if form.registers and operand == 0:
                continue
            bits, begin = BITS[kind], image.size
            lead, stride, size = strides(case.swizzle, len(raw), mn_major, bits)
            image = np.concatenate([image, np.full(-(-size // 2048) * 2048, 0xFF, np.uint8)])
            where = mma_model.canonical_addresses(
                BASE + begin, lead, stride, case.swizzle, mn_major=mn_major, rows=len(raw), element_bits=bits
            )
            at = where[..., None] - BASE + np.arange(bits // 8)
            image[at] = np.ascontiguousarray(raw).view(np.uint8).reshape(at.shape)
            descriptors[step, operand] = descriptor(begin, lead, stride, case.swizzle)
    fragments = np.concatenate([a_fragments(raw) for raw in a], 1)
    return Inputs(case, a, b, start, image, descriptors, fragments)


def launch(
    inputs: Inputs, *, mode: str = "random", seed: int = 0, text: str = "", threads: int = THREADS, **options: Any
) -> tuple[np.ndarray, emulator.Report]:
    """The accumulator [64, N] that the kernel (or a changed text of it) leaves, and the report. Raises Verdict.

    `options` go to `Program.launch`.
    """
    form = inputs.case.form
    out = np.zeros((THREADS, form.words), np.uint32)
    report = emulator.load(text or inputs.text).launch(
        grid=(1, 1, 1),
        block=(threads, 1, 1),
        params=[inputs.image, inputs.descriptors, inputs.fragments, to_fragments(inputs.start, form.d), out],
        schedule=emulator.Schedule(seed=seed, async_=mode),
        **options,
    )
    return from_fragments(out, form.n, form.d), report
