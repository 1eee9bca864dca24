"""Exchange inside a warp, with full and partial member masks, from converged and diverged code."""

import numpy as np
import pytest

import emulator
from emulator.core_kernels import SCHEDULES, expect_fault, outputs, run

LANES = np.arange(32)


def shuffle(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    """Source lane and predicate of each lane, by the ISA's pseudo code."""
    bval, cval, segment = b & 31, c & 31, c >> 8 & 31
    source, valid = [], []
    for lane in range(32):
        high, low = lane & segment | cval & ~segment, lane & segment
        j, inside = {
            "up": (lane - bval, lane - bval >= high),
            "down": (lane + bval, lane + bval <= high),
            "bfly": (lane ^ bval, lane ^ bval <= high),
            "idx": (low | bval & ~segment, (low | bval & ~segment) <= high),
        }[mode]
        source.append(j if inside else lane)
        valid.append(inside)
    return np.array(source), np.array(valid)


@pytest.mark.parametrize(("b", "c"), [(0, 0x1F), (1, 0x1F), (5, 0x1F), (3, 0x181F), (1, 0), (9, 0x1C03), (31, 0x1F)])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(mode: str, b: int, c: int) -> None:
    got = outputs(
        f"mul.lo.u32 r5, %t, 3; shfl.sync.{mode}.b32 r0|p0, r5, {b}, {c}, -1; selp.u32 r1, 1, 0, p0;", per_thread=2
    )
    source, valid = shuffle(mode, b, c)
    np.testing.assert_array_equal(got[:, 0], 3 * source)
    np.testing.assert_array_equal(got[:, 1], valid)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partial_masks_in_both_branches(schedule: emulator.Schedule) -> None:
    """Each side of a branch exchanges among its own lanes; the elect of a side sees only its members."""
    body = """setp.lt.u32 p0, %t, 12; mov.u32 r0, 0; @p0 bra LOW;
    vote.sync.ballot.b32 r0, p0, 0xfffff000; elect.sync r1|p1, 0xfffff000; redux.sync.add.u32 r2, %t, 0xfffff000;
    bra END;
    LOW: setp.eq.u32 p2, %t, 3; vote.sync.ballot.b32 r0, p2, 0x00000fff; elect.sync r1|p1, 0xfff;
    redux.sync.add.u32 r2, %t, 0xfff;
    END: selp.u32 r3, 1, 0, p1; activemask.b32 r4; bar.warp.sync -1; vote.sync.any.pred p3, p1, -1;
    selp.u32 r5, 1, 0, p3;"""
    got = outputs(body, per_thread=6, schedule=schedule)
    low = LANES < 12
    np.testing.assert_array_equal(got[:, 0], np.where(low, 8, 0))
    np.testing.assert_array_equal(got[:, 1], np.where(low, 0, 12))
    np.testing.assert_array_equal(got[:, 2], np.where(low, LANES[low].sum(), LANES[~low].sum()))
    np.testing.assert_array_equal(got[:, 3], (LANES == 0) | (LANES == 12))
    assert all(int(mask) >> lane & 1 for lane, mask in enumerate(got[:, 4]))
    np.testing.assert_array_equal(got[:, 5], 1)


def test_one_instruction_with_two_member_masks() -> None:
    body = """setp.lt.u32 p0, %t, 16; selp.b32 r9, 0x0000ffff, 0xffff0000, p0; and.b32 r8, %t, 1; setp.eq.u32 p1, r8, 1;
    vote.sync.ballot.b32 r0, p1, r9; elect.sync r1|p2, r9; match.any.sync.b32 r2, r8, r9;
    match.all.sync.b32 r3|p3, r9, r9; selp.u32 r4, 1, 0, p3;"""
    got = outputs(body, per_thread=5)
    low = LANES < 16
    half = np.where(low, 0x0000FFFF, 0xFFFF0000)
    odd = np.where(LANES % 2, 0xAAAAAAAA, 0x55555555)
    want = [half & 0xAAAAAAAA, np.where(low, 0, 16), half & odd, half, np.ones(32)]
    np.testing.assert_array_equal(got.T, want)


def test_votes() -> None:
    body = """setp.ge.u32 p0, %t, 0; setp.eq.u32 p1, %t, 5; setp.eq.u32 p2, %t, 99;
    vote.sync.all.pred p3, p0, -1; selp.u32 r0, 1, 0, p3; vote.sync.all.pred p3, p1, -1; selp.u32 r1, 1, 0, p3;
    vote.sync.any.pred p3, p1, -1; selp.u32 r2, 1, 0, p3; vote.sync.any.pred p3, p2, -1; selp.u32 r3, 1, 0, p3;
    vote.sync.uni.pred p3, !p2, -1; selp.u32 r4, 1, 0, p3; vote.sync.uni.pred p3, p1, -1; selp.u32 r5, 1, 0, p3;
    vote.sync.ballot.b32 r6, !p1, -1;"""
    got = outputs(body, per_thread=7)
    np.testing.assert_array_equal(got[0], [1, 0, 1, 0, 1, 0, 0xFFFFFFDF])


REDUX = {
    "add.u32": lambda v: v.sum(),
    "min.s32": lambda v: v.view(np.int32).min().view(np.uint32),
    "max.s32": lambda v: v.view(np.int32).max().view(np.uint32),
    "min.u32": np.min,
    "max.u32": np.max,
    "and.b32": np.bitwise_and.reduce,
    "or.b32": np.bitwise_or.reduce,
    "xor.b32": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("op", REDUX)
def test_redux(op: str) -> None:
    values = (LANES.astype(np.uint64) * 0x9E3779B1 & 0xFFFFFFFF).astype(np.uint32)
    got = outputs(f"mul.lo.u32 r5, %t, 0x9E3779B1; redux.sync.{op} r0, r5, -1;")
    np.testing.assert_array_equal(got[:, 0], REDUX[op](values).astype(np.uint32))


@pytest.mark.parametrize(
    ("form", "want"), [("max", 5.0), ("min", -7.0), ("max.abs", 7.0), ("min.abs", 0.5), ("max.NaN", np.nan)]
)
def test_redux_of_floats(form: str, want: float) -> None:
    values = np.full(32, 0.5, np.float32)
    values[[3, 9, 17]] = 5.0, -7.0, np.nan
    body = f"""mad.wide.u32 d1, %t, 4, %in; ld.global.b32 r5, [d1];
    redux.sync.{form}.f32 r0, r5, -1; st.global.b32 [d1+128], r0;"""
    memory = np.concatenate([values, np.zeros(32, np.float32)])
    run(body, memory, params=("in",))
    np.testing.assert_array_equal(memory[32:], np.full(32, want, np.float32))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads_and_stores(count: int, transposed: bool) -> None:
    """8x8 tiles of 16 bits against the layout of the mma fragments, and a store that brings them back."""
    tiles = np.arange(count * 64, dtype=np.uint16).reshape(count, 8, 8)
    trans = ".trans" if transposed else ""
    registers = ", ".join(f"r{k + 10}" for k in range(count))
    body = f"""mov.u32 r0, tiles; mad.lo.u32 r1, %t, 16, r0; setp.lt.u32 p0, %t, {8 * count};
    mad.wide.u32 d1, %t, 16, %in;
    @p0 ld.global.v2.b64 {{d2, d3}}, [d1]; @p0 st.shared.v2.b64 [r1], {{d2, d3}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [r1]; bar.warp.sync -1;
    mad.lo.u32 r2, %t, 16, r0; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [r2+512], {{{registers}}};
    mad.wide.u32 d4, %t, {4 * count}, %out;"""
    body += "".join(f"st.global.b32 [d4+{4 * k}], r{k + 10};" for k in range(count))
    body += "bar.warp.sync -1; @p0 ld.shared.v2.b64 {d2, d3}, [r1+512]; @p0 st.global.v2.b64 [d1], {d2, d3};"
    memory, out = tiles.copy(), np.zeros((32, count, 2), np.uint16)
    run(body, memory, out, params=("in", "out"), declare=".shared .align 16 .b8 tiles[1024];")
    row, column = LANES[:, None] // 4, 2 * (LANES[:, None] % 4) + np.arange(2)
    for k in range(count):
        want = tiles[k, column, row] if transposed else tiles[k, row, column]
        np.testing.assert_array_equal(out[:, k], want)
    np.testing.assert_array_equal(memory, tiles)


def test_movmatrix() -> None:
    got = outputs(
        """mul.lo.u32 r1, %t, 2; add.u32 r2, r1, 1; shl.b32 r2, r2, 16; or.b32 r1, r1, r2;
        movmatrix.sync.aligned.m8n8.trans.b16 r0, r1;"""
    )
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), tile.T)


def test_a_member_that_never_comes_is_a_deadlock() -> None:
    body = (
        "setp.eq.u32 p0, %t, 31; @p0 bra L; shfl.sync.idx.b32 r0, %t, 0, 31, -1; L: bar.warp.sync 0x80000000; M: bra M;"
    )
    with expect_fault("deadlock", "other member threads"):
        run(body, np.zeros(1), check=emulator.Checks(spin_limit=100_000))
