"""Warp-wide instructions, divergence, named barriers, matrix loads and stores, atomics."""

import numpy as np

from .micro import PROLOGUE, Micro, Pointer, entry, poison
from .values import generator

MASKS = (0xFFFFFFFF, 0xFFFFFF60, 0x80000000, 0x0000F0F0, 0x55555555, 0x00000001)


def _per_lane(name: str, body: str, stores: int, *, threads: int = 32, inputs: np.ndarray | None = None) -> Micro:
    """`body` takes a word in r90 and leaves `stores` results in r100, r101, ...; they go to out[k, thread]."""
    values = generator(61).integers(0, 1 << 32, threads, np.uint64).astype(np.uint32) if inputs is None else inputs
    text = PROLOGUE + (
        "    .reg .b64 %a;\n    cvt.u64.u32 %a, %t;\n    mad.lo.u64 %a, %a, 4, %in;\n    ld.global.b32 r90, [%a];\n"
    )
    text += "".join(f"    mov.u32 r{100 + k}, 0xEEEEEEEE;\n" for k in range(stores)) + body
    text += "    cvt.u64.u32 %a, %t;\n    mad.lo.u64 %a, %a, 4, %out;\n"
    text += "".join(f"    st.global.b32 [%a+{4 * threads * k}], r{100 + k};\n" for k in range(stores))
    return Micro(
        name=name,
        ptx=entry("u64 in, u64 out", text),
        buffers={"in": values, "out": poison(threads * stores)},
        params=[Pointer("in"), Pointer("out")],
        block=(threads, 1, 1),
    )


def _elect() -> Micro:
    lines = []
    for k, mask in enumerate(MASKS):
        lines.append(f"""
    mov.u32 r0, {mask:#x};
    shr.u32 r1, r0, %t;
    and.b32 r1, r1, 1;
    setp.eq.u32 p0, r1, 1;
    @!p0 bra SKIP{k};
    elect.sync r2|p1, {mask:#x};
    selp.b32 r3, 64, 0, p1;
    or.b32 r{100 + k}, r2, r3;
SKIP{k}:
    bar.warp.sync 0xffffffff;""")
    return _per_lane("elect", "\n".join(lines), len(MASKS))


def _shfl() -> list[Micro]:
    forms = []
    for mode, operands in (
        ("up", ((1, 0), (3, 0), (16, 0), (2, 0x1800), (31, 0))),
        ("down", ((1, 31), (3, 31), (16, 31), (2, 0x181F), (5, 0x1007))),
        ("bfly", ((1, 31), (16, 31), (31, 31), (3, 0x1C1F), (7, 0x0F))),
        ("idx", ((0, 31), (33, 31), (5, 0x181F), (7, 0x1003), (9, 3))),
    ):
        body = []
        for k, (lane, clamp) in enumerate(operands):
            body.append(
                f"    shfl.sync.{mode}.b32 r100|p0, r90, {lane}, {clamp}, 0xffffffff;".replace(
                    "r100", f"r{100 + 2 * k}"
                )
            )
            body.append(f"    selp.b32 r{101 + 2 * k}, 1, 0, p0;")
        # lane and clamp that differ by lane, and an index taken from a register
        body.append(
            f"    and.b32 r0, r90, 31;\n    shfl.sync.{mode}.b32 r{100 + 2 * len(operands)}|p0, %t, r0, 31, -1;"
        )
        body.append(f"    selp.b32 r{101 + 2 * len(operands)}, 1, 0, p0;")
        forms.append(_per_lane(f"shfl_{mode}", "\n".join(body) + "\n", 2 * len(operands) + 2))
    return forms


def _vote() -> Micro:
    body = """
    and.b32 r0, r90, 1;
    setp.eq.u32 p0, r0, 1;
    setp.lt.u32 p1, %t, 40;
    vote.sync.ballot.b32 r100, p0, 0xffffffff;
    vote.sync.any.pred p2, p0, -1;
    vote.sync.all.pred p3, p0, -1;
    vote.sync.uni.pred p4, p0, -1;
    vote.sync.all.pred p5, p1, -1;
    vote.sync.uni.pred p6, p1, -1;
    vote.sync.any.pred p7, !p1, -1;
    selp.b32 r1, 1, 0, p2;
    selp.b32 r2, 2, 0, p3;
    or.b32 r1, r1, r2;
    selp.b32 r2, 4, 0, p4;
    or.b32 r1, r1, r2;
    selp.b32 r2, 8, 0, p5;
    or.b32 r1, r1, r2;
    selp.b32 r2, 16, 0, p6;
    or.b32 r1, r1, r2;
    selp.b32 r2, 32, 0, p7;
    or.b32 r101, r1, r2;
    setp.ge.u32 p8, %t, 12;
    @!p8 bra DONE;
    vote.sync.ballot.b32 r102, p0, 0xfffff000;
    activemask.b32 r103;
DONE:
    bar.warp.sync 0xffffffff;
"""
    return _per_lane("vote", body, 4)


def _match_redux() -> list[Micro]:
    few = generator(62).integers(0, 5, 32, np.uint32)
    match = """
    match.any.sync.b32 r100, r90, 0xffffffff;
    match.all.sync.b32 r101|p0, r90, 0xffffffff;
    selp.b32 r102, 1, 0, p0;
    mov.u32 r0, 7;
    match.all.sync.b32 r103|p0, r0, 0xffffffff;
    selp.b32 r104, 1, 0, p0;
    cvt.u64.u32 d0, r90;
    shl.b64 d0, d0, 33;
    match.any.sync.b64 r105, d0, 0xffffffff;
"""
    redux = "".join(
        f"    redux.sync.{op} r{100 + k}, r90, 0xffffffff;\n"
        for k, op in enumerate(
            ["add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32"]
        )
    )
    redux += """
    setp.ge.u32 p0, %t, 20;
    @p0 bra DONE;
    redux.sync.add.u32 r109, r90, 0x000fffff;
    redux.sync.max.s32 r110, r90, 0x000fffff;
DONE:
    bar.warp.sync 0xffffffff;
"""
    return [_per_lane("match", match, 6, inputs=few), _per_lane("redux", redux, 11)]


def _divergence() -> list[Micro]:
    loops = """
    and.b32 r0, r90, 15;
    mov.u32 r1, 0;
    mov.u32 r2, 0;
LOOP:
    setp.ge.u32 p0, r1, r0;
    @p0 bra OUT;
    and.b32 r3, r1, 1;
    setp.eq.u32 p1, r3, 0;
    @p1 bra EVEN;
    mad.lo.u32 r2, r2, 3, r1;
    bra.uni NEXT;
EVEN:
    mad.lo.u32 r2, r2, 5, 7;
    setp.gt.u32 p2, r2, 0x10000;
    @p2 bra OUT;
NEXT:
    add.u32 r1, r1, 1;
    bra LOOP;
OUT:
    mov.u32 r100, r2;
    mov.u32 r101, r1;
    bar.warp.sync 0xffffffff;
    vote.sync.ballot.b32 r102, p1, 0xffffffff;
    setp.lt.u32 p3, %t, 9;
    @p3 mov.u32 r103, 77;
    @!p3 mov.u32 r103, r1;
"""
    table = """
TARGETS: .branchtargets ZERO, ONE, TWO, THREE;
    and.b32 r0, r90, 3;
    brx.idx r0, TARGETS;
ZERO:
    mov.u32 r100, 10;
    bra JOIN;
ONE:
    mov.u32 r100, 11;
    bra JOIN;
TWO:
    add.u32 r100, r90, 12;
    bra JOIN;
THREE:
    not.b32 r100, r90;
JOIN:
    bar.warp.sync 0xffffffff;
    shfl.sync.bfly.b32 r101, r100, 1, 31, -1;
"""
    return [_per_lane("divergence", loops, 4), _per_lane("branch_table", table, 2)]


def _special_registers() -> Micro:
    body = "".join(
        f"    mov.u32 r{100 + k}, %{name};\n"
        for k, name in enumerate(
            [
                "tid.x",
                "tid.y",
                "ntid.x",
                "ntid.y",
                "nctaid.x",
                "laneid",
                "lanemask_eq",
                "lanemask_le",
                "lanemask_lt",
                "lanemask_ge",
                "lanemask_gt",
            ]
        )
    )
    body += "    mov.u32 r111, %cluster_ctarank;\n    mov.u32 r112, %cluster_nctarank;\n"
    return _per_lane("special_registers", body, 13, threads=64)


def _named_barriers() -> list[Micro]:
    # Warps 0 and 1 produce, 2 and 3 consume through two buffers: bar.arrive by one side, bar.sync by the other.
    hand_over = (
        PROLOGUE
        + """
    .reg .b32 %warp, %i, %slot, %lane4, %place;
    .reg .b64 %a;
    shr.u32 %warp, %t, 5;
    and.b32 r0, %t, 63;
    shl.b32 %lane4, r0, 2;
    mov.u32 r1, ring;
    add.u32 %place, r1, %lane4;
    mov.u32 %i, 0;
    mov.u32 r9, 0;
    setp.ge.u32 p0, %warp, 2;
    @p0 bra CONSUME;
PRODUCE:
    and.b32 %slot, %i, 1;
    setp.lt.u32 p1, %i, 2;
    add.u32 r2, %slot, 3;
    @p1 bra FREE;
    bar.sync r2, 128;
FREE:
    mad.lo.u32 r3, %i, 100, r0;
    shl.b32 r4, %slot, 8;
    add.u32 r4, r4, %place;
    st.shared.b32 [r4], r3;
    add.u32 r2, %slot, 1;
    bar.arrive r2, 128;
    add.u32 %i, %i, 1;
    setp.lt.u32 p1, %i, 6;
    @p1 bra PRODUCE;
    bra END;
CONSUME:
    and.b32 %slot, %i, 1;
    add.u32 r2, %slot, 1;
    bar.sync r2, 128;
    xor.b32 r5, %place, 252;
    shl.b32 r4, %slot, 8;
    mov.u32 r6, ring;
    sub.u32 r7, 252, %lane4;
    add.u32 r6, r6, r7;
    add.u32 r4, r4, r6;
    ld.shared.b32 r8, [r4];
    mad.lo.u32 r9, r9, 3, r8;
    setp.ge.u32 p1, %i, 4;
    add.u32 r2, %slot, 3;
    @p1 bra LAST;
    bar.arrive r2, 128;
LAST:
    add.u32 %i, %i, 1;
    setp.lt.u32 p1, %i, 6;
    @p1 bra CONSUME;
END:
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 4, %out;
    st.global.b32 [%a], r9;
"""
    )
    reductions = (
        PROLOGUE
        + """
    .reg .b64 %a;
    and.b32 r0, %t, 3;
    setp.eq.u32 p0, r0, 1;
    setp.lt.u32 p1, %t, 96;
    barrier.cta.red.popc.aligned.u32 r1, 0, p0;
    barrier.cta.red.and.aligned.pred p2, 1, p1;
    barrier.cta.red.or.aligned.pred p3, 2, p0;
    barrier.cta.red.popc.u32 r2, 3, 96, !p0;
    bar.red.popc.u32 r3, 4, p1;
    setp.lt.u32 p5, %t, 128;
    bar.red.and.pred p4, 5, 96, p5;
    selp.b32 r4, 1, 0, p2;
    selp.b32 r5, 2, 0, p3;
    selp.b32 r6, 4, 0, p4;
    or.b32 r4, r4, r5;
    or.b32 r4, r4, r6;
    barrier.sync 6;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 16, %out;
    st.global.v4.b32 [%a], {r1, r2, r3, r4};
"""
    )
    return [
        Micro(
            name="named_barrier_ring",
            ptx=entry("u64 out", hand_over, shared=".shared .align 256 .b8 ring[512];"),
            buffers={"out": poison(128)},
            params=[Pointer("out")],
            block=(128, 1, 1),
        ),
        Micro(
            name="named_barrier_reduce",
            ptx=entry("u64 out", reductions),
            buffers={"out": poison(96 * 4)},
            params=[Pointer("out")],
            block=(96, 1, 1),
        ),
    ]


def _matrix_moves() -> Micro:
    body = (
        PROLOGUE
        + """
    .reg .b64 %a;
    .reg .b32 %s, %row;
    mov.u32 %s, tile;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 32, %in;
    ld.global.v4.b32 {r0, r1, r2, r3}, [%a];
    ld.global.v4.b32 {r4, r5, r6, r7}, [%a+16];
    mad.lo.u32 r8, %t, 32, %s;
    st.shared.v4.b32 [r8], {r0, r1, r2, r3};
    st.shared.v4.b32 [r8+16], {r4, r5, r6, r7};
    bar.warp.sync -1;
    xor.b32 r9, %t, 5;
    mad.lo.u32 %row, r9, 16, %s;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {r10}, [%row];
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {r11, r12}, [%row];
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r13, r14, r15, r16}, [%row];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {r17, r18, r19, r20}, [%row];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {r21}, [%row+512];
    movmatrix.sync.aligned.m8n8.trans.b16 r22, r13;
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%row], {r17, r14, r19, r16};
    bar.warp.sync -1;
    ld.shared.v4.b32 {r24, r25, r26, r27}, [r8];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%row+512], {r13, r20};
    bar.warp.sync -1;
    ld.shared.v4.b32 {r28, r29, r30, r31}, [r8+16];
    mov.u32 r23, 0;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %a, %a, 96, %out;
    st.global.v2.b32 [%a+80], {r22, r23};
    st.global.v2.b32 [%a+88], {r10, r11};
    st.global.v4.b32 [%a], {r12, r13, r14, r15};
    st.global.v4.b32 [%a+16], {r16, r17, r18, r19};
    st.global.v4.b32 [%a+32], {r20, r21, r24, r25};
    st.global.v4.b32 [%a+48], {r26, r27, r28, r29};
    st.global.v2.b32 [%a+64], {r30, r31};
    st.global.v2.b32 [%a+72], {r22, r10};
"""
    )
    return Micro(
        name="matrix_load_store",
        ptx=entry("u64 in, u64 out", body, shared=".shared .align 1024 .b8 tile[2048];"),
        buffers={"in": np.arange(512, dtype=np.uint16).view(np.uint32).copy(), "out": poison(32 * 24)},
        params=[Pointer("in"), Pointer("out")],
    )


def _atomics() -> list[Micro]:
    # Operations whose final value does not depend on the order of the threads; returned values only where it is unique.
    operations = [
        ("add.u32", "r0"),
        ("min.s32", "r1"),
        ("max.u32", "r1"),
        ("and.b32", "r1"),
        ("or.b32", "r1"),
        ("xor.b32", "r1"),
        ("inc.u32", "9"),
        ("dec.u32", "1000"),
        ("max.s32", "r1"),
        ("min.u32", "r1"),
    ]
    body = [
        PROLOGUE,
        "    add.u32 r0, %t, 1;\n    mul.lo.u32 r1, r0, 0x9E3779B1;\n    .reg .b32 %s;\n    mov.u32 %s, words;",
    ]
    body.append("    setp.ge.u32 p0, %t, 32;\n    @p0 bra READY;\n    mul.lo.u32 r2, %t, 4;\n    add.u32 r2, r2, %s;")
    body.append("    st.shared.b32 [r2], 0x00010001;\nREADY:\n    bar.sync 0;")
    for k, (op, value) in enumerate(operations):
        body.append(f"    atom.shared.{op} r3, [%s+{4 * k}], {value};")
        if op in ("inc.u32", "dec.u32"):
            body.append(f"    atom.global.{op} r3, [%out+{4 * k}], {value};")
        else:
            body.append(f"    red.global.relaxed.gpu.{op} [%out+{4 * k}], {value};")
    body.append("""
    cvt.rn.f32.u32 r4, r0;
    red.global.add.f32 [%out+40], r4;
    atom.shared.add.f32 r5, [%s+44], r4;
    mov.b32 r6, 0x3C003C00;
    red.global.add.noftz.f16x2 [%out+48], r6;
    mov.b32 r6, 0x3F803F80;
    red.global.add.noftz.bf16x2 [%out+52], r6;
    cvt.u64.u32 d0, r1;
    red.global.add.u64 [%out+56], d0;
    atom.shared.cas.b32 r7, [%s+60], 0x00010001, 5;
    bar.sync 0;
    setp.ge.u32 p0, %t, 16;
    @p0 bra END;
    mul.lo.u32 r2, %t, 4;
    add.u32 r8, r2, %s;
    ld.shared.b32 r9, [r8];
    cvt.u64.u32 d1, r2;
    add.u64 d1, d1, %out;
    st.global.b32 [d1+128], r9;
    setp.ne.u32 p1, %t, 0;
    @p1 bra END;
    atom.global.exch.b32 r10, [%out+256], 77;
    atom.global.cas.b32 r11, [%out+256], 77, 88;
    atom.global.cas.b32 r12, [%out+256], 77, 99;
    atom.global.inc.u32 r13, [%out+256], 87;
    st.global.v4.b32 [%out+272], {r10, r11, r12, r13};
    mov.b64 d2, 0x1122334455667788;
    atom.global.exch.b64 d3, [%out+288], d2;
    atom.global.cas.b64 d4, [%out+288], d2, d3;
    st.global.v2.b64 [%out+304], {d3, d4};
    mov.b32 r20, 0f3F800000;
    mov.b32 r21, 0f40000000;
    mov.b32 r22, 0fC0A00000;
    mov.b32 r23, 0f00000001;
    red.global.v4.f32.add [%out+320], {r20, r21, r22, r23};
    mov.b32 r24, 0x3C004000;
    red.global.v2.f16x2.add.noftz [%out+336], {r24, r24};
END:""")
    initial = np.full(96, 0x00010001, np.uint32)
    initial[10] = np.float32(0.5).view(np.uint32)
    initial[12:14] = 0
    initial[80:84] = np.array([1.0, np.inf, 2.5, 0.0], np.float32).view(np.uint32)
    initial[84:86] = 0x40003C00
    atomics = Micro(
        name="atomics",
        ptx=entry("u64 out", "\n".join(body), shared=".shared .align 16 .b8 words[128];"),
        buffers={"out": initial},
        params=[Pointer("out")],
        block=(64, 1, 1),
    )
    vectors = (
        PROLOGUE
        + """
    .reg .b64 %a, %b;
    .reg .b32 %s;
    mov.u32 %s, words;
    cvt.u64.u32 %a, %t;
    mad.lo.u64 %b, %a, 64, %out;
    mad.lo.u64 %a, %a, 64, %in;
    ld.global.v4.b32 {r0, r1, r2, r3}, [%a];
    ld.global.nc.v2.b64 {d0, d1}, [%a+16];
    ld.global.v2.b32 {r4, r5}, [%a+32];
    ld.global.u8 r6, [%a+41];
    ld.global.s8 r7, [%a+42];
    ld.global.u16 r8, [%a+44];
    ld.global.s16 r9, [%a+46];
    ld.global.v4.u8 {h0, h1, h2, h3}, [%a+48];
    ld.global.v2.u16 {h4, h5}, [%a+52];
    ld.global.cg.b32 r10, [%a+56];
    ld.relaxed.gpu.global.b32 r11, [%a+60];
    mad.lo.u32 r20, %t, 32, %s;
    st.shared.v2.b64 [r20], {d1, d0};
    st.shared.u8 [r20+16], r6;
    st.shared.u8 [r20+17], h3;
    st.shared.u16 [r20+18], h5;
    st.shared.v2.b16 [r20+20], {h0, h1};
    st.shared.b32 [r20+24], r10;
    st.shared.b32 [r20+28], r11;
    ld.shared.v4.b32 {r12, r13, r14, r15}, [r20];
    ld.shared.v4.b32 {r16, r17, r18, r19}, [r20+16];
    st.global.v4.b32 [%b], {r12, r13, r14, r15};
    st.global.v4.b32 [%b+16], {r16, r17, r18, r19};
    st.global.v4.b32 [%b+32], {r7, r8, r9, r5};
    st.global.v4.b32 [%b+48], {r0, r1, r2, r3};
"""
    )
    words = generator(63).integers(0, 1 << 32, 32 * 16, np.uint64).astype(np.uint32)
    moves = Micro(
        name="vector_load_store",
        ptx=entry("u64 in, u64 out", vectors, shared=".shared .align 32 .b8 words[1024];"),
        buffers={"in": words, "out": poison(32 * 16)},
        params=[Pointer("in"), Pointer("out")],
    )
    return [atomics, moves]


def cases() -> list[Micro]:
    return [
        _elect(),
        *_shfl(),
        _vote(),
        *_match_redux(),
        *_divergence(),
        _special_registers(),
        *_named_barriers(),
        _matrix_moves(),
        *_atomics(),
    ]
