"""tcgen05 through PTX: MMA in every form against arithmetic and layouts tested on their own, copies, reductions."""

import numpy as np
import pytest

import emulator
from emulator import mma_model, mma_native
from emulator.lane_kernels import HEADER
from emulator.tcgen05_kernels import MmaCase, launch_mma, make_inputs, mma_ptx, move_columns
from emulator.test_mma import numbers

MODES = ("eager", "lazy", "random")


def inputs_of(case: MmaCase, seed: int = 0, spread: int = 4):
    """Random operands with exponents around the middle, a random accumulator."""
    rng = np.random.default_rng(seed)
    k = 256 // mma_native.CONTAINER_BITS.get(case.a_type, 8)
    a_type, b_type = case.types

    def operands(step):
        del step
        if a_type in mma_model.INTEGERS:
            return rng.integers(0, 256, (case.m, k)), rng.integers(0, 256, (case.n, k))
        return numbers(rng, (case.m, k), a_type, spread), numbers(rng, (case.n, k), b_type, spread)

    shape = (case.group, 128, case.columns)
    if case.d_type == "f16":
        start = 0x7FFF0000 | rng.standard_normal(shape).astype(np.float16).view(np.uint16).astype(np.uint32)
    elif case.d_type == "s32":
        start = rng.integers(0, 2**32, shape, np.uint64).astype(np.uint32)
    else:
        start = rng.standard_normal(shape).astype(np.float32).view(np.uint32)
    case.data["start"] = start
    return make_inputs(case, operands)


def check(case: MmaCase, *, mode: str = "random", seed: int = 0):
    inputs = inputs_of(case, seed)
    out, report = launch_mma(inputs, mode=mode, seed=seed)
    np.testing.assert_array_equal(out, inputs.expected())
    return report


def name(case: MmaCase) -> str:
    parts = [
        str(case.m),
        str(case.n),
        case.a_type,
        f"cta{case.group}",
        "TS" if case.a_in_tensor else "SS",
        case.swizzle,
    ]
    parts += [f"{'MN' if case.mn_major_a else 'K'}{'MN' if case.mn_major_b else 'K'}"] + ["ws"] * case.ws
    parts += [f"lane{case.lane}"] * bool(case.lane) + [case.d_type] * (case.d_type != "f32")
    return "-".join(parts)


LAYOUTS = [
    MmaCase(256, 48, group=2), MmaCase(256, 32, group=2, a_in_tensor=True), MmaCase(128, 64, group=2),
    MmaCase(128, 32, group=2, a_in_tensor=True), MmaCase(128, 24), MmaCase(128, 256, "f16"),
    MmaCase(128, 40, a_in_tensor=True), MmaCase(64, 32), MmaCase(64, 8), MmaCase(64, 32, lane=16),
    MmaCase(64, 32, a_in_tensor=True), MmaCase(64, 32, a_in_tensor=True, lane=16),
    MmaCase(128, 64, ws=True), MmaCase(64, 64, ws=True), MmaCase(32, 128, ws=True),
    MmaCase(128, 64, ws=True, a_in_tensor=True),
]  # fmt: skip
TYPES = [
    MmaCase(128, 16, "f16"), MmaCase(128, 16, "f16", d_type="f16"), MmaCase(64, 16, "f16", "bf16"),
    MmaCase(128, 16, "tf32"),
    MmaCase(64, 16, "tf32", a_in_tensor=True), MmaCase(128, 16, "e4m3"), MmaCase(64, 16, "e4m3", "e5m2", d_type="f16"),
    MmaCase(256, 32, "e5m2", "e4m3", group=2, a_in_tensor=True), MmaCase(128, 16, "u8", "s8", d_type="s32"),
    MmaCase(64, 48, "s8", d_type="s32", a_in_tensor=True),
]  # fmt: skip
OPERANDS = [
    MmaCase(m, n, t, group=group, mn_major_a=ma, mn_major_b=mb, swizzle=swizzle)
    for m, n, group in ((128, 32, 1), (256, 64, 2), (64, 64, 1))
    for ma, mb in ((False, True), (True, False), (True, True))
    for t, swizzles in (("bf16", ("none", "32B", "64B", "128B")), ("e4m3", ("64B", "128B")))
    for swizzle in swizzles
] + [
    MmaCase(128, 32, "tf32", mn_major_a=ma, mn_major_b=mb, swizzle="128B_32B") for ma, mb in ((True, True),)
] + [MmaCase(128, 32, t, swizzle=s) for t in ("bf16", "tf32", "e4m3") for s in ("none", "32B", "64B")]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", LAYOUTS, ids=name)
def test_layouts_of_the_accumulator(case, mode):
    check(case, mode=mode)


@pytest.mark.parametrize("case", TYPES, ids=name)
def test_types(case):
    check(case)


@pytest.mark.parametrize("case", OPERANDS, ids=name)
def test_operands_in_shared_memory(case):
    check(case)


@pytest.mark.parametrize("pair", [False, True])
def test_options(pair):
    m, group = (256, 2) if pair else (128, 1)
    check(MmaCase(m, 32, group=group, accumulate=False))
    check(MmaCase(m, 32, group=group, negate_a=True, scale=3))
    words = (0xFFFF0000, 0x1, 0x0, 0x80000000, 0xAAAAAAAA, 0x0, 0xFFFFFFFF, 0x7)
    check(MmaCase(m, 32, group=group, disable=words[: 4 * group]))
    fill = tuple(f"collector::a::{op}" for op in ("fill", "discard", "fill"))
    check(MmaCase(m, 32, group=group, collector=fill, steps=3))


def test_one_step_equals_the_slow_model():
    """The whole way, with the slow model at its end instead of the library."""
    case = MmaCase(64, 16, "bf16", steps=1)
    inputs = inputs_of(case, seed=3, spread=14)
    out, report = launch_mma(inputs)
    place = mma_native.place(case.idesc, case.kind, rows=64, n=16)
    lane, column = place[..., 0], place[..., 1]
    want = mma_model.matmul(inputs.a[0], inputs.b[0], inputs.start[0][lane, column], "bf16", "bf16")
    np.testing.assert_array_equal(out[0][lane, column], want)
    assert sum(report.mma.values()) == 1


def test_the_collector_may_be_used_while_a_is_the_same():
    """use and lastuse read A again; the descriptors of all three steps name the same matrix."""
    case = MmaCase(128, 16, steps=3, collector=tuple(f"collector::a::{op}" for op in ("fill", "use", "lastuse")))
    inputs = inputs_of(case)
    inputs.descriptors[:, 0] = inputs.descriptors[0, 0]
    inputs.a[1:] = [inputs.a[0]] * 2
    out, _ = launch_mma(inputs)
    np.testing.assert_array_equal(out, inputs.expected())


def test_a_longer_chain_does_not_depend_on_the_schedule():
    case = MmaCase(128, 64, "f16", steps=6)
    inputs = inputs_of(case, seed=2)
    want = inputs.expected()
    for mode, seed in (("eager", 0), ("lazy", 1), ("random", 2), ("random", 3), ("random", 4)):
        out, report = launch_mma(inputs, mode=mode, seed=seed)
        np.testing.assert_array_equal(out, want)
        assert report.tmem_peak_columns == 64


# ---------------------------------------------------------------- cp


def copy_ptx(shape: str, modifiers: str, columns: int, group: int, nbytes: int, lane: int) -> str:
    """Kernel (image, descriptor, out): one tcgen05.cp, then all of Tensor Memory's first columns."""
    text = mma_ptx(MmaCase(128 * group, 16 * group, group=group, steps=1), nbytes)
    begin, end = text.index("ld.global.b64 %desc_a"), text.index("tcgen05.commit")
    text = (
        text[:begin]
        + f"ld.global.b64 %desc_a, [%descs];\nadd.u32 %ta, %tmem, {lane << 16};\n"
        + f"tcgen05.cp.cta_group::{group}.{shape}{modifiers} [%ta], %desc_a;\n"
        + text[end:]
    )
    assert columns == 16 * group
    return text


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("shape", "modifiers", "rows", "units", "lanes"),
    [
        ("128x256b", "", 128, 2, lambda r: [r]),
        ("128x128b", "", 128, 1, lambda r: [r]),
        ("64x128b", ".warpx2::02_13", 64, 1, lambda r: [r, r + 64]),
        ("64x128b", ".warpx2::01_23", 64, 1, lambda r: [r % 32 + 64 * (r // 32) + 32 * i for i in (0, 1)]),
        ("32x128b", ".warpx4", 32, 1, lambda r: [r + 32 * i for i in range(4)]),
        ("4x256b", "", 4, 2, lambda r: [7 + 32 * r]),
    ],
)
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_copies_from_shared_memory(shape, modifiers, rows, units, lanes, group, swizzle):
    rng = np.random.default_rng(1)
    columns = 16 * group
    lbo, sbo = 2048, 1024 if swizzle == "128B" else 128
    nbytes = 16384
    image = rng.integers(0, 2**32, (group, nbytes // 4), np.uint64).astype(np.uint32).view(np.uint8)
    # Rows of 16-byte units, as an operand of 8-bit elements would lie.
    where = mma_model.canonical_addresses(
        1024, lbo, sbo, swizzle, mn_major=False, rows=max(rows, 8), element_bits=8
    )[:rows]  # fmt: skip
    descriptors = np.array([[mma_model.shared_descriptor(1024, lbo, sbo, swizzle), 0]], np.uint64)
    start = rng.integers(0, 2**32, (group, 128, columns), np.uint64).astype(np.uint32)
    want = start.copy()
    for cta in range(group):
        for r in range(rows):
            data = image[cta][where[r] - 1024].view(np.uint32)[: 4 * units]
            for lane in lanes(r):
                want[cta, lane, : 4 * units] = data
    out = np.zeros_like(start)
    text = copy_ptx(shape, modifiers, columns, group, nbytes, 7 if shape == "4x256b" else 0)
    emulator.load(text).launch(
        grid=(group, 1, 1),
        block=(128, 1, 1),
        cluster=(group, 1, 1),
        shared_bytes=nbytes + 16,
        params=[image, descriptors, np.zeros(1, np.uint32), start, out],
        schedule=emulator.Schedule(seed=1),
    )
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("group", [1, 2])
def test_shift_moves_31_lanes_down(group):
    rng = np.random.default_rng(2)
    columns = 16 * group
    text = copy_ptx("128x128b", "", columns, group, 1024, 0)
    begin, end = text.index("tcgen05.cp"), text.index("tcgen05.commit")
    shift = f"add.u32 %ta, %ta, {32 << 16 | 4};\ntcgen05.shift.cta_group::{group}.down [%ta];\n"
    start = rng.integers(0, 2**32, (group, 128, columns), np.uint64).astype(np.uint32)
    want = start.copy()
    want[:, 32:63, 4:12] = start[:, 33:64, 4:12]
    out = np.zeros_like(start)
    emulator.load(text[:begin] + shift + text[end:]).launch(
        grid=(group, 1, 1),
        block=(128, 1, 1),
        cluster=(group, 1, 1),
        shared_bytes=1024 + 16,
        params=[np.zeros((group, 1024), np.uint8), np.zeros(2, np.uint64), np.zeros(1, np.uint32), start, out],
        schedule=emulator.Schedule(seed=1),
    )
    np.testing.assert_array_equal(out, want)


# ---------------------------------------------------------------- ld.red, allocation


def tmem_ptx(body: str, *, columns: int = 32, target: str = "sm_100a") -> str:
    """Kernel (input, out) of 128 threads with `columns` columns at %tmem; `body` may use %v0-%v31, %r and %in, %out."""
    return f"""{HEADER.replace("sm_100a", target)}
.visible .entry kernel(.param .u64 input, .param .u64 out) {{
.reg .b32 %tid, %warp, %tmem, %ta, %lane_base, %r, %n, %v<32>;
.reg .b64 %in, %out, %g;
.reg .pred %p;
.shared .align 4 .b32 slot[4];
mov.u32 %tid, %tid.x;
shr.u32 %warp, %tid, 5;
ld.param.b64 %in, [input];
ld.param.b64 %out, [out];
setp.ne.b32 %p, %warp, 0;
@%p bra READY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {columns};
READY:
bar.sync 0;
ld.shared.b32 %tmem, [slot];
shl.b32 %lane_base, %warp, 21;
add.u32 %lane_base, %lane_base, %tmem;
{body}
bar.sync 0;
setp.ne.b32 %p, %warp, 0;
@%p bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, {columns};
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
END:
ret;
}}"""


def run_tmem(
    text: str, values: np.ndarray, out_words: int, *, mode: str = "random", seed: int = 0, ctas: int = 1
) -> np.ndarray:
    out = np.zeros((128, out_words), np.uint32)
    emulator.load(text).launch(
        grid=(ctas, 1, 1),
        block=(128, 1, 1),
        cluster=(ctas, 1, 1),
        params=[values, out],
        schedule=emulator.Schedule(seed=seed, async_=mode),
    )
    return out


@pytest.mark.parametrize(
    ("form", "reduce"),
    [
        ("min.u32", lambda v: v.min(1)),
        ("max.s32", lambda v: v.view(np.int32).max(1).view(np.uint32)),
        ("max.f32", lambda v: np.fmax.reduce(v.view(np.float32), 1).view(np.uint32)),
        ("min.abs.f32", lambda v: np.fmin.reduce(np.abs(v.view(np.float32)), 1).view(np.uint32)),
        ("max.NaN.f32", lambda v: np.maximum.reduce(v.view(np.float32), 1).view(np.uint32)),
    ],
)
def test_load_with_reduction(form, reduce):
    rng = np.random.default_rng(4)
    values = rng.standard_normal((128, 8)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    values[5] = np.nan
    values[6] = 0.0
    values[6, 3] = -0.0
    words = values.view(np.uint32)
    loads = "{%v8, %v9, %v10, %v11, %v12, %v13, %v14, %v15}"
    body = f"""{move_columns("%in", 8, 0, "in", store=True)}
tcgen05.ld.red.sync.aligned.32x32b.x8.{form} {loads}, %r, [%lane_base];
mul.wide.u32 %g, %tid, 36;
add.s64 %g, %g, %out;
st.global.b32 [%g+32], %r;
""" + "".join(f"st.global.b32 [%g+{4 * i}], %v{8 + i};\n" for i in range(8))
    for mode in MODES:
        out = run_tmem(tmem_ptx(body, target="sm_103a"), words, 9, mode=mode)
        np.testing.assert_array_equal(out[:, :8], words)
        want = reduce(words)
        want = np.where(np.isnan(want.view(np.float32)) & ("f32" in form), np.uint32(0x7FFFFFFF), want)
        if form == "max.f32":
            want[6] = 0
        if form == "min.abs.f32":
            want[6] = 0
        np.testing.assert_array_equal(out[:, 8], want)
    with pytest.raises(emulator.Verdict, match="exists on sm_101, sm_103"):
        emulator.load(tmem_ptx(body))


def test_fresh_columns_are_poison_and_registers_wait_for_their_load():
    """A load's registers are right as soon as they are used, wait or no wait; columns nobody wrote are NaN."""
    body = """tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v0, %v1}, [%lane_base];
mul.wide.u32 %g, %tid, 8;
add.s64 %g, %g, %out;
st.global.b32 [%g], %v0;
st.global.b32 [%g+4], %v1;"""
    for mode in MODES:
        out = run_tmem(tmem_ptx(body), np.zeros(1, np.uint32), 2, mode=mode)
        assert np.isnan(out.view(np.float32)).all()


def test_a_late_load_sees_what_a_later_store_wrote():
    """ld, then st to the same place, without wait::ld: lazily that is the hazard that the ISA warns of."""
    body = f"""{move_columns("%in", 8, 0, "in", store=True)}
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r}}, [%lane_base];
mov.b32 %v0, 0;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%lane_base], {{%v0}};
tcgen05.wait::st.sync.aligned;
mul.wide.u32 %g, %tid, 4;
add.s64 %g, %g, %out;
st.global.b32 [%g], %r;"""
    values = np.arange(1, 1025, dtype=np.uint32).reshape(128, 8)
    out = run_tmem(tmem_ptx(body), values, 1, mode="eager")
    np.testing.assert_array_equal(out[:, 0], values[:, 0])
    with pytest.raises(emulator.Verdict, match=r"tcgen05.st overwrites Tensor Memory .* tcgen05.ld of warp"):
        run_tmem(tmem_ptx(body), values, 1, mode="lazy")


@pytest.mark.parametrize("mode", MODES)
def test_an_allocation_waits_for_free_columns(mode):
    """Warp 0 fills Tensor Memory; warp 1's allocation waits until a part is free again."""
    take = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
    give = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
    body = f"""setp.ge.u32 %p, %warp, 2;
@%p bra DONE;
setp.eq.b32 %p, %warp, 1;
@%p bra OTHER;
{take} [slot+4], 128;
ld.shared.b32 %r, [slot+4];
{take} [slot+4], 128;
ld.shared.b32 %n, [slot+4];
bar.sync 1, 64;
{give} %r, 128;
{give} %n, 128;
bra DONE;
OTHER:
bar.sync 1, 64;
{take} [slot+8], 128;
ld.shared.b32 %r, [slot+8];
{give} %r, 128;
DONE:"""
    for seed in range(4):
        run_tmem(tmem_ptx(body, columns=256), np.zeros(1, np.uint32), 1, mode=mode, seed=seed)
    endless = body.replace(f"{give} %r, 128;\n{give} %n, 128;", "bar.sync 2, 96;")
    with pytest.raises(emulator.Verdict, match="deadlock") as caught:
        run_tmem(tmem_ptx(endless, columns=256), np.zeros(1, np.uint32), 1, mode=mode)
    assert any("free Tensor Memory columns" in row.waits_for for row in caught.value.waiting)
