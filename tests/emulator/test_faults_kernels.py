"""Planted faults: small kernels, each right as it stands, with one step of their protocol broken; each is caught.

Where a fault can only give wrong values, some schedule must show it: shared memory and fragments start as poison, and
copies land as late or as early as they may.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator.kernels import build, pipeline, protocols
from emulator.kernels.protocols import changed

pytestmark = pytest.mark.emulator

SCHEDULES = [
    emulator.Schedule(seed=seed, async_=async_, spurious_wait=0.2 * (seed % 2))
    for seed in range(4)
    for async_ in ("lazy", "eager", "random")
]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A correct program, how to launch it, its inputs and its result."""

    text: str
    result: np.ndarray
    inputs: tuple[np.ndarray, ...] = ()
    block: int = protocols.THREADS
    cluster: int = 1

    def run(self, text: str, schedule: emulator.Schedule) -> np.ndarray:
        out = np.zeros_like(self.result)
        extent = (self.cluster, 1, 1)
        emulator.load(text).launch(
            grid=extent, block=(self.block, 1, 1), cluster=extent, params=[*self.inputs, out], schedule=schedule
        )
        return out


SOURCE = protocols.ring_input()
SINGLE_SOURCE = np.arange(5, 17, dtype=np.uint32)
RING = Kernel(protocols.RING, protocols.ring_result(SOURCE), (SOURCE,))
PAIR = Kernel(protocols.PAIR, protocols.pair_result(), cluster=2)
STORE = Kernel(protocols.STORE, protocols.store_result())
NAMED = Kernel(protocols.NAMED, protocols.named_result())
SINGLE = Kernel(
    protocols.single_buffer(False),
    np.array([sum(int(k) * (int(k) + 1) for k in SINGLE_SOURCE[::4])], np.uint32),
    (SINGLE_SOURCE,),
    block=96,
)
KERNELS = {"ring": RING, "pair": PAIR, "store": STORE, "named": NAMED, "single": SINGLE}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.async_}{s.seed}")
@pytest.mark.parametrize("name", KERNELS)
def test_unbroken_kernels_are_right(name: str, schedule: emulator.Schedule):
    kernel = KERNELS[name]
    np.testing.assert_array_equal(kernel.run(kernel.text, schedule), kernel.result)


# kernel, broken step, what stands there instead, the faults that may be reported. "wrong": a wrong result under some
# schedule. A fault that depends on the order of events may show in more than one way.
FAULTS = [
    ("ring", "init full 0", "", {"barrier_state"}),
    ("ring", "init sync", "", {"barrier_state"}),
    ("ring", "init empty 0", "mbarrier.init.shared.b64 [%empty], 33;", {"deadlock"}),
    ("ring", "init empty 0", "mbarrier.init.shared.b64 [%empty], 16;", {"phase_alias", "deadlock"}),
    ("ring", "init full 0", "mbarrier.init.shared.b64 [%full], 2;", {"deadlock"}),
    ("ring", "producer starts ahead", "", {"deadlock"}),
    ("ring", "wait empty", "", {"phase_alias", "barrier_state", "deadlock"}),
    ("ring", "wait full", "", {"phase_alias", "deadlock"}),
    ("ring", "expect", "mbarrier.arrive.expect_tx.shared.b64 %state, [%at], 496;", {"byte_count"}),
    ("ring", "expect", "mbarrier.arrive.expect_tx.shared.b64 %state, [%at], 528;", {"deadlock"}),
    ("ring", "expect", "mbarrier.arrive.shared.b64 %state, [%at];", {"byte_count", "in_flight"}),
    ("ring", "expect", "mbarrier.expect_tx.relaxed.cta.shared.b64 [%at], 512;", {"deadlock"}),
    ("ring", "copy", "", {"deadlock"}),
    ("ring", "stage address", "mov.u32 %word, %tile;", {"wrong"}),
    ("ring", "consumer parity", "mov.u32 %parity, 0;", {"phase_alias", "barrier_state", "deadlock"}),
    ("ring", "release", "", {"deadlock"}),
    ("ring", "release", "mad.lo.u32 %at, %stage, 8, %full; mbarrier.arrive.shared.b64 %state, [%at];",
     {"deadlock"}),
    ("ring", "release", "st.shared.b64 [%at], 0;", {"barrier_state"}),
    ("ring", "release", "mbarrier.init.shared.b64 [%at], 32;", {"barrier_state"}),
    ("ring", "producer rounds", "setp.lt.u32 %p, %i, 8;", {"out_of_bounds"}),
    ("pair", "begin wait", "", {"barrier_state"}),
    ("pair", "begin wait", "barrier.cluster.wait.aligned; setp.eq.u32 %p, %rank, 1; @%p ret;",
     {"deadlock", "in_flight"}),
    ("pair", "begin arrive", "", {"named_barrier"}),
    ("pair", "two barriers", "mov.u32 %barrier, %full;", {"phase_alias", "deadlock", "wrong"}),
    ("pair", "barrier of the peer", "mapa.shared::cluster.u32 %there, %barrier, 0;", {"deadlock"}),
    ("pair", "barrier of the peer", "mapa.shared::cluster.u32 %there, %barrier, 2;", {"out_of_bounds"}),
    ("pair", "box of the peer", "mov.u32 %there, %at;", {"wrong"}),
    ("pair", "arrive", "", {"deadlock"}),
    ("pair", "init", "mbarrier.init.shared.b64 [%full], 32;", {"wrong", "phase_alias", "deadlock"}),
    ("store", "filled", "", {"wrong"}),
    ("store", "commit", "", {"in_flight"}),
    ("store", "wait read", "", {"wrong"}),
    ("store", "drained", "", {"wrong"}),
    ("named", "full", "bar.arrive 3, 64;", {"deadlock"}),
    ("named", "free", "", {"deadlock"}),
    ("named", "give free", "bar.sync 2, 96;", {"named_barrier"}),
    ("named", "give free", "", {"deadlock"}),
    ("named", "take full", "bar.sync 1, 32;", {"named_barrier", "deadlock"}),
]  # fmt: skip


def outcomes(kernel: Kernel, text: str) -> set[str]:
    """What goes wrong under the schedules: kinds of fault, and "wrong" for a wrong result."""
    found = set()
    for schedule in SCHEDULES:
        try:
            if np.any(kernel.run(text, schedule) != kernel.result):
                found.add("wrong")
        except emulator.Verdict as verdict:
            found.add(verdict.fault)
            if verdict.fault == "deadlock" and not verdict.waiting:
                found.add("a deadlock that names nobody who waits")
    return found


@pytest.mark.parametrize(
    ("name", "step", "instead", "allowed"), FAULTS, ids=[f"{n}-{s}-{i[:24]}" for n, s, i, _ in FAULTS]
)
def test_fault_is_caught(name: str, step: str, instead: str, allowed: set[str]):
    kernel = KERNELS[name]
    found = outcomes(kernel, changed(kernel.text, step, instead))
    assert found, "no schedule shows the fault"
    assert found <= allowed, f"reported {found}, expected one of {allowed}"


def test_single_buffered_tile_deadlocks_if_the_next_step_begins_early():
    """The load waits until K is free, the MMA warp for the next K, and the softmax for the next S: a circle."""
    text = protocols.single_buffer(True)
    lines = text.split("\n")
    for schedule in SCHEDULES:
        with pytest.raises(emulator.Verdict) as caught:
            SINGLE.run(text, schedule)
        assert caught.value.fault == "deadlock"
        waiting = {row.warp: lines[row.line - 1].split("// @")[1] for row in caught.value.waiting}
        assert waiting == {0: "K free for step 1", 1: "K of step 1", 2: "S of step 1"}
        assert all(row.barrier["pending"] == 1 for row in caught.value.waiting)


def replace_nth(text: str, statement: str, index: int, count: int, instead: str) -> str:
    """Replaces the n-th line that holds `statement`, of exactly `count`."""
    lines = text.split("\n")
    found = [i for i, line in enumerate(lines) if statement in line]
    assert len(found) == count, f"{statement!r} occurs {len(found)} times in what the compiler wrote; expected {count}"
    lines[found[index]] = instead
    return "\n".join(lines)


# statement of the compiled pipeline kernel, which of how many, what stands there instead, faults that may be reported
PIPELINE_FAULTS = [
    ("tcgen05.commit", 0, 2, "", {"deadlock"}),
    ("tcgen05.commit", 1, 2, "", {"deadlock"}),
    ("tcgen05.dealloc", 0, 1, "", {"tensor_memory"}),
    ("tcgen05.relinquish", 0, 1, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;", {"tensor_memory"}),
    ("setmaxnreg.dec", 0, 1, "", {"register_pool", "deadlock"}),
    ("setmaxnreg.dec", 0, 1, "setmaxnreg.dec.sync.aligned.u32 160;", {"register_pool", "deadlock"}),
    (
        "fence.mbarrier_init",
        0,
        1,
        "ret;",
        {"tensor_memory", "deadlock", "barrier_state", "out_of_bounds", "named_barrier"},
    ),
]


@pytest.mark.parametrize(
    ("statement", "index", "count", "instead", "allowed"),
    PIPELINE_FAULTS,
    ids=[f"{f[0]}-{f[1]}" for f in PIPELINE_FAULTS],
)
def test_fault_of_the_pipeline_is_caught(statement: str, index: int, count: int, instead: str, allowed: set[str]):
    rng = np.random.default_rng(11)
    m, n, k = 256, 64, 256
    a, b = (rng.integers(-3, 4, (rows, k)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    text = replace_nth(build.ptx(pipeline.Config()), statement, index, count, instead)
    found = set()
    for schedule in SCHEDULES[:3]:
        c = np.zeros((m, n), np.float32)
        maps = [
            emulator.TensorMap(
                x, dtype="bf16", dims=(k, len(x)), strides_bytes=(2 * k,), box=(64, rows), swizzle="128B"
            )
            for x, rows in ((a, 128), (b, 64))
        ]
        try:
            emulator.load(text).launch(
                grid=(1, 1, 1),
                block=(pipeline.THREADS, 1, 1),
                shared_bytes=1024 + pipeline.STAGES * 2 * 64 * (128 + 64),
                params=[maps[0], bytes(8), maps[1], bytes(8), c, np.int32(m), np.int32(n), np.int32(k)],
                schedule=schedule,
            )
            if np.any(c != a.astype(np.float32) @ b.astype(np.float32).T):
                found.add("wrong")
        except emulator.Verdict as verdict:
            found.add(verdict.fault)
    assert found, "no schedule shows the fault"
    assert found <= allowed, f"reported {found}, expected one of {allowed}"
