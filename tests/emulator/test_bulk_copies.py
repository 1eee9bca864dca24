"""Bulk copies without tensor maps, multicast and pairs of CTAs, tensor-map editing, and the life of bulk groups."""

import re

import numpy as np
import pytest

import emulator
from emulator.lane_kernels import HEADER
from emulator.test_tma_tiles import MODES, launch, load_instruction, random_bytes, tensor_map
from emulator.tma_kernels import load_ptx, store_ptx
from emulator.tma_model import Box, shared_positions

DUMMY = np.zeros(64, np.uint8)
DUMMY_BOX = Box(1, (64,), (), (64,))


def dummy_map() -> emulator.TensorMap:
    return tensor_map(DUMMY, "u8", DUMMY_BOX)


@pytest.mark.parametrize("mode", MODES)
def test_global_to_shared_and_back(mode: str) -> None:
    """One kernel loads 1040 bytes and stores them elsewhere in the same array."""
    data = random_bytes(4096)
    want = data.copy()
    want[2048 : 2048 + 1040] = data[16 : 16 + 1040]
    body = """add.s64 %global, %array, 16;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%smem], [%global], %size, [%bar];
    SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
    @!%done bra SPIN;
    add.s64 %global, %array, 2048;
    cp.async.bulk.global.shared::cta.bulk_group [%global], [%smem], %size;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;"""
    text = load_ptx(body, 1040, 0)
    text = text[: text.index("mov.b32 %word, %tid;")] + "ret;\n}"  # no copy out: the array is the result
    launch(text, dummy_map(), data, (), 1040, mode)
    np.testing.assert_array_equal(data, want)


def test_cache_hints_and_byte_masks() -> None:
    data = random_bytes(512)
    text = store_ptx(
        """add.s64 %global, %array, 256;
    { .reg .b64 policy; mov.b64 policy, 0; .reg .b16 mask; mov.b16 mask, 0x0ff1;
    cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.cp_mask [%global], [%smem], %size, policy, mask; }""",
        256,
        0,
    )
    want = data.copy()
    chosen = np.array([0x0FF1 >> (i % 16) & 1 for i in range(256)], bool)
    want[256:][chosen] = data[:256][chosen]
    launch(text, dummy_map(), data, (), 256)
    np.testing.assert_array_equal(data, want)


REDUCE_NEXT = """add.s64 %global, %array, 256;
cp.reduce.async.bulk.global.shared::cta.bulk_group.{} [%global], [%smem], %size;"""


@pytest.mark.parametrize(
    ("suffix", "numpy_type", "function"),
    [
        ("add.u32", np.uint32, np.add),
        ("add.u64", np.uint64, np.add),
        ("min.s32", np.int32, np.minimum),
        ("max.s64", np.int64, np.maximum),
        ("and.b32", np.uint32, np.bitwise_and),
        ("xor.b64", np.uint64, np.bitwise_xor),
        ("add.noftz.f16", np.float16, np.add),
        ("add.f32", np.float32, np.add),
        ("add.f64", np.float64, np.add),
        ("min.f16", np.float16, np.fmin),
    ],
)
def test_reductions_of_global_memory(suffix: str, numpy_type, function) -> None:
    rng = np.random.default_rng(1)
    kind = np.dtype(numpy_type)
    if kind.kind == "f":
        data = rng.standard_normal(512 // kind.itemsize).astype(kind)
    else:
        data = rng.integers(0, 256, 512, dtype=np.uint8).view(kind)
    half = len(data) // 2
    want = data.copy()
    want[half:] = function(data[half:], data[:half])
    text = store_ptx(REDUCE_NEXT.format(suffix), 256, 0)
    launch(text, dummy_map(), data, (), 256)
    np.testing.assert_array_equal(data, want)


def test_f32_reduction_flushes_and_f16_does_not() -> None:
    """PTX: .add.f32 flushes subnormal inputs and results to zero; .noftz of f16 keeps them."""
    data = np.full(128, 1e-40, np.float32)
    launch(store_ptx(REDUCE_NEXT.format("add.f32"), 256, 0), dummy_map(), data, (), 256)
    assert (data[64:] == 0).all()
    half = np.full(256, 2.0**-24, np.float16)
    launch(store_ptx(REDUCE_NEXT.format("add.noftz.f16"), 256, 0), dummy_map(), half, (), 256)
    assert (half[128:] == np.float16(2.0**-23)).all()


# ---- clusters ------------------------------------------------------------------------------------

CLUSTER = (
    HEADER
    + """
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 array) {{
.reg .b32 %tid, %rank, %smem, %bar, %remote, %remotebar, %word, %value, %t;
.reg .b64 %map, %global, %array;
.reg .b16 %mask;
.reg .pred %p, %first, %done, %zero;
mov.u32 %tid, %tid.x;
mov.u32 %rank, %cluster_ctarank;
setp.eq.b32 %zero, %rank, 0;
mov.b32 %smem, shared;
add.s32 %bar, %smem, {bytes};
mov.b64 %map, map;
cvta.param.u64 %map, %map;
ld.param.b64 %array, [array];
setp.eq.b32 %first, %tid, 0;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%first bra WAIT;
{body}
WAIT:
{wait}
mov.b32 %word, %tid;
mad.lo.s32 %t, %rank, {bytes}, 0;
cvt.u64.u32 %global, %t;
add.s64 %array, %array, %global;
OUT:
setp.ge.u32 %p, %word, {words};
@%p bra DONE;
mad.lo.s32 %value, %word, 4, %smem;
mul.wide.u32 %global, %word, 4;
add.s64 %global, %global, %array;
{{ .reg .b32 w; ld.shared.b32 w, [%value]; st.global.b32 [%global], w; }}
add.s32 %word, %word, 32;
bra OUT;
DONE:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ret;
}}"""
)
# Stands for LOAD2d in the bodies below, and so on.
LOAD = r"cp.async.bulk.tensor.\1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
WAIT_ALL = "SPIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;\n@!%done bra SPIN;"


def run_cluster(body: str, nbytes: int, tensor, size: int, wait: str = WAIT_ALL, mode: str = "random") -> np.ndarray:
    out = np.zeros((size, nbytes), np.uint8)
    body = re.sub(r"LOAD(\d)d", LOAD, body)
    text = CLUSTER.format(body=body, bytes=nbytes, words=nbytes // 4, wait=wait)
    emulator.load(text).launch(
        grid=(size, 1, 1), block=(32, 1, 1), cluster=(size, 1, 1), shared_bytes=nbytes + 64, params=[tensor, out],
        schedule=emulator.Schedule(seed=1, async_=mode),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("mode", MODES)
def test_multicast_reaches_the_masked_ctas(mode: str) -> None:
    """CTA 0 loads to CTAs 0, 1 and 3; CTA 2 loads to itself. Each waits on its own barrier."""
    box = Box(2, (64, 16), (128,), (64, 8))
    memory = random_bytes(box.tensor_bytes)
    body = """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 1024;
    mov.b16 %mask, 0xb;
    @%zero LOAD2d.multicast::cluster [%smem], [%map, {0, 0}], [%bar], %mask;
    setp.eq.b32 %p, %rank, 2;
    @%p LOAD2d [%smem], [%map, {0, 8}], [%bar];"""
    out = run_cluster(body, 1024, tensor_map(memory, "bf16", box, swizzle="128B"), 4, mode=mode)
    at = shared_positions(1024, "128B")
    for rank in range(4):
        np.testing.assert_array_equal(out[rank][at], box.load(memory, (0, 8 if rank == 2 else 0), b"\0\0"))


@pytest.mark.parametrize("mode", MODES)
def test_pair_signals_the_even_cta(mode: str) -> None:
    """.cta_group::2: both CTAs load their half and signal the even one, whose address has the rank bit cleared."""
    box = Box(2, (64, 16), (128,), (64, 8))
    memory = random_bytes(box.tensor_bytes)
    body = """@%zero mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 2048;
    and.b32 %remotebar, %bar, 0xfeffffff;
    mad.lo.s32 %t, %rank, 8, 0;
    LOAD2d.cta_group::2 [%smem], [%map, {0, %t}], [%remotebar];"""
    # The odd CTA learns of the data from the even one, by the cluster barrier.
    wait = "@!%zero bra PAST;\n" + WAIT_ALL + "\nPAST:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
    out = run_cluster(body, 1024, tensor_map(memory, "bf16", box), 2, wait, mode)
    np.testing.assert_array_equal(out.ravel(), memory)


def test_multicast_of_pairs_signals_one_cta_of_each() -> None:
    """Multicast with .cta_group::2 and the barrier of CTA 0: data in four CTAs, two signals each at CTAs 0 and 2."""
    box = Box(1, (256,), (), (256,))
    memory = random_bytes(256)
    body = """and.b32 %t, %rank, 1;
    setp.eq.b32 %p, %t, 0;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    mov.b16 %mask, 0xf;
    @%zero LOAD1d.multicast::cluster.cta_group::2 [%smem], [%map, {0}], [%bar], %mask;"""
    others = "@%first bra JOINED;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;\nJOINED:\n"
    wait = (
        others
        + "and.b32 %t, %rank, 1;\nsetp.ne.b32 %p, %t, 0;\n@%p bra PAST;\n"
        + WAIT_ALL
        + "\nPAST:\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
    )
    out = run_cluster(body, 256, tensor_map(memory, "u8", box), 4, wait)
    for rank in range(4):
        np.testing.assert_array_equal(out[rank], memory)


@pytest.mark.parametrize("mode", MODES)
def test_shared_to_shared(mode: str) -> None:
    """Each CTA sends its tile to the other CTA of the pair."""
    box = Box(1, (64, 2), (64,), (64, 1))
    memory = random_bytes(128)
    body = """mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 64;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%smem], [%map, {0, %rank}], [%bar];
    FIRST: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
    @!%done bra FIRST;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 64;
    xor.b32 %t, %rank, 1;
    add.s32 %value, %smem, 64;
    mapa.shared::cluster.u32 %remote, %value, %t;
    mapa.shared::cluster.u32 %remotebar, %bar, %t;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%remote], [%smem], 64, [%remotebar];"""
    wait = WAIT_ALL.replace("], 0;", "], 1;") + "\nbarrier.cluster.arrive;\nbarrier.cluster.wait;"
    out = run_cluster(body, 128, tensor_map(memory, "u8", box), 2, wait.replace("SPIN", "AGAIN"), mode)
    for rank in range(2):
        np.testing.assert_array_equal(out[rank][:64], memory[64 * rank : 64 * rank + 64])
        np.testing.assert_array_equal(out[rank][64:], memory[64 * (1 - rank) :][:64])


# ---- bulk groups ---------------------------------------------------------------------------------

STORE_ALL = "cp.async.bulk.global.shared::cta.bulk_group [%array], [%smem], %size;"
OVERWRITE = "st.shared.b32 [%smem], 0;"


def test_reuse_after_wait_group_read_is_safe() -> None:
    for mode in MODES:
        for seed in range(4):
            data = random_bytes(256)
            want = data.copy()
            text = store_ptx(STORE_ALL, 256, 0, wait=f"cp.async.bulk.wait_group.read 0;\n{OVERWRITE}")
            launch(text, dummy_map(), data, (), 256, mode, seed)
            np.testing.assert_array_equal(data, want)


def test_reuse_before_wait_group_read_shows() -> None:
    """The overwritten word is what arrives, when the copy reads its source as late as it may."""
    data = random_bytes(256) | 1
    text = store_ptx(STORE_ALL, 256, 0, after=OVERWRITE)
    launch(text, dummy_map(), data, (), 256, "lazy")
    assert (data[:4] == 0).all()
    assert (data[4:] & 1 == 1).all()


def test_wait_group_counts_the_most_recent_groups() -> None:
    """With one group allowed to be pending, the older of two has completed."""
    text = store_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [%array], [%smem], %size;",
        128,
        0,
        after="""add.s64 %global, %array, 256;
        cp.async.bulk.global.shared::cta.bulk_group [%global], [%smem], %size;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 1;
        add.s64 %global, %array, 512;
        { .reg .b32 w; ld.global.b32 w, [%array]; st.global.b32 [%global], w; }""",
    )
    for seed in range(6):
        data = random_bytes(1024, seed)
        first = data[:4].copy()
        launch(text, dummy_map(), data, (), 128, "random", seed)
        np.testing.assert_array_equal(data[512:516], first)
        np.testing.assert_array_equal(data[256:384], data[:128])


def test_a_store_may_outlive_its_cta_once_its_source_is_read() -> None:
    for mode in MODES:
        data = random_bytes(512)
        want = data.copy()
        want[256:] = data[:256]
        body = "add.s64 %global, %array, 256;\n" + STORE_ALL.replace("[%array]", "[%global]")
        launch(store_ptx(body, 256, 0, wait="cp.async.bulk.wait_group.read 0;"), dummy_map(), data, (), 256, mode)
        np.testing.assert_array_equal(data, want)


# ---- editing tensor maps -------------------------------------------------------------------------

REPLACE = """
{{ .reg .b32 w, a; .reg .b64 g, n; .reg .pred q; .reg .b32 i;
mov.b32 i, 0;
COPY: mul.wide.u32 g, i, 4; add.s64 g, g, %map; ld.b32 w, [g];
mad.lo.s32 a, i, 4, %smem; st.shared.b32 [a], w;
add.s32 i, i, 1; setp.lt.u32 q, i, 32; @q bra COPY; }}
add.s64 %global, %array, {address};
tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%smem], %global;
tensormap.replace.tile.rank.shared::cta.b1024.b32 [%smem], 1;
tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%smem], 1, 20;
tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%smem], 0, 96;
tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%smem], 0, 32;
tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%smem], 1, 4;
tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%smem], 1, 1;
tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%smem], 10;
tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%smem], 2;
tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%smem], 1;
"""


def test_tensormap_replace_and_fenced_copy() -> None:
    """A map is copied to shared memory, every field replaced, written back to global memory by the warp, and used."""
    box = Box(2, (40, 20), (96,), (32, 4))
    array = np.zeros(8192, np.uint8)
    array[4096 : 4096 + box.tensor_bytes] = random_bytes(box.tensor_bytes)
    source = array[4096:].copy()
    text = f"""{HEADER}
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 array) {{
.reg .b32 %smem, %bar, %tid, %value, %word;
.reg .b64 %map, %array, %global, %new;
.reg .pred %first, %done, %p;
mov.u32 %tid, %tid.x;
setp.eq.b32 %first, %tid, 0;
mov.b32 %smem, shared;
add.s32 %bar, %smem, 512;
mov.b64 %map, map;
cvta.param.u64 %map, %map;
ld.param.b64 %array, [array];
add.s64 %new, %array, 1024;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@!%first bra JOIN;
{REPLACE.format(address=4096)}
tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%smem], 0, 40;
JOIN:
bar.warp.sync 0xffffffff;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%new], [%smem], 128;
fence.proxy.tensormap::generic.acquire.gpu [%new], 128;
bar.warp.sync 0xffffffff;
@!%first bra WAIT;
fence.proxy.async.shared::cta;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 256;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%smem], [%new, {{16, 18}}], [%bar];
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
mov.b32 %word, %tid;
OUT:
mad.lo.s32 %value, %word, 4, %smem;
mul.wide.u32 %global, %word, 4;
add.s64 %global, %global, %array;
{{ .reg .b32 w; ld.shared.b32 w, [%value]; st.global.b32 [%global], w; }}
add.s32 %word, %word, 32;
setp.lt.u32 %p, %word, 64;
@%p bra OUT;
ret;
}}"""
    tensor = tensor_map(np.zeros(4096, np.uint8), "u8", Box(1, (64,), (), (64,)))
    emulator.load(text).launch(grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=1024, params=[tensor, array])
    want = box.load(source, (16, 18), b"\xf7\x7f")
    np.testing.assert_array_equal(array[:256][shared_positions(256, "64B")], want)


def test_a_map_in_global_memory_needs_no_parameter() -> None:
    """The tensor map may lie in an ordinary buffer, 64-byte aligned."""
    box = Box(2, (64, 8), (128,), (64, 8))
    memory, out = random_bytes(box.tensor_bytes), np.zeros(1024, np.uint8)
    launch(load_ptx(load_instruction(2), 1024, 2), tensor_map(memory, "bf16", box), out, (0, 0), 1024)
    np.testing.assert_array_equal(out, memory)
