"""Branches, divergence and reconvergence, calls, tables, scopes of names, special registers."""

import numpy as np
import pytest

import emulator
from emulator.core_kernels import SCHEDULES, expect_fault, module, outputs, run

LANES = np.arange(32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_if_else_and_nested_divergence(schedule: emulator.Schedule) -> None:
    body = """and.b32 r1, %t, 1; setp.eq.u32 p0, r1, 0; @p0 bra EVEN;
    add.u32 r0, %t, 1000; bra DONE;
    EVEN: and.b32 r1, %t, 2; setp.eq.u32 p1, r1, 0; @p1 bra FOUR; mov.u32 r0, 7; bra DONE;
    FOUR: mul.lo.u32 r0, %t, 3;
    DONE: vote.sync.ballot.b32 r1, p0, -1;"""
    got = outputs(body, per_thread=2, schedule=schedule)
    want = np.where(LANES % 2, LANES + 1000, np.where(LANES % 4 == 0, 3 * LANES, 7))
    np.testing.assert_array_equal(got[:, 0], want)
    np.testing.assert_array_equal(got[:, 1], 0x55555555)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loops_of_different_lengths(schedule: emulator.Schedule) -> None:
    body = """mov.u32 r0, 0; mov.u32 r1, 0; LOOP: setp.ge.u32 p0, r1, %t; @p0 bra END; add.u32 r0, r0, r1;
    add.u32 r1, r1, 1; bra.uni LOOP; END: shfl.sync.idx.b32 r1, r0, 31, 31, -1;"""
    got = outputs(body, per_thread=2, schedule=schedule)
    np.testing.assert_array_equal(got[:, 0], LANES * (LANES - 1) // 2)
    np.testing.assert_array_equal(got[:, 1], 31 * 30 // 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_lane_waits_for_a_lane_behind_it(schedule: emulator.Schedule) -> None:
    """Independent threads: the lane at the lower address spins until a lane at a higher one has stored."""
    body = """mov.u32 r5, cell; st.shared.u32 [r5], 0; bar.warp.sync -1; setp.eq.u32 p0, %t, 0; @!p0 bra GIVE;
    SPIN: ld.volatile.shared.u32 r0, [r5]; setp.eq.u32 p1, r0, 0; @p1 bra SPIN; bra DONE;
    GIVE: setp.eq.u32 p1, %t, 9; mov.u32 r0, 0; @p1 st.volatile.shared.u32 [r5], 77;
    DONE: bar.warp.sync -1;"""
    got = outputs(body, declare=".shared .u32 cell;", schedule=schedule)
    np.testing.assert_array_equal(got[:, 0], [77] + [0] * 31)


def test_branch_tables() -> None:
    body = """and.b32 r1, %t, 3; ts: .branchtargets L0, L1, L2, L0; brx.idx r1, ts;
    L0: mov.u32 r0, 10; bra END; L1: mov.u32 r0, 11; bra END; L2: mov.u32 r0, 12; END:"""
    got = outputs(body)
    np.testing.assert_array_equal(got[:, 0], np.array([10, 11, 12, 10])[LANES % 4])
    with expect_fault("illegal_operand", "brx.idx index 4"):
        run(body.replace("and.b32 r1, %t, 3", "and.b32 r1, %t, 7"), np.zeros(1, np.uint32))


CALLEE = """.func (.param .b32 result) twice_plus(.param .b32 a, .param .b64 b)
{ .reg .b32 x, y; .reg .b64 z; .reg .pred p; ld.param.b32 x, [a]; ld.param.b64 z, [b]; cvt.u32.u64 y, z;
  add.u32 x, x, x; setp.gt.u32 p, x, 20; @p bra BIG; add.u32 x, x, y; st.param.b32 [result], x; ret;
  BIG: st.param.b32 [result], 0; ret; }
"""


def test_calls_with_divergent_returns() -> None:
    body = """{ .param .b32 pa; .param .b64 pb; .param .b32 pr; cvt.u64.u32 d1, %t; add.u64 d1, d1, 5;
    st.param.b32 [pa], %t; st.param.b64 [pb], d1; call.uni (pr), twice_plus, (pa, pb); ld.param.b32 r0, [pr]; }"""
    got = outputs(body, before=CALLEE)
    np.testing.assert_array_equal(got[:, 0], np.where(2 * LANES > 20, 0, 3 * LANES + 5))
    predicated = body.replace("call.uni", "@p0 call").replace("ld.param", "@p0 ld.param")
    predicated = "mov.u32 r0, 9; setp.lt.u32 p0, %t, 4;" + predicated
    got = outputs(predicated, before=CALLEE)
    np.testing.assert_array_equal(got[:, 0], np.where(LANES < 4, 3 * LANES + 5, 9))


def test_calls_of_unknown_functions_fail_when_executed() -> None:
    before = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);"
    call = "{ .param .b64 a, b; .param .b32 r; call.uni (r), vprintf, (a, b); }"
    out = np.zeros(1, np.uint32)
    run(f"setp.eq.u32 p0, %t, 99; @!p0 bra END; {call} END:", out, before=before)
    with expect_fault("unsupported", "vprintf"):
        run(call, out, before=before)


def test_names_live_in_their_braces() -> None:
    body = """mov.u32 r0, 1; { .reg .u32 r0; .reg .pred P1; mov.u32 r0, 50; setp.eq.u32 P1, r0, 50;
    @P1 bra NEXT; trap; NEXT: { .reg .b32 %x<3>; mov.u32 %x2, r0; add.u32 r1, %x2, 1; } }
    { NEXT: add.u32 r1, r1, 1; }"""
    got = outputs(body, per_thread=2)
    np.testing.assert_array_equal(got[0], [1, 52])


def test_threads_that_return_early_leave_the_rest_running() -> None:
    out = np.zeros(64, np.uint32)
    body = """setp.lt.u32 p0, %t, 40; @p0 ret; add.u32 r0, %t, 1; mad.wide.u32 d0, %t, 4, %out; st.global.u32 [d0], r0;
    setp.eq.u32 p1, %t, 50; @p1 exit; st.global.u32 [d0], %t;"""
    run(body, out, threads=64)
    threads = np.arange(64)
    np.testing.assert_array_equal(out, np.where(threads < 40, 0, np.where(threads == 50, 51, threads)))


def test_special_registers() -> None:
    text = module(
        """.reg .b32 x<16>; .reg .b64 place; mov.u32 x0, %tid.x; mov.u32 x1, %tid.y; mov.u32 x2, %tid.z;
        mov.u32 x3, %ntid.y; mov.u32 x4, %ctaid.x; mov.u32 x5, %ctaid.y; mov.u32 x6, %nctaid.y; mov.u32 x7, %laneid;
        mov.u32 x8, %warpid;
        mov.u32 x9, %lanemask_lt; mov.u32 x10, %cluster_ctarank; mov.u32 x11, %clusterid.x;
        mad.lo.u32 r1, x2, 3, x1; mad.lo.u32 r1, r1, 8, x0; mad.lo.u32 r2, x5, 4, x4; mad.lo.u32 r1, r2, 48, r1;
        mad.wide.u32 place, r1, 48, %out; st.global.v4.u32 [place], {x0, x1, x2, x3};
        st.global.v4.u32 [place+16], {x4, x5, x6, x7}; st.global.v4.u32 [place+32], {x8, x9, x10, x11};"""
    )
    out = np.zeros((2, 4, 2, 3, 8, 12), np.uint32)
    emulator.load(text).launch(grid=(4, 2, 1), block=(8, 3, 2), cluster=(2, 1, 1), params=[out])
    cy, cx, z, y, x = np.indices(out.shape[:-1])
    linear = (z * 3 + y) * 8 + x
    want = [x, y, z, 3 + 0 * x, cx, cy, 2 + 0 * x, linear % 32, linear // 32]
    want += [(1 << linear % 32) - 1, cx % 2, cx // 2]
    np.testing.assert_array_equal(out, np.stack(want, -1))


def test_clocks_run_forward() -> None:
    got = outputs(
        "mov.u64 d0, %clock64; mov.u64 d1, %globaltimer; mov.u64 d2, %clock64;", per_thread=3, dtype=np.uint64
    )
    assert (got[:, 2] > got[:, 0]).all()
    assert (got[:, 1] >= got[:, 0]).all()


CONTROL_FAULTS = [
    ("divergence", "bra.uni", "setp.lt.u32 p0, %t, 4; @p0 bra.uni END; END:"),
    ("trap", "trap", "setp.eq.u32 p0, %t, 4; @p0 trap;"),
    ("divergence", "predicated off", "setp.eq.u32 p0, %t, 4; @p0 bar.sync 0;"),
    ("divergence", "predicated off", "setp.eq.u32 p0, %t, 4; @p0 shfl.sync.idx.b32 r0, r0, 0, 31, -1;"),
    ("illegal_operand", "does not hold the executing lane", "vote.sync.ballot.b32 r0, p0, 0xfffffffe;"),
    ("deadlock", "other threads of its warp", "setp.eq.u32 p0, %t, 4; @p0 bra L; bar.sync 0; bra E; L: bar.sync 0; E:"),
    ("deadlock", "polls", "L: ld.volatile.global.u32 r0, [%out]; setp.eq.u32 p0, r0, 0; @p0 bra L;"),
]


@pytest.mark.parametrize(("fault", "text", "body"), CONTROL_FAULTS, ids=[f[2][:40] for f in CONTROL_FAULTS])
def test_faults(fault: str, text: str, body: str) -> None:
    with expect_fault(fault, text):
        run(body, np.zeros(32, np.uint32), check=emulator.Checks(spin_limit=100_000))
