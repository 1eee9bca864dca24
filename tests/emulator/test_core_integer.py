"""Integer and logic instructions, comparisons and moves against numpy and Python integers."""

import numpy as np
import pytest

from emulator.lane_kernels import apply

EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF)
COUNT = 512


def words(bits: int, seed: int) -> np.ndarray:
    """Random values of a width, with edges mixed in at places that differ from seed to seed."""
    rng = np.random.default_rng(seed)
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    top = 1 << bits
    edges = [e for e in (*EDGES, top // 2 - 1, top // 2, top - 1, top - 2) if e < top]
    values = [int(v) for v in rng.integers(0, top, COUNT, dtype=np.uint64, endpoint=False)] if bits == 64 else None
    values = values or [int(v) for v in rng.integers(0, top, COUNT)]
    for place in range(0, COUNT, 2):
        values[place] = edges[int(rng.integers(len(edges)))]
    return np.array(values, dtype)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def as_type(value: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(value, bits) if kind[0] == "s" else value & ((1 << bits) - 1)


def trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def check(body: str, arrays: list[np.ndarray], output_bits: int, want) -> None:
    """`want` maps a tuple of unsigned ints to the result's bits."""
    out_type = {16: np.uint16, 32: np.uint32, 64: np.uint64}[output_bits]
    got = apply(body, *arrays, output=out_type)
    expected = [want(*(int(v) for v in row)) & ((1 << output_bits) - 1) for row in zip(*arrays, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, out_type))


KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str, kind: str) -> None:
    bits = int(kind[1:])
    check(
        f"{op}.{kind} %z, %a, %b;",
        [words(bits, 1), words(bits, 2)],
        bits,
        lambda a, b: BINARY[op](as_type(a, kind), as_type(b, kind)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_high_products_and_division(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = (words(bits, seed) for seed in (1, 2, 3))
    check(f"mul.hi.{kind} %z, %a, %b;", [a, b], bits, lambda x, y: as_type(x, kind) * as_type(y, kind) >> bits)
    check(
        f"mad.lo.{kind} %z, %a, %b, %c;",
        [a, b, c],
        bits,
        lambda x, y, w: as_type(x, kind) * as_type(y, kind) + w,
    )
    check(
        f"mad.hi.{kind} %z, %a, %b, %c;",
        [a, b, c],
        bits,
        lambda x, y, w: (as_type(x, kind) * as_type(y, kind) >> bits) + w,
    )
    nonzero = np.where(b == 0, 1, b).astype(b.dtype)
    check(f"div.{kind} %z, %a, %b;", [a, nonzero], bits, lambda x, y: trunc_div(as_type(x, kind), as_type(y, kind)))
    check(
        f"rem.{kind} %z, %a, %b;",
        [a, nonzero],
        bits,
        lambda x, y: as_type(x, kind) - trunc_div(as_type(x, kind), as_type(y, kind)) * as_type(y, kind),
    )
    check(f"sad.{kind} %z, %a, %b, %c;", [a, b, c], bits, lambda x, y, w: w + abs(as_type(x, kind) - as_type(y, kind)))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = words(bits, 1), words(bits, 2), words(2 * bits, 3)
    check(f"mul.wide.{kind} %z, %a, %b;", [a, b], 2 * bits, lambda x, y: as_type(x, kind) * as_type(y, kind))
    check(
        f"mad.wide.{kind} %z, %a, %b, %c;", [a, b, c], 2 * bits, lambda x, y, w: as_type(x, kind) * as_type(y, kind) + w
    )


def clamp32(value: int) -> int:
    return max(-(2**31), min(2**31 - 1, value))


def halves(function, kind: str):
    def both(a: int, b: int) -> int:
        low = function(as_type(a, kind), as_type(b, kind)) & 0xFFFF
        high = function(as_type(a >> 16, kind), as_type(b >> 16, kind)) & 0xFFFF
        return high << 16 | low

    return both


SPECIAL = {
    "add.sat.s32 %z, %a, %b;": lambda a, b: clamp32(signed(a, 32) + signed(b, 32)),
    "sub.sat.s32 %z, %a, %b;": lambda a, b: clamp32(signed(a, 32) - signed(b, 32)),
    "min.relu.s32 %z, %a, %b;": lambda a, b: max(0, min(signed(a, 32), signed(b, 32))),
    "max.relu.s32 %z, %a, %b;": lambda a, b: max(0, signed(a, 32), signed(b, 32)),
    "add.u16x2 %z, %a, %b;": halves(lambda a, b: a + b, "u16"),
    "min.s16x2 %z, %a, %b;": halves(min, "s16"),
    "max.u16x2 %z, %a, %b;": halves(max, "u16"),
    "max.relu.s16x2 %z, %a, %b;": halves(lambda a, b: max(0, a, b), "s16"),
    "mul24.lo.s32 %z, %a, %b;": lambda a, b: signed(a, 24) * signed(b, 24),
    "mul24.hi.u32 %z, %a, %b;": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16,
    "bmsk.clamp.b32 %z, %a, %b;": lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32),
    "bmsk.wrap.b32 %z, %a, %b;": lambda a, b: ((1 << (b & 31)) - 1) << (a & 31),
}


@pytest.mark.parametrize("body", SPECIAL)
def test_special_forms(body: str) -> None:
    check(body, [words(32, 1), words(32, 2)], 32, SPECIAL[body])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits: int) -> None:
    a, b, n = words(bits, 1), words(bits, 2), words(32, 3) % np.uint32(80)
    check(f"and.b{bits} %z, %a, %b;", [a, b], bits, lambda x, y: x & y)
    check(f"or.b{bits} %z, %a, %b;", [a, b], bits, lambda x, y: x | y)
    check(f"xor.b{bits} %z, %a, %b;", [a, b], bits, lambda x, y: x ^ y)
    check(f"not.b{bits} %z, %a;", [a], bits, lambda x: ~x)
    check(f"cnot.b{bits} %z, %a;", [a], bits, lambda x: int(x == 0))
    check(f"shl.b{bits} %z, %a, %b;", [a, n], bits, lambda x, s: x << s)
    check(f"shr.u{bits} %z, %a, %b;", [a, n], bits, lambda x, s: x >> s)
    check(f"shr.s{bits} %z, %a, %b;", [a, n], bits, lambda x, s: signed(x, bits) >> s)
    check(f"neg.s{bits} %z, %a;", [a], bits, lambda x: -signed(x, bits))
    check(f"abs.s{bits} %z, %a;", [a], bits, lambda x: abs(signed(x, bits)))


@pytest.mark.parametrize("table", [0x00, 0xC0, 0x96, 0xE8, 0x1B, 0xFF])
def test_lop3(table: int) -> None:
    def want(a: int, b: int, c: int) -> int:
        return sum(((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1))) & 1) << i for i in range(32))

    arrays = [words(32, 1), words(32, 2), words(32, 3)]
    check(f"lop3.b32 %z, %a, %b, %c, {table};", arrays, 32, want)
    body = (
        f"{{ .reg .pred p, q; setp.ne.b32 q, %a, %a; lop3.or.b32 %z|p, %a, %b, %c, {table}, q; selp.b32 %z, 1, 0, p; }}"
    )
    check(body, arrays, 32, lambda a, b, c: int(want(a, b, c) != 0))


def test_funnel_shifts() -> None:
    arrays = [words(32, 1), words(32, 2), words(32, 3) % np.uint32(70)]

    def left(a: int, b: int, s: int) -> int:
        return (b << 32 | a) << s >> 32

    def right(a: int, b: int, s: int) -> int:
        return (b << 32 | a) >> s

    check("shf.l.clamp.b32 %z, %a, %b, %c;", arrays, 32, lambda a, b, s: left(a, b, min(s, 32)))
    check("shf.l.wrap.b32 %z, %a, %b, %c;", arrays, 32, lambda a, b, s: left(a, b, s & 31))
    check("shf.r.clamp.b32 %z, %a, %b, %c;", arrays, 32, lambda a, b, s: right(a, b, min(s, 32)))
    check("shf.r.wrap.b32 %z, %a, %b, %c;", arrays, 32, lambda a, b, s: right(a, b, s & 31))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_counting_and_fields(bits: int) -> None:
    a, b = words(bits, 1), words(bits, 2)
    at, length = words(32, 3) % np.uint32(72), words(32, 4) % np.uint32(72)
    check(f"popc.b{bits} %z, %a;", [a], 32, lambda x: x.bit_count())
    check(f"clz.b{bits} %z, %a;", [a], 32, lambda x: bits - x.bit_length())
    check(f"brev.b{bits} %z, %a;", [a], bits, lambda x: int(f"{x:0{bits}b}"[::-1], 2))
    check(f"bfind.u{bits} %z, %a;", [a], 32, lambda x: x.bit_length() - 1)

    def bfind_signed(x: int) -> int:
        x = signed(x, bits)
        return (x if x >= 0 else ~x).bit_length() - 1

    check(f"bfind.s{bits} %z, %a;", [a], 32, bfind_signed)
    check(f"bfind.shiftamt.u{bits} %z, %a;", [a], 32, lambda x: bits - x.bit_length() if x else -1)

    def extract(x: int, position: int, size: int) -> int:
        return x >> position & ((1 << size) - 1)

    check(f"bfe.u{bits} %z, %a, %b, %c;", [a, at, length], bits, extract)

    def extract_signed(x: int, position: int, size: int) -> int:
        if size == 0:
            return 0
        sign = x >> min(position + size - 1, bits - 1) & 1
        got = min(size, max(bits - position, 0))
        field = x >> position & ((1 << got) - 1)
        return field | (-1 << got if sign else 0)

    check(f"bfe.s{bits} %z, %a, %b, %c;", [a, at, length], bits, extract_signed)

    def insert(x: int, y: int, position: int, size: int) -> int:
        mask = ((1 << size) - 1) << position
        return y & ~mask | x << position & mask

    check(f"bfi.b{bits} %z, %a, %b, %c, %d;", [a, b, at, length], bits, insert)


def permute(a: int, b: int, selector: int) -> int:
    data = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
    out = 0
    for k in range(4):
        pick = selector >> 4 * k & 15
        byte = data[pick & 7]
        out |= (0xFF if pick & 8 and byte & 0x80 else 0 if pick & 8 else byte) << 8 * k
    return out


PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def test_byte_permutation() -> None:
    arrays = [words(32, 1), words(32, 2), words(32, 3)]
    check("prmt.b32 %z, %a, %b, %c;", arrays, 32, permute)
    for mode, table in PRMT_MODES.items():
        check(f"prmt.b32.{mode} %z, %a, %b, %c;", arrays, 32, lambda a, b, c, t=table: permute(a, b, t[c & 3]))


def test_dot_products() -> None:
    arrays = [words(32, 1), words(32, 2), words(32, 3)]

    def dp4a(a: int, b: int, c: int) -> int:
        return c + sum(signed(a >> 8 * k, 8) * (b >> 8 * k & 0xFF) for k in range(4))

    def dp2a(a: int, b: int, c: int) -> int:
        return c + sum((a >> 16 * k & 0xFFFF) * signed(b >> 8 * (k + 2), 8) for k in range(2))

    check("dp4a.s32.u32 %z, %a, %b, %c;", arrays, 32, dp4a)
    check("dp2a.hi.u32.s32 %z, %a, %b, %c;", arrays, 32, dp2a)


def test_carry_chains() -> None:
    a, b = words(64, 1), words(64, 2)
    wide = """{ .reg .b32 al, ah, bl, bh, zl, zh; mov.b64 {al, ah}, %a; mov.b64 {bl, bh}, %b;
    OP.cc.u32 zl, al, bl; OPc.u32 zh, ah, bh; mov.b64 %z, {zl, zh}; }"""
    check(wide.replace("OP", "add"), [a, b], 64, lambda x, y: x + y)
    check(wide.replace("OP", "sub"), [a, b], 64, lambda x, y: x - y)
    product = """{ .reg .b32 al, ah, bl, bh, zl, zh; mov.b64 {al, ah}, %a; mov.b64 {bl, bh}, %b;
    mul.lo.u32 zl, al, bl; mul.hi.u32 zh, al, bl; mad.lo.cc.u32 zh, ah, bl, zh; madc.lo.u32 zh, al, bh, zh;
    mov.b64 %z, {zl, zh}; }"""

    def want(x: int, y: int) -> int:
        low, high = x & 0xFFFFFFFF, x >> 32
        first = (low * (y & 0xFFFFFFFF) >> 32) + (high * (y & 0xFFFFFFFF) & 0xFFFFFFFF)
        upper = (first & 0xFFFFFFFF) + (low * (y >> 32)) + (first >> 32)
        return (upper & 0xFFFFFFFF) << 32 | low * (y & 0xFFFFFFFF) & 0xFFFFFFFF

    check(product, [a, b], 64, want)


RELATIONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_of_integers(relation: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = words(bits, 1), words(bits, 2)
    b[::3] = a[::3]
    body = f"{{ .reg .pred p, q; setp.{relation}.{kind} p|q, %a, %b; selp.b32 %z, 1, 0, p; @q add.s32 %z, %z, 2; }}"

    def want(x: int, y: int) -> int:
        return 1 if RELATIONS[relation](as_type(x, kind), as_type(y, kind)) else 2

    check(body, [a, b], 32, want)


@pytest.mark.parametrize("unordered", [False, True])
@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_of_floats(relation: str, unordered: bool) -> None:
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3.5], np.float32)
    pairs = np.array([(x, y) for x in values for y in values], np.float32)
    a, b = (np.resize(pairs[:, k], 128).astype(np.float32) for k in (0, 1))
    name = relation + ("u" if unordered else "")

    def want(x: int, y: int) -> int:
        u, v = np.array([x, y], np.uint32).view(np.float32)
        nan = bool(np.isnan(u) or np.isnan(v))
        return int(unordered if nan else RELATIONS[relation](u, v))

    body = f"{{ .reg .pred p; setp.{name}.f32 p, %a, %b; selp.b32 %z, 1, 0, p; }}"
    check(body, [a.view(np.uint32), b.view(np.uint32)], 32, want)
    body = f"set.{name}.u32.f32 %z, %a, %b;"
    check(body, [a.view(np.uint32), b.view(np.uint32)], 32, lambda x, y: -want(x, y))


def test_setp_ftz_num_nan_and_combinations() -> None:
    a = np.resize(np.array([0.0, 1e-40, np.nan, 2.0], np.float32), 128).view(np.uint32)
    b = np.zeros(128, np.uint32)

    def value(bits: int) -> float:
        return float(np.array([bits], np.uint32).view(np.float32)[0])

    body = "{{ .reg .pred p, q; setp.ne.b32 q, %b, 0; {}; selp.b32 %z, 1, 0, p; }}"
    check(body.format("setp.gt.ftz.f32 p, %a, %b"), [a, b], 32, lambda x, y: int(value(x) > 1e-30))
    check(body.format("setp.gt.f32 p, %a, %b"), [a, b], 32, lambda x, y: int(value(x) > 0))
    check(body.format("setp.num.f32 p, %a, %b"), [a, b], 32, lambda x, y: int(value(x) == value(x)))
    check(body.format("setp.nan.f32 p, %a, %b"), [a, b], 32, lambda x, y: int(value(x) != value(x)))
    check(body.format("setp.gt.or.f32 p, %a, %b, !q"), [a, b], 32, lambda x, y: 1)
    check(body.format("setp.gt.and.f32 p, %a, %b, q"), [a, b], 32, lambda x, y: 0)
    check(body.format("setp.gt.xor.f32 p, %a, %b, !q"), [a, b], 32, lambda x, y: int(not value(x) > 0))


def test_selects() -> None:
    a, b, c = words(32, 1), words(32, 2), words(32, 3)
    body = "{ .reg .pred p; setp.lt.s32 p, %c, 0; selp.b32 %z, %a, %b, p; }"
    check(body, [a, b, c], 32, lambda x, y, w: x if signed(w, 32) < 0 else y)
    check("slct.u32.s32 %z, %a, %b, %c;", [a, b, c], 32, lambda x, y, w: x if signed(w, 32) >= 0 else y)
    chooser = np.resize(np.array([0.0, -0.0, -1.0, np.nan, 5.0], np.float32), COUNT).view(np.uint32)

    def by_float(x: int, y: int, w: int) -> int:
        return x if float(np.array([w], np.uint32).view(np.float32)[0]) >= 0 else y

    check("slct.b32.f32 %z, %a, %b, %c;", [a, b, chooser], 32, by_float)


def test_packing_moves() -> None:
    a, b = words(32, 1), words(32, 2)
    check("mov.b64 %z, {%a, %b};", [a, b], 64, lambda x, y: y << 32 | x)
    wide = words(64, 3)
    check("{ .reg .b32 l; mov.b64 {_, l}, %a; mov.b32 %z, l; }", [wide], 32, lambda x: x >> 32)
    check("{ .reg .b32 l; mov.b64 {l, _}, %a; mov.b32 %z, l; }", [wide], 32, lambda x: x)
    body = "{ .reg .b16 e<4>; mov.b64 {e0, e1, e2, e3}, %a; mov.b64 %z, {e3, e2, e1, e0}; }"
    check(body, [wide], 64, lambda x: sum((x >> 16 * k & 0xFFFF) << 16 * (3 - k) for k in range(4)))
    body = "{ .reg .b16 l, h; mov.b32 {l, h}, %a; mov.b32 %z, {h, l}; }"
    check(body, [a], 32, lambda x: x >> 16 | x << 16)
    body = "{ .reg .b128 q, w; .reg .b64 l; mov.b128 q, {%a, %b}; mov.b128 w, q; mov.b128 {l, %z}, w; }"
    check(body, [wide, words(64, 4)], 64, lambda x, y: y)
