"""Conversions: every rounding between the float types, float to integer and back, saturation, narrowing."""

import numpy as np

from .micro import Micro, elementwise
from .values import f32_values, generator, integers, pairs_bf16x2, pairs_f16x2

COUNT = 512


def cases() -> list[Micro]:
    x, y = f32_values(COUNT, 1), generator(2).permutation(f32_values(COUNT, 3))
    all16 = np.arange(0, 1 << 16, 64, dtype=np.uint16) | (np.arange(1024, dtype=np.uint16) & np.uint16(63))
    half = np.concatenate([pairs_f16x2(COUNT // 4, 4)[0].view(np.uint16), all16[: COUNT // 2]])
    brain = np.concatenate([pairs_bf16x2(COUNT // 4, 5)[0].view(np.uint16), all16[: COUNT // 2]])
    bytes2 = (np.arange(256, dtype=np.uint16) << np.uint16(8)) | np.arange(256, dtype=np.uint16)[::-1]
    word, word2 = integers(COUNT, 6)
    long = integers(COUNT, 7, bits=64)[0]
    # where float-to-integer conversions saturate, tie or change sign
    edges = np.array(
        [s * v for v in (0.5, 1.5, 2.5, 126.5, 127.5, 128, 255.5, 256, 32767.5, 65535.5, 0.49999997) for s in (1, -1)]
        + [s * 2.0**v for v in (31, 32, 63, 64) for s in (1, -1)]
        + [127.4, 128.4, 254.5, 255.4, 32766.5, 32768.5, 65534.5, 2147483520.0, 4294967040.0],
        np.float32,
    ).view(np.uint32)  # fmt: skip
    mixed = np.concatenate([edges, f32_values(COUNT - len(edges), 8)])
    return [
        elementwise(
            "cvt_f32_to_f16",
            {"x": x},
            [f"cvt.{m}.f16.f32 {{d}}, {{0}};" for m in ("rn", "rz", "rm", "rp", "rn.relu", "rn.sat")],
            results="16",
        ),
        elementwise(
            "cvt_f32_to_bf16",
            {"x": x},
            [f"cvt.{m}.bf16.f32 {{d}}, {{0}};" for m in ("rn", "rz", "rn.relu", "rz.relu")],
            results="16",
        ),
        elementwise(
            "cvt_f32_to_packed16",
            {"x": x, "y": y},
            [
                f"cvt.{m}.{t}.f32 {{d}}, {{0}}, {{1}};"
                for t in ("f16x2", "bf16x2")
                for m in ("rn", "rz", "rn.relu", "rz.relu")
            ],
        ),
        elementwise(
            "cvt_f32_to_tf32", {"x": x}, [f"cvt.{m}.tf32.f32 {{d}}, {{0}};" for m in ("rna", "rn", "rz", "rn.relu")]
        ),
        elementwise(
            "cvt_f32_to_fp8",
            {"x": x, "y": y},
            [
                f"cvt.rn.satfinite{relu}.{t}.f32 {{d}}, {{0}}, {{1}};"
                for t in ("e4m3x2", "e5m2x2")
                for relu in ("", ".relu")
            ],
            results="16",
        ),
        elementwise(
            "cvt_f16x2_to_fp8",
            {"x": pairs_f16x2(COUNT, 9)[0]},
            [f"cvt.rn.satfinite{relu}.{t}.f16x2 {{d}}, {{0}};" for t in ("e4m3x2", "e5m2x2") for relu in ("", ".relu")],
            results="16",
        ),
        elementwise(
            "cvt_fp8_to_f16x2",
            {"x": bytes2},
            [f"cvt.rn.f16x2.{t} {{d}}, {{0}};" for t in ("e4m3x2", "e5m2x2")],
        ),
        elementwise("cvt_f16_to_f32", {"x": half}, ["cvt.f32.f16 {d}, {0};", "cvt.ftz.f32.f16 {d}, {0};"]),
        elementwise("cvt_bf16_to_f32", {"x": brain}, ["cvt.f32.bf16 {d}, {0};"]),
        elementwise(
            "cvt_f16_to_integer",
            {"x": half},
            [f"cvt.{m}i.{t}.f16 {{d}}, {{0}};" for m in ("rn", "rz") for t in ("s32", "u32")],
        ),
        elementwise(
            "cvt_f32_to_integer",
            {"x": mixed},
            [f"cvt.{m}i.{t}.f32 {{d}}, {{0}};" for m in ("rn", "rz", "rm", "rp") for t in ("s32", "u32")]
            + ["cvt.rni.ftz.s32.f32 {d}, {0};", "cvt.rmi.ftz.s32.f32 {d}, {0};"],
        ),
        elementwise(
            "cvt_f32_to_small_integer",
            {"x": mixed},
            [f"cvt.{m}.{t}.f32 {{d}}, {{0}};" for m in ("rni", "rzi.sat") for t in ("s16", "u16")]
            + [f"cvt.rni.sat.{t}.f32 r0, {{0}}; cvt.u16.u32 {{d}}, r0;" for t in ("s8", "u8")],
            results="16",
        ),
        elementwise(
            "cvt_f32_to_64",
            {"x": mixed},
            [f"cvt.{m}i.{t}.f32 {{d}}, {{0}};" for m in ("rn", "rz", "rm") for t in ("s64", "u64")]
            + ["cvt.f64.f32 {d}, {0};"],
            results="64",
        ),
        elementwise(
            "cvt_f32_to_f32",
            {"x": mixed},
            [
                f"cvt.{m}.f32.f32 {{d}}, {{0}};"
                for m in ("rni", "rzi", "rmi", "rpi", "sat", "ftz", "rni.ftz", "ftz.sat")
            ],
        ),
        elementwise(
            "cvt_integer_to_f32",
            {"x": word},
            [f"cvt.{m}.f32.{t} {{d}}, {{0}};" for m in ("rn", "rz", "rm", "rp") for t in ("s32", "u32")]
            + [
                "cvt.u16.u32 h0, {0}; cvt.rn.f32.s16 {d}, h0;",
                "cvt.rn.f32.u8 {d}, {0};",
                "cvt.rn.f32.s8 {d}, {0};",
                "cvt.rn.sat.f32.s32 {d}, {0};",
            ],
        ),
        elementwise(
            "cvt_integer_to_16",
            {"x": word},
            [f"cvt.{m}.f16.{t} {{d}}, {{0}};" for m in ("rn", "rz", "rp") for t in ("s32", "u32")]
            + [f"cvt.rn.bf16.{t} {{d}}, {{0}};" for t in ("s32", "u32")],
            results="16",
        ),
        elementwise(
            "cvt_long_to_f32",
            {"x": long},
            [f"cvt.{m}.f32.{t} {{d}}, {{0}};" for m in ("rn", "rz", "rp") for t in ("s64", "u64")],
        ),
        elementwise(
            "cvt_integer_to_integer",
            {"x": word},
            [
                f"cvt{sat}.{t}.{s} {{d}}, {{0}};"
                for sat in ("", ".sat")
                for t in ("s8", "u8", "s16", "u16")
                for s in ("s32", "u32")
            ]
            + [
                "cvt.sat.u32.s32 {d}, {0};",
                "cvt.sat.s32.u32 {d}, {0};",
                "cvt.s32.s8 {d}, {0};",
                "cvt.u32.u8 {d}, {0};",
            ],
        ),
        elementwise(
            "cvt_integer_to_long",
            {"x": word},
            ["cvt.s64.s32 {d}, {0};", "cvt.u64.u32 {d}, {0};", "cvt.s64.s16 {d}, {0};", "cvt.u64.s32 {d}, {0};"],
            results="64",
        ),
        elementwise(
            "cvt_long_to_integer",
            {"x": long},
            [f"cvt{sat}.{t}.{s} {{d}}, {{0}};" for sat in ("", ".sat") for t in ("s32", "u32") for s in ("s64", "u64")],
        ),
        elementwise(
            "cvt_pack",
            {"x": word, "y": word2},
            [f"cvt.pack.sat.{t}.s32 {{d}}, {{0}}, {{1}};" for t in ("u16", "s16")]
            + [f"cvt.pack.sat.{t}.s32.b32 {{d}}, {{0}}, {{1}}, {{0}};" for t in ("u8", "s8")],
        ),
    ]
