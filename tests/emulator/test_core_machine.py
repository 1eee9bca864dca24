"""The machine as a whole: schedules, determinism, registers, cluster launch control, reports, launches, plans."""

import itertools

import numpy as np
import pytest
from chex import assert_trees_all_equal

import emulator
from emulator.core_kernels import SCHEDULES, expect_fault, module, run
from emulator.library import library
from jax_fa_blackwell.plan import launch as plans

# ---- order and determinism ------------------------------------------------------------------------------------------

# Every thread adds its own float to one sum (the order shows in the rounding) and takes a ticket.
ORDER = """cvt.rn.f32.u32 r1, %me; mul.f32 r1, r1, 0f3DCCCCCD; rcp.approx.f32 r1, r1; setp.eq.u32 p0, %me, 0;
@p0 mov.b32 r1, 0f4B800000; red.global.add.f32 [%out], r1; atom.global.add.u32 r2, [%out+4], 1;
mad.wide.u32 d1, %me, 4, %out; st.global.u32 [d1+8], r2;"""


def order(seed: int, threads: int) -> tuple[np.ndarray, int]:
    out = np.zeros(2 + 96 * 12, np.uint32)
    report = run(ORDER, out, threads=96, grid=12, schedule=emulator.Schedule(seed=seed, threads=threads))
    return out, report.instructions


def test_the_seed_alone_decides() -> None:
    first = order(1, 1)
    assert_trees_all_equal(first, order(1, 2))
    assert_trees_all_equal(first, order(1, 5))
    assert any((first[0] != order(seed, 2)[0]).any() for seed in range(2, 6))
    np.testing.assert_array_equal(np.sort(first[0][2:]), np.arange(96 * 12))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grid", [2, 40])
def test_ctas_that_wait_for_each_other_through_global_memory(grid: int, schedule: emulator.Schedule) -> None:
    """A chain in descending order: each CTA polls the flag of the next, so that even late ones must become resident."""
    out = np.zeros(grid + 1, np.uint32)
    out[grid] = 5
    body = """mov.u32 r1, %ctaid.x; mad.wide.u32 d1, r1, 4, %out;
    L: ld.acquire.gpu.global.u32 r2, [d1+4]; setp.eq.u32 p0, r2, 0; @p0 bra L;
    add.u32 r2, r2, 1; st.release.gpu.global.u32 [d1], r2;"""
    run(body, out, threads=1, grid=grid, schedule=schedule)
    np.testing.assert_array_equal(out, 5 + np.arange(grid, -1, -1))


def test_ctas_that_wait_for_each_other_in_vain() -> None:
    body = """mov.u32 r1, %ctaid.x; xor.b32 r1, r1, 1; mad.wide.u32 d1, r1, 4, %out;
    L: ld.acquire.gpu.global.u32 r2, [d1]; setp.eq.u32 p0, r2, 0; @p0 bra L;"""
    with expect_fault("deadlock") as caught:
        run(body, np.zeros(2, np.uint32), threads=1, grid=2)
    assert {row.cta for row in caught.verdict.waiting} == {(0, 0, 0), (1, 0, 0)}


def test_the_first_clusters_verdict_is_raised() -> None:
    for threads in (1, 3):
        with expect_fault("trap") as caught:
            run("setp.gt.u32 p0, %me, 70; @p0 trap;", np.zeros(1), grid=8, schedule=emulator.Schedule(threads=threads))
        assert "CTA (2,0,0)" in caught.verdict.where


# ---- setmaxnreg -----------------------------------------------------------------------------------------------------

SMALL_BLOCKS = ".reqntid 512, 1, 1\n.minnctapersm 1"


def maxnreg(*by_group: tuple[str, ...]) -> str:
    """Each warpgroup executes its own setmaxnreg instructions."""
    lines = ["shr.u32 r1, %warp, 2;"]
    for group, actions in enumerate(by_group):
        lines.append(f"setp.ne.u32 p0, r1, {group}; @p0 bra G{group};")
        lines += [f"setmaxnreg.{action}.sync.aligned.u32 {count};" for action, count in (a.split() for a in actions)]
        lines.append(f"G{group}:")
    return "\n".join(lines)


def test_registers_move_between_warpgroups() -> None:
    """512 threads begin with 128 registers each; what two groups give away, the other two get."""
    for seed in range(4):
        report = run(
            maxnreg(("dec 24",), ("dec 32",), ("inc 224",), ("inc 232",)),
            np.zeros(1),
            threads=512,
            directives=SMALL_BLOCKS,
            schedule=emulator.Schedule(seed=seed),
        )
        assert report.registers == 128


@pytest.mark.parametrize(
    ("fault", "text", "groups"),
    [
        ("deadlock", "registers free in the CTA's pool", (("dec 24",), ("dec 32",), ("inc 232",), ("inc 232",))),
        ("register_pool", "have 128 registers", (("dec 136",),)),
        ("register_pool", "have 128 registers", (("inc 120",),)),
    ],
)
def test_faults_of_setmaxnreg(fault: str, text: str, groups: tuple) -> None:
    with expect_fault(fault, text, at="setmaxnreg"):
        run(maxnreg(*groups), np.zeros(1), threads=512, directives=SMALL_BLOCKS)


def test_setmaxnreg_by_part_of_a_warpgroup() -> None:
    body = "setp.eq.u32 p0, %warp, 1; @p0 bra END; setmaxnreg.dec.sync.aligned.u32 24; END:"
    with expect_fault("register_pool", "warps 0 and 1 of one warpgroup"):
        run(body, np.zeros(1), threads=128, directives=".reqntid 128, 1, 1\n.minnctapersm 1")


def test_the_compiler_ignores_setmaxnreg_without_minnctapersm() -> None:
    report = run("setmaxnreg.inc.sync.aligned.u32 24;", np.zeros(1), threads=128, directives=".reqntid 128, 1, 1")
    assert report.registers == 0


# ---- cluster launch control -----------------------------------------------------------------------------------------

CANCEL = """mov.u32 r20, bar; mov.u32 r21, answer; mov.u32 r10, 0; mov.u32 r11, %ctaid.x; setp.eq.u32 p10, %t, 0;
@p10 mbarrier.init.shared.b64 [r20], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
LOOP: mad.wide.u32 d1, r11, 4, %out; @p10 red.global.add.u32 [d1], 1; bar.sync 0;
@p10 mbarrier.arrive.expect_tx.shared.b64 _, [r20], 16;
@p10 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [r21], [r20];
W: mbarrier.try_wait.parity.shared.b64 p1, [r20], r10; @!p1 bra W; xor.b32 r10, r10, 1;
ld.shared.b128 q0, [r21]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p2, q0; @!p2 bra END;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {r11, r12, r13, _}, q0;
clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 r14, q0; add.u32 r12, r12, r14;
setp.ne.u32 p3, r12, 0; @p3 trap; bra LOOP; END:"""
SHARED = ".shared .align 8 .b64 bar; .shared .align 16 .b8 answer[16];"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_launch_control_gives_every_cta_once(schedule: emulator.Schedule) -> None:
    out = np.zeros(50, np.uint32)
    run(CANCEL, out, threads=64, grid=50, declare=SHARED, schedule=schedule)
    np.testing.assert_array_equal(out, 1)


def test_a_request_after_a_failed_one() -> None:
    body = CANCEL.replace("@!p2 bra END;", "@!p2 bra LOOP;").replace("mad.wide.u32 d1, r11", "mad.wide.u32 d1, 0")
    with expect_fault("illegal_operand", "after one that failed"):
        run(body, np.zeros(50, np.uint32), threads=64, grid=9, declare=SHARED)


# ---- reports --------------------------------------------------------------------------------------------------------


def test_report_counts() -> None:
    body = "mov.u32 r0, 0; L: add.u32 r0, r0, 1; setp.lt.u32 p0, r0, 10; @p0 bra L; setp.eq.u32 p1, %warp, 0; @p1 ret;"
    report = run(body, np.zeros(1, np.uint32), threads=64, grid=3, declare=".shared .b8 s[100];")
    assert report.entry == "kernel"
    assert report.by_opcode["bra"] == 3 * 2 * 10
    assert report.instructions == sum(report.by_opcode.values()) == sum(report.by_warp) == sum(report.by_line.values())
    assert report.by_warp[1] - report.by_warp[0] == 3
    assert "60 bra" in report.table()


def test_trace_covers_every_warp_and_plots(tmp_path) -> None:
    body = "mov.u32 r0, 0; L: add.u32 r0, r0, 1; setp.lt.u32 p0, r0, 900; @p0 bra L; bar.sync 0;"
    report = run(body, np.zeros(1, np.uint32), threads=96, grid=2, trace="role")
    rows = [row for row in report.trace if row.cluster == 1 and row.kind == "run"]
    assert {row.warp for row in rows} == {0, 1, 2}
    times = sorted((row.begin, row.end) for row in rows)
    assert all(begin < end for begin, end in times)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert sum(row.end - row.begin for row in report.trace if row.kind == "run") == report.instructions
    waits = [row for row in report.trace if row.kind == "wait" and row.cluster == 1]
    assert {row.line for row in waits} == {module(body).split("\n").index(body) + 1}
    assert len({row.warp for row in waits}) == 2
    report.plot(tmp_path / "trace.png", cluster=1)
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no trace of cluster 7"):
        report.plot(tmp_path / "no.png", cluster=7)


def test_events_are_reported() -> None:
    body = """mov.u32 r20, bar; setp.eq.u32 p10, %t, 0; @p10 mbarrier.init.shared.b64 [r20], 64; bar.sync 0;
    fence.proxy.async.shared::cta; ld.global.u32 r1, [%out]; atom.global.add.u32 r2, [%out], 1; mov.u32 r3, answer;
    @p10 st.shared.u32 [r3], r2; setp.lt.u32 p0, %t, 3; @p0 cp.async.ca.shared.global [r3+8], [%out], 4;
    mbarrier.arrive.shared.b64 _, [r20]; W: mbarrier.try_wait.parity.shared.b64 p1, [r20], 0; @!p1 bra W;
    cp.async.wait_all; barrier.cluster.arrive; barrier.cluster.wait;"""
    report = run(body, np.zeros(4, np.uint32), threads=64, declare=SHARED, check=emulator.Checks(events=True))
    want = {
        "global read generic": 64,
        "global reduce generic": 64,
        "shared write generic": 1,
        "mbarrier_init": 1,
        "mbarrier_arrive": 64,
        "mbarrier_wait": 64,
        "named_barrier_arrive": 2,
        "named_barrier_leave": 2,
        "fence_proxy_async": 64,
        "issue": 3,
        "complete": 3,
        "cluster_arrive": 2,
        "cluster_leave": 2,
    }
    assert {name: report.events.get(name) for name in want} == want
    assert run(body, np.zeros(4, np.uint32), threads=64, declare=SHARED).events == {}


def test_source_lines_are_roles() -> None:
    text = (
        module("bar.sync 1, 64;", directives=".reqntid 32, 1, 1")
        .replace("bar.sync", ".loc 1 77 3\nbar.sync")
        .replace(".visible", '.file 1 "attention.py"\n.visible')
    )
    with expect_fault("named_barrier") as caught:
        emulator.load(text).launch(grid=(1, 1, 1), block=(32, 1, 1), params=[np.zeros(1)])
    assert "attention.py:77" in caught.verdict.where


# ---- launching ------------------------------------------------------------------------------------------------------

LAUNCH = {"grid": (1, 1, 1), "block": (32, 1, 1)}


@pytest.mark.parametrize(
    ("changes", "params", "message"),
    [
        ({}, [], "has 1 parameters; got 0"),
        ({}, [np.int32(3)], "parameter 0 of kernel has 8 bytes; got 4"),
        ({}, [3], "numpy array, Pointer, TensorMap, numpy scalar or bytes; got int 3"),
        ({"grid": (0, 1, 1)}, [np.zeros(1)], "grid must be three positive extents"),
        ({"entry": "other"}, [np.zeros(1)], "entry must be one of kernel; got 'other'"),
        ({"trace": "all"}, [np.zeros(1)], 'trace must be None or "role"'),
        ({}, [np.zeros(4)[::-1]], "negative strides"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict, params: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        emulator.load(module("")).launch(**{**LAUNCH, **changes}, params=params)


@pytest.mark.parametrize(
    ("changes", "directives", "text"),
    [
        ({"block": (1024, 2, 1)}, "", "at most 1024 threads"),
        ({"block": (64, 1, 1)}, ".reqntid 32, 1, 1", "requires blocks of (32, 1, 1)"),
        ({"block": (64, 1, 1)}, ".maxntid 32", "allows blocks of 32"),
        ({"cluster": (2, 1, 1)}, "", "does not divide grid"),
        ({"grid": (2, 1, 1)}, ".reqnctapercluster 2", "requires clusters of (2, 1, 1)"),
        ({"shared_bytes": 300_000}, "", "exceed 232448"),
    ],
)
def test_launches_that_the_kernel_does_not_allow(changes: dict, directives: str, text: str) -> None:
    with expect_fault("launch", text):
        emulator.load(module("", directives=directives)).launch(**{**LAUNCH, **changes}, params=[np.zeros(1)])


def test_unaligned_arrays_are_passed_at_256_bytes() -> None:
    memory = np.zeros(100, np.uint32)
    run("cvt.u32.u64 r0, %out; and.b32 r0, r0, 255; st.global.u32 [%out], r0; st.global.u32 [%out+4], 9;", memory[3:])
    np.testing.assert_array_equal(memory[:6], [0, 0, 0, 0, 9, 0])


def test_schedule_values() -> None:
    with pytest.raises(ValueError, match="async_ must be one of"):
        emulator.Schedule(async_="late")
    with pytest.raises(ValueError, match="probability below 1"):
        emulator.Schedule(spurious_wait=1.0)


def test_the_missing_library_names_its_build_command(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("EMULATOR_LIBRARY", str(tmp_path / "none.so"))
    library.cache_clear()
    with pytest.raises(FileNotFoundError, match="cmake -S tests/emulator/native -B build/emulator"):
        library()
    library.cache_clear()


# ---- plans ----------------------------------------------------------------------------------------------------------

SHA = "ab" * 32


def scale_plan() -> plans.LaunchPlan:
    """result[i] = argument[i] * factor for the first half of the result, after a fill of a quarter of it."""
    launch = plans.Launch(
        kernel="scale",
        sha256=SHA,
        symbol="kernel",
        grid=(1, 1, 1),
        block=(32, 1, 1),
        params=(plans.Pointer(0), plans.Pointer(1, 128), plans.Float32(2.5), plans.Int32(30)),
    )
    steps = (plans.Fill(operand=1, words=16, word=0x3F800000), launch)
    return plans.LaunchPlan("test", (128,), (384,), (plans.Program("sm_100a", steps),))


SCALE = module(
    """setp.ge.s32 p0, %t, %count; @p0 ret; mad.wide.u32 d1, %t, 4, %in; ld.global.f32 r1, [d1];
    mul.f32 r1, r1, %factor;
    mad.wide.u32 d2, %t, 4, %out; st.global.f32 [d2], r1;""",
    ("in", "out", "factor:f32", "count:u32"),
)


def test_run_plan() -> None:
    x = np.arange(32, dtype=np.float32)
    for ptx in ({SHA: SCALE}, {"scale": SCALE}, lambda launch: SCALE):
        (result,), report = emulator.run_plan(scale_plan(), [x], ptx=ptx)
        values = result.view(np.float32)
        np.testing.assert_array_equal(values[:16], 1.0)
        np.testing.assert_array_equal(values[32:62], 2.5 * x[:30])
        assert np.isnan(values[16:32]).all()
        assert np.isnan(values[62:]).all()
        assert report.by_opcode["mul.f32"] == 1


def test_run_plan_refuses_what_does_not_fit() -> None:
    x = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match="takes 1 operands; got 2"):
        emulator.run_plan(scale_plan(), [x, x], ptx={})
    with pytest.raises(ValueError, match="must have 128 bytes; got 64"):
        emulator.run_plan(scale_plan(), [x[:16]], ptx={})
    with pytest.raises(KeyError, match="no PTX for kernel 'scale'"):
        emulator.run_plan(scale_plan(), [x], ptx={"other": SCALE})
    with expect_fault("read_only"):
        emulator.run_plan(scale_plan(), [x], ptx={SHA: SCALE.replace("[d2], r1", "[d1], r1")})
