"""Arithmetic: rounding, flush to zero, saturation, packed f16 and bf16, comparisons, integers, approximations."""

import numpy as np

from .micro import Micro, elementwise
from .values import f32_values, generator, integers, pairs_bf16x2, pairs_f16x2, pairs_f32

COUNT = 512
ROUNDINGS = ("rn", "rz", "rm", "rp")


def f32_cases() -> list[Micro]:
    x, y, z = pairs_f32(COUNT, 11, 3)
    one = f32_values(COUNT, 12)
    # operands whose sum or product loses exactly half a unit, and products that cancel against z
    rng = generator(13)
    a = (rng.integers(0x3F800000, 0x40000000, COUNT, np.uint32)).astype(np.uint32)
    b = (rng.integers(0x3F800000, 0x40000000, COUNT, np.uint32)).astype(np.uint32)
    product = -(a.view(np.float32) * b.view(np.float32))
    tiny = (rng.integers(0x33000000, 0x34800000, COUNT, np.uint32)).astype(np.uint32)
    fma3 = {"x": np.concatenate([x, a]), "y": np.concatenate([y, b]), "z": np.concatenate([z, product.view(np.uint32)])}
    return [
        elementwise(
            "add_f32",
            {"x": np.concatenate([x, a]), "y": np.concatenate([y, tiny])},
            [f"{op}.{m}.f32 {{d}}, {{0}}, {{1}};" for op in ("add", "sub") for m in ROUNDINGS]
            + ["add.rn.ftz.f32 {d}, {0}, {1};", "add.sat.f32 {d}, {0}, {1};", "add.f32 {d}, {0}, {1};"],
        ),
        elementwise(
            "mul_f32",
            {"x": x, "y": y},
            [f"mul.{m}.f32 {{d}}, {{0}}, {{1}};" for m in ROUNDINGS]
            + ["mul.rn.ftz.f32 {d}, {0}, {1};", "mul.rz.ftz.f32 {d}, {0}, {1};", "mul.sat.f32 {d}, {0}, {1};"],
        ),
        elementwise(
            "fma_f32",
            fma3,
            [f"fma.{m}.f32 {{d}}, {{0}}, {{1}}, {{2}};" for m in ROUNDINGS]
            + ["fma.rn.ftz.f32 {d}, {0}, {1}, {2};", "fma.rn.sat.f32 {d}, {0}, {1}, {2};"],
        ),
        elementwise(
            "div_sqrt_rcp_f32",
            {"x": x, "y": y},
            [f"div.{m}.f32 {{d}}, {{0}}, {{1}};" for m in ROUNDINGS]
            + [f"{op}.{m}.f32 {{d}}, {{0}};" for op in ("sqrt", "rcp") for m in ROUNDINGS]
            + ["div.rn.ftz.f32 {d}, {0}, {1};", "sqrt.rn.ftz.f32 {d}, {0};", "rcp.rn.ftz.f32 {d}, {0};"],
        ),
        elementwise(
            "min_max_f32",
            {"x": x, "y": y},
            [
                f"{op}{m}.f32 {{d}}, {{0}}, {{1}};"
                for op in ("min", "max")
                for m in ("", ".ftz", ".NaN", ".NaN.xorsign.abs", ".xorsign.abs")
            ],
        ),
        elementwise(
            "sign_f32",
            {"x": x, "y": y},
            [f"{op}.f32 {{d}}, {{0}};" for op in ("neg", "abs", "neg.ftz", "abs.ftz")]
            + ["copysign.f32 {d}, {0}, {1};"],
        ),
        elementwise(
            "compare_f32",
            {"x": x, "y": y},
            [
                "mov.u32 r1, 0;"
                + " ".join(
                    f"setp.{c}{ftz}.f32 p0, {{0}}, {{1}}; selp.b32 r0, {1 << k}, 0, p0; or.b32 r1, r1, r0;"
                    for k, c in enumerate(
                        ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
                    )
                )
                + "mov.b32 {d}, r1;"
                for ftz in ("", ".ftz")
            ]
            + [
                "setp.lt.f32 p0, {1}, 0f3F800000; setp.gt.and.f32 p1|p2, {0}, {1}, p0; selp.b32 r0, 1, 0, p1;"
                " selp.b32 r1, 2, 0, p2; or.b32 {d}, r0, r1;",
                "setp.lt.f32 p0, {1}, 0f3F800000; setp.gt.xor.f32 p1|p2, {0}, {1}, !p0; selp.b32 r0, 1, 0, p1;"
                " selp.b32 r1, 2, 0, p2; or.b32 {d}, r0, r1;",
                "set.ge.u32.f32 {d}, {0}, {1};",
                "set.ltu.f32.f32 {d}, {0}, {1};",
            ],
        ),
        elementwise(
            "testp_f32",
            {"x": one},
            [
                "mov.u32 r1, 0;"
                + " ".join(
                    f"testp.{c}.f32 p0, {{0}}; selp.b32 r0, {1 << k}, 0, p0; or.b32 r1, r1, r0;"
                    for k, c in enumerate(["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
                )
                + "mov.b32 {d}, r1;"
            ],
        ),
        elementwise(
            "f64",
            {"x": one, "y": generator(14).permutation(one)},
            [
                "cvt.f64.f32 d0, {0}; cvt.f64.f32 d1, {1}; " + op
                for op in (
                    "add.rn.f64 {d}, d0, d1;",
                    "mul.rz.f64 {d}, d0, d1;",
                    "fma.rn.f64 {d}, d0, d1, d0;",
                    "div.rn.f64 {d}, d0, d1;",
                    "sqrt.rn.f64 {d}, d0;",
                    "mul.rn.f64 d0, d0, 0d3FB999999999999A; cvt.rn.f32.f64 r0, d0; cvt.u64.u32 {d}, r0;",
                    "mul.rn.f64 d0, d0, 0d3FB999999999999A; cvt.rzi.s32.f64 r0, d0; cvt.u64.u32 {d}, r0;",
                )
            ],
            results="64",
        ),
    ]


def packed_cases() -> list[Micro]:
    out = []
    for kind, pairs in (("f16x2", pairs_f16x2(COUNT, 21, 3)), ("bf16x2", pairs_bf16x2(COUNT, 22, 3))):
        x, y, z = pairs
        saturating = [
            "add.sat.f16x2 {d}, {0}, {1};",
            "mul.sat.f16x2 {d}, {0}, {1};",
            "fma.rn.sat.f16x2 {d}, {0}, {1}, {2};",
            "add.ftz.f16x2 {d}, {0}, {1};",
            "fma.rn.ftz.f16x2 {d}, {0}, {1}, {2};",
            "min.ftz.f16x2 {d}, {0}, {1};",
        ]
        out += [
            elementwise(
                f"arithmetic_{kind}",
                {"x": x, "y": y, "z": z},
                [f"{op}.rn.{kind} {{d}}, {{0}}, {{1}};" for op in ("add", "sub", "mul")]
                + [f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};", f"fma.rn.relu.{kind} {{d}}, {{0}}, {{1}}, {{2}};"]
                + [f"neg.{kind} {{d}}, {{0}};", f"abs.{kind} {{d}}, {{0}};"]
                + (saturating if kind == "f16x2" else []),
            ),
            elementwise(
                f"min_max_{kind}",
                {"x": x, "y": y},
                [
                    f"{op}{m}.{kind} {{d}}, {{0}}, {{1}};"
                    for op in ("min", "max")
                    for m in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs")
                ],
            ),
            elementwise(
                f"compare_{kind}",
                {"x": x, "y": y},
                [
                    f"setp.{c}.{kind} p0|p1, {{0}}, {{1}}; selp.b32 r0, 1, 0, p0; selp.b32 r1, 2, 0, p1;"
                    " or.b32 {d}, r0, r1;"
                    for c in ("eq", "lt", "geu", "nan")
                ]
                + [f"set.gt.{kind}.{kind} {{d}}, {{0}}, {{1}};", f"set.le.u32.{kind[:-2]} {{d}}, h0, h1;"],
            ),
        ]
        # the last comparison works on scalars
        last = out[-1]
        out[-1] = Micro(**{**vars(last), "ptx": last.ptx.replace(
            f"set.le.u32.{kind[:-2]} %y, h0, h1;",
            f"mov.b32 {{h0, h2}}, %x0; mov.b32 {{h1, h3}}, %x1; set.le.u32.{kind[:-2]} %y, h0, h1;")})  # fmt: skip
    return out


def mixed_cases() -> list[Micro]:
    """f16 scalars; f32 from f16 comes with the conversions."""
    x, y, z = pairs_f16x2(COUNT // 2, 31, 3)
    halves = {"x": x.view(np.uint16), "y": y.view(np.uint16), "z": z.view(np.uint16)}
    bx, by, bz = pairs_bf16x2(COUNT // 2, 32, 3)
    brains = {"x": bx.view(np.uint16), "y": by.view(np.uint16), "z": bz.view(np.uint16)}
    return [
        elementwise(
            f"scalar_{kind}",
            values,
            [f"{op}.rn.{kind} {{d}}, {{0}}, {{1}};" for op in ("add", "sub", "mul")]
            + [
                f"fma.rn.{kind} {{d}}, {{0}}, {{1}}, {{2}};",
                f"max.{kind} {{d}}, {{0}}, {{1}};",
                f"neg.{kind} {{d}}, {{0}};",
            ],
            results="16",
        )
        for kind, values in (("f16", halves), ("bf16", brains))
    ]


def integer_cases() -> list[Micro]:
    x, y, z = integers(COUNT, 41, 3)
    lx, ly = integers(COUNT, 42, 2, bits=64)
    sx, sy = integers(COUNT, 43, 2, bits=16)
    nonzero = np.where(y == 0, np.uint32(3), y)
    lnonzero = np.where(ly == 0, np.uint64(3), ly)
    return [
        elementwise(
            "integer_basic",
            {"x": x, "y": y, "z": z},
            [f"{op}.{t} {{d}}, {{0}}, {{1}};" for op in ("min", "max", "mul.hi", "mul24.lo") for t in ("s32", "u32")]
            + [f"mad.{h}.{t} {{d}}, {{0}}, {{1}}, {{2}};" for h in ("lo", "hi") for t in ("s32", "u32")]
            + [
                "add.sat.s32 {d}, {0}, {1};",
                "sub.sat.s32 {d}, {0}, {1};",
                "min.relu.s32 {d}, {0}, {1};",
                "max.relu.s32 {d}, {0}, {1};",
                "mad.hi.sat.s32 {d}, {0}, {1}, {2};",
                "sad.s32 {d}, {0}, {1}, {2};",
                "sad.u32 {d}, {0}, {1}, {2};",
                "abs.s32 {d}, {0};",
                "neg.s32 {d}, {0};",
                "not.b32 {d}, {0};",
                "cnot.b32 {d}, {0};",
            ],
        ),
        elementwise(
            "integer_divide",
            {"x": x, "y": nonzero},
            [f"{op}.{t} {{d}}, {{0}}, {{1}};" for op in ("div", "rem") for t in ("s32", "u32")],
        ),
        elementwise(
            "integer_divide_64",
            {"x": lx, "y": lnonzero},
            [f"{op}.{t} {{d}}, {{0}}, {{1}};" for op in ("div", "rem") for t in ("s64", "u64")],
            results="64",
        ),
        elementwise(
            "integer_bits",
            {"x": x, "y": y, "z": z},
            [
                "popc.b32 {d}, {0};",
                "clz.b32 {d}, {0};",
                "brev.b32 {d}, {0};",
                "bfind.u32 {d}, {0};",
                "bfind.s32 {d}, {0};",
                "bfind.shiftamt.u32 {d}, {0};",
                "bfe.u32 {d}, {0}, {1}, {2};",
                "bfe.s32 {d}, {0}, {1}, {2};",
                "bfi.b32 {d}, {0}, {1}, 5, 9;",
                "bfi.b32 {d}, {0}, {1}, {2}, 12;",
                "fns.b32 {d}, {0}, 0, 3;",
                "bmsk.clamp.b32 {d}, {0}, {1};",
                "bmsk.wrap.b32 {d}, {0}, {1};",
                "szext.clamp.s32 {d}, {0}, {1};",
                "szext.wrap.u32 {d}, {0}, {1};",
                "lop3.b32 {d}, {0}, {1}, {2}, 0xCA;",
                "lop3.b32 {d}, {0}, {1}, {2}, 0x96;",
                "lop3.b32 {d}, {0}, {1}, {2}, 0x1E;",
            ],
        ),
        elementwise(
            "integer_shift",
            {"x": x, "y": y, "z": z},
            [
                "shl.b32 {d}, {0}, {1};",
                "shr.u32 {d}, {0}, {1};",
                "shr.s32 {d}, {0}, {1};",
                "shf.l.wrap.b32 {d}, {0}, {2}, {1};",
                "shf.r.wrap.b32 {d}, {0}, {2}, {1};",
                "shf.l.clamp.b32 {d}, {0}, {2}, {1};",
                "shf.r.clamp.b32 {d}, {0}, {2}, {1};",
                "shl.b32 {d}, {0}, 7;",
            ],
        ),
        elementwise(
            "integer_prmt",
            {"x": x, "y": y, "z": z},
            ["prmt.b32 {d}, {0}, {1}, {2};", "prmt.b32 {d}, {0}, {1}, 0x5410;", "prmt.b32 {d}, {0}, {1}, 0xC3F8;"]
            + [f"prmt.b32.{m} {{d}}, {{0}}, {{1}}, {{2}};" for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")],
        ),
        elementwise(
            "integer_dot",
            {"x": x, "y": y, "z": z},
            [f"dp4a.{a}32.{b}32 {{d}}, {{0}}, {{1}}, {{2}};" for a in "us" for b in "us"]
            + [f"dp2a.{h}.{a}32.{b}32 {{d}}, {{0}}, {{1}}, {{2}};" for h in ("lo", "hi") for a in "us" for b in "us"],
        ),
        elementwise(
            "integer_carry",
            {"x": x, "y": y, "z": z},
            [
                "add.cc.u32 r0, {0}, {1}; addc.u32 {d}, {2}, 0;",
                "add.cc.u32 r0, {0}, {1}; addc.cc.u32 r1, {2}, {0}; addc.u32 {d}, 0, 0;",
                "sub.cc.u32 r0, {0}, {1}; subc.u32 {d}, {2}, 0;",
                "sub.cc.u32 r0, {0}, {1}; subc.cc.u32 r1, {2}, {0}; subc.u32 {d}, 0, 0;",
                "mad.lo.cc.u32 r0, {0}, {1}, {2}; madc.hi.u32 {d}, {0}, {1}, 0;",
            ],
        ),
        elementwise(
            "integer_compare",
            {"x": x, "y": y},
            [
                "mov.u32 r1, 0;"
                + " ".join(
                    f"setp.{c} p0, {{0}}, {{1}}; selp.b32 r0, {1 << k}, 0, p0; or.b32 r1, r1, r0;"
                    for k, c in enumerate(
                        [
                            "eq.s32",
                            "ne.b32",
                            "lt.s32",
                            "le.s32",
                            "gt.s32",
                            "ge.s32",
                            "lo.u32",
                            "ls.u32",
                            "hi.u32",
                            "hs.u32",
                            "lt.u32",
                            "ge.u32",
                        ]
                    )
                )
                + "mov.b32 {d}, r1;",
                "slct.s32.s32 {d}, {0}, {1}, {0};",
                "slct.f32.f32 {d}, {0}, {1}, {1};",
                "set.lt.and.s32.s32 {d}, {0}, {1}, p0;",
            ],
            extra="    setp.eq.u32 p0, %t, 5;",
        ),
        elementwise(
            "integer_64",
            {"x": lx, "y": ly},
            [
                "add.s64 {d}, {0}, {1};",
                "sub.s64 {d}, {0}, {1};",
                "mul.lo.s64 {d}, {0}, {1};",
                "mul.hi.s64 {d}, {0}, {1};",
                "mul.hi.u64 {d}, {0}, {1};",
                "mad.lo.s64 {d}, {0}, {1}, {0};",
                "min.s64 {d}, {0}, {1};",
                "max.u64 {d}, {0}, {1};",
                "xor.b64 {d}, {0}, {1};",
                "not.b64 {d}, {0};",
                "cvt.u32.u64 r0, {1}; shl.b64 {d}, {0}, r0;",
                "cvt.u32.u64 r0, {1}; shr.s64 {d}, {0}, r0;",
                "cvt.u32.u64 r0, {1}; shr.u64 {d}, {0}, r0;",
                "popc.b64 r0, {0}; cvt.u64.u32 {d}, r0;",
                "clz.b64 r0, {0}; cvt.u64.u32 {d}, r0;",
                "brev.b64 {d}, {0};",
                "mov.b64 {{r0, r1}}, {0}; mov.b64 {d}, {{r1, r0}};",
                "cvt.u32.u64 r0, {0}; cvt.u32.u64 r1, {1}; mul.wide.s32 {d}, r0, r1;",
                "cvt.u32.u64 r0, {0}; cvt.u32.u64 r1, {1}; mad.wide.u32 {d}, r0, r1, {0};",
            ],
            results="64",
        ),
        elementwise(
            "integer_16",
            {"x": sx, "y": sy},
            [
                "add.s16 {d}, {0}, {1};",
                "sub.u16 {d}, {0}, {1};",
                "mul.lo.s16 {d}, {0}, {1};",
                "mul.hi.s16 {d}, {0}, {1};",
                "mul.hi.u16 {d}, {0}, {1};",
                "min.s16 {d}, {0}, {1};",
                "max.u16 {d}, {0}, {1};",
                "cvt.u32.u16 r0, {1}; shl.b16 {d}, {0}, r0;",
                "cvt.u32.u16 r0, {1}; shr.s16 {d}, {0}, r0;",
                "cvt.u32.u16 r0, {1}; shr.u16 {d}, {0}, r0;",
                "mul.wide.s16 r0, {0}, {1}; cvt.u16.u32 {d}, r0;",
                "mul.wide.u16 r0, {0}, {1}; shr.u32 r0, r0, 16; cvt.u16.u32 {d}, r0;",
                "not.b16 {d}, {0};",
            ],
            results="16",
        ),
        elementwise(
            "integer_packed_16",
            {"x": x, "y": y},
            ["add.u16x2 {d}, {0}, {1};", "add.s16x2 {d}, {0}, {1};"]
            + [f"{op}.{t} {{d}}, {{0}}, {{1}};" for op in ("min", "max") for t in ("u16x2", "s16x2")],
        ),
    ]


def approximate_cases() -> list[Micro]:
    """Results may differ by the ulp that the PTX manual allows; specials agree in any case."""
    rng = generator(51)
    sweep = np.concatenate([rng.uniform(-1, 0, 400), rng.uniform(-126, 127, 500)]).astype(np.float32).view(np.uint32)
    special = f32_values(124, 52)
    x = np.concatenate([special, sweep])
    positive = np.concatenate([special, (rng.integers(0x00800000, 0x7F7FFFFF, 900, np.uint32))]).astype(np.uint32)
    small = np.concatenate([special, rng.uniform(-3.1, 3.1, 900).astype(np.float32).view(np.uint32)])
    halves = pairs_f16x2(COUNT, 53)[0]
    brains = pairs_bf16x2(COUNT, 54)[0]
    return [
        elementwise("approx_ex2", {"x": x}, ["ex2.approx.ftz.f32 {d}, {0};", "ex2.approx.f32 {d}, {0};"], max_ulp=2.1),
        elementwise(
            "approx_rcp",
            {"x": positive},
            [f"{op}.approx{ftz}.f32 {{d}}, {{0}};" for op in ("rcp", "rsqrt", "sqrt") for ftz in (".ftz", "")],
            max_ulp=2.1,
        ),
        elementwise(
            "approx_lg2",
            {"x": positive},
            ["lg2.approx.ftz.f32 {d}, {0};", "lg2.approx.f32 {d}, {0};"],
            max_ulp=2.1,
            absolute=2.0**-22,
        ),
        elementwise(
            "approx_div",
            {"x": small, "y": rng.permutation(x)},
            ["div.approx.f32 {d}, {0}, {1};", "div.approx.ftz.f32 {d}, {0}, {1};", "div.full.f32 {d}, {0}, {1};"],
            max_ulp=2.1,
        ),
        # its stated error is 2^-11 of the value
        elementwise("approx_tanh", {"x": small}, ["tanh.approx.f32 {d}, {0};"], max_ulp=2.0**13),
        elementwise(
            "approx_f16x2",
            {"x": halves},
            ["ex2.approx.f16x2 {d}, {0};", "tanh.approx.f16x2 {d}, {0};"],
            max_ulp=2.1,
            ulp_dtype="f16",
        ),
        elementwise(
            "approx_bf16x2",
            {"x": brains},
            ["ex2.approx.ftz.bf16x2 {d}, {0};", "tanh.approx.bf16x2 {d}, {0};"],
            max_ulp=2.1,
            ulp_dtype="bf16",
        ),
    ]


def cases() -> list[Micro]:
    return f32_cases() + packed_cases() + mixed_cases() + integer_cases() + approximate_cases()
