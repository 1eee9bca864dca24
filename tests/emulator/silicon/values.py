"""Deterministic operands: every special value against every other, then random ones over the whole exponent range."""

import numpy as np

_F32_SPECIAL = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000,
    0x3F800000, 0xBF800000, 0x3F800001, 0xBF7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0x4B000000, 0x4B000001, 0xCB7FFFFF, 0x4F000000,
    0xCF000000, 0x4EFFFFFF, 0x5F000000, 0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0xC0200000,
)  # fmt: skip
_F16_SPECIAL = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3C01, 0xBBFF,
    0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0x7FFF, 0x6400, 0x6401, 0x3800, 0xB800,
)  # fmt: skip
_BF16_SPECIAL = (
    0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3F81, 0xBF7F,
    0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0x7FFF, 0x4300, 0x4301, 0x3F00, 0xBF00,
)  # fmt: skip


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def f32_values(count: int, seed: int) -> np.ndarray:
    """Bit patterns: the specials, values that tie when rounded to 10, 7 and 3 mantissa bits, then random patterns."""
    rng = generator(seed)
    base = rng.integers(0x3F000000, 0x42000000, count, np.uint32)
    ties = np.concatenate(
        [(base[: count // 8] & ~np.uint32((1 << drop) - 1)) | np.uint32(1 << (drop - 1)) for drop in (13, 16, 20)]
    )
    spread = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
    near = (rng.integers(0x3C000000, 0x44000000, count, np.uint32)) | (
        rng.integers(0, 2, count, np.uint32) << np.uint32(31)
    )
    mixed = np.where(rng.random(count) < 0.5, spread, near)
    return np.concatenate([np.array(_F32_SPECIAL, np.uint32), ties, mixed])[:count].astype(np.uint32)


def pairs_f32(count: int, seed: int, arity: int = 2) -> list[np.ndarray]:
    """`arity` operand arrays: first all pairs of 20 specials, then operands of near exponents, then any."""
    rng = generator(seed)
    special = np.array(_F32_SPECIAL[:20], np.uint32)
    x, y = (a.ravel() for a in np.meshgrid(special, special, indexing="ij"))
    columns = [x, y]
    while len(columns) < arity:
        columns.append(rng.permutation(x))
    out = []
    for column in columns[:arity]:
        near = rng.integers(0x3E000000, 0x41000000, count, np.uint32)
        near |= rng.integers(0, 2, count, np.uint32) << np.uint32(31)
        spread = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
        out.append(np.concatenate([column, np.where(rng.random(count) < 0.7, near, spread)])[:count].astype(np.uint32))
    return out


def _pack16(special: tuple[int, ...], count: int, seed: int, arity: int, low: int, high: int) -> list[np.ndarray]:
    rng = generator(seed)
    table = np.array(special, np.uint16)
    x, y = (a.ravel() for a in np.meshgrid(table, table, indexing="ij"))
    columns = [x, y]
    while len(columns) < arity:
        columns.append(rng.permutation(x))
    out = []
    for column in columns[:arity]:
        n = 2 * count
        near = rng.integers(low, high, n, np.uint16) | (rng.integers(0, 2, n, np.uint16) << np.uint16(15))
        spread = rng.integers(0, 1 << 16, n, np.uint32).astype(np.uint16)
        halves = np.concatenate([column, np.where(rng.random(n) < 0.7, near, spread)])[:n].astype(np.uint16)
        out.append(halves.view(np.uint32).copy())
    return out


def pairs_f16x2(count: int, seed: int, arity: int = 2) -> list[np.ndarray]:
    """As `pairs_f32`, two f16 in each u32."""
    return _pack16(_F16_SPECIAL, count, seed, arity, 0x3400, 0x4400)


def pairs_bf16x2(count: int, seed: int, arity: int = 2) -> list[np.ndarray]:
    """As `pairs_f32`, two bf16 in each u32."""
    return _pack16(_BF16_SPECIAL, count, seed, arity, 0x3E00, 0x4100)


def integers(count: int, seed: int, arity: int = 2, bits: int = 32) -> list[np.ndarray]:
    """Operand arrays of unsigned words: all pairs of edge values, then random ones of random magnitude."""
    rng = generator(seed)
    top = 1 << (bits - 1)
    edges = np.array([0, 1, 2, 3, 7, 31, 32, 33, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 2 * top - 7], object)
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    edges = edges.astype(dtype)
    x, y = (a.ravel() for a in np.meshgrid(edges, edges, indexing="ij"))
    columns = [x, y]
    while len(columns) < arity:
        columns.append(rng.permutation(x))
    out = []
    for column in columns[:arity]:
        word = rng.integers(0, 1 << 63, count, np.uint64) * np.uint64(2) + rng.integers(0, 2, count, np.uint64)
        word = (word >> np.uint64(64 - bits)) >> rng.integers(0, bits, count).astype(np.uint64)
        out.append(np.concatenate([column, word.astype(dtype)])[:count].astype(dtype))
    return out
