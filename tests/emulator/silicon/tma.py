"""TMA: tile loads, stores and reductions at every edge, in 1 to 5 dimensions, swizzled or not; bulk copies."""

from collections.abc import Sequence

import numpy as np

from .micro import MAP_DTYPES, PROLOGUE, Map, Micro, Pointer, entry, poison
from .values import generator


def _coordinates(rank: int) -> str:
    """Loads this block's coordinates into r10... and names them as an operand list."""
    loads = f"    mul.lo.u32 r0, %blk, {4 * rank};\n    cvt.u64.u32 d0, r0;\n    add.u64 d0, d0, %coords;\n"
    loads += "".join(f"    ld.global.b32 r{10 + i}, [d0+{4 * i}];\n" for i in range(rank))
    return loads


def _names(rank: int) -> str:
    return ", ".join(f"r{10 + i}" for i in range(rank))


def _array(dtype: str, dims: Sequence[int], strides: Sequence[int], seed: int, offset: int = 0) -> np.ndarray:
    """Global memory of a tensor: distinct small values everywhere, the pitch padding too."""
    size = MAP_DTYPES[dtype][1]
    total = offset + max(stride * extent for stride, extent in zip((size, *strides), dims, strict=True))
    if dtype in ("f32", "tf32"):
        values = generator(seed).integers(-2000, 2000, total // 4).astype(np.float32) + np.float32(0.37)
        return values.view(np.uint32)
    numpy_type = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
    if dtype in ("f16", "bf16"):
        base = 0x3C00 if dtype == "f16" else 0x3F80
        return (base + generator(seed).integers(0, 128, total // 2)).astype(np.uint16)
    return generator(seed).integers(0, 1 << min(8 * size, 63), total // size, np.uint64).astype(numpy_type)


def _load(
    name: str,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    coords: Sequence[Sequence[int]],
    *,
    swizzle: str = "none",
    fill: str = "zero",
    element_strides: tuple[int, ...] | None = None,
    offset_bytes: int = 0,
    modifiers: str = "",
) -> Micro:
    """Block i loads the box at coords[i] and copies shared memory to out[i] as it lies."""
    rank = len(dims)
    tensor = Map("tensor", dtype, dims, strides, box, element_strides, swizzle, fill, offset_bytes)
    size = tensor.box_bytes
    if element_strides:  # of the innermost dimension it is ignored
        steps = (1, *element_strides[1:])
        size = int(np.prod([-(-b // s) for b, s in zip(box, steps, strict=True)])) * MAP_DTYPES[dtype][1]
    room = -(-size // 128) * 128
    if swizzle != "none":  # a row narrower than the swizzle's span still takes the span
        room = max(room, int(np.prod(box[1:])) * int(swizzle[:-1]))
    body = PROLOGUE + _coordinates(rank)
    body += f"""
    .reg .b32 %s, %b;
    .reg .b64 %o;
    mov.u32 %s, tile;
    mov.u32 %b, barrier;
    mov.u32 r1, %t;
FILL:
    mad.lo.u32 r2, r1, 4, %s;
    st.shared.b32 [r2], 0xA5A5A5A5;
    add.u32 r1, r1, 32;
    setp.lt.u32 p0, r1, {room // 4};
    @p0 bra FILL;
    setp.ne.u32 p1, %t, 0;
    @p1 bra READY;
    mbarrier.init.shared.b64 [%b], 1;
    fence.mbarrier_init.release.cluster;
READY:
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @p1 bra WAIT;
    prefetch.tensormap [%map];
    mbarrier.arrive.expect_tx.shared.b64 d1, [%b], {size};
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{modifiers}
        [%s], [%map, {{{_names(rank)}}}], [%b];
WAIT:
    mbarrier.try_wait.parity.shared.b64 p2, [%b], 0;
    @!p2 bra WAIT;
    mul.lo.u32 r3, %blk, {room};
    cvt.u64.u32 %o, r3;
    add.u64 %o, %o, %out;
    mov.u32 r1, %t;
COPY:
    shl.b32 r4, r1, 2;
    add.u32 r2, r4, %s;
    ld.shared.b32 r5, [r2];
    cvt.u64.u32 d2, r4;
    add.u64 d2, d2, %o;
    st.global.b32 [d2], r5;
    add.u32 r1, r1, 32;
    setp.lt.u32 p0, r1, {room // 4};
    @p0 bra COPY;
"""
    return Micro(
        name=name,
        ptx=entry("map map, u64 coords, u64 out", body, shared=_shared(room)),
        buffers={
            "tensor": _array(dtype, dims, strides, 71, offset_bytes),
            "coords": np.array(coords, np.int32).ravel(),
            "out": poison(room // 4 * len(coords)),
        },
        params=[tensor, Pointer("coords"), Pointer("out")],
        grid=(len(coords), 1, 1),
    )


def _shared(room: int) -> str:
    return f".shared .align 1024 .b8 tile[{room}]; .shared .align 8 .b8 barrier[8];"


def _store(
    name: str,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    coords: Sequence[Sequence[int]],
    *,
    swizzle: str = "none",
    reduce: str = "",
) -> Micro:
    """Block i fills shared memory with data of its own and stores (or reduces) it to the box at coords[i]."""
    rank = len(dims)
    tensor = Map("tensor", dtype, dims, strides, box, swizzle=swizzle)
    size = tensor.box_bytes
    room = -(-size // 128) * 128
    verb = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduce}" if reduce else (
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta"
    )  # fmt: skip
    body = PROLOGUE + _coordinates(rank)
    body += f"""
    .reg .b32 %s;
    .reg .b64 %o;
    mov.u32 %s, tile;
    mul.lo.u32 r3, %blk, {room};
    cvt.u64.u32 %o, r3;
    add.u64 %o, %o, %data;
    mov.u32 r1, %t;
FILL:
    shl.b32 r4, r1, 2;
    cvt.u64.u32 d2, r4;
    add.u64 d2, d2, %o;
    ld.global.b32 r5, [d2];
    add.u32 r2, r4, %s;
    st.shared.b32 [r2], r5;
    add.u32 r1, r1, 32;
    setp.lt.u32 p0, r1, {room // 4};
    @p0 bra FILL;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 p1, %t, 0;
    @p1 bra END;
    {verb}.tile.bulk_group [%map, {{{_names(rank)}}}], [%s];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    cp.async.bulk.wait_group 0;
END:
"""
    return Micro(
        name=name,
        ptx=entry("map map, u64 coords, u64 data", body, shared=_shared(room)),
        buffers={
            "tensor": _array(dtype, dims, strides, 72),
            "coords": np.array(coords, np.int32).ravel(),
            "data": _array(dtype, (room * len(coords) // MAP_DTYPES[dtype][1],), (), 73).view(np.uint32),
        },
        params=[tensor, Pointer("coords"), Pointer("data")],
        outputs=("tensor",),
        grid=(len(coords), 1, 1),
    )  # fmt: skip


def load_cases() -> list[Micro]:
    # 2-D, pitch larger than the row: inside, over each edge and corner, negative starts, wholly outside
    edges = [
        (0, 0), (4, 3), (40, 0), (0, 16), (44, 18), (-4, 0), (0, -2), (-8, -5), (-40, 0), (60, 30), (0, 20), (-28, -7),
    ]  # fmt: skip
    f32 = ("f32", (48, 20), (224,), (32, 8))
    bf16 = ("bf16", (96, 24), (208,))
    corner = [(0, 0), (80, 20), (-8, -3), (40, 8)]
    return [
        _load("tma_load_1d_f32", "f32", (100,), (), (32,), [(0,), (4,), (88,), (-8,), (100,), (-32,), (68,)]),
        _load("tma_load_1d_u8", "u8", (200,), (), (48,), [(0,), (16,), (192,), (-32,), (160,)]),
        _load("tma_load_2d_edges", *f32, edges),
        _load("tma_load_2d_nan_fill", *f32, edges[:9], fill="nan"),
        _load("tma_load_2d_f16_nan_fill", "f16", (48, 20), (112,), (32, 4), [(0, 0), (40, 18), (-8, -1)], fill="nan"),
        _load("tma_load_2d_bf16_nan_fill", "bf16", (48, 20), (112,), (32, 4), [(0, 0), (40, 18), (-8, -1)], fill="nan"),
        _load("tma_load_2d_u64", "u64", (20, 12), (176,), (8, 4), [(0, 0), (16, 10), (-2, -1)]),
        _load("tma_load_2d_tf32", "tf32", (48, 20), (224,), (32, 8), [(0, 0), (40, 16)]),
        _load("tma_load_2d_offset", *f32, [(0, 0), (44, 18)], offset_bytes=64),
        _load("tma_load_2d_swizzle_32B", *bf16, (16, 16), corner, swizzle="32B"),
        _load("tma_load_2d_swizzle_64B", *bf16, (32, 16), corner, swizzle="64B"),
        _load("tma_load_2d_swizzle_128B", *bf16, (64, 16), corner, swizzle="128B"),
        _load("tma_load_2d_swizzle_128B_narrow", *bf16, (32, 16), corner, swizzle="128B"),
        _load("tma_load_2d_swizzle_128B_f32", "f32", (48, 20), (224,), (32, 12), corner, swizzle="128B"),
        _load(
            "tma_load_3d", "bf16", (40, 10, 5), (96, 1120), (16, 4, 2), [(0, 0, 0), (32, 8, 4), (-8, -2, -1), (8, 4, 5)]
        ),
        _load(
            "tma_load_3d_swizzle_128B",
            "bf16",
            (128, 6, 3),
            (256, 1536),
            (64, 4, 2),
            [(0, 0, 0), (64, 4, 2)],
            swizzle="128B",
        ),
        _load(
            "tma_load_4d",
            "f32",
            (12, 5, 4, 3),
            (48, 256, 1024),
            (8, 2, 2, 2),
            [(0, 0, 0, 0), (8, 4, 3, 2), (-4, -1, -1, -1), (4, 2, 1, 1)],
        ),
        _load(
            "tma_load_5d",
            "u16",
            (16, 3, 4, 3, 2),
            (32, 112, 448, 1344),
            (8, 2, 2, 2, 2),
            [(0, 0, 0, 0, 0), (8, 2, 3, 2, 1), (-8, -1, -1, -1, -1), (8, 1, 2, 1, 0)],
        ),
        _load(
            "tma_load_2d_element_strides",
            "f32",
            (48, 20),
            (224,),
            (32, 8),
            [(0, 0), (8, 2), (28, 10)],
            element_strides=(1, 2),
        ),
        _load(
            "tma_load_permuted_strides",
            "bf16",
            (32, 6, 10),
            (640, 64),
            (32, 2, 4),
            [(0, 0, 0), (0, 4, 8)],
            swizzle="64B",
        ),
    ]


def start_cases() -> list[Micro]:
    """One start coordinate each, at and off multiples of 16 bytes, since an error of one would hide the others."""
    starts = {
        "4_bytes": ("f32", (48, 20), (224,), (32, 8), [(1, 0)]),
        "8_bytes": ("f32", (48, 20), (224,), (32, 8), [(2, 0)]),
        "minus_12_bytes": ("f32", (48, 20), (224,), (32, 8), [(-3, 0)]),
        "odd_outside": ("f32", (48, 20), (224,), (32, 8), [(47, 19)]),
        "1d_20_bytes": ("f32", (100,), (), (32,), [(5,)]),
        "1d_3_bytes": ("u8", (200,), (), (48,), [(3,)]),
        "bf16_8_bytes": ("bf16", (96, 24), (208,), (16, 16), [(4, 0)]),
    }
    swizzled = ("bf16", (96, 24), (208,), (64, 16), [(4, 0)])
    return [
        *[_load(f"tma_start_{name}", *arguments) for name, arguments in starts.items()],
        _load("tma_start_swizzled_8_bytes", *swizzled, swizzle="128B"),
        _load("tma_strides_1_2", "f32", (48, 20), (224,), (32, 8), [(0, 0)], element_strides=(1, 2)),
        _load("tma_strides_2_1", "f32", (48, 20), (224,), (32, 8), [(0, 0)], element_strides=(2, 1)),
        _store("tma_store_start_4_bytes", "f32", (44, 27), (224,), (8, 8), [(1, 0)]),
    ]


def ragged_cases() -> list[Micro]:
    """Tensors whose rows are no multiple of 16 bytes long: is the end of a row kept to the element, or to 16 bytes?"""
    coords = [(0, 0), (32, 8), (16, 16), (40, 24)]
    pitch, box = (112,), (8, 8)
    return [
        _load("tma_ragged_load_bf16", "bf16", (45, 27), pitch, box, coords),
        _load("tma_ragged_load_bf16_nan_fill", "bf16", (45, 27), pitch, box, coords, fill="nan"),
        _load("tma_ragged_load_bf16_swizzled", "bf16", (45, 27), pitch, (32, 8), [(0, 0), (32, 24)], swizzle="64B"),
        _load("tma_ragged_load_u8", "u8", (37, 27), (48,), (16, 8), [(0, 0), (32, 8)]),
        _load("tma_ragged_load_f32", "f32", (43, 27), (224,), box, coords),
        _load("tma_ragged_load_1d_f32", "f32", (101,), (), (32,), [(0,), (96,)]),
        _store("tma_ragged_store_bf16", "bf16", (45, 27), pitch, box, coords),
        _store("tma_ragged_store_u8", "u8", (37, 27), (48,), (16, 8), [(0, 0), (32, 8)]),
        _store("tma_ragged_store_f32", "f32", (43, 27), (224,), box, coords),
        _store("tma_ragged_store_1d_f32", "f32", (101,), (), (32,), [(0,), (96,)]),
        _store("tma_ragged_add_f32", "f32", (43, 27), (224,), box, coords, reduce="add"),
        _store("tma_ragged_add_bf16", "bf16", (45, 27), pitch, box, coords, reduce="add"),
        _store("tma_even_add_bf16", "bf16", (40, 27), pitch, box, coords, reduce="add"),
    ]


def store_cases() -> list[Micro]:
    disjoint = [(0, 0), (32, 8), (8, 16), (40, 24), (48, 0), (0, 24)]
    f32 = ("f32", (44, 27), (224,), (8, 8), disjoint)
    wide = ("bf16", (96, 24), (208,))
    half = ((44, 27), (112,), (8, 8), disjoint)
    return [
        _store("tma_store_1d", "f32", (100,), (), (16,), [(0,), (32,), (92,), (100,)]),
        _store("tma_store_2d_edges", *f32),
        *[
            _store(f"tma_store_2d_swizzle_{s}", *wide, (w, 8), [(0, 0), (64, 8), (88, 20)], swizzle=s)
            for s, w in (("128B", 64), ("64B", 32), ("32B", 16))
        ],
        _store("tma_store_3d", "f32", (20, 6, 5), (80, 512), (8, 4, 2), [(0, 0, 0), (16, 4, 4), (8, 0, 2)]),
        _store("tma_store_4d", "f32", (12, 5, 4, 3), (48, 256, 1024), (8, 2, 2, 2), [(0, 0, 0, 0), (8, 4, 3, 2)]),
        _store(
            "tma_store_5d",
            "u16",
            (16, 3, 4, 3, 2),
            (32, 112, 448, 1344),
            (8, 2, 2, 2, 2),
            [(0, 0, 0, 0, 0), (8, 2, 3, 2, 1)],
        ),
        _store("tma_reduce_add_f32", *f32, reduce="add"),
        _store("tma_reduce_add_bf16", "bf16", *half, reduce="add"),
        _store("tma_reduce_add_f16", "f16", *half, reduce="add"),
        _store("tma_reduce_max_bf16", "bf16", *half, reduce="max"),
        _store("tma_reduce_min_f16", "f16", *half, reduce="min"),
        *[
            _store(f"tma_reduce_{op}_{t}", t, (44, 27), (224,), (8, 8), disjoint, reduce=op)
            for t, op in [("s32", "min"), ("s32", "max")]
            + [("u32", op) for op in ("add", "max", "and", "or", "xor", "inc", "dec")]
        ],
        # every block adds to one box: exact sums, so that their order does not matter
        _store("tma_reduce_add_u32_same_box", "u32", (44, 27), (224,), (8, 8), [(8, 8)] * 4, reduce="add"),
    ]  # fmt: skip


def bulk_cases() -> list[Micro]:
    """Bulk copies without a tensor map: 1-D, both directions, and reductions."""
    body = (
        PROLOGUE
        + """
    .reg .b32 %s, %b;
    mov.u32 %s, tile;
    mov.u32 %b, barrier;
    setp.ne.u32 p1, %t, 0;
    @p1 bra READY;
    mbarrier.init.shared.b64 [%b], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    @p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 d1, [%b], 768;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%in], 512, [%b];
    add.u64 d2, %in, 1024;
    add.u32 r1, %s, 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r1], [d2], 256, [%b];
WAIT:
    mbarrier.try_wait.parity.shared.b64 p2, [%b], 0;
    @!p2 bra WAIT;
    mad.lo.u32 r2, %t, 4, %s;
    ld.shared.b32 r3, [r2+256];
    add.u32 r3, r3, 1;
    st.shared.b32 [r2+256], r3;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @p1 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%out], [%s], 768;
    cp.async.bulk.commit_group;
    add.u64 d3, %out, 1024;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d3], [%s], 256;
    add.u64 d3, %out, 1280;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s32 [d3], [%s], 128;
    cp.async.bulk.commit_group;
    add.u64 d3, %out, 1536;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [d3], [r1], 64;
    add.u64 d3, %out, 1600;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [d3], [r1], 64;
    add.u64 d3, %out, 1664;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [d3], [r1], 64;
    add.u64 d3, %out, 1728;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b32 [d3], [r1], 64;
    add.u64 d3, %out, 1792;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [d3], [r1], 64;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 1;
    cp.async.bulk.wait_group 0;
END:
"""
    )
    words = generator(74).integers(0, 1 << 32, 512, np.uint64).astype(np.uint32)
    # the part that is added as f16, bf16 and f32 holds moderate values
    words[256:320] = (generator(75).integers(0x3C00, 0x4400, 128)).astype(np.uint16).view(np.uint32)
    start = generator(76).integers(0, 1 << 32, 512, np.uint64).astype(np.uint32)
    start[384:432] = (generator(77).integers(0x3C00, 0x4400, 96)).astype(np.uint16).view(np.uint32)
    return [
        Micro(
            name="bulk_copy_and_reduce",
            ptx=entry("u64 in, u64 out", body, shared=_shared(1024)),
            buffers={"in": words, "out": start},
            params=[Pointer("in"), Pointer("out")],
        )
    ]


def cases() -> list[Micro]:
    return load_cases() + start_cases() + ragged_cases() + store_cases() + bulk_cases()
