"""Approximation instructions: error against double precision, special values, and what an H200 gave."""

import math

import ml_dtypes
import numpy as np
import pytest

from emulator.lane_kernels import apply

COUNT = 4096
FUNCTIONS = {
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "rcp.approx": lambda x: 1.0 / x,
    "rsqrt.approx": lambda x: 1.0 / np.sqrt(x),
    "sqrt.approx": np.sqrt,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
    "tanh.approx": np.tanh,
}
SUBNORMAL = np.float32(1e-40)


def bits(values) -> np.ndarray:
    values = np.asarray(values, np.float32).ravel()
    return np.resize(values, -(-len(values) // 128) * 128).view(np.uint32)


def arguments(name: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    if name.startswith("ex2"):
        return np.concatenate([rng.uniform(-150, 129, COUNT // 2), rng.uniform(-1, 0, COUNT // 2)]).astype(np.float32)
    if name[:3] in ("sin", "cos", "tan"):
        return rng.uniform(-8, 8, COUNT).astype(np.float32)
    return np.exp2(rng.uniform(-148, 128, COUNT)).astype(np.float32)


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        exponent = np.maximum(
            np.floor(np.log2(np.abs(exact), where=exact != 0, out=np.full(exact.shape, -149.0))), -126
        )
    return np.abs(got.astype(np.float64) - exact) / np.exp2(exponent - 23)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error(name: str) -> None:
    x = arguments(name)
    got = apply(f"{name}.f32 %z, %a;", bits(x), output=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        exact = FUNCTIONS[name](x.astype(np.float64))
    finite = np.abs(exact) < 3.4e38
    assert np.isinf(got[~finite]).all()
    error = ulps(got[finite], exact[finite]).max()
    if name == "tanh.approx":
        assert 2**11 < error < 2**13  # as wrong as the ISA allows, 2**-11
    else:
        assert error <= 0.51


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flushing(name: str) -> None:
    if name == "tanh.approx":
        pytest.skip("tanh has no .ftz")
    x = np.concatenate(
        [arguments(name), np.exp2(np.random.default_rng(2).uniform(-149, -120, COUNT)).astype(np.float32)]
    )
    got = apply(f"{name}.ftz.f32 %z, %a;", bits(x), output=np.uint32).view(np.float32)
    tiny = np.float32(2.0**-126)
    assert (np.abs(got[got != 0]) >= tiny).all()
    x = np.where(np.abs(x) < tiny, np.copysign(0, x), x)
    plain = apply(f"{name}.f32 %z, %a;", bits(x), output=np.uint32).view(np.float32)
    np.testing.assert_array_equal(got, np.where(np.abs(plain) < tiny, np.copysign(0, plain), plain))


SPECIAL_CASES = [
    # PTX ISA tables, and measured on an H200
    ("ex2.approx.f32", [-math.inf, -0.0, 0.0, math.inf, -149.0, -3.0], [0.0, 1.0, 1.0, math.inf, 2.0**-149, 0.125]),
    ("ex2.approx.ftz.f32", [-126.5, -126.0, 128.0], [0.0, 2.0**-126, math.inf]),
    ("lg2.approx.ftz.f32", [0.0, -0.0, SUBNORMAL, 8.0, math.inf], [-math.inf, -math.inf, -math.inf, 3.0, math.inf]),
    ("rcp.approx.ftz.f32", [0.0, -0.0, SUBNORMAL, -math.inf], [math.inf, -math.inf, math.inf, -0.0]),
    ("rsqrt.approx.f32", [0.0, -0.0, math.inf], [math.inf, -math.inf, 0.0]),
    ("sqrt.approx.f32", [0.0, -0.0, math.inf], [0.0, -0.0, math.inf]),
    ("sin.approx.f32", [0.0, -0.0], [0.0, -0.0]),
    ("cos.approx.f32", [0.0, -0.0], [1.0, 1.0]),
    ("tanh.approx.f32", [-math.inf, -0.0, 0.0, math.inf, SUBNORMAL], [-1.0, -0.0, 0.0, 1.0, SUBNORMAL]),
]


@pytest.mark.parametrize(("name", "x", "want"), SPECIAL_CASES, ids=[case[0] for case in SPECIAL_CASES])
def test_special_values(name: str, x: list[float], want: list[float]) -> None:
    got = apply(f"{name} %z, %a;", bits(x), output=np.uint32)[: len(x)]
    np.testing.assert_array_equal(got, np.array(want, np.float32).view(np.uint32))


INVALID = [
    ("lg2.approx", -1.0),
    ("rsqrt.approx", -2.0),
    ("sqrt.approx", -1.0),
    ("sin.approx", math.inf),
    ("cos.approx", -math.inf),
]


@pytest.mark.parametrize(("name", "x"), [*((name, math.nan) for name in FUNCTIONS), *INVALID])
def test_nan(name: str, x: float) -> None:
    assert (apply(f"{name}.f32 %z, %a;", bits([x]), output=np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize("kind", ["approx", "approx.ftz", "full"])
def test_division(kind: str) -> None:
    rng = np.random.default_rng(5)
    a = (rng.standard_normal(COUNT) * np.exp2(rng.integers(-60, 60, COUNT))).astype(np.float32)
    b = (rng.standard_normal(COUNT) * np.exp2(rng.integers(-60, 60, COUNT))).astype(np.float32)
    got = apply(f"div.{kind}.f32 %z, %a, %b;", bits(a), bits(b), output=np.uint32).view(np.float32)
    assert ulps(got, a.astype(np.float64) / b.astype(np.float64)).max() <= 2


def test_approximate_division_by_huge_numbers() -> None:
    b = bits([2.0**127, -(2.0**127), 2.0**127, 2.0**126])
    a = bits([1.0, 1.0, math.inf, 2.0**126])
    got = apply("div.approx.f32 %z, %a, %b;", a, b, output=np.uint32)[:4]
    np.testing.assert_array_equal(got, [0, 0x80000000, 0x7FFFFFFF, 0x3F800000])
    got = apply("div.full.f32 %z, %a, %b;", a, b, output=np.uint32)[:4]
    np.testing.assert_array_equal(got.view(np.float32), [2.0**-127, -(2.0**-127), math.inf, 1.0])


HALF_FORMS = [
    ("ex2.approx.f16", np.float16),
    ("ex2.approx.ftz.bf16", ml_dtypes.bfloat16),
    ("tanh.approx.f16", np.float16),
    ("tanh.approx.bf16", ml_dtypes.bfloat16),
]


@pytest.mark.parametrize(("name", "dtype"), HALF_FORMS, ids=[f[0] for f in HALF_FORMS])
def test_half_forms(name: str, dtype) -> None:
    x = np.random.default_rng(6).uniform(-8, 8, 1024).astype(dtype)
    function = np.exp2 if name.startswith("ex2") else np.tanh
    want = function(x.astype(np.float64)).astype(np.float32).astype(dtype)
    got = apply(f"{name} %z, %a;", x.view(np.uint16), output=np.uint16)
    np.testing.assert_array_equal(got, want.view(np.uint16))
    pairs = np.ascontiguousarray(x).view(np.uint32)
    packed = apply(f"{name}x2 %z, %a;", pairs, output=np.uint32)
    np.testing.assert_array_equal(packed.view(np.uint16), want.view(np.uint16))
