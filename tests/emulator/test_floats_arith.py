"""Float arithmetic instructions against the exact model of float_model.py, bit for bit."""

import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from emulator import float_model as model
from emulator.lane_kernels import apply

COUNT = 1024
ROUNDS = ("rn", "rz", "rm", "rp")
OPERATIONS: dict[str, tuple[Callable[..., int], int]] = {
    "add": (model.add, 2),
    "sub": (model.sub, 2),
    "mul": (model.mul, 2),
    "fma": (model.fma, 3),
}


def f32_samples(number: int) -> list[np.ndarray]:
    return [model.samples(model.F32, COUNT, seed).astype(np.uint32) for seed in range(number)]


def assert_same(got: np.ndarray, want, operands=()) -> None:
    want = np.asarray(want, got.dtype)
    wrong = np.flatnonzero(got != want)
    if len(wrong):
        i = wrong[0]
        shown = ", ".join(hex(int(a[i])) for a in operands)
        raise AssertionError(
            f"{len(wrong)} of {len(got)} differ; operands {shown}: got {int(got[i]):#x}, expected {int(want[i]):#x}"
        )


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    width = low.dtype.itemsize * 8
    wide = {32: np.uint64, 16: np.uint32}[width]
    return low.astype(wide) | high.astype(wide) << wide(width)


@pytest.mark.parametrize("mode", ROUNDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_f32(name: str, mode: str) -> None:
    function, arity = OPERATIONS[name]
    operands = f32_samples(arity)
    sources = ", ".join(f"%{x}" for x in "abc"[:arity])
    got = apply(f"{name}.{mode}.f32 %z, {sources};", *operands, output=np.uint32)
    want = [function(*map(int, row), model.F32, mode) for row in zip(*operands, strict=True)]
    assert_same(got, want, operands)


@pytest.mark.parametrize("name", OPERATIONS)
def test_f32_flushes_subnormals(name: str) -> None:
    function, arity = OPERATIONS[name]
    operands = f32_samples(arity)
    for operand in operands:
        operand[: COUNT // 4] &= 0x80FFFFFF  # many subnormals and small numbers
    sources = ", ".join(f"%{x}" for x in "abc"[:arity])
    got = apply(f"{name}.rn.ftz.f32 %z, {sources};", *operands, output=np.uint32)
    want = [function(*map(int, row), model.F32, "rn", True) for row in zip(*operands, strict=True)]
    assert_same(got, want, operands)


@pytest.mark.parametrize("mode", ROUNDS)
def test_flushing_next_to_the_smallest_normal_number(mode: str) -> None:
    """Products that lie within an ulp of 2^-126, on both sides: which are flushed depends on the rounding mode."""
    rng = np.random.default_rng(21)
    near_one = np.uint32(0x3F800000) + rng.integers(-6, 7, COUNT).astype(np.int32).view(np.uint32)
    smallest = np.uint32(0x00800000) + rng.integers(0, 7, COUNT).astype(np.uint32)
    signs = rng.integers(0, 2, COUNT).astype(np.uint32) << np.uint32(31)
    a, b = smallest | signs, near_one
    got = apply(f"mul.{mode}.ftz.f32 %z, %a, %b;", a, b, output=np.uint32)
    want = [model.mul(int(x), int(y), model.F32, mode, True) for x, y in zip(a, b, strict=True)]
    assert_same(got, want, (a, b))
    flushed = (got & 0x7FFFFFFF) == 0
    assert flushed.any()
    assert not flushed.all()
    c = rng.choice(np.array([1, 0x80000001, 0x33800000, 0], np.uint32), COUNT)  # flushed themselves, or not
    got = apply(f"fma.{mode}.ftz.f32 %z, %a, %b, %c;", a, b, c, output=np.uint32)
    want = [model.fma(*map(int, row), form=model.F32, mode=mode, ftz=True) for row in zip(a, b, c, strict=True)]
    assert_same(got, want, (a, b, c))


@pytest.mark.parametrize("modifiers", ["rn.sat", "rm.sat", "rz.ftz.sat"])
def test_f32_saturates(modifiers: str) -> None:
    operands = f32_samples(3)
    got = apply(f"fma.{modifiers}.f32 %z, %a, %b, %c;", *operands, output=np.uint32)
    mode, ftz = modifiers[:2], "ftz" in modifiers
    want = [
        model.saturate(model.fma(*map(int, row), form=model.F32, mode=mode, ftz=ftz), model.F32)
        for row in zip(*operands, strict=True)
    ]
    assert_same(got, want, operands)


@pytest.mark.parametrize("mode", ROUNDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_f32x2(name: str, mode: str) -> None:
    function, arity = OPERATIONS[name]
    low, high = f32_samples(arity), [a[::-1].copy() for a in f32_samples(arity)]
    operands = [pack(a, b) for a, b in zip(low, high, strict=True)]
    sources = ", ".join(f"%{x}" for x in "abc"[:arity])
    got = apply(f"{name}.{mode}.f32x2 %z, {sources};", *operands, output=np.uint64)
    for half, part in ((got & 0xFFFFFFFF, low), (got >> np.uint64(32), high)):
        want = [function(*map(int, row), model.F32, mode) for row in zip(*part, strict=True)]
        assert_same(half.astype(np.uint32), want, part)


def test_masked_lanes_keep_their_value() -> None:
    a, b = f32_samples(2)
    body = """{ .reg .pred p; .reg .b32 one; mov.b32 %z, 0x12345678; and.b32 one, %t, 1; setp.ne.b32 p, one, 0;
    @p add.rn.f32 %z, %a, %b; }"""
    got = apply(body, a, b, output=np.uint32)
    want = [model.add(int(x), int(y), model.F32) for x, y in zip(a, b, strict=True)]
    assert_same(got[1::2], want[1::2])
    assert (got[::2] == 0x12345678).all()


HALVES = {"f16": model.F16, "bf16": model.BF16}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_half(name: str, kind: str, packed: bool) -> None:
    function, arity = OPERATIONS[name]
    form = HALVES[kind]
    parts = [[model.samples(form, COUNT, seed + shift).astype(np.uint16) for seed in range(arity)] for shift in (0, 10)]
    operands = [pack(a, b) for a, b in zip(*parts, strict=True)] if packed else parts[0]
    sources = ", ".join(f"%{x}" for x in "abc"[:arity])
    got = apply(f"{name}.rn.{kind}{'x2' * packed} %z, {sources};", *operands, output=operands[0].dtype)
    for shift, part in zip((0, 16), parts, strict=True):
        if shift and not packed:
            break
        half = (got >> got.dtype.type(shift)).astype(np.uint16)
        want = [function(*map(int, row), form) for row in zip(*part, strict=True)]
        assert_same(half, want, part)


@pytest.mark.parametrize("modifiers", ["ftz", "sat", "relu"])
def test_f16_modifiers(modifiers: str) -> None:
    operands = [model.samples(model.F16, COUNT, seed).astype(np.uint16) for seed in range(3)]
    got = apply(f"fma.rn.{modifiers}.f16 %z, %a, %b, %c;", *operands, output=np.uint16)
    want = [model.fma(*map(int, row), form=model.F16, ftz=modifiers == "ftz") for row in zip(*operands, strict=True)]
    if modifiers == "sat":
        want = [model.saturate(w, model.F16) for w in want]
    if modifiers == "relu":
        want = [0 if w & 0x8000 else w for w in want]
    assert_same(got, want, operands)


def test_fma_oob_forces_zero() -> None:
    a = np.full(128, 0x3C00, np.uint16)
    a[::2] = 0x7FF7  # the fill value of tensor maps
    got = apply("fma.rn.oob.bf16 %z, %a, %b, %b;", a, np.full(128, 0x3F80, np.uint16), output=np.uint16)
    assert (got[::2] == 0).all()
    assert (got[1::2] != 0).all()


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
@pytest.mark.parametrize("mode", ROUNDS)
def test_mixed_precision(name: str, mode: str, kind: str) -> None:
    form = HALVES[kind]
    a, b = (model.samples(form, COUNT, seed).astype(np.uint16) for seed in range(2))
    (c,) = f32_samples(1)
    sources = "%a, %b, %c" if name == "fma" else "%a, %c"
    got = apply(f"{name}.{mode}.f32.{kind} %z, {sources};", a, b, c, output=np.uint32)

    def widen(bits: int) -> int:
        value = np.float32(model.decode(bits, form))
        return int(value.view(np.uint32)) if not math.isnan(value) else model.F32.nan

    one = 0x3F800000
    want = []
    for x, y, z in zip(a, b, c, strict=True):
        if name == "fma":
            want.append(model.fma(widen(int(x)), widen(int(y)), int(z), model.F32, mode))
        else:
            addend = int(z) ^ (0x80000000 if name == "sub" else 0)
            want.append(model.fma(widen(int(x)), one, addend, model.F32, mode))
    assert_same(got, want, (a, b, c))


# ---- min and max ---------------------------------------------------------------------------------


def choose(values: list[int], form: model.Format, largest: bool, nan: bool) -> int:
    """min or max by the text of the PTX ISA: NaNs ignored unless `nan`, -0 below +0."""
    numbers = [v for v in values if not math.isnan(model.decode(v, form))]
    if not numbers or (nan and len(numbers) < len(values)):
        return form.nan
    key = lambda v: (model.decode(v, form), 0 if v & form.sign else 1)  # noqa: E731
    return max(numbers, key=key) if largest else min(numbers, key=key)


def with_many_specials(form: model.Format, seed: int, dtype) -> np.ndarray:
    rng = np.random.default_rng(seed)
    few = np.array([0, form.sign, form.nan, form.infinity, form.infinity | form.sign, 1, form.sign | 1], np.uint64)
    return np.where(rng.random(COUNT) < 0.5, rng.choice(few, COUNT), model.samples(form, COUNT, seed)).astype(dtype)


@pytest.mark.parametrize("modifiers", ["", ".NaN", ".ftz", ".NaN.xorsign.abs", ".xorsign.abs"])
@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_min_max(kind: str, name: str, modifiers: str) -> None:
    form, dtype = (model.F32, np.uint32) if kind == "f32" else (HALVES[kind], np.uint16)
    if kind == "bf16" and "ftz" in modifiers:
        pytest.skip("PTX has no .ftz for bf16")
    a, b = with_many_specials(form, 1, dtype), with_many_specials(form, 2, dtype)
    got = apply(f"{name}{modifiers}.{kind} %z, %a, %b;", a, b, output=dtype)
    want = []
    for x, y in zip(map(int, a), map(int, b), strict=True):
        u, v = (model.flush(x, form), model.flush(y, form)) if "ftz" in modifiers else (x, y)
        if "abs" in modifiers:
            u, v = u & ~form.sign, v & ~form.sign
        result = choose([u, v], form, name == "max", "NaN" in modifiers)
        if "xorsign" in modifiers and result != form.nan:
            result |= (x ^ y) & form.sign
        want.append(result)
    assert_same(got, want, (a, b))


@pytest.mark.parametrize("modifiers", ["", ".NaN", ".abs", ".ftz.NaN.abs"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_max_of_three(name: str, modifiers: str) -> None:
    operands = [with_many_specials(model.F32, seed, np.uint32) for seed in range(3)]
    got = apply(f"{name}{modifiers}.f32 %z, %a, %b, %c;", *operands, output=np.uint32)
    want = []
    for row in zip(*operands, strict=True):
        values = [int(v) for v in row]
        if "ftz" in modifiers:
            values = [model.flush(v, model.F32) for v in values]
        if "abs" in modifiers:
            values = [v & 0x7FFFFFFF for v in values]
        want.append(choose(values, model.F32, name == "max", "NaN" in modifiers))
    assert_same(got, want, operands)


def test_measured_on_h200() -> None:
    nan, two = np.full(128, 0x7FC00000, np.uint32), np.full(128, 0x40000000, np.uint32)
    assert (apply("max.f32 %z, %a, %b;", nan, two, output=np.uint32) == 0x40000000).all()
    assert (apply("max.NaN.f32 %z, %a, %b;", nan, two, output=np.uint32) == 0x7FFFFFFF).all()


# ---- signs, tests, f64 ---------------------------------------------------------------------------


def test_signs() -> None:
    a, b = f32_samples(2)
    nan = (a & 0x7FFFFFFF) > 0x7F800000
    for ftz in ("", ".ftz"):
        x = np.where((a & 0x7F800000) == 0, a & 0x80000000, a) if ftz else a
        assert_same(apply(f"neg{ftz}.f32 %z, %a;", a, output=np.uint32), np.where(nan, 0x7FFFFFFF, x ^ 0x80000000))
        assert_same(apply(f"abs{ftz}.f32 %z, %a;", a, output=np.uint32), np.where(nan, 0x7FFFFFFF, x & 0x7FFFFFFF))
    assert_same(apply("copysign.f32 %z, %a, %b;", a, b, output=np.uint32), (a & 0x80000000) | (b & 0x7FFFFFFF))
    for kind, infinity in (("f16", 0x7C00), ("bf16", 0x7F80)):
        h = model.samples(HALVES[kind], COUNT, 1).astype(np.uint16)
        nan = (h & 0x7FFF) > infinity
        negative, positive = np.where(nan, 0x7FFF, h ^ 0x8000), np.where(nan, 0x7FFF, h & 0x7FFF)
        assert_same(apply(f"abs.{kind} %z, %a;", h, output=np.uint16), positive)
        pairs = pack(h, h[::-1])
        want = pack(negative.astype(np.uint16), negative[::-1].astype(np.uint16))
        assert_same(apply(f"neg.{kind}x2 %z, %a;", pairs, output=np.uint32), want)
    d = np.random.default_rng(0).integers(0, 2**64, COUNT, dtype=np.uint64)
    assert_same(apply("neg.f64 %z, %a;", d, output=np.uint64), d ^ np.uint64(1 << 63))


@pytest.mark.parametrize("test", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
def test_testp(test: str) -> None:
    a = with_many_specials(model.F32, 5, np.uint32)
    got = apply(f"{{ .reg .pred p; testp.{test}.f32 p, %a; selp.b32 %z, 1, 0, p; }}", a, output=np.uint32)
    x = a.view(np.float32)
    tiny = (a & 0x7F800000) == 0
    want = {
        "finite": np.isfinite(x),
        "infinite": np.isinf(x),
        "number": ~np.isnan(x),
        "notanumber": np.isnan(x),
        "normal": (np.isfinite(x) & ~tiny) | (x == 0),  # zero too, as an H200 says
        "subnormal": tiny & (x != 0),
    }[test]
    assert_same(got, want.astype(np.uint32), (a,))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_f64(name: str) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-5, 5, COUNT) for _ in range(2))
    nearest = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[name]
    bits = [x.view(np.uint64) for x in (a, b)]
    results = {m: apply(f"{name}.{m}.f64 %z, %a, %b;", *bits, output=np.uint64).view(np.float64) for m in ROUNDS}
    np.testing.assert_array_equal(results["rn"], nearest)
    down, up = results["rm"], results["rp"]
    assert (down <= nearest).all()
    assert (up >= nearest).all()
    assert ((up == down) | (np.nextafter(down, np.inf) == up)).all()
    assert (up != down).any()
    np.testing.assert_array_equal(results["rz"], np.where(nearest > 0, down, up))


def test_f64_min_max_and_roots() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal(COUNT), rng.standard_normal(COUNT)
    a[:3], b[:3] = (math.nan, 1.0, 0.0), (2.0, math.nan, -0.0)
    bits = a.view(np.uint64), b.view(np.uint64)
    got = apply("max.f64 %z, %a, %b;", *bits, output=np.uint64).view(np.float64)
    np.testing.assert_array_equal(got, np.fmax(a, b))
    assert not np.signbit(got[2])
    positive = np.abs(a[3:]).repeat(2)[: COUNT - 128].copy()
    got = apply("sqrt.rn.f64 %z, %a;", positive.view(np.uint64), output=np.uint64).view(np.float64)
    np.testing.assert_array_equal(got, np.sqrt(positive))


# ---- division and roots --------------------------------------------------------------------------


def root_model(bits: int, mode: str) -> int:
    value = model.decode(bits, model.F32)
    if math.isnan(value) or value < 0:
        return model.F32.nan
    if value == 0 or math.isinf(value):
        return bits
    # floor(sqrt(value) * 2^k) as an integer, plus a half when the root is irrational: enough digits to round once
    scaled = Fraction(value) * 4**200
    whole = math.isqrt(int(scaled))
    exact = Fraction(2 * whole + (whole * whole != scaled), 2) / 2**200
    return model.round_exact(exact, model.F32, mode)


def quotient_model(a: int, b: int, mode: str) -> int:
    x, y = model.decode(a, model.F32), model.decode(b, model.F32)
    sign = int((a ^ b) & 0x80000000)
    if math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
        return model.F32.nan
    if math.isinf(x) or y == 0:
        return sign | model.F32.infinity
    if math.isinf(y):
        return sign
    return model.round_exact(Fraction(x) / Fraction(y), model.F32, mode, int(sign != 0))


@pytest.mark.parametrize("mode", ROUNDS)
def test_division_and_roots_round_once(mode: str) -> None:
    a, b = f32_samples(2)
    got = apply(f"div.{mode}.f32 %z, %a, %b;", a, b, output=np.uint32)
    assert_same(got, [quotient_model(int(x), int(y), mode) for x, y in zip(a, b, strict=True)], (a, b))
    got = apply(f"rcp.{mode}.f32 %z, %a;", a, output=np.uint32)
    assert_same(got, [quotient_model(0x3F800000, int(x), mode) for x in a], (a,))
    got = apply(f"sqrt.{mode}.f32 %z, %a;", a, output=np.uint32)
    assert_same(got, [root_model(int(x), mode) for x in a], (a,))


def test_half_values_cover_ml_dtypes() -> None:
    """The model's decoding is ml_dtypes' and numpy's, for every pattern."""
    patterns = np.arange(65536, dtype=np.uint16)
    for form, dtype in ((model.F16, np.float16), (model.BF16, ml_dtypes.bfloat16)):
        with np.errstate(invalid="ignore"):
            want = patterns.view(dtype).astype(np.float64)
        got = np.array([model.decode(int(p), form) for p in patterns])
        np.testing.assert_array_equal(got, want)
