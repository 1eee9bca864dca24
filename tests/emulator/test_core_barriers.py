"""Named barriers, cluster barriers and mbarriers: what they order, count and return."""

import numpy as np
import pytest

import emulator
from emulator.core_kernels import SCHEDULES, expect_fault, outputs, run

BAR = ".shared .align 8 .b64 bar; .shared .align 8 .b64 bar2; .shared .align 16 .b8 stage[1024];"
INIT = """mov.u32 r20, bar; mov.u32 r21, bar2; setp.eq.u32 p10, %t, 0; @p10 mbarrier.init.shared.b64 [r20], COUNT;
bar.sync 0; """
WAIT = """W: mbarrier.try_wait.parity.shared::cta.b64 p11, [r20], PARITY; @!p11 bra W;"""


def init(count: int) -> str:
    return INIT.replace("COUNT", str(count))


def wait(parity: int | str, label: str) -> str:
    return WAIT.replace("PARITY", str(parity)).replace("W:", f"{label}:").replace("bra W", f"bra {label}")


# ---- named barriers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bar_sync_orders_shared_memory(schedule: emulator.Schedule) -> None:
    body = """mov.u32 r9, stage; mad.lo.u32 r10, %t, 4, r9; st.shared.u32 [r10], %t; bar.sync 0;
    xor.b32 r11, %t, 127; mad.lo.u32 r11, r11, 4, r9; ld.shared.u32 r0, [r11]; barrier.cta.sync.aligned 3, 128;
    st.shared.u32 [r10], 5; bar.sync 0; ld.shared.u32 r1, [r11];"""
    got = outputs(body, threads=128, per_thread=2, declare=BAR, schedule=schedule)
    np.testing.assert_array_equal(got[:, 0], np.arange(128) ^ 127)
    np.testing.assert_array_equal(got[:, 1], 5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_producer_arrives_and_consumers_wait(schedule: emulator.Schedule) -> None:
    """Warp 0 fills, arrives and goes on; warps 1 and 2 wait at the barrier of 96 threads."""
    body = """mov.u32 r9, stage; mad.lo.u32 r10, %lane, 4, r9; setp.eq.u32 p0, %warp, 0; mov.u32 r0, 0;
    @!p0 bra CONSUME;
    add.u32 r11, %t, 50; st.shared.u32 [r10], r11; bar.arrive 1, 96; bra END;
    CONSUME: bar.sync 1, 96; ld.shared.u32 r0, [r10]; END:"""
    got = outputs(body, threads=96, declare=BAR, schedule=schedule)
    np.testing.assert_array_equal(got[:, 0], np.where(np.arange(96) < 32, 0, np.arange(96) % 32 + 50))


def test_bar_red() -> None:
    body = """setp.lt.u32 p0, %t, 40; bar.red.popc.u32 r0, 1, p0; bar.red.and.pred p1, 1, p0; selp.u32 r1, 1, 0, p1;
    bar.red.or.pred p1, 1, 64, p0; selp.u32 r2, 1, 0, p1; bar.red.and.pred p1, 1, 64, !p10; selp.u32 r3, 1, 0, p1;
    bar.red.or.pred p1, 1, p10; selp.u32 r4, 1, 0, p1;"""
    got = outputs("setp.eq.u32 p10, %t, 99;" + body, threads=64, per_thread=5)
    np.testing.assert_array_equal(got, np.tile([40, 0, 1, 1, 0], (64, 1)))


def test_barriers_per_thread_from_diverged_code() -> None:
    body = """setp.lt.u32 p0, %t, 10; mov.u32 r0, 1; @p0 bra LOW; barrier.sync 2, 64; mov.u32 r0, 2; bra END;
    LOW: barrier.sync 2, 64; mov.u32 r0, 3; END:"""
    got = outputs(body, threads=64)
    np.testing.assert_array_equal(got[:, 0], np.where(np.arange(64) < 10, 3, 2))


NAMED_FAULTS = [
    ("named_barrier", "barrier number 16", "bar.sync 16;", {}),
    ("named_barrier", "multiple of 32", "bar.sync 1, 40;", {}),
    ("named_barrier", "multiple of 32", "bar.sync 1, 96;", {}),
    (
        "named_barrier",
        "have arrived gave",
        "setp.eq.u32 p0, %warp, 0; @p0 bra A; bar.sync 1, 32; bra B; A: bar.sync 1, 64; B:",
        {},
    ),
    ("deadlock", "32 of 64 threads have arrived", "setp.eq.u32 p0, %warp, 0; @p0 bar.sync 1, 64;", {}),
    ("named_barrier", "never completed", "setp.eq.u32 p0, %warp, 0; @p0 bar.arrive 1, 64;", {}),
    ("named_barrier", "a second time", "barrier.cluster.arrive; barrier.cluster.arrive;", {}),
    ("named_barrier", "without barrier.cluster.arrive", "barrier.cluster.wait;", {}),
]


@pytest.mark.parametrize(("fault", "text", "body", "parts"), NAMED_FAULTS, ids=[f[2][:44] for f in NAMED_FAULTS])
def test_faults_of_named_barriers(fault: str, text: str, body: str, parts: dict) -> None:
    with expect_fault(fault, text):
        for seed in range(4):  # which of the two warps comes first depends on the seed
            run(body, np.zeros(1), threads=64, schedule=emulator.Schedule(seed=seed), **parts)


# ---- clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_cluster_barrier_and_distributed_shared_memory(schedule: emulator.Schedule) -> None:
    body = """mov.u32 r9, stage; mad.lo.u32 r10, %t, 4, r9; st.shared.u32 [r10], %me;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    mov.u32 r1, %cluster_ctarank; add.u32 r1, r1, 1; and.b32 r1, r1, 3; mapa.shared::cluster.u32 r2, r10, r1;
    ld.shared::cluster.u32 r0, [r2]; barrier.cluster.arrive; barrier.cluster.wait;"""
    got = outputs(body, threads=64, grid=8, cluster=4, declare=BAR, schedule=schedule)
    me = np.arange(512)
    np.testing.assert_array_equal(got[:, 0], me // 256 * 256 + (me + 64) % 256)


def test_threads_that_have_ended_count_for_the_cluster_barrier() -> None:
    out = np.zeros(128, np.uint32)
    body = """setp.eq.u32 p0, %warp, 1; @p0 ret; barrier.cluster.arrive; barrier.cluster.wait;
    mad.wide.u32 d0, %me, 4, %out; st.global.u32 [d0], 1;"""
    run(body, out, threads=64, grid=2, cluster=2)
    np.testing.assert_array_equal(out, np.arange(128) // 32 % 2 == 0)


def test_access_to_the_shared_memory_of_an_ended_cta() -> None:
    body = """mov.u32 r1, %cluster_ctarank; setp.eq.u32 p0, r1, 1; @p0 ret; mov.u32 r9, stage;
    L: add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 10000; @p1 bra L;
    mapa.shared::cluster.u32 r2, r9, 1; ld.shared::cluster.u32 r0, [r2];"""
    with expect_fault("in_flight", "has ended", at="ld.shared::cluster"):
        run("mov.u32 r5, 0;" + body, np.zeros(1), grid=2, cluster=2, declare=BAR)


# ---- mbarrier -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_of_two_warps(schedule: emulator.Schedule) -> None:
    """Warp 0 fills one buffer 20 times, warp 1 empties it: full and empty barriers with parities that flip."""
    body = """mov.u32 r20, bar; mov.u32 r21, bar2; setp.eq.u32 p10, %t, 0;
    @p10 mbarrier.init.shared.b64 [r20], 32; @p10 mbarrier.init.shared.b64 [r21], 32;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 r22, stage; mad.lo.u32 r22, %lane, 4, r22; mov.u32 r0, 0; mov.u32 r1, 0; setp.eq.u32 p0, %warp, 0;
    @!p0 bra TAKE;
    FILL: and.b32 r2, r1, 1; xor.b32 r3, r2, 1;
    WE: mbarrier.try_wait.parity.shared.b64 p11, [r21], r3; @!p11 bra WE;
    mad.lo.u32 r4, r1, 100, %lane; st.shared.u32 [r22], r4; mbarrier.arrive.shared.b64 _, [r20];
    add.u32 r1, r1, 1; setp.lt.u32 p1, r1, 20; @p1 bra FILL; bra END;
    TAKE: and.b32 r2, r1, 1; WF: mbarrier.test_wait.parity.shared.b64 p11, [r20], r2; @!p11 bra WF;
    ld.shared.u32 r4, [r22]; add.u32 r0, r0, r4; mbarrier.arrive.shared.b64 d20, [r21];
    add.u32 r1, r1, 1; setp.lt.u32 p1, r1, 20; @p1 bra TAKE; END:"""
    got = outputs(body, threads=64, declare=BAR, schedule=schedule)
    lane = np.arange(64) % 32
    np.testing.assert_array_equal(got[:, 0], np.where(np.arange(64) < 32, 0, 100 * 190 + 20 * lane))


def test_states_counts_and_pending() -> None:
    """One thread: arrive with counts, states, test_wait by state, pending_count, drop."""
    body = """mov.u32 r20, bar; mbarrier.init.shared.b64 [r20], 3; mbarrier.arrive.shared.b64 d1, [r20];
    mbarrier.pending_count.b64 r0, d1; mbarrier.test_wait.shared.b64 p0, [r20], d1; selp.u32 r1, 1, 0, p0;
    mbarrier.arrive.noComplete.shared.b64 d2, [r20], 1; mbarrier.pending_count.b64 r2, d2;
    mbarrier.arrive.shared.b64 d3, [r20], 1; mbarrier.test_wait.shared.b64 p0, [r20], d1; selp.u32 r3, 1, 0, p0;
    mbarrier.arrive_drop.shared.b64 d4, [r20]; mbarrier.arrive.shared.b64 d5, [r20], 2;
    mbarrier.test_wait.shared.b64 p0, [r20], d5; selp.u32 r4, 1, 0, p0; mbarrier.arrive.shared.b64 d6, [r20];
    mbarrier.pending_count.b64 r5, d6; mbarrier.test_wait.parity.shared.b64 p0, [r20], 1; selp.u32 r6, 1, 0, p0;
    mbarrier.inval.shared.b64 [r20]; mbarrier.init.shared.b64 [r20], 1; ld.shared.u32 r7, [r20+8];"""
    got = outputs(body.replace("ld.shared.u32 r7, [r20+8];", "mov.u32 r7, 8;"), threads=1, per_thread=8, declare=BAR)
    np.testing.assert_array_equal(got[0], [3, 0, 2, 1, 1, 2, 1, 8])


def test_fresh_barriers_have_completed_the_odd_phase() -> None:
    body = """mov.u32 r20, bar; mbarrier.init.shared.b64 [r20], 1; mbarrier.test_wait.parity.shared.b64 p0, [r20], 1;
    selp.u32 r0, 1, 0, p0; mbarrier.test_wait.parity.shared.b64 p0, [r20], 0; selp.u32 r1, 1, 0, p0;"""
    np.testing.assert_array_equal(outputs(body, threads=1, per_thread=2, declare=BAR)[0], [1, 0])


def test_transaction_bytes_hold_the_phase() -> None:
    body = """mov.u32 r20, bar; mbarrier.init.shared.b64 [r20], 1; mbarrier.arrive.expect_tx.shared.b64 _, [r20], 48;
    mbarrier.test_wait.parity.shared.b64 p0, [r20], 0; selp.u32 r0, 1, 0, p0;
    mbarrier.complete_tx.relaxed.cta.shared.b64 [r20], 32; mbarrier.test_wait.parity.shared.b64 p0, [r20], 0;
    selp.u32 r1, 1, 0, p0; mbarrier.complete_tx.shared::cta.b64 [r20], 16;
    mbarrier.test_wait.parity.shared.b64 p0, [r20], 0; selp.u32 r2, 1, 0, p0;
    mbarrier.complete_tx.shared.b64 [r20], 64; mbarrier.expect_tx.shared.b64 [r20], 64;
    mbarrier.arrive.shared.b64 _, [r20];
    mbarrier.test_wait.parity.shared.b64 p0, [r20], 1; selp.u32 r3, 1, 0, p0;"""
    np.testing.assert_array_equal(outputs(body, threads=1, per_thread=4, declare=BAR)[0], [0, 0, 1, 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_remote_arrivals(schedule: emulator.Schedule) -> None:
    """CTA 0 waits for one arrive of each CTA of its cluster and the bytes that they announce and send with st.async."""
    body = f"""mov.u32 r20, bar; mov.u32 r9, stage; setp.eq.u32 p10, %t, 0; @p10 mbarrier.init.shared.b64 [r20], 4;
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    mov.u32 r1, %cluster_ctarank; mapa.shared::cluster.u32 r2, r20, 0; mad.lo.u32 r3, r1, 16, r9;
    mapa.shared::cluster.u32 r3, r3, 0; add.u32 r4, r1, 7; cvt.u64.u32 d1, r4;
    @p10 mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [r2], 16;
    @p10 st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [r3], {{d1, d1}}, [r2];
    setp.eq.u32 p1, r1, 0; mov.u32 r0, 0; @!p1 bra END; {wait(0, "W")}
    mad.lo.u32 r5, %t, 4, r9; setp.lt.u32 p2, %t, 16; @p2 ld.shared.u32 r0, [r5];
    END: barrier.cluster.arrive; barrier.cluster.wait;"""
    got = outputs(body, grid=4, cluster=4, declare=BAR, schedule=schedule)
    want = np.zeros(128, np.uint32)
    want[0:16:2] = np.repeat([7, 8, 9, 10], 2)
    np.testing.assert_array_equal(got[:, 0], want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_thread_copies(schedule: emulator.Schedule) -> None:
    """cp.async with groups, zero fill, ignored sources, and the arrive of an mbarrier."""
    source = np.arange(1, 257, dtype=np.uint32)
    out = np.zeros((32, 4), np.uint32)
    body = f"""{init(32)} mov.u32 r9, stage; mad.lo.u32 r9, %t, 16, r9; mad.wide.u32 d1, %t, 16, %in;
    and.b32 r1, %t, 3; mul.lo.u32 r1, r1, 4; setp.eq.u32 p0, %t, 9;
    cp.async.cg.shared.global [r9], [d1], 16, r1; @p0 cp.async.ca.shared.global [r9], [d1], 8, p0;
    cp.async.commit_group; cp.async.ca.shared.global [r9+512], [d1+4], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [r20]; cp.async.commit_group; cp.async.wait_group 1;
    ld.shared.v2.u32 {{r2, r3}}, [r9]; ld.shared.u32 r4, [r9+8]; {wait(0, "W")} ld.shared.u32 r5, [r9+512];
    mad.wide.u32 d2, %t, 16, %out; st.global.v4.u32 [d2], {{r2, r3, r4, r5}}; cp.async.wait_all;"""
    run(body, source, out, params=("in", "out"), declare=BAR, schedule=schedule)
    rows = source.reshape(-1, 4)[:32]
    want = np.where(np.arange(3) < np.arange(32)[:, None] % 4, rows[:, :3], 0)
    want[9, :2] = 0
    np.testing.assert_array_equal(out[:, :3], want)
    np.testing.assert_array_equal(out[:, 3], rows[:, 1])


def test_try_wait_may_return_false_and_time_out() -> None:
    """A peek that fails must return, not hang: the thread itself makes the arrival that it looked for."""
    body = f"""{init(1)} mbarrier.try_wait.parity.shared.b64 p0, [r20], 0; selp.u32 r0, 1, 0, p0;
    @p10 mbarrier.arrive.shared.b64 _, [r20]; {wait(0, "W")}"""
    assert not outputs(body, declare=BAR).any()
    body = f"""{init(1)} @p10 mbarrier.arrive.shared.b64 _, [r20]; bar.sync 0; mov.u32 r0, 0;
    W: mbarrier.try_wait.parity.shared.b64 p0, [r20], 0; add.u32 r0, r0, 1; @!p0 bra W;"""
    assert outputs(body, declare=BAR, schedule=emulator.Schedule(seed=3)).max() == 1
    turns = outputs(body, threads=256, declare=BAR, schedule=emulator.Schedule(seed=3, spurious_wait=0.7))
    assert turns.max() > 1


MBARRIER_FAULTS = [
    ("barrier_state", "no mbarrier", "mov.u32 r20, bar; mbarrier.arrive.shared.b64 _, [r20];"),
    ("barrier_state", "no mbarrier", "mov.u32 r20, bar; mbarrier.try_wait.parity.shared.b64 p0, [r20], 0;"),
    ("barrier_state", "initialised again", init(1) + "@p10 mbarrier.init.shared.b64 [r20], 1;"),
    ("barrier_state", "live mbarrier", init(1) + "@p10 st.shared.u32 [r20+4], 0;"),
    ("barrier_state", "live mbarrier", init(1) + "@p10 ld.shared.v2.u64 {d1, d2}, [r20];"),
    ("barrier_state", "2 arrivals, but only 1", init(1) + "@p10 mbarrier.arrive.shared.b64 _, [r20], 2;"),
    ("barrier_state", "completes the phase", init(1) + "@p10 mbarrier.arrive.noComplete.shared.b64 d1, [r20], 1;"),
    ("illegal_operand", "count must be 1 to", "mov.u32 r20, bar; mbarrier.init.shared.b64 [r20], 0;"),
    ("illegal_operand", "parity must be 0 or 1", init(1) + "@p10 mbarrier.test_wait.parity.shared.b64 p0, [r20], 2;"),
    ("misaligned", "mbarrier at shared address", "mov.u32 r20, bar; mbarrier.init.shared.b64 [r20+4], 1;"),
    ("out_of_bounds", "mbarrier", "mov.u32 r20, bar; mbarrier.init.shared.b64 [r20+65536], 1;"),
    ("deadlock", "parity 0: phase 0, 2 of 2 arrivals pending", init(2) + wait(0, "W")),
    ("byte_count", "tx bytes -16", init(1) + "@p10 mbarrier.complete_tx.shared.b64 [r20], 16;" + wait(0, "W")),
    ("deadlock", "tx bytes 16", init(1) + "@p10 mbarrier.arrive.expect_tx.shared.b64 _, [r20], 16;" + wait(0, "W")),
    ("byte_count", "tx bytes 16", init(1) + "@p10 mbarrier.arrive.expect_tx.shared.b64 _, [r20], 16;"),
]


@pytest.mark.parametrize(
    ("fault", "text", "body"), MBARRIER_FAULTS, ids=[f"{f[1]} {k}" for k, f in enumerate(MBARRIER_FAULTS)]
)
def test_faults_of_mbarriers(fault: str, text: str, body: str) -> None:
    with expect_fault(fault, text):
        run(body, np.zeros(1), declare=BAR.replace("bar2;", "bar2;"), threads=32 if "init" in body else 1)


def test_a_wait_that_misses_its_phase() -> None:
    """Warp 1 waits for phase 0 while warp 0 completes two phases without asking whether anyone has looked."""
    body = f"""{init(1)} setp.eq.u32 p0, %warp, 1; @p0 bra LOOK;
    mov.u32 r5, 0; L: add.u32 r5, r5, 1; setp.lt.u32 p1, r5, 2000; @p1 bra L;
    @p10 mbarrier.arrive.shared.b64 _, [r20]; @p10 mbarrier.arrive.shared.b64 _, [r20]; bra END;
    LOOK: {wait(0, "W")} END:"""
    with expect_fault("phase_alias", "still waits for phase 0", at="mbarrier.arrive"):
        run(body, np.zeros(1), threads=64, declare=BAR)
    # The same with tests that return at once: found when the thread looks again.
    with expect_fault("phase_alias", "still waits for phase 0"):
        run(body.replace("try_wait", "test_wait"), np.zeros(1), threads=64, declare=BAR)


def test_an_abandoned_test_is_no_fault() -> None:
    body = f"""{init(1)} mbarrier.test_wait.parity.shared.b64 p0, [r20], 0; bar.sync 0;
    @p10 mbarrier.arrive.shared.b64 _, [r20]; {wait(0, "W0")} bar.sync 0;
    @p10 mbarrier.arrive.shared.b64 _, [r20]; {wait(1, "W1")} bar.sync 0;
    @p10 mbarrier.arrive.shared.b64 _, [r20]; bar.sync 0; mbarrier.test_wait.parity.shared.b64 p0, [r20], 0;
    selp.u32 r0, 1, 0, p0;"""
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(outputs(body, threads=64, declare=BAR, schedule=schedule), 1)


def test_waiting_by_a_state_two_phases_old() -> None:
    body = """mov.u32 r20, bar; mbarrier.init.shared.b64 [r20], 1; mbarrier.arrive.shared.b64 d1, [r20];
    mbarrier.arrive.shared.b64 d2, [r20]; mbarrier.test_wait.shared.b64 p0, [r20], d1;"""
    with expect_fault("phase_alias", "state of phase 0"):
        run(body, np.zeros(1), threads=1, declare=BAR)


def test_deadlock_report() -> None:
    """The classic: a single buffer whose consumer needs it twice, so that both sides wait for each other."""
    body = f"""mov.u32 r20, bar; mov.u32 r21, bar2; setp.eq.u32 p10, %t, 0;
    @p10 mbarrier.init.shared.b64 [r20], 1; @p10 mbarrier.init.shared.b64 [r21], 1; bar.sync 0;
    setp.eq.u32 p0, %warp, 0; @!p0 bra CONSUMER;
    setp.ne.u32 p1, %lane, 0; @p1 bra END;
    mbarrier.arrive.shared.b64 _, [r20];
    {wait(0, "EMPTY").replace("r20", "r21")} mbarrier.arrive.shared.b64 _, [r20]; bra END;
    CONSUMER: {wait(0, "FULL0")} {wait(1, "FULL1")} mbarrier.arrive.shared.b64 _, [r21]; END:"""
    with expect_fault("deadlock", "2 thread groups") as caught:
        run(body, np.zeros(1), threads=64, declare=BAR)
    rows = {row.warp: row for row in caught.verdict.waiting}
    assert set(rows) == {0, 1}
    producer, consumer = rows[0], rows[1]
    assert (producer.lanes, consumer.lanes) == (1, 0xFFFFFFFF)
    assert "EMPTY" in producer.text
    assert "[r21], 0" in producer.text
    assert "[r20], 1" in consumer.text
    assert dict(producer.barrier) | {"address": 0, "init_line": 0} == {
        "address": 0,
        "parity": 0,
        "phase": 0,
        "pending": 1,
        "expected": 1,
        "tx_bytes": 0,
        "init_line": 0,
    }
    assert consumer.barrier["phase"] == 1
    assert "waits for mbarrier" in str(caught.verdict)


def test_a_fault_of_an_operation_in_flight_names_its_issuer() -> None:
    body = """mov.u32 r9, stage; setp.eq.u32 p0, %t, 33; @p0 bra COPY; bra WAIT;
    COPY: cp.async.ca.shared.global [r9], [%out], 8;
    WAIT: bar.sync 0; setp.eq.u32 p10, %t, 0;
    @p10 mbarrier.init.shared.b64 [r9], 1;
    bar.sync 0; cp.async.wait_all;"""
    with expect_fault("barrier_state", "cp.async touches shared offset", at="cp.async.ca") as caught:
        lazy = emulator.Schedule(async_="lazy")
        run(body, np.zeros(4, np.uint32), threads=64, declare=BAR, schedule=lazy)
    assert "warp 1 lane 1, which issued: cp.async of 8 bytes" in caught.verdict.where
