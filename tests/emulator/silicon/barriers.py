"""mbarrier: phases, parities, pending counts, byte counts, drops, remote arrivals."""

import numpy as np

from .micro import PROLOGUE, Micro, Pointer, entry, poison

_SHARED = ".shared .align 8 .b8 barrier[64];"


def _sequence(name: str, steps: str, stores: int) -> Micro:
    """Thread 0 alone runs `steps`; results stand in r100, r101, ..."""
    body = PROLOGUE + "    .reg .b32 %b;\n    mov.u32 %b, barrier;\n    setp.ne.u32 p15, %t, 0;\n    @p15 bra END;\n"
    body += steps
    body += "".join(f"    st.global.b32 [%out+{4 * k}], r{100 + k};\n" for k in range(stores))
    body += "    mbarrier.inval.shared.b64 [%b];\nEND:\n"
    return Micro(
        name=name,
        ptx=entry("u64 out", body, shared=_SHARED),
        buffers={"out": poison(stores)},
        params=[Pointer("out")],
    )


class _Steps:
    """Writes PTX and numbers the results."""

    def __init__(self):
        self.lines: list[str] = []
        self.count = 0

    def do(self, text: str):
        self.lines.append(f"    {text}")

    def result(self, register: str):
        self.do(f"mov.u32 r{100 + self.count}, {register};")
        self.count += 1

    def parities(self, wait: str = "test_wait.parity"):
        """Both parities, as bits 0 and 1 of one result."""
        for parity in (0, 1):
            self.do(f"mbarrier.{wait}.shared.b64 p{parity}, [%b], {parity};")
        self.do("selp.b32 r0, 1, 0, p0;")
        self.do("selp.b32 r1, 2, 0, p1;")
        self.do("or.b32 r2, r0, r1;")
        self.result("r2")

    def pending(self, token: str):
        self.do(f"mbarrier.pending_count.b64 r3, {token};")
        self.result("r3")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def _phases() -> Micro:
    s = _Steps()
    s.do("mbarrier.init.shared.b64 [%b], 3;")
    s.parities()
    for arrival in range(7):
        s.do("mbarrier.arrive.shared.b64 d0, [%b];")
        s.pending("d0")
        s.parities()
        s.do("mbarrier.test_wait.shared.b64 p2, [%b], d0;")
        s.do("selp.b32 r4, 1, 0, p2;")
        s.result("r4")
        if arrival == 4:
            s.do("mbarrier.arrive.shared.b64 d0, [%b], 1;")
            s.pending("d0")
            s.parities()
    return _sequence("mbarrier_phases", s.text(), s.count)


def _counts() -> Micro:
    s = _Steps()
    s.do("mbarrier.init.shared.b64 [%b], 10;")
    for count in (3, 6):
        s.do(f"mbarrier.arrive.shared.b64 d0, [%b], {count};")
        s.pending("d0")
        s.parities()
    s.do("mbarrier.arrive.shared.b64 d0, [%b], 1;")
    s.pending("d0")
    s.parities()
    s.do("mbarrier.arrive.noComplete.shared.b64 d0, [%b], 9;")
    s.pending("d0")
    s.parities()
    s.do("mbarrier.arrive_drop.shared.b64 d0, [%b];")
    s.pending("d0")
    s.parities()
    # one arrival fewer is expected from here on
    s.do("mbarrier.arrive.shared.b64 d0, [%b], 8;")
    s.pending("d0")
    s.parities()
    s.do("mbarrier.arrive.shared.b64 d0, [%b], 1;")
    s.parities()
    s.do("mbarrier.arrive_drop.shared.b64 d0, [%b], 4;")
    s.pending("d0")
    s.do("mbarrier.arrive.shared.b64 d0, [%b], 5;")
    s.pending("d0")
    s.parities()
    s.do("mbarrier.arrive.shared.b64 d0, [%b], 5;")
    s.pending("d0")
    s.parities()
    return _sequence("mbarrier_counts", s.text(), s.count)


def _transactions() -> Micro:
    s = _Steps()
    s.do("mbarrier.init.shared.b64 [%b], 1;")
    s.do("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%b], 64;")
    s.parities()
    s.do("mbarrier.arrive.shared.b64 d0, [%b];")
    s.pending("d0")
    s.parities()
    s.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%b], 48;")
    s.parities()
    s.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%b], 16;")
    s.parities("try_wait.parity")
    # bytes may complete before they are expected
    s.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%b], 32;")
    s.parities()
    s.do("mbarrier.arrive.expect_tx.shared.b64 d0, [%b], 32;")
    s.parities("try_wait.parity")
    s.do("mbarrier.arrive.expect_tx.shared.b64 d0, [%b], 1048575;")
    s.parities()
    s.do("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%b], 1048575;")
    s.parities()
    # an arrival of count 0 bytes
    s.do("mbarrier.arrive.expect_tx.shared.b64 d0, [%b], 0;")
    s.parities()
    return _sequence("mbarrier_transactions", s.text(), s.count)


def _many_threads() -> Micro:
    """128 threads: each round all arrive, all wait by parity, and every thread sees what the others wrote."""
    body = (
        PROLOGUE
        + """
    .reg .b32 %b, %round, %s;
    .reg .b64 %a;
    mov.u32 %b, barrier;
    mov.u32 %s, words;
    setp.ne.u32 p0, %t, 0;
    @p0 bra READY;
    mbarrier.init.shared::cta.b64 [%b], 128;
READY:
    bar.sync 0;
    mov.u32 %round, 0;
    mov.u32 r9, %t;
LOOP:
    and.b32 r1, %round, 1;
    mad.lo.u32 r2, r1, 512, %s;
    mad.lo.u32 r3, %t, 4, r2;
    st.shared.b32 [r3], r9;
    mbarrier.arrive.release.cta.shared::cta.b64 d0, [%b];
WAIT:
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p1, [%b], r1, 1000000;
    @!p1 bra WAIT;
    add.u32 r4, %t, 37;
    and.b32 r4, r4, 127;
    mad.lo.u32 r4, r4, 4, r2;
    ld.shared.b32 r5, [r4];
    mad.lo.u32 r9, r9, 5, r5;
    add.u32 %round, %round, 1;
    setp.lt.u32 p2, %round, 9;
    @p2 bra LOOP;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 4, %out;
    st.global.b32 [%a], r9;
"""
    )
    return Micro(
        name="mbarrier_many_threads",
        ptx=entry("u64 out", body, shared=_SHARED + " .shared .align 16 .b8 words[1024];"),
        buffers={"out": poison(128)},
        params=[Pointer("out")],
        block=(128, 1, 1),
    )


def _cp_async() -> Micro:
    """cp.async (not bulk) with groups and with an mbarrier arrival, and its zero fill."""
    body = (
        PROLOGUE
        + """
    .reg .b32 %b, %s;
    .reg .b64 %a;
    mov.u32 %b, barrier;
    mov.u32 %s, words;
    setp.ne.u32 p0, %t, 0;
    @p0 bra READY;
    mbarrier.init.shared.b64 [%b], 32;
READY:
    bar.sync 0;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 16, %in;
    mad.lo.u32 r0, %t, 16, %s;
    cp.async.cg.shared.global [r0], [%a], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%b];
WAIT:
    mbarrier.try_wait.parity.shared.b64 p1, [%b], 0;
    @!p1 bra WAIT;
    ld.shared.v4.b32 {r4, r5, r6, r7}, [r0];
    and.b32 r2, %t, 15;
    cp.async.ca.shared.global [r0+512], [%a], 16, r2;
    cp.async.commit_group;
    cp.async.ca.shared.global [r0+1024], [%a+4], 4;
    cp.async.ca.shared.global [r0+1032], [%a+8], 8, 3;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.v4.b32 {r8, r9, r10, r11}, [r0+512];
    cp.async.wait_all;
    ld.shared.b32 r12, [r0+1024];
    ld.shared.v2.b32 {r14, r15}, [r0+1032];
    mov.u32 r13, 0;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 48, %out;
    st.global.v4.b32 [%a], {r4, r5, r6, r7};
    st.global.v4.b32 [%a+16], {r8, r9, r10, r11};
    st.global.v4.b32 [%a+32], {r12, r13, r14, r15};
"""
    )
    return Micro(
        name="cp_async",
        ptx=entry("u64 in, u64 out", body, shared=_SHARED + " .shared .align 16 .b8 words[1536];"),
        buffers={"in": np.arange(0x11223344, 0x11223344 + 132, dtype=np.uint32), "out": poison(32 * 12)},
        params=[Pointer("in"), Pointer("out")],
    )


def cases() -> list[Micro]:
    return [_phases(), _counts(), _transactions(), _many_threads(), _cp_async()]
