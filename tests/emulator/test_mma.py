"""MMA arithmetic against the slow integer model, bit for bit, and operand layouts against CuTe's layout algebra."""

from pathlib import Path

import numpy as np
import pytest

from emulator import mma_model, mma_native

FLOATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
M, N = 10, 21  # two vectors of eight and a rest, rows in pairs and one over


def k_of(element: str) -> int:
    return 256 // mma_native.CONTAINER_BITS.get(element, 8)


def raw(rng: np.random.Generator, shape, element: str) -> np.ndarray:
    """Any bit pattern of the container."""
    return rng.integers(0, 2 ** mma_native.CONTAINER_BITS.get(element, 8), shape, dtype=np.uint64)


def numbers(rng: np.random.Generator, shape, element: str, spread: int, exponent: int | None = None) -> np.ndarray:
    """Finite values whose encoded exponents lie within `spread` of `exponent` (default: the middle of the range)."""
    fmt = mma_model.FORMATS[element]
    top = 2**fmt.exponent_bits - (2 if fmt.specials == "ieee" else 1)
    middle = fmt.bias if exponent is None else exponent
    encoded = np.clip(middle + rng.integers(-spread, spread + 1, shape), 0, top)
    fraction = rng.integers(0, 2**fmt.mantissa_bits, shape)
    if fmt.specials == "nan":  # not the one NaN
        fraction = np.where(encoded == top, fraction % (2**fmt.mantissa_bits - 1), fraction)
    sign = rng.integers(0, 2, shape)
    bits = (sign << (fmt.width - 1)) | (encoded << fmt.mantissa_bits) | fraction
    if element == "tf32":  # the container's low bits are noise
        bits = (bits << 13) | rng.integers(0, 2**13, shape)
    return bits.astype(np.uint64)


def special_values(element: str) -> list[int]:
    fmt = mma_model.FORMATS[element]
    sign, one = 1 << (fmt.width - 1), fmt.bias << fmt.mantissa_bits
    largest = sign - 1 - {"ieee": 2**fmt.mantissa_bits, "nan": 1, "none": 0}[fmt.specials]
    values = [
        0,
        sign,
        1,
        sign | 1,
        2**fmt.mantissa_bits - 1,
        2**fmt.mantissa_bits,
        one,
        sign | one,
        largest,
        sign | largest,
    ]
    if fmt.specials == "ieee":
        infinity = sign - 2**fmt.mantissa_bits
        values += [infinity, sign | infinity, infinity | 1, sign - 1]
    if fmt.specials == "nan":
        values += [sign - 1]
    if element == "tf32":
        values = [v << 13 for v in values] + [0x7F800001, 0x00000001]  # a NaN and a subnormal that the cut removes
    return values


def sprinkle(rng: np.random.Generator, array: np.ndarray, values: list[int], share: float) -> np.ndarray:
    hit = rng.random(array.shape) < share
    return np.where(hit, rng.choice(np.array(values, np.uint64), array.shape), array)


def operands(case: str, a_type: str, b_type: str, d_type: str, seed: int):
    """A [M, K], B [N, K], C [M, N] (or None) of a named sort."""
    rng = np.random.default_rng(seed)
    k = k_of(a_type)
    c_bits = 16 if d_type == "f16" else 32
    a_shape, b_shape, c_shape = (M, k), (N, k), (M, N)
    match case:
        case "narrow":
            a, b = numbers(rng, a_shape, a_type, 2), numbers(rng, b_shape, b_type, 2)
            c = numbers(rng, c_shape, d_type, 3)
        case "wide":  # exponents across the whole range: most products fall below the window
            a, b = numbers(rng, a_shape, a_type, 300), numbers(rng, b_shape, b_type, 300)
            c = numbers(rng, c_shape, d_type, 300)
        case "window":  # exponents around the window's edge
            a, b = numbers(rng, a_shape, a_type, 14), numbers(rng, b_shape, b_type, 14)
            c = numbers(rng, c_shape, d_type, 30)
        case "no_c":
            a, b, c = numbers(rng, a_shape, a_type, 14), numbers(rng, b_shape, b_type, 6), None
        case "large_c":  # products vanish under C, and C cancels in its last bits
            a, b = numbers(rng, a_shape, a_type, 1), numbers(rng, b_shape, b_type, 1)
            c = numbers(rng, c_shape, d_type, 2, mma_model.FORMATS[d_type].bias + 14)
        case "cancel":  # pairs of equal products of opposite sign, and small rests
            a, b = numbers(rng, a_shape, a_type, 3), numbers(rng, b_shape, b_type, 3)
            flip = 1 << (mma_native.CONTAINER_BITS.get(a_type, 8) - 1)
            if mma_native.CONTAINER_BITS.get(a_type, 8) == 8:
                flip = 1 << (mma_model.FORMATS[a_type].width - 1)
            a[:, 1::2] = a[:, ::2] ^ flip
            b[:, 1::2] = b[:, ::2]
            a = sprinkle(rng, a, [1, 3], 0.1)
            c = numbers(rng, c_shape, d_type, 1, 5)
        case "tiny":  # results among the subnormals
            a, b = numbers(rng, a_shape, a_type, 1, 1), numbers(rng, b_shape, b_type, 3)
            a[::2] = numbers(rng, a[::2].shape, a_type, 0, 0)
            b[::2] = numbers(rng, b[::2].shape, b_type, 4, mma_model.FORMATS[b_type].bias - 20)
            c = sprinkle(rng, numbers(rng, c_shape, d_type, 2, 1), special_values(d_type)[:2], 0.5)
        case "zeros":
            a = sprinkle(rng, numbers(rng, a_shape, a_type, 2), special_values(a_type)[:2], 0.8)
            b = sprinkle(rng, numbers(rng, b_shape, b_type, 2), special_values(b_type)[:2], 0.8)
            a[0], b[0] = 0, special_values(b_type)[1]
            c = rng.choice(np.array([0, 1 << (c_bits - 1)], np.uint64), c_shape)
        case "specials":
            a = sprinkle(rng, numbers(rng, a_shape, a_type, 3), special_values(a_type), 0.04)
            b = sprinkle(rng, numbers(rng, b_shape, b_type, 3), special_values(b_type), 0.02)
            c = sprinkle(rng, numbers(rng, c_shape, d_type, 3), special_values(d_type), 0.1)
        case "raw":
            a, b, c = (
                raw(rng, a_shape, a_type),
                raw(rng, b_shape, b_type),
                rng.integers(0, 2**c_bits, c_shape, np.uint64),
            )
        case _:
            raise AssertionError(case)
    return a, b, None if c is None else c.astype(np.uint32)


CASES = ("narrow", "wide", "window", "no_c", "large_c", "cancel", "tiny", "zeros", "specials", "raw")
PATHS = ({"portable": True}, {"inner_a": False}, {"inner_a": True})
PAIRS = [(t, t) for t in FLOATS] + [("e4m3", "e5m2"), ("e5m2", "e2m1"), ("e2m3", "e3m2"), ("bf16", "f16")]


def check(a, b, c, a_type, b_type, d_type, **options):
    expected = mma_model.matmul(a, b, c, a_type, b_type, d_type, **options)
    for path in PATHS:
        got = mma_native.multiply(a, b, c, a_type, b_type, d_type, **options, **path)
        wrong = np.argwhere(got != expected)
        assert not len(wrong), (path, wrong[0], hex(got[tuple(wrong[0])]), hex(expected[tuple(wrong[0])]), len(wrong))
    return expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("a_type", "b_type"), PAIRS)
def test_f32_accumulator_matches_the_model(a_type, b_type, case):
    a, b, c = operands(case, a_type, b_type, "f32", seed=CASES.index(case))
    check(a, b, c, a_type, b_type, "f32")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("a_type", "b_type"), [p for p in PAIRS if p[0] in ("f16", "e4m3", "e5m2", "e3m2")])
def test_f16_accumulator_matches_the_model(a_type, b_type, case):
    a, b, c = operands(case, a_type, b_type, "f16", seed=100 + CASES.index(case))
    check(a, b, c, a_type, b_type, "f16")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("d_type", ["f32", "f16"])
@pytest.mark.parametrize(("a_type", "b_type"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_the_precision_of_8_bit_wgmma_matches_the_model(a_type, b_type, d_type, case):
    a, b, c = operands(case, a_type, b_type, d_type, seed=200 + CASES.index(case))
    check(a, b, c, a_type, b_type, d_type, **mma_model.HOPPER_8_BIT)


@pytest.mark.parametrize("element", ["bf16", "tf32", "f16"])
@pytest.mark.parametrize("scale", [1, 7, 15])
def test_scaled_accumulator_and_negation(element, scale):
    a, b, c = operands("window", element, element, "f32", seed=scale)
    check(a, b, c, element, element, "f32", scale_c=scale)
    check(a, b, c, element, element, "f32", negate_a=True)
    check(a, b, c, element, element, "f32", negate_a=True, negate_b=True, scale_c=scale)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("a_type", "b_type"), [("u8", "u8"), ("s8", "s8"), ("u8", "s8")])
def test_integers(a_type, b_type, saturate):
    rng = np.random.default_rng(7)
    a, b = raw(rng, (M, 32), a_type), raw(rng, (N, 32), b_type)
    c = rng.integers(0, 2**32, (M, N), np.uint64)
    c[::2] = np.where(rng.random((M // 2, N)) < 0.5, 0x7FFFFFF0, 0x80000010)
    expected = mma_model.matmul(a, b, c, a_type, b_type, saturate=saturate)
    assert (mma_native.multiply(a, b, c, a_type, b_type, "s32", saturate=saturate) == expected).all()


def test_sums_of_the_largest_products_do_not_overflow():
    """The vector path sums in 32 bits; the greatest significands at one exponent are its worst case."""
    for element, bits in (("bf16", 0x3FFF), ("f16", 0x3FFF), ("tf32", 0x3FFFFFFF), ("e4m3", 0x3F), ("e5m2", 0x3F)):
        a = np.full((M, k_of(element)), bits, np.uint64)
        c = np.full((M, N), 0x3FFFFFFF, np.uint32)  # the same exponent as the products
        check(a, np.resize(a, (N, a.shape[1])), c, element, element, "f32")
        check(a, np.resize(a, (N, a.shape[1])), c | 0x80000000, element, element, "f32")


def test_known_values():
    """Figures worked by hand from the rule, so that model and library cannot be wrong together."""
    one, tiny = 0x3F80, 0x3380  # bf16: 1 and 2**-24
    a = np.array([[one, one] + [0] * 14])
    # 1 - 1 + 2**-25 survives in the window, 2**-26 does not.
    for exponent, expected in ((-25, 0x33000000), (-26, 0)):
        b = np.array([[one, 0xBF80, (127 + exponent) << 7] + [0] * 13])
        a3 = np.array([[one] * 3 + [0] * 13])
        assert mma_native.multiply(a3, b, None, "bf16", "bf16")[0, 0] == expected
    # 1 + 2**-24 is cut to 1, and so is its negative: toward zero, not down.
    b = np.array([[one, tiny] + [0] * 14])
    assert mma_native.multiply(a, b, None, "bf16", "bf16")[0, 0] == 0x3F800000
    assert mma_native.multiply(a, b ^ 0x8000, None, "bf16", "bf16")[0, 0] == 0xBF800000
    # -0 + -0 is +0; infinity times zero is the one NaN.
    zero = np.zeros((1, 1), np.uint32)
    assert mma_native.multiply(a * 0, b, zero | 0x80000000, "bf16", "bf16")[0, 0] == 0
    assert mma_native.multiply(a * 0, b | 0x7F80, zero, "bf16", "bf16")[0, 0] == 0x7FFFFFFF


# ---------------------------------------------------------------- descriptors and layouts

LAYOUT_TYPES = ("bf16", "tf32", "e4m3")


def layout_case(mode: str, element: str, mn_major: bool, rows: int, start: int):
    """Strides as CuTe's tile_to_shape makes them, widened by one unit so that a mix-up of the two shows."""
    size = mma_native.CONTAINER_BITS.get(element, 8) // 8
    width = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_32B": 8}[mode]
    atom_k = 4 if mode == "128B_32B" else 8
    if not mn_major:
        return start, 16 * rows + 48, 8 * 16 * width + 1024 * (mode != "none")
    atom = width * 16 * atom_k
    groups = -(-rows * size // (16 * width))
    if mode == "none":  # SBO between groups along MN, LBO between groups of eight K
        return start, groups * 128 + 16, 128
    return start, atom, atom * groups + 1024


def layout_cases():
    for mode in mma_model.SWIZZLES:
        for element in LAYOUT_TYPES:
            if mode != "128B_32B":  # 32-byte atoms exist for MN-major operands only
                yield from ((mode, False, rows, element) for rows in (8, 64, 256))
            if (element == "tf32") == (mode == "128B_32B"):  # tf32 is transposed with them, the other types never
                yield from ((mode, True, rows, element) for rows in (16, 64, 256))


@pytest.mark.parametrize(("mode", "mn_major", "rows", "element"), list(layout_cases()))
def test_canonical_layouts(mode, mn_major, rows, element):
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 1 << 17, dtype=np.uint8)
    bits = mma_native.CONTAINER_BITS.get(element, 8)
    for start in (0x400, 0x1000, 0x1420 if not mn_major else 0x2400):  # the last: a K step inside an atom
        begin, lbo, sbo = layout_case(mode, element, mn_major, rows, start)
        where = mma_model.canonical_addresses(begin, lbo, sbo, mode, mn_major=mn_major, rows=rows, element_bits=bits)
        assert len(np.unique(where)) == where.size, "the test's own layout folds onto itself"
        descriptor = mma_model.shared_descriptor(begin, lbo, sbo, mode)
        got = mma_native.gather(descriptor, element, mn_major=mn_major, rows=rows, shared=shared)
        values = shared[where[..., None] + np.arange(bits // 8)].view(mma_native.container_dtype(element))[..., 0]
        assert (got == values).all()


def test_base_offset_moves_the_pattern():
    """A pattern that begins at an odd multiple of 128 bytes, read with its base offset, is the aligned one moved."""
    rng = np.random.default_rng(5)
    tile = rng.integers(0, 256, 4096, dtype=np.uint8)
    aligned, moved = np.zeros(1 << 15, np.uint8), np.zeros(1 << 15, np.uint8)
    aligned[0x1000:0x2000], moved[0x1180:0x2180] = tile, tile
    plain = mma_model.shared_descriptor(0x1000, 16, 1024, "128B")
    shifted = mma_model.shared_descriptor(0x1180, 16, 1024, "128B", base_offset=3)
    read = lambda d, s: mma_native.gather(d, "bf16", mn_major=False, rows=32, shared=s)  # noqa: E731
    assert (read(plain, aligned) == read(shifted, moved)).all()


@pytest.mark.parametrize(("element", "bits"), [("e2m1", 4), ("e2m3", 6), ("e3m2", 6)])
def test_types_below_8_bits_are_packed_in_units_of_16(element, bits):
    rng = np.random.default_rng(6)
    values = rng.integers(0, 2**bits, (8, 32))
    shared = rng.integers(0, 256, 8192, dtype=np.uint8)  # padding is noise
    for row in range(8):
        for unit in range(2):
            word = sum(int(v) << (i * bits) for i, v in enumerate(values[row, unit * 16 : unit * 16 + 16]))
            at = 1024 + row * 16 + unit * 512
            shared[at : at + 2 * bits] = np.frombuffer(word.to_bytes(2 * bits, "little"), np.uint8)
    descriptor = mma_model.shared_descriptor(1024, 512, 128, "none")
    assert (mma_native.gather(descriptor, element, mn_major=False, rows=8, shared=shared) == values).all()


@pytest.mark.parametrize(
    ("layout", "m", "group", "ws", "rows"),
    [("A", 256, 2, False, 128), ("B", 128, 2, False, 64), ("D", 128, 1, False, 128), ("D", 128, 1, True, 128),
     ("E", 64, 1, True, 64), ("F", 64, 1, False, 64), ("G", 32, 1, True, 32)],
)  # fmt: skip
def test_accumulator_layouts(layout, m, group, ws, rows):
    n = 64
    bits = mma_model.instruction_descriptor(m, n, "bf16")
    # CuTe layouts (lane, column) of the PTX ISA's figures.
    lane = {
        "B": mma_model.layout_offsets((64, (n // 2, 2)), (1, (0, 64))),
        "E": mma_model.layout_offsets((64, (n // 2, 2)), (1, (0, 64))),
        "F": mma_model.layout_offsets(((16, 4), n), ((1, 32), 0)),
        "G": mma_model.layout_offsets((32, (n // 4, 4)), (1, (0, 32))),
    }.get(layout, mma_model.layout_offsets((128, n), (1, 0)))
    column = np.arange(n) % {"B": n // 2, "E": n // 2, "G": n // 4}.get(layout, n)
    got = mma_native.place(bits, "f16", rows=rows, n=n, cta_group=group, ws=ws)
    assert (got[..., 0] == lane).all()
    assert (got[..., 1] == column).all()
    described = mma_native.instruction(bits, "f16", cta_group=group, ws=ws)
    assert (described.layout, described.columns) == (layout, column.max() + 1)
    if layout == "F":
        assert (mma_native.place(bits, "f16", rows=rows, n=n, lane=16)[..., 0] == lane + 16).all()
    else:
        with pytest.raises(mma_native.RefusedError, match=r"descriptor: .*begins in lane 16"):
            mma_native.place(bits, "f16", rows=rows, n=n, cta_group=group, ws=ws, lane=16)


def test_instruction_descriptor_fields():
    bits = mma_model.instruction_descriptor(
        128, 96, "e4m3", "e5m2", "f16", mn_major_b=True, negate_a=True, mn_major_a=False
    )
    d = mma_native.instruction(bits, "f8f6f4")
    assert (d.a, d.b, d.d, d.m, d.n, d.k) == ("e4m3", "e5m2", "f16", 128, 96, 32)
    assert (d.negate_a, d.negate_b, d.mn_major_a, d.mn_major_b) == (True, False, False, True)


ILLEGAL = [
    # what is wrong, kind, descriptor, cta_group, ws, part of the message
    ("M of the other group", "f16", mma_model.instruction_descriptor(256, 64, "bf16"), 1, False, "M = 256"),
    ("M too small", "f16", mma_model.instruction_descriptor(32, 64, "bf16"), 1, False, "M = 32"),
    ("M of one CTA", "f16", mma_model.instruction_descriptor(64, 64, "bf16"), 2, False, "M = 64"),
    ("M of .ws", "f16", mma_model.instruction_descriptor(256, 64, "bf16"), 1, True, "M = 256"),
    ("N zero", "f16", mma_model.instruction_descriptor(128, 0, "bf16"), 1, False, "N = 0"),
    ("N too large", "f16", mma_model.instruction_descriptor(128, 264, "bf16"), 1, False, "N = 264"),
    ("N odd for two CTAs", "f16", mma_model.instruction_descriptor(256, 24, "bf16"), 2, False, "N = 24"),
    ("N of .ws", "f16", mma_model.instruction_descriptor(64, 96, "bf16"), 1, True, "N = 96"),
    ("N of i8", "i8", mma_model.instruction_descriptor(128, 40, "u8", "u8", "s32"), 1, False, "N = 40"),
    ("N of 8-bit B", "f8f6f4", mma_model.instruction_descriptor(128, 24, "e4m3", mn_major_b=True), 1, False, "N = 24"),
    ("type of another kind", "f16", mma_model.instruction_descriptor(128, 64, "tf32"), 1, False, "atype = 2"),
    ("no such type", "f8f6f4", mma_model.instruction_descriptor(128, 64, "e4m3") | 2 << 10, 1, False, "btype = 2"),
    ("f16 D with bf16", "f16", mma_model.instruction_descriptor(128, 64, "bf16", d_type="f16"), 1, False, "dtype = 0"),
    ("f16 D with tf32", "tf32", mma_model.instruction_descriptor(128, 64, "tf32", d_type="f16"), 1, False, "dtype = 0"),
    ("s32 D with floats", "f16", mma_model.instruction_descriptor(128, 64, "f16", d_type="s32"), 1, False, "dtype = 2"),
    ("sparse", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 4, 1, False, "sparsity"),
    ("saturating floats", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 8, 1, False, "bits 3-3"),
    ("reserved bit 6", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 1 << 6, 1, False, "bits 6-6"),
    ("reserved bit 23", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 1 << 23, 1, False, "bits 23-23"),
    ("reserved bit 29", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 1 << 29, 1, False, "bits 29-29"),
    ("shift without .ws", "f16", mma_model.instruction_descriptor(128, 64, "f16") | 1 << 30, 1, False, "bits 30-31"),
    ("negated s8", "i8", mma_model.instruction_descriptor(128, 64, "s8", d_type="s32") | 3 << 13, 1, False, "bits 13"),
]  # fmt: skip


@pytest.mark.parametrize("case", ILLEGAL, ids=[c[0].replace(" ", "_") for c in ILLEGAL])
def test_illegal_instruction_descriptors(case):
    _, kind, bits, group, ws, message = case
    with pytest.raises(mma_native.RefusedError, match=f"descriptor: .*{message}"):
        mma_native.instruction(bits, kind, cta_group=group, ws=ws)


def gather_once(descriptor: int, element: str = "bf16", mn_major: bool = False):
    mma_native.gather(descriptor, element, mn_major=mn_major, rows=64, shared=np.zeros(1 << 18, np.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d & ~(7 << 46), "bits 46-48"),
        (lambda d: d | 2 << 46, "bits 46-48"),
        (lambda d: d | 1 << 53, "bits 53-60"),
        (lambda d: d | 1 << 14, "bits 14-15"),
        (lambda d: d | 1 << 31, "bits 30-31"),
        (lambda d: d ^ 1 << 61, "swizzle mode 3"),
        (lambda d: d & ~(7 << 61) | 2 << 49, "base offset 2 without"),
    ],
)
def test_illegal_shared_descriptors(change, message):
    good = mma_model.shared_descriptor(0x400, 16, 1024, "128B")
    gather_once(good)
    with pytest.raises(mma_native.RefusedError, match=f"descriptor: .*{message}"):
        gather_once(change(good))


def test_major_ness_type_and_swizzle_must_go_together():
    swizzled, atom32 = (mma_model.shared_descriptor(0x400, 1024, 4096, m) for m in ("128B", "128B_32B"))
    with pytest.raises(mma_native.RefusedError, match=r"descriptor: .*tf32 is transposed"):
        gather_once(swizzled, "tf32", mn_major=True)
    with pytest.raises(mma_native.RefusedError, match=r"descriptor: .*bf16 is transposed"):
        gather_once(atom32, "bf16", mn_major=True)
    with pytest.raises(mma_native.RefusedError, match=r"descriptor: .*e2m1 cannot be transposed"):
        gather_once(swizzled, "e2m1", mn_major=True)
    with pytest.raises(mma_native.RefusedError, match=r"unsupported: .*bit 52"):
        gather_once(swizzled | 1 << 52)


def test_the_vector_path_is_what_the_tests_above_ran():
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo to compare with")
    assert mma_native.has_vector_path() == (" avx2 " in cpuinfo.read_text())
