"""Clusters: ranks, address mapping, distributed shared memory, remote arrivals, st.async, multicast."""

import numpy as np

from .micro import PROLOGUE, Map, Micro, Pointer, entry, poison
from .values import generator

_SHARED = ".shared .align 128 .b8 words[2048]; .shared .align 8 .b8 barrier[16];"
_CLUSTER_SYNC = "    barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;\n"
_OUT = """
    .reg .b64 %o;
    mov.u32 r0, %nctaid.x;
    mov.u32 r1, %nctaid.y;
    mov.u32 r2, %ctaid.y;
    mov.u32 r3, %ctaid.z;
    mad.lo.u32 r3, r3, r1, r2;
    mad.lo.u32 r3, r3, r0, %blk;
    mul.lo.u32 r3, r3, {size};
    cvt.u64.u32 %o, r3;
    add.u64 %o, %o, %out;
"""


def _ranks(cluster: tuple[int, int, int], grid: tuple[int, int, int]) -> Micro:
    names = [
        "cluster_ctarank",
        "cluster_nctarank",
        "cluster_ctaid.x",
        "cluster_ctaid.y",
        "cluster_ctaid.z",
        "cluster_nctaid.x",
        "cluster_nctaid.y",
        "cluster_nctaid.z",
        "clusterid.x",
        "clusterid.y",
        "clusterid.z",
        "nclusterid.x",
        "nclusterid.y",
        "ctaid.x",
    ]
    body = PROLOGUE + _OUT.format(size=4 * len(names) + 8)
    for k, name in enumerate(names):
        body += f"    mov.u32 r{10 + k}, %{name};\n"
    body += "    setp.ne.u32 p0, %t, 0;\n    @p0 bra END;\n"
    for k in range(len(names)):
        body += f"    st.global.b32 [%o+{4 * k}], r{10 + k};\n"
    body += f"""
    mov.pred p1, %is_explicit_cluster;
    selp.b32 r40, 1, 0, p1;
    st.global.b32 [%o+{4 * len(names)}], r40;
    st.global.b32 [%o+{4 * len(names) + 4}], 0;
END:
"""
    blocks = int(np.prod(grid))
    return Micro(
        name="cluster_ranks_" + "x".join(map(str, cluster)),
        ptx=entry("u64 out", body),
        buffers={"out": poison(blocks * (len(names) + 2))},
        params=[Pointer("out")],
        grid=grid,
        cluster=cluster,
    )


def _mapa() -> Micro:
    """Addresses of shared memory in a cluster, relative to the window of rank 0."""
    body = PROLOGUE + _OUT.format(size=48) + """
    .reg .b32 %s;
    .reg .b64 %g;
    mov.u32 %s, words;
    add.u32 %s, %s, 256;
    mov.u32 r9, %cluster_ctarank;
    mapa.shared::cluster.u32 r10, %s, 0;
    mapa.shared::cluster.u32 r11, %s, 1;
    mapa.shared::cluster.u32 r12, %s, 2;
    mapa.shared::cluster.u32 r13, %s, 3;
    sub.u32 r11, r11, r10;
    sub.u32 r12, r12, r10;
    sub.u32 r13, r13, r10;
    mapa.shared::cluster.u32 r14, %s, r9;
    sub.u32 r15, r14, %s;
    getctarank.shared::cluster.u32 r16, r14;
    cvt.u64.u32 d0, %s;
    cvta.shared.u64 %g, d0;
    isspacep.shared::cta p0, %g;
    isspacep.shared::cluster p1, %g;
    isspacep.global p2, %g;
    mapa.u64 d1, %g, 2;
    isspacep.shared::cluster p3, d1;
    getctarank.u64 r17, d1;
    cvta.to.shared::cluster.u64 d2, d1;
    cvt.u32.u64 r18, d2;
    sub.u32 r18, r18, r10;
    selp.b32 r19, 1, 0, p0;
    selp.b32 r20, 2, 0, p1;
    selp.b32 r21, 4, 0, p2;
    selp.b32 r22, 8, 0, p3;
    or.b32 r19, r19, r20;
    or.b32 r19, r19, r21;
    or.b32 r19, r19, r22;
    shr.u32 r23, r10, 24;
    setp.ne.u32 p4, %t, 0;
    @p4 bra END;
    st.global.v4.b32 [%o], {r9, r11, r12, r13};
    st.global.v4.b32 [%o+16], {r15, r16, r17, r18};
    st.global.v2.b32 [%o+32], {r19, r23};
    st.global.v2.b32 [%o+40], {r9, r9};
END:
""" + _CLUSTER_SYNC  # fmt: skip
    return Micro(
        name="cluster_mapa",
        ptx=entry("u64 out", body, shared=_SHARED),
        buffers={"out": poison(8 * 12)},
        params=[Pointer("out")],
        grid=(8, 1, 1),
        cluster=(4, 1, 1),
    )


def _distributed() -> Micro:
    """Remote loads, stores and atomics, then a generic-address load of the peer's memory."""
    body = PROLOGUE + _OUT.format(size=32 * 16) + """
    .reg .b32 %s, %rank, %peer, %near;
    .reg .b64 %g;
    mov.u32 %s, words;
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 r4, %rank, 1;
    mapa.shared::cluster.u32 %peer, %s, r4;
    add.u32 r5, %rank, 1;
    and.b32 r5, r5, 3;
    mapa.shared::cluster.u32 %near, %s, r5;
    mad.lo.u32 r6, %t, 4, %s;
    mad.lo.u32 r7, %rank, 1000, %t;
    st.shared.b32 [r6], r7;
    st.shared.b32 [r6+256], 0;
""" + _CLUSTER_SYNC + """
    mad.lo.u32 r8, %t, 4, %peer;
    ld.shared::cluster.b32 r9, [r8];
    mad.lo.u32 r10, %t, 4, %near;
    st.shared::cluster.b32 [r10+128], r7;
    atom.shared::cluster.add.u32 r11, [r10+256], r7;
    red.relaxed.cluster.shared::cluster.max.u32 [r8+384], r7;
    cvt.u64.u32 d0, %s;
    cvta.shared.u64 d0, d0;
    mapa.u64 %g, d0, 3;
    cvt.u64.u32 d1, %t;
    mad.lo.u64 %g, d1, 4, %g;
    ld.b32 r12, [%g];
""" + _CLUSTER_SYNC + """
    ld.shared.b32 r13, [r6+128];
    ld.shared.b32 r14, [r6+256];
    mad.lo.u64 %o, d1, 16, %o;
    st.global.v4.b32 [%o], {r9, r12, r13, r14};
"""  # fmt: skip
    body = body.replace(
        "    st.shared.b32 [r6+256], 0;\n", "    st.shared.b32 [r6+256], 0;\n    st.shared.b32 [r6+384], 0;\n"
    )
    return Micro(
        name="cluster_distributed_memory",
        ptx=entry("u64 out", body, shared=_SHARED),
        buffers={"out": poison(4 * 32 * 4)},
        params=[Pointer("out")],
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
    )


def _remote_arrive() -> Micro:
    """A ring: each CTA waits on its own barrier, to which the CTA before it arrives, three times round."""
    body = PROLOGUE + _OUT.format(size=128) + """
    .reg .b32 %s, %b, %rank, %next, %nextb, %round;
    mov.u32 %s, words;
    mov.u32 %b, barrier;
    mov.u32 %rank, %cluster_ctarank;
    add.u32 r4, %rank, 1;
    and.b32 r4, r4, 3;
    mapa.shared::cluster.u32 %next, %s, r4;
    mapa.shared::cluster.u32 %nextb, %b, r4;
    setp.ne.u32 p0, %t, 0;
    @p0 bra READY;
    mbarrier.init.shared.b64 [%b], 32;
    fence.mbarrier_init.release.cluster;
READY:
""" + _CLUSTER_SYNC + """
    mov.u32 %round, 0;
    mad.lo.u32 r9, %rank, 100, %t;
    setp.ne.u32 p1, %rank, 0;
LOOP:
    and.b32 r5, %round, 1;
    @!p1 bra SEND;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p2, [%b], r5;
    @!p2 bra WAIT;
    mad.lo.u32 r6, %t, 4, %s;
    ld.shared.b32 r7, [r6];
    mad.lo.u32 r9, r9, 3, r7;
SEND:
    mad.lo.u32 r8, %t, 4, %next;
    st.shared::cluster.b32 [r8], r9;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%nextb];
    @p1 bra AGAIN;
BACK:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p2, [%b], r5;
    @!p2 bra BACK;
    mad.lo.u32 r6, %t, 4, %s;
    ld.shared.b32 r7, [r6];
    mad.lo.u32 r9, r9, 3, r7;
AGAIN:
    add.u32 %round, %round, 1;
    setp.lt.u32 p3, %round, 3;
    @p3 bra LOOP;
    cvt.u64.u32 d1, %t;
    mad.lo.u64 %o, d1, 4, %o;
    st.global.b32 [%o], r9;
""" + _CLUSTER_SYNC  # fmt: skip
    return Micro(
        name="cluster_remote_arrive",
        ptx=entry("u64 out", body, shared=_SHARED),
        buffers={"out": poison(4 * 32)},
        params=[Pointer("out")],
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
    )


def _st_async() -> Micro:
    """st.async of 4, 8 and 16 bytes, a bulk copy and a remote expect_tx, all counted by the peer's barrier."""
    body = PROLOGUE + _OUT.format(size=1024) + """
    .reg .b32 %s, %b, %rank, %peer, %peerb;
    mov.u32 %s, words;
    mov.u32 %b, barrier;
    mov.u32 %rank, %cluster_ctarank;
    xor.b32 r4, %rank, 1;
    mapa.shared::cluster.u32 %peer, %s, r4;
    mapa.shared::cluster.u32 %peerb, %b, r4;
    mov.u32 r5, %t;
CLEAR:
    mad.lo.u32 r6, r5, 4, %s;
    st.shared.b32 [r6], 0xA5A5A5A5;
    add.u32 r5, r5, 32;
    setp.lt.u32 p0, r5, 256;
    @p0 bra CLEAR;
    mad.lo.u32 r6, %t, 4, %s;
    mad.lo.u32 r7, %rank, 5000, %t;
    st.shared.b32 [r6+1024], r7;
    fence.proxy.async.shared::cta;
    setp.ne.u32 p1, %t, 0;
    @p1 bra READY;
    mbarrier.init.shared.b64 [%b], 2;
    fence.mbarrier_init.release.cluster;
READY:
""" + _CLUSTER_SYNC + """
    mad.lo.u32 r8, %t, 4, %peer;
    mad.lo.u32 r10, %t, 8, %peer;
    mad.lo.u32 r11, %t, 16, %peer;
    add.u32 r12, r7, 1;
    add.u32 r13, r7, 2;
    add.u32 r14, r7, 3;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [r8], r7, [%peerb];
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [r10+128], {r7, r12}, [%peerb];
    st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [r11+384], {r7, r12, r13, r14}, [%peerb];
    @p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 d0, [%b], 896;
    mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%peerb], 64;
    add.u32 r15, %peer, 896;
    add.u32 r16, %s, 1024;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r15], [r16], 64, [%peerb];
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p2, [%b], 0;
    @!p2 bra WAIT;
    mov.u32 r5, %t;
COPY:
    mad.lo.u32 r6, r5, 4, %s;
    ld.shared.b32 r17, [r6];
    cvt.u64.u32 d1, r5;
    mad.lo.u64 d1, d1, 4, %o;
    st.global.b32 [d1], r17;
    add.u32 r5, r5, 32;
    setp.lt.u32 p0, r5, 256;
    @p0 bra COPY;
""" + _CLUSTER_SYNC  # fmt: skip
    return Micro(
        name="cluster_st_async",
        ptx=entry("u64 out", body, shared=_SHARED),
        buffers={"out": poison(2 * 256)},
        params=[Pointer("out")],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )


def _multicast(name: str, cluster: int, masks: list[int], *, swizzle: str = "none") -> Micro:
    """Rank r loads slice r of the box to every CTA of masks[r]; each CTA expects what the masks send to it."""
    box = (32, 4)
    bytes_each = 32 * 4 * 4
    mask_words = ", ".join(str(m) for m in masks)
    expected = ", ".join(str(bytes_each * sum(m >> r & 1 for m in masks)) for r in range(cluster))
    body = PROLOGUE + _OUT.format(size=2048) + """
    .reg .b32 %s, %b, %rank;
    .reg .b16 %mask;
    mov.u32 %s, words;
    mov.u32 %b, barrier;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 r5, %t;
CLEAR:
    mad.lo.u32 r6, r5, 4, %s;
    st.shared.b32 [r6], 0xA5A5A5A5;
    add.u32 r5, r5, 32;
    setp.lt.u32 p0, r5, 512;
    @p0 bra CLEAR;
    fence.proxy.async.shared::cta;
    setp.ne.u32 p1, %t, 0;
    @p1 bra READY;
    mbarrier.init.shared.b64 [%b], 1;
    fence.mbarrier_init.release.cluster;
READY:
""" + _CLUSTER_SYNC + f"""
    @p1 bra WAIT;
    mul.lo.u32 r7, %rank, 4;
    cvt.u64.u32 d0, r7;
    mov.u64 d1, masks;
    add.u64 d1, d1, d0;
    ld.const.b32 r8, [d1];
    mov.u64 d2, expected;
    add.u64 d2, d2, d0;
    ld.const.b32 r9, [d2];
    cvt.u16.u32 %mask, r8;
    mbarrier.arrive.expect_tx.shared.b64 d3, [%b], r9;
    mad.lo.u32 r10, %rank, {bytes_each}, %s;
    mul.lo.u32 r11, %rank, 4;
    mov.u32 r12, 8;
    setp.eq.u32 p3, r8, 0;
    @p3 bra WAIT;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [r10], [%map, {{r12, r11}}], [%b], %mask;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p2, [%b], 0;
    @!p2 bra WAIT;
    mov.u32 r5, %t;
COPY:
    mad.lo.u32 r6, r5, 4, %s;
    ld.shared.b32 r17, [r6];
    cvt.u64.u32 d1, r5;
    mad.lo.u64 d1, d1, 4, %o;
    st.global.b32 [d1], r17;
    add.u32 r5, r5, 32;
    setp.lt.u32 p0, r5, 512;
    @p0 bra COPY;
""" + _CLUSTER_SYNC  # fmt: skip
    text = entry("map map, u64 out", body, shared=_SHARED.replace(".align 128", ".align 1024"))
    tables = (
        f".const .align 4 .u32 masks[{cluster}] = {{{mask_words}}};\n"
        f".const .align 4 .u32 expected[{cluster}] = {{{expected}}};\n"
    )
    text = text.replace(".visible .entry", tables + ".visible .entry", 1)
    values = generator(81).integers(-999, 999, 48 * 20).astype(np.float32).view(np.uint32)
    return Micro(
        name=name,
        ptx=text,
        buffers={"tensor": values, "out": poison(512 * cluster)},
        params=[Map("tensor", "f32", (48, 18), (192,), box, swizzle=swizzle), Pointer("out")],
        grid=(cluster, 1, 1),
        cluster=(cluster, 1, 1),
    )


def cases() -> list[Micro]:
    return [
        _ranks((2, 1, 1), (4, 2, 1)),
        _ranks((1, 2, 2), (2, 4, 2)),
        _ranks((2, 2, 1), (4, 2, 2)),
        _mapa(),
        _distributed(),
        _remote_arrive(),
        _st_async(),
        _multicast("multicast_all_2", 2, [0b11, 0b11]),
        _multicast("multicast_masks_4", 4, [0b1011, 0b0110, 0b1000, 0b0000]),
        _multicast("multicast_swizzle_128B", 4, [0b0101, 0b1010, 0b1111, 0b0001], swizzle="128B"),
    ]
