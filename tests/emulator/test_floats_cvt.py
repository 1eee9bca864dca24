"""cvt in its many forms: against the exact model, ml_dtypes and plain integer arithmetic."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator import float_model as model
from emulator.lane_kernels import apply, elementwise_ptx
from emulator.test_floats_arith import COUNT, assert_same, pack

F64 = model.Format(11, 52, 0xFFF8000000000000)
FORMS = {"f16": model.F16, "bf16": model.BF16, "f32": model.F32, "f64": F64}
DTYPES = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
SMALL = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 8),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5, 8),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0, 8),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 4),
}
NAN_OF_SMALL = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x07}


def samples(kind: str, seed: int) -> np.ndarray:
    return model.samples(FORMS[kind], COUNT, seed).astype(DTYPES[kind])


def converted(bits: int, source: str, target: str, mode: str) -> int:
    value = model.decode(bits, FORMS[source])
    form = FORMS[target]
    if math.isnan(value) and (source, target) == ("f64", "f32"):  # keeps its payload
        return bits >> 32 & 0x80000000 | 0x7FC00000 | bits >> 29 & 0x7FFFFF
    if not math.isfinite(value):
        return model.special(value, form)
    return model.round_exact(Fraction(value), form, mode, int(math.copysign(1, value) < 0))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16"), ("f16", "bf16"), ("bf16", "f16")],
)
def test_narrowing(source: str, target: str, mode: str) -> None:
    a = samples(source, 1)
    if source == "f64":  # most random doubles are far outside the smaller ranges
        near = np.random.default_rng(2).standard_normal(COUNT) * 10.0 ** np.random.default_rng(3).integers(-8, 6, COUNT)
        a[::2] = near.view(np.uint64)[::2]
    got = apply(f"cvt.{mode}.{target}.{source} %z, %a;", a, output=DTYPES[target])
    assert_same(got, [converted(int(x), source, target, mode) for x in a], (a,))


@pytest.mark.parametrize(("source", "target"), [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64")])
def test_widening_is_exact(source: str, target: str) -> None:
    a = samples(source, 1)
    finite = np.array([math.isfinite(model.decode(int(x), FORMS[source])) for x in a])
    got = apply(f"cvt.{target}.{source} %z, %a;", a, output=DTYPES[target])
    want = np.array([converted(int(x), source, target, "rn") for x in a], DTYPES[target])
    assert_same(got[finite], want[finite], (a[finite],))
    if (source, target) == ("f32", "f64"):  # NaNs become quiet and keep their payload
        is_nan = np.isnan(a.view(np.float32))
        kept = [(int(x) >> 31) << 63 | 0x7FF8 << 48 | (int(x) & 0x7FFFFF) << 29 for x in a[is_nan]]
        assert_same(got[is_nan], kept)
    values = np.array([model.decode(int(x), FORMS[target]) for x in got])
    np.testing.assert_array_equal(values, [model.decode(int(x), FORMS[source]) for x in a])


@pytest.mark.parametrize("modifiers", ["relu", "satfinite", "relu.satfinite"])
@pytest.mark.parametrize("target", ["f16", "bf16"])
def test_f32_to_half_modifiers(target: str, modifiers: str) -> None:
    a, form = samples("f32", 4), FORMS[target]
    a[:8] = [0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FF000, 0x80000000, 0x7FC00001, 0xFFC00000]
    got = apply(f"cvt.rn.{modifiers}.{target}.f32 %z, %a;", a, output=np.uint16)
    want = []
    for x in map(int, a):
        y = converted(x, "f32", target, "rn")
        if "satfinite" in modifiers and y & 0x7FFF == form.infinity:
            y -= 1
        want.append(0 if "relu" in modifiers and y & 0x8000 else y)
    assert_same(got, want, (a,))


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("target", ["f16x2", "bf16x2"])
def test_pairs_put_the_first_operand_high(target: str, mode: str) -> None:
    a, b = samples("f32", 5), samples("f32", 6)
    got = apply(f"cvt.{mode}.{target}.f32 %z, %a, %b;", a, b, output=np.uint32)
    kind = target[:-2]
    assert_same((got >> 16).astype(np.uint16), [converted(int(x), "f32", kind, mode) for x in a], (a,))
    assert_same((got & 0xFFFF).astype(np.uint16), [converted(int(x), "f32", kind, mode) for x in b], (b,))


def test_bf16_pairs_measured_on_h200() -> None:
    """Ties go to even."""
    one = np.full(128, 0x3F808000, np.uint32)  # 1 + 2^-8
    odd = np.full(128, 0x3F818000, np.uint32)
    assert (apply("cvt.rn.bf16x2.f32 %z, %a, %b;", odd, one, output=np.uint32) == 0x3F823F80).all()


def small_bits(values: np.ndarray, name: str, relu: bool) -> np.ndarray:
    """Saturated conversion by ml_dtypes, NaN and signs by PTX."""
    dtype, largest, _ = SMALL[name]
    clipped = np.clip(np.nan_to_num(values, nan=0.0), -largest, largest)
    bits = clipped.astype(np.float32).astype(dtype).view(np.uint8).astype(np.uint32)
    sign = {"e4m3": 0x80, "e5m2": 0x80, "e2m3": 0x20, "e3m2": 0x20, "e2m1": 0x08}[name]
    if relu:
        bits = np.where(bits & sign, 0, bits)
    return np.where(np.isnan(values), NAN_OF_SMALL[name], bits).astype(np.uint32)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_small_formats(name: str, relu: bool) -> None:
    rng = np.random.default_rng(7)
    _, largest, stride = SMALL[name]
    scale = largest * 2.0 ** rng.integers(-12, 2, (2, COUNT))
    values = (rng.standard_normal((2, COUNT)) * scale).astype(np.float32)
    values[:, :6] = [math.nan, math.inf, -math.inf, 0.0, -0.0, -largest]
    grid = np.arange(256).astype(np.uint8)  # every tie between neighbours
    exact = np.sort(np.nan_to_num(grid.view(ml_dtypes.float8_e4m3fn).astype(np.float32)))
    values[0, 100:355] = (exact[1:] + exact[:-1]) / 2
    a, b = values.view(np.uint32)
    modifier = ".relu" * relu
    if stride == 4:  # the pair is a byte: read it back through a wider register
        body = f"{{ .reg .b8 t; cvt.rn.satfinite{modifier}.e2m1x2.f32 t, %a, %b; cvt.u32.u8 %z, t; }}"
    else:
        body = f"{{ .reg .b16 t; cvt.rn.satfinite{modifier}.{name}x2.f32 t, %a, %b; cvt.u32.u16 %z, t; }}"
    got = apply(body, a, b, output=np.uint32)
    want = small_bits(values[0], name, relu) << stride | small_bits(values[1], name, relu)
    assert_same(got, want, (a, b))


@pytest.mark.parametrize("name", SMALL)
def test_small_formats_to_f16_and_back(name: str) -> None:
    dtype, _, stride = SMALL[name]
    count = 256 if stride == 8 else 16
    if name in ("e2m3", "e3m2"):
        count = 64
    one = np.arange(count, dtype=np.uint32)
    low, high = (x.ravel() for x in np.meshgrid(one, one[::-1] if count < 256 else one[::16]))
    pairs = (high << stride | low).astype(np.uint16)
    pairs = np.resize(pairs, -(-len(pairs) // 128) * 128)
    load = "{ .reg .b8 t; cvt.u8.u16 t, %a; " if stride == 4 else "{ .reg .b16 t; mov.b16 t, %a; "
    got = apply(load + f"cvt.rn.f16x2.{name}x2 %z, t; }}", pairs, output=np.uint32)

    def value(bits: np.ndarray) -> np.ndarray:
        f16 = bits.astype(np.uint8).view(dtype).astype(np.float32).astype(np.float16)
        return np.where(np.isnan(f16), np.uint16(0x7FFF), f16.view(np.uint16))

    mask = (1 << stride) - 1
    assert_same((got & 0xFFFF).astype(np.uint16), value(pairs & mask))
    assert_same((got >> 16).astype(np.uint16), value(pairs >> stride & mask))
    finite = ((got & 0x7C00) != 0x7C00) & ((got >> 16 & 0x7C00) != 0x7C00)
    back = apply(
        f"{{ .reg .b{stride * 2} t; cvt.rn.satfinite.{name}x2.f16x2 t, %a; cvt.u16.u{stride * 2} %z, t; }}",
        got,
        output=np.uint16,
    )
    assert_same(back[finite], pairs[finite])


@pytest.mark.parametrize("mode", ["rn", "rz", "rna"])
def test_tf32(mode: str) -> None:
    a = samples("f32", 8)
    got = apply(f"cvt.{mode}.tf32.f32 %z, %a;", a, output=np.uint32)
    want = []
    for x in a:
        value = model.decode(int(x), model.F32)
        if math.isnan(value):  # as recorded on an H200
            want.append(int(x) & 0xFFFFE000 if mode == "rna" else 0x7FFFE000)
        elif math.isinf(value):
            want.append(int(x))
        else:
            want.append(model.round_exact(Fraction(value), model.TF32, mode, int(x) >> 31) << 13)
    assert_same(got, want, (a,))


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_ue8m0(mode: str) -> None:
    a = samples("f32", 9)
    b = np.full_like(a, 0x3F800000)
    got = apply(
        f"{{ .reg .b16 t; cvt.{mode}.satfinite.ue8m0x2.f32 t, %a, %b; cvt.u32.u16 %z, t; }}", a, b, output=np.uint32
    )
    assert (got & 0xFF == 127).all()
    for x, code in zip(a.view(np.float32), got >> 8, strict=True):
        size = abs(float(x))
        if math.isnan(size):
            assert code == 0xFF
        elif size >= 2.0**127:
            assert code == 0xFE
        elif size <= 2.0**-127:
            assert code == 0
        else:
            power = math.floor(math.log2(size)) if mode == "rz" else math.ceil(math.log2(size))
            assert code == power + 127
    codes = np.arange(256, dtype=np.uint16)
    back = apply("cvt.rn.bf16x2.ue8m0x2 %z, %a;", codes | codes[::-1] << np.uint16(8), output=np.uint32)
    want = codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got_values = (back << 16).view(np.float32)
    np.testing.assert_array_equal(got_values, want)


# ---- integers ------------------------------------------------------------------------------------

INTEGERS = {f"{s}{b}": (s == "s", b) for s in "us" for b in (8, 16, 32, 64)}


def bounds(name: str) -> tuple[int, int]:
    signed, bits = INTEGERS[name]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u64", "s16", "u8"])
@pytest.mark.parametrize("source", ["f32", "f16", "f64"])
def test_float_to_integer(source: str, target: str, mode: str) -> None:
    a = samples(source, 11)
    ties = np.arange(-20, 20) / 4
    dtype = {"f32": np.float32, "f16": np.float16, "f64": np.float64}[source]
    a[: len(ties)] = ties.astype(dtype).view(DTYPES[source])
    signed, bits = INTEGERS[target]
    out = {8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    got = apply(f"cvt.{mode}.{target}.{source} %z, %a;", a, output=out)
    low, high = bounds(target)
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    width = np.dtype(out).itemsize * 8
    want = []
    for x in a:
        value = model.decode(int(x), FORMS[source])
        if math.isnan(value):
            result = 0 if source != "f64" and bits != 64 else (-(1 << bits - 1) if signed else 1 << bits - 1)
        elif math.isinf(value):
            result = high if value > 0 else low
        else:
            result = min(max(rounding(value), low), high)
        want.append(result & (1 << width) - 1)
    assert_same(got, want, (a,))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integer_to_float(source: str, target: str, mode: str) -> None:
    signed, bits = INTEGERS[source]
    rng = np.random.default_rng(12)
    dtype = np.uint64 if bits == 64 else np.uint32
    a = rng.integers(0, 1 << bits, COUNT, dtype=dtype, endpoint=False) >> rng.integers(0, bits, COUNT).astype(dtype)
    a[::3] = (~a[::3] + dtype(1)) if signed else a[::3]
    a[:3] = [0, (1 << bits) - 1, 1 << bits - 1]
    got = apply(f"cvt.{mode}.{target}.{source} %z, %a;", a, output=DTYPES[target])
    values = [int(x) - (1 << bits) if signed and int(x) >> (bits - 1) else int(x) for x in a]
    assert_same(got, [model.round_exact(Fraction(v), FORMS[target], mode) for v in values], (a,))


@pytest.mark.parametrize("sat", [False, True])
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(source: str, target: str, sat: bool) -> None:
    """Wraps or clamps, then fills a wider destination register by the sign of the destination type."""
    from_signed, from_bits = INTEGERS[source]
    to_signed, to_bits = INTEGERS[target]
    rng = np.random.default_rng(13)
    # The source register may be wider than its type: its upper bits must not matter.
    dtype = {8: np.uint32, 16: np.uint16, 32: np.uint32, 64: np.uint64}[from_bits]
    a = rng.integers(0, np.iinfo(dtype).max, 256, dtype=dtype, endpoint=True) >> rng.integers(0, 8, 256).astype(dtype)
    out = {8: np.uint32, 16: np.uint32, 32: np.uint32, 64: np.uint64}[to_bits]
    got = apply(f"cvt{'.sat' * sat}.{target}.{source} %z, %a;", a, output=out)
    low, high = bounds(target)
    width = np.dtype(out).itemsize * 8
    want = []
    for x in map(int, a):
        value = x & (1 << from_bits) - 1
        if from_signed and value >> (from_bits - 1):
            value -= 1 << from_bits
        if sat:
            value = min(max(value, low), high)
        value &= (1 << to_bits) - 1
        if to_signed and value >> (to_bits - 1):
            value -= 1 << to_bits
        want.append(value & (1 << width) - 1)
    assert_same(got, want, (a,))


@pytest.mark.parametrize(
    ("modifiers", "function"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_rounding_to_integral_keeps_the_type(modifiers: str, function) -> None:
    a = np.random.default_rng(14).normal(scale=100, size=COUNT).astype(np.float32)
    a[:6] = [-0.25, 0.5, 1.5, 2.5, 1e30, -0.0]
    got = apply(f"cvt.{modifiers}.f32.f32 %z, %a;", a.view(np.uint32), output=np.uint32)
    assert_same(got, function(a).view(np.uint32))


def test_saturation_and_flushing_of_f32() -> None:
    a = samples("f32", 15)
    assert_same(
        apply("cvt.sat.f32.f32 %z, %a;", a, output=np.uint32), [model.saturate(int(x), model.F32) for x in a], (a,)
    )
    got = apply("cvt.ftz.f32.f32 %z, %a;", a, output=np.uint32)
    want = [model.F32.nan if math.isnan(model.decode(int(x), model.F32)) else model.flush(int(x), model.F32) for x in a]
    assert_same(got, want, (a,))


@pytest.mark.parametrize(
    "instruction",
    [
        "cvt.f16.f32 %z, %a",  # no rounding
        "cvt.s32.f32 %z, %a",
        "cvt.rn.f32.f16 %z, %a",  # exact
        "cvt.rn.s32.f32 %z, %a",
        "cvt.rs.bf16x2.f32 %z, %a, %a, %a",
        "cvt.rn.e4m3x2.f32 %z, %a, %a",  # .satfinite is mandatory
        "cvt.rna.f32.f64 %z, %a",
        "cvt.rn.relu.f32.f64 %z, %a",
    ],
)
def test_unknown_forms_are_refused(instruction: str) -> None:
    text = elementwise_ptx(instruction + ";", [np.dtype(np.uint32)], np.dtype(np.uint32))
    with pytest.raises(emulator.Verdict, match="cvt"):
        emulator.load(text)


def test_pack_helper() -> None:
    assert pack(np.array([1], np.uint16), np.array([2], np.uint16))[0] == 0x20001
