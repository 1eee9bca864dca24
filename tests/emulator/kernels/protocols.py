"""Small correct kernels in PTX whose every protocol step is a tagged line, so that tests can break one step at a time.

A tag is a comment at the end of a line, as in `bar.sync 0; // @init sync`. `changed` replaces or removes the line.
"""

import numpy as np

from ..silicon.micro import entry

THREADS = 64
ROUNDS = 7
WORDS = 128  # of a buffer


def changed(text: str, tag: str, replacement: str = "") -> str:
    """`text` with the statement of the line tagged `tag` replaced. Raises ValueError unless there is exactly one."""
    lines = text.split("\n")
    found = [i for i, line in enumerate(lines) if line.rstrip().endswith(f"// @{tag}")]
    if len(found) != 1:
        raise ValueError(f"tag {tag!r} occurs {len(found)} times; expected once")
    lines[found[0]] = f"    {replacement}"
    return "\n".join(lines)


def _wait(name: str, barrier: str, parity: str, tag: str) -> str:
    """A wait loop on one line, so that it is one step."""
    return f"{name}: mbarrier.try_wait.parity.shared.b64 %done, [{barrier}], {parity}; @!%done bra {name}; // @{tag}"


_REGISTERS = """
    .reg .b32 %t, %warp, %lane, %i, %stage, %parity, %full, %empty, %at, %tile, %word, %sum, %value;
    .reg .b64 %from, %offset, %state;
    .reg .pred %p, %done, %elected, %last;
    mov.u32 %t, %tid.x;
    shr.u32 %warp, %t, 5;
    and.b32 %lane, %t, 31;
"""

# Warp 0 copies ROUNDS blocks of WORDS words into a ring of two buffers; warp 1 sums what each lane sees.
RING = entry(
    "u64 in, u64 out",
    _REGISTERS
    + f"""
    mov.u32 %full, full;
    mov.u32 %empty, empty;
    mov.u32 %tile, tile;
    setp.ne.u32 %p, %t, 0;
    @%p bra READY;
    mbarrier.init.shared.b64 [%full], 1; // @init full 0
    mbarrier.init.shared.b64 [%full+8], 1;
    mbarrier.init.shared.b64 [%empty], 32; // @init empty 0
    mbarrier.init.shared.b64 [%empty+8], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0; // @init sync
    mov.u32 %i, 0;
    mov.u32 %sum, 0;
    setp.ne.u32 %p, %warp, 0;
    @%p bra CONSUME;
PRODUCE:
    and.b32 %stage, %i, 1;
    shr.u32 %parity, %i, 1;
    and.b32 %parity, %parity, 1;
    xor.b32 %parity, %parity, 1; // @producer starts ahead
    mad.lo.u32 %at, %stage, 8, %empty;
    {_wait("FREE", "%at", "%parity", "wait empty")}
    setp.ne.u32 %p, %lane, 0;
    @%p bra NEXT;
    mad.lo.u32 %at, %stage, 8, %full;
    mad.lo.u32 %word, %stage, {4 * WORDS}, %tile; // @stage address
    mul.wide.u32 %offset, %i, {4 * WORDS};
    add.u64 %from, %in, %offset;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%at], {4 * WORDS}; // @expect
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%word], [%from], {4 * WORDS}, [%at]; // @copy
NEXT:
    bar.warp.sync -1;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {ROUNDS}; // @producer rounds
    @%p bra PRODUCE;
    bra END;
CONSUME:
    and.b32 %stage, %i, 1;
    shr.u32 %parity, %i, 1;
    and.b32 %parity, %parity, 1; // @consumer parity
    mad.lo.u32 %at, %stage, 8, %full;
    {_wait("FILLED", "%at", "%parity", "wait full")}
    mad.lo.u32 %word, %stage, {4 * WORDS}, %tile;
    mad.lo.u32 %word, %lane, 16, %word;
    ld.shared.b32 %value, [%word+4];
    mad.lo.u32 %sum, %sum, 3, %value;
    mad.lo.u32 %at, %stage, 8, %empty;
    mbarrier.arrive.shared.b64 %state, [%at]; // @release
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {ROUNDS};
    @%p bra CONSUME;
    mul.wide.u32 %offset, %lane, 4;
    add.u64 %from, %out, %offset;
    st.global.b32 [%from], %sum;
END:
""",
    shared=f".shared .align 128 .b8 tile[{8 * WORDS}]; .shared .align 8 .b64 full[2]; .shared .align 8 .b64 empty[2];",
)


def ring_input() -> np.ndarray:
    return (np.arange(ROUNDS * WORDS, dtype=np.uint32) * np.uint32(2654435761)) >> np.uint32(8)


def ring_result(source: np.ndarray) -> np.ndarray:
    total = np.zeros(32, np.uint32)
    for block in source.reshape(ROUNDS, 32, 4):
        total = total * np.uint32(3) + block[:, 1]
    return total


# The trap of a single-buffered key tile in a backward kernel. Warp 0 loads K, warp 1 multiplies, warp 2 is the
# softmax. A step needs K twice: for S, which the softmax turns into dS, and for dQ = dS·K. The right order ends step
# j before step j + 1 begins; the tempting one issues S of the next step first, and then K can never be overwritten.
_STEP_S = """
    {filled}
    ld.shared.b32 %value, [%tile];
    st.shared.b32 [%scores], %value;
    mbarrier.arrive.shared.b64 %state, [%full+16];
"""
_STEP_DQ = """
    {softmax}
    ld.shared.b32 %value, [%tile];
    ld.shared.b32 %word, [%scores];
    mad.lo.u32 %sum, %value, %word, %sum;
    mbarrier.arrive.shared.b64 %state, [%full+8];
"""


def single_buffer(eager_next_step: bool, steps: int = 3) -> str:
    """Barriers: full (K has come), full+8 (K is free), full+16 (S is ready), full+24 (dS is ready)."""

    def step_s(j: int) -> str:
        return _STEP_S.format(filled=_wait(f"K{j}", "%full", str(j % 2), f"K of step {j}"))

    def step_dq(j: int) -> str:
        return _STEP_DQ.format(softmax=_wait(f"DS{j}", "%full+24", str(j % 2), f"dS of step {j}"))

    order = []
    if eager_next_step:
        order = [step_s(0)]
        for j in range(steps):
            order += ([step_s(j + 1)] if j + 1 < steps else []) + [step_dq(j)]
    else:
        for j in range(steps):
            order += [step_s(j), step_dq(j)]
    loads = "".join(
        f"""
    {_wait(f"F{j}", "%full+8", str(1 - j % 2), f"K free for step {j}")}
    mbarrier.arrive.expect_tx.shared.b64 %state, [%full], 16;
    add.u64 %from, %in, {16 * j};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%tile], [%from], 16, [%full];
"""
        for j in range(steps)
    )
    softmax = "".join(
        f"""
    {_wait(f"S{j}", "%full+16", str(j % 2), f"S of step {j}")}
    ld.shared.b32 %value, [%scores];
    add.u32 %value, %value, 1;
    st.shared.b32 [%scores], %value;
    mbarrier.arrive.shared.b64 %state, [%full+24];
"""
        for j in range(steps)
    )
    body = (
        _REGISTERS
        + f"""
    .reg .b32 %scores;
    mov.u32 %full, full;
    mov.u32 %tile, tile;
    mov.u32 %scores, scores;
    mov.u32 %sum, 0;
    setp.ne.u32 %p, %t, 0;
    @%p bra READY;
    mbarrier.init.shared.b64 [%full], 1;
    mbarrier.init.shared.b64 [%full+8], 1;
    mbarrier.init.shared.b64 [%full+16], 1;
    mbarrier.init.shared.b64 [%full+24], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    setp.ne.u32 %p, %lane, 0;
    @%p bra END;
    setp.eq.u32 %p, %warp, 1;
    @%p bra MULTIPLY;
    setp.eq.u32 %p, %warp, 2;
    @%p bra SOFTMAX;
{loads}
    bra END;
MULTIPLY:
{"".join(order)}
    st.global.b32 [%out], %sum;
    bra END;
SOFTMAX:
{softmax}
END:
"""
    )
    shared = ".shared .align 16 .b8 tile[16];\n    .shared .b32 scores;\n    .shared .align 8 .b64 full[4];"
    return entry("u64 in, u64 out", body, shared=shared)


# Two CTAs: each thread stores a value in the other's memory and arrives at the other's barrier, ROUNDS times. Two
# barriers in turn: with one, a fast CTA would complete the next phase before the last thread has seen this one.
PAIR = entry(
    "u64 out",
    _REGISTERS
    + f"""
    .reg .b32 %rank, %peer, %there, %box, %barrier;
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 %peer, %rank, 1;
    mov.u32 %full, full;
    mov.u32 %box, box;
    setp.ne.u32 %p, %t, 0;
    @%p bra READY;
    mbarrier.init.shared.b64 [%full], {THREADS}; // @init
    mbarrier.init.shared.b64 [%full+8], {THREADS};
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned; // @begin arrive
    barrier.cluster.wait.aligned; // @begin wait
    mad.lo.u32 %sum, %rank, 1000, %t;
    mov.u32 %i, 0;
LOOP:
    and.b32 %stage, %i, 1;
    shr.u32 %parity, %i, 1;
    and.b32 %parity, %parity, 1;
    mad.lo.u32 %barrier, %stage, 8, %full; // @two barriers
    mad.lo.u32 %at, %stage, {4 * THREADS}, %box;
    mad.lo.u32 %at, %t, 4, %at;
    mapa.shared::cluster.u32 %there, %at, %peer; // @box of the peer
    st.shared::cluster.b32 [%there], %sum;
    mapa.shared::cluster.u32 %there, %barrier, %peer; // @barrier of the peer
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%there]; // @arrive
    {_wait("WAIT", "%barrier", "%parity", "wait")}
    ld.shared.b32 %value, [%at];
    mad.lo.u32 %sum, %sum, 3, %value;
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {ROUNDS};
    @%p bra LOOP;
    mad.lo.u32 %word, %rank, {THREADS}, %t;
    mul.wide.u32 %offset, %word, 4;
    add.u64 %from, %out, %offset;
    st.global.b32 [%from], %sum;
    barrier.cluster.arrive.aligned; // @end arrive
    barrier.cluster.wait.aligned; // @end wait
""",
    shared=f".shared .align 16 .b8 box[{8 * THREADS}];\n    .shared .align 8 .b64 full[2];",
)


def pair_result() -> np.ndarray:
    values = (np.arange(2)[:, None] * 1000 + np.arange(THREADS)).astype(np.uint32)
    for _ in range(ROUNDS):
        values = values * np.uint32(3) + values[::-1]
    return values


# Threads write a buffer that a bulk copy stores, ROUNDS times, from the same buffer.
STORE = entry(
    "u64 out",
    _REGISTERS
    + f"""
    mov.u32 %tile, tile;
    mov.u32 %i, 0;
LOOP:
    mad.lo.u32 %value, %i, 1000, %t;
    mad.lo.u32 %at, %t, 4, %tile;
    st.shared.b32 [%at], %value;
    fence.proxy.async.shared::cta; // @proxy fence
    bar.sync 0; // @filled
    setp.ne.u32 %p, %t, 0;
    @%p bra NEXT;
    mul.wide.u32 %offset, %i, {4 * THREADS};
    add.u64 %from, %out, %offset;
    cp.async.bulk.global.shared::cta.bulk_group [%from], [%tile], {4 * THREADS};
    cp.async.bulk.commit_group; // @commit
    cp.async.bulk.wait_group.read 0; // @wait read
NEXT:
    bar.sync 0; // @drained
    add.u32 %i, %i, 1;
    setp.lt.u32 %p, %i, {ROUNDS};
    @%p bra LOOP;
    cp.async.bulk.wait_group 0; // @wait all
""",
    shared=f".shared .align 128 .b8 tile[{4 * THREADS}];",
)


def store_result() -> np.ndarray:
    return (np.arange(ROUNDS)[:, None] * 1000 + np.arange(THREADS)).astype(np.uint32)


# Warp 1 hands a value to warp 0 through named barriers 1 (full) and 2 (free).
NAMED = entry(
    "u64 out",
    _REGISTERS
    + f"""
    mov.u32 %tile, tile;
    mad.lo.u32 %at, %lane, 4, %tile;
    mov.u32 %i, 0;
    mov.u32 %sum, 0;
    setp.ne.u32 %p, %warp, 0;
    @%p bra GIVE;
TAKE:
    bar.sync 1, 64; // @take full
    ld.shared.b32 %value, [%at];
    mad.lo.u32 %sum, %sum, 3, %value;
    add.u32 %i, %i, 1;
    setp.eq.u32 %last, %i, {ROUNDS};
    @%last bra TAKEN;
    bar.arrive 2, 64; // @free
    bra TAKE;
TAKEN:
    mul.wide.u32 %offset, %lane, 4;
    add.u64 %from, %out, %offset;
    st.global.b32 [%from], %sum;
    bra END;
GIVE:
    mad.lo.u32 %value, %i, 100, %lane;
    st.shared.b32 [%at], %value;
    bar.arrive 1, 64; // @full
    add.u32 %i, %i, 1;
    setp.eq.u32 %last, %i, {ROUNDS};
    @%last bra END;
    bar.sync 2, 64; // @give free
    bra GIVE;
END:
""",
    shared=".shared .align 128 .b8 tile[128];",
)


def named_result() -> np.ndarray:
    total = np.zeros(32, np.uint32)
    for i in range(ROUNDS):
        total = total * np.uint32(3) + (100 * i + np.arange(32)).astype(np.uint32)
    return total
