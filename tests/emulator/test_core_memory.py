"""Loads, stores, atomics and address arithmetic in every space, and their faults."""

import numpy as np
import pytest

import emulator
from emulator.core_kernels import expect_fault, module, outputs, run

LOADS = [
    ("u8", np.uint8),
    ("s8", np.int8),
    ("u16", np.uint16),
    ("s16", np.int16),
    ("u32", np.uint32),
    ("s32", np.int32),
]


@pytest.mark.parametrize("wide", [32, 64])
@pytest.mark.parametrize(("kind", "dtype"), LOADS)
def test_narrow_loads_extend(kind: str, dtype: type, wide: int) -> None:
    source = np.random.default_rng(0).integers(0, 256, 32 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    out = np.zeros(32, np.int64 if wide == 64 else np.int32)
    size = np.dtype(dtype).itemsize
    letter = "d" if wide == 64 else "r"
    body = f"""mad.wide.u32 d1, %t, {size}, %in; ld.global.{kind} {letter}2, [d1];
    mad.wide.u32 d3, %t, {wide // 8}, %out; st.global.b{wide} [d3], {letter}2;"""
    run(body, source, out, params=("in", "out"))
    np.testing.assert_array_equal(out, source.astype(np.int64).astype(out.dtype))


@pytest.mark.parametrize(
    ("form", "bytes_"),
    [
        ("v2.b32", 8),
        ("v4.b32", 16),
        ("v8.b32", 32),
        ("v2.b64", 16),
        ("v4.b64", 32),
        ("v4.b8", 4),
        ("v2.b16", 4),
        ("b128", 16),
    ],
)
def test_vectors_round_trip(form: str, bytes_: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 32 * bytes_, dtype=np.uint8)
    out = np.zeros_like(source)
    count = int(form[1]) if form[0] == "v" else 1
    letter = {"8": "h", "16": "h", "32": "r", "64": "d", "128": "q"}[form.rsplit("b", 1)[1]]
    regs = ", ".join(f"{letter}{k + (4 if letter == 'd' else 0)}" for k in range(count))
    regs = f"{{{regs}}}" if form[0] == "v" else "q0"
    body = f"""mad.wide.u32 d1, %t, {bytes_}, %in; mad.wide.u32 d2, %t, {bytes_}, %out;
    ld.global.nc.L1::no_allocate.{form} {regs}, [d1]; st.global.{form} [d2], {regs};"""
    run(body, source, out, params=("in", "out"))
    np.testing.assert_array_equal(out, source)


def test_masked_stores_touch_only_their_lanes() -> None:
    out = np.full(32, 7, np.uint32)
    run("setp.lt.u32 p0, %t, 5; mad.wide.u32 d0, %t, 4, %out; @!p0 bra END; st.global.u32 [d0], %t; END:", out)
    np.testing.assert_array_equal(out, [0, 1, 2, 3, 4] + [7] * 27)


def test_shared_static_dynamic_and_generic() -> None:
    declare = ".shared .align 16 .b8 stage[256];"
    before = ".extern .shared .align 128 .b8 dyn[];"
    body = """mov.u32 r1, stage; mad.lo.u32 r1, %t, 4, r1; st.shared.u32 [r1], %t;
    mov.u32 r2, dyn; and.b32 r6, r2, 127; mad.lo.u32 r2, %t, 4, r2; add.u32 r3, %t, 100; st.shared::cta.u32 [r2], r3;
    bar.sync 0;
    xor.b32 r4, %t, 1; mov.u64 d1, stage; cvta.shared.u64 d1, d1; mad.wide.u32 d1, r4, 4, d1; ld.u32 r0, [d1];
    cvta.to.shared.u64 d2, d1; cvt.u32.u64 r5, d2; ld.shared.u32 r1, [r5];
    mov.u32 r2, dyn; mad.lo.u32 r2, r4, 4, r2; ld.volatile.shared.u32 r2, [r2]; mov.b32 r3, r6;"""
    got = outputs(body, threads=64, per_thread=4, declare=declare, before=before, shared_bytes=256)
    other = np.arange(64) ^ 1
    np.testing.assert_array_equal(got.T, [other, other, other + 100, np.zeros(64)])


def test_shared_memory_starts_as_nan() -> None:
    got = outputs("mov.u32 r1, stage; ld.shared.u32 r0, [r1+32];", declare=".shared .align 16 .b8 stage[256];")
    assert np.isnan(got.view(np.float32)).all()


def test_local_memory_is_private_and_reached_by_generic_addresses() -> None:
    body = """mov.u64 d1, depot; cvta.local.u64 d2, d1; st.local.u32 [depot+4], %t; ld.u32 r0, [d2+4];
    add.u32 r1, %t, 1; st.u32 [d2+8], r1; ld.local.u32 r1, [depot+8]; isspacep.local p0, d2; selp.u32 r2, 1, 0, p0;"""
    got = outputs(body, per_thread=3, declare=".local .align 8 .b8 depot[16];")
    np.testing.assert_array_equal(got.T, [np.arange(32), np.arange(1, 33), np.ones(32)])


def test_parameters_are_reached_by_generic_addresses() -> None:
    text = module(
        "mov.b64 d1, blob_param; cvta.param.u64 d1, d1; mad.wide.u32 d1, %t, 4, d1; ld.u32 r1, [d1];"
        "mad.wide.u32 d2, %t, 4, %out; st.global.u32 [d2], r1;"
    ).replace(".param .u64 out_param", ".param .u64 out_param, .param .align 64 .b8 blob_param[128]")
    out, blob = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32) * 3
    emulator.load(text).launch(grid=(1, 1, 1), block=(32, 1, 1), params=[out, blob.tobytes()])
    np.testing.assert_array_equal(out, blob)


def test_module_variables() -> None:
    before = ".global .align 8 .u32 counts[4] = {5, 6, 7, 8}; .const .align 8 .f32 half = 0f3F000000;"
    body = """mov.u64 d1, counts; ld.global.u32 r0, [d1+8]; ld.const.f32 r1, [half]; st.global.u32 [counts], 9;
    ld.global.u32 r2, [counts];"""
    got = outputs(body, per_thread=3, before=before)
    np.testing.assert_array_equal(got[0], [7, 0x3F000000, 9])


ATOMICS = {
    "add.u32": lambda old, b: old + b,
    "min.s32": min,
    "max.u32": max,
    "and.b32": lambda old, b: old & b,
    "or.b32": lambda old, b: old | b,
    "xor.b32": lambda old, b: old ^ b,
    "exch.b32": lambda old, b: b,
    "inc.u32": lambda old, b: 0 if old >= b else old + 1,
    "dec.u32": lambda old, b: b if old == 0 or old > b else old - 1,
}


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", ATOMICS)
def test_atomics(op: str, space: str) -> None:
    """All lanes on one word: the values seen must be those of some order, here the lanes' own."""
    start = 11
    memory = np.array([start], np.uint32)
    name = {"global": ".global", "shared": ".shared", "generic": ""}[space]
    address = "d9" if space != "shared" else "r9"
    setup = (
        "mov.b64 d9, %mem;"
        if space != "shared"
        else f"mov.u32 r9, cell; st.shared.u32 [r9], {start}; bar.warp.sync -1;"
    )
    finish = "" if space != "shared" else "ld.shared.u32 r8, [r9]; st.global.u32 [%mem], r8;"
    out = np.zeros(32, np.uint32)
    body = f"""{setup} mul.lo.u32 r1, %t, 7; atom{name}.{op} r0, [{address}], r1;
    mad.wide.u32 d0, %t, 4, %out; st.global.u32 [d0], r0; {finish}"""
    run(body, memory, out, params=("mem", "out"), declare=".shared .u32 cell;")
    value = start
    for lane in range(32):
        assert out[lane] == value
        value = ATOMICS[op](value, 7 * lane)
    assert memory[0] == value


def test_compare_and_swap_and_vector_reductions() -> None:
    out = np.zeros(8, np.uint32)
    run(
        "add.u32 r1, %t, 1; atom.global.cas.b32 r2, [%out], %t, r1; mov.b64 d1, 5; red.global.add.u64 [%out+8], d1;",
        out,
    )
    np.testing.assert_array_equal(out[:4], [32, 0, 160, 0])
    sums = np.zeros(4, np.float32)
    run("mov.b32 r1, 0f3F800000; mov.b32 r2, 0f40000000; red.global.add.v4.f32 [%out], {r1, r2, r1, r2};", sums)
    np.testing.assert_array_equal(sums, [32, 64, 32, 64])
    halves = np.zeros(2, np.float16)
    run("mov.b32 r1, 0x3c004000; red.global.add.noftz.f16x2 [%out], r1;", halves)
    np.testing.assert_array_equal(halves, [64, 32])


def test_mapa_and_cluster_addresses() -> None:
    body = """mov.u32 r9, stage; mad.lo.u32 r10, %t, 4, r9; st.shared.u32 [r10], %me;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 r1, %cluster_ctarank; xor.b32 r2, r1, 1; mapa.shared::cluster.u32 r3, r10, r2;
    ld.shared::cluster.u32 r0, [r3]; cvt.u64.u32 d1, r10; cvta.shared::cluster.u64 d1, d1; mapa.u64 d2, d1, r2;
    ld.u32 r1, [d2];
    mapa.shared::cluster.u32 r4, r9, 0; shr.u32 r2, r3, 24; getctarank.shared::cluster.u32 r3, r4;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    got = outputs(body, grid=4, cluster=2, per_thread=4, declare=".shared .align 16 .b8 stage[256];")
    me = np.arange(128)
    np.testing.assert_array_equal(got.T, [me ^ 32, me ^ 32, 1 - me // 32 % 2, np.zeros(128)])


def test_bulk_zeroing() -> None:
    body = """mov.u32 r9, stage; mov.b64 d1, 24; mov.u64 d3, stage; cvta.shared.u64 d3, d3; setp.eq.u32 p0, %t, 0;
    @p0 st.bulk.weak.shared::cta [r9+8], d1, 0; @p0 st.bulk [d3+48], d1, 0; bar.warp.sync -1;
    mad.lo.u32 r10, %t, 4, r9; ld.shared.u32 r0, [r10];"""
    got = outputs(body, declare=".shared .align 16 .b8 stage[128];")[:, 0]
    zero = np.zeros(32, bool)
    zero[2:8] = zero[12:18] = True
    np.testing.assert_array_equal(got == 0, zero)


def test_overlapping_arrays_share_memory_and_offsets_reach_the_whole() -> None:
    base = np.zeros(64, np.uint32)
    text = module("st.global.u32 [%a], 1; ld.global.u32 r1, [%b+-4]; st.global.u32 [%b], r1;", ("a", "b"))
    emulator.load(text).launch(grid=(1, 1, 1), block=(1, 1, 1), params=[base[4:], emulator.Pointer(base, 20)])
    np.testing.assert_array_equal(base[3:7], [0, 1, 1, 0])


FAULTS = [
    ("out_of_bounds", "outside every buffer", "st.global.u32 [%out+128], %t;", {}),
    ("out_of_bounds", "parameter 0 of 128 bytes, at its byte 128", "ld.global.u32 r0, [%out+128];", {}),
    ("out_of_bounds", "outside every buffer", "mov.b64 d0, 0; ld.global.u32 r0, [d0];", {}),
    ("misaligned", "load of 4 bytes", "ld.global.u32 r0, [%out+2];", {}),
    ("misaligned", "store of 16 bytes", "st.global.v4.u32 [%out+8], {%t, %t, %t, %t};", {}),
    ("out_of_bounds", "shared offset", "mov.u32 r0, 64; ld.shared.u32 r1, [r0];", {}),
    (
        "out_of_bounds",
        "[0x400, 0x440)",
        "mov.u32 r0, cell; ld.shared.u32 r1, [r0+64];",
        {"declare": ".shared .b8 cell[64];"},
    ),
    (
        "misaligned",
        "load of 8 bytes",
        "mov.u32 r0, cell; ld.shared.u64 d1, [r0+4];",
        {"declare": ".shared .align 8 .b8 cell[64];"},
    ),
    ("out_of_bounds", "CTA rank 3 of a cluster of 1", "mov.u32 r0, 0x3000400; ld.shared::cluster.u32 r1, [r0];", {}),
    ("out_of_bounds", "not of the thread's own CTA", "mov.u32 r0, 0x1000400; ld.shared.u32 r1, [r0];", {}),
    ("out_of_bounds", "local address", "ld.local.u32 r0, [depot+16];", {"declare": ".local .b32 depot[4];"}),
    ("read_only", "the kernel's parameters", "mov.b64 d1, out_param; st.u32 [d1], 1;", {}),
    ("misaligned", "multiples of 8", "mov.b64 d1, 12; mov.u32 r0, 1024; st.bulk.shared::cta [r0], d1, 0;", {}),
    ("illegal_operand", "not in that space", "cvta.to.shared.u64 d1, %out;", {}),
    (
        "out_of_bounds",
        "CTA rank 1 of a cluster of 1",
        "mov.u32 r0, 0x400; mapa.shared::cluster.u32 r1, r0, 1; ld.shared::cluster.u32 r2, [r1];",
        {},
    ),
]


@pytest.mark.parametrize(("fault", "text", "body", "parts"), FAULTS, ids=[f[2][:50] for f in FAULTS])
def test_faults(fault: str, text: str, body: str, parts: dict) -> None:
    with expect_fault(fault, text, at=body):
        run(body, np.zeros(32, np.uint32), **parts)


def test_stores_to_read_only_arrays() -> None:
    array = np.zeros(32, np.uint32)
    array.flags.writeable = False
    with expect_fault("read_only", "parameter 0"):
        run("st.global.u32 [%out], %t;", array)
    run("ld.global.u32 r0, [%out];", array)


def test_lane_at_fault_is_named() -> None:
    with expect_fault("out_of_bounds") as caught:
        run("mad.wide.u32 d0, %t, 4, %out; st.global.u32 [d0], %t;", np.zeros(70, np.uint32), threads=96)
    assert "warp 2 lane 6" in caught.verdict.where
    assert caught.verdict.line > 0
