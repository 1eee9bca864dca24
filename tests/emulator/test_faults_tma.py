"""Broken uses of bulk copies, each with its verdict."""

import contextlib

import numpy as np
import pytest

import emulator
from emulator.test_bulk_copies import CLUSTER, STORE_ALL, WAIT_ALL, dummy_map
from emulator.test_tma_tiles import launch, load_instruction, random_bytes, store_instruction, tensor_map
from emulator.tma_kernels import load_ptx, store_ptx
from emulator.tma_model import Box

BOX = Box(2, (64, 16), (128,), (64, 8))
NBYTES = BOX.nbytes
BULK_LOAD = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%smem], [%array], {}, [%bar];"


def run_load(
    instruction: str, *, box: Box = BOX, tensor=None, expect: int | None = None, coords=(0, 0), seed: int = 0, **options
):
    memory = random_bytes(box.tensor_bytes)
    tensor = tensor or tensor_map(memory, "bf16", box, **options)
    text = load_ptx(instruction, NBYTES, len(coords), expect=expect)
    return launch(text, tensor, np.zeros(NBYTES, np.uint8), coords, NBYTES, "random", seed)


def run_store(
    instruction: str,
    *,
    coords=(0, 0),
    dtype: str = "bf16",
    wait: str = "cp.async.bulk.wait_group 0;",
    mode: str = "random",
):
    memory = random_bytes(BOX.tensor_bytes)
    text = store_ptx(instruction, NBYTES, len(coords), wait=wait)
    return launch(text, tensor_map(memory, dtype, BOX), random_bytes(NBYTES, 1), coords, NBYTES, mode)


@contextlib.contextmanager
def verdict(fault: str, match: str):
    """The verdict must be of this kind and say this."""
    with pytest.raises(emulator.Verdict, match=match) as info:
        yield info
    assert info.value.fault == fault, info.value


def test_expecting_too_many_bytes() -> None:
    with verdict("deadlock", "mbarrier") as info:
        run_load(load_instruction(2), expect=NBYTES + 16)
    assert "16" in str(info.value)


@pytest.mark.parametrize("expect", [NBYTES - 16, NBYTES // 2])
def test_expecting_too_few_bytes(expect: int) -> None:
    """On hardware the wait may return early; here the count itself is the fault."""
    with verdict("byte_count", "bytes"):
        run_load(load_instruction(2), expect=expect)


def test_expecting_nothing() -> None:
    """The phase completes before the data: what is seen first is the exit with the load in flight, or its bytes."""
    faults = set()
    for seed in range(8):
        with pytest.raises(emulator.Verdict) as info:
            run_load(load_instruction(2), expect=0, seed=seed)
        faults.add(info.value.fault)
    assert faults <= {"in_flight", "byte_count"}


def test_expecting_only_the_bytes_inside_the_tensor() -> None:
    """A box that reaches over the edge still counts in full."""
    with verdict("byte_count", "bytes"):
        run_load(load_instruction(2), coords=(0, 12), expect=NBYTES // 2)


def test_misaligned_tile_destination() -> None:
    with verdict("misaligned", "multiple of 128"):
        run_load("add.s32 %smem, %smem, 64;\n" + load_instruction(2))


@pytest.mark.parametrize("column", [1, 4, -3, 63])
def test_box_that_starts_off_16_bytes(column: int) -> None:
    """An H200 raises "illegal instruction"."""
    with verdict("misaligned", "multiple of 16 bytes"):
        run_load(load_instruction(2), coords=(column, 0))
    if column > 0:
        with verdict("misaligned", "multiple of 16 bytes"):
            run_store(store_instruction(2), coords=(column, 0))


def test_misaligned_bulk_destination() -> None:
    body = "add.s32 %smem, %smem, 8;\n" + BULK_LOAD.format(512)
    with verdict("misaligned", "multiple of 16"):
        run_load(body)


def test_misaligned_bulk_source() -> None:
    body = "add.s64 %array, %array, 8;\n" + BULK_LOAD.format(512)
    with verdict("misaligned", "multiple of 16"):
        run_load(body)


@pytest.mark.parametrize("size", [0, 24, 1000])
def test_bulk_size_not_in_sixteens(size: int) -> None:
    body = BULK_LOAD.format(size)
    with verdict("illegal_operand", "multiple of 16"):
        run_load(body)


def test_bulk_beyond_the_buffer() -> None:
    body = "add.s64 %array, %array, 528;\n" + BULK_LOAD.format(512)
    with verdict("out_of_bounds", "bulk load"):
        run_load(body)


def test_tile_beyond_shared_memory() -> None:
    with verdict("out_of_bounds", "TMA load"):
        run_load("add.s32 %smem, %smem, 128;\n" + load_instruction(2))


def test_tile_over_a_live_barrier() -> None:
    body = "sub.s32 %bar, %bar, 64;\nmbarrier.init.shared::cta.b64 [%bar], 1;\n" + load_instruction(2)
    with verdict("barrier_state", "mbarrier"):
        run_load(body)


def test_uninitialised_barrier() -> None:
    with verdict("barrier_state", "initialised"):
        run_load("add.s32 %bar, %bar, 8;\n" + load_instruction(2))


def test_tensor_map_of_memory_outside_the_launch() -> None:
    memory = random_bytes(BOX.tensor_bytes + 256)
    map_bytes = tensor_map(memory, "bf16", BOX).encode(memory.ctypes.data // 256 * 256 + 256)
    with verdict("out_of_bounds", "TMA load"):
        run_load(load_instruction(2), tensor=map_bytes)


@pytest.mark.parametrize("seed", range(2))
def test_junk_tensor_map(seed: int) -> None:
    junk = np.random.default_rng(seed).integers(0, 256, 128, dtype=np.uint8).tobytes()
    with verdict("tensor_map", "not a tensor map"):
        run_load(load_instruction(2), tensor=junk)


def test_tensor_map_changed_by_a_store() -> None:
    body = """{ .reg .b64 t; .reg .b32 i, w, s; .reg .pred q; mov.b32 i, 0;
    COPY: mul.wide.u32 t, i, 4; add.s64 t, t, %map; ld.b32 w, [t];
    mul.wide.u32 t, i, 4; add.s64 t, t, %array; st.global.b32 [t], w;
    add.s32 i, i, 1; setp.lt.u32 q, i, 32; @q bra COPY; }
    st.global.b32 [%array+16], 128;
    mov.b64 %map, %array;
    """
    with verdict("tensor_map", "changed"):
        run_load(body + load_instruction(2))


def test_misaligned_tensor_map() -> None:
    with verdict("misaligned", "tensor map"):
        run_load("add.s64 %map, %map, 32;\n" + load_instruction(2))


def test_tensor_map_in_shared_memory() -> None:
    with verdict("out_of_bounds", "tensor map"):
        run_load("cvt.u64.u32 %map, %smem;\ncvta.shared.u64 %map, %map;\n" + load_instruction(2))


def test_rank_of_instruction_and_map_differ() -> None:
    with verdict("tensor_map", "rank"):
        run_load(load_instruction(3), coords=(0, 0, 0))


def test_gather_needs_a_box_of_one_row() -> None:
    with verdict("tensor_map", "1 row"):
        run_load(load_instruction(2, "tile::gather4"), coords=(0, 0, 1, 2, 3))


@pytest.mark.parametrize("coords", [(-8, 0), (0, -1)])
@pytest.mark.parametrize("operation", ["", "add"])
def test_store_with_a_negative_coordinate(operation: str, coords: tuple[int, int]) -> None:
    with verdict("illegal_operand", "negative"):
        run_store(store_instruction(2, operation), coords=coords)


@pytest.mark.parametrize(
    ("operation", "dtype"), [("and", "bf16"), ("inc", "s32"), ("min", "f32"), ("add", "s64"), ("add", "u16")]
)
def test_reduction_the_type_does_not_have(operation: str, dtype: str) -> None:
    box = Box({"bf16": 2, "u16": 2, "s64": 8}.get(dtype, 4), (16, 16), (128,), (16, 8))
    text = store_ptx(store_instruction(2, operation), box.nbytes, 2)
    with verdict("tensor_map", f"no .{operation}"):
        launch(
            text, tensor_map(random_bytes(box.tensor_bytes), dtype, box), random_bytes(box.nbytes), (0, 0), box.nbytes
        )


def test_store_of_a_converting_type() -> None:
    box = Box(4, (16, 16), (128,), (16, 8))
    text = store_ptx(store_instruction(2), box.nbytes, 2)
    with verdict("unsupported", "tf32"):
        launch(
            text, tensor_map(random_bytes(box.tensor_bytes), "tf32", box), random_bytes(box.nbytes), (0, 0), box.nbytes
        )


@pytest.mark.parametrize("mode", ["lazy", "random"])
def test_exit_before_the_source_was_read(mode: str) -> None:
    with verdict("in_flight", "store"):
        for _ in range(20):
            run_store(store_instruction(2), wait="", mode=mode)


def test_exit_with_a_load_in_flight() -> None:
    text = load_ptx(load_instruction(2), NBYTES, 2)
    text = text[: text.index("WAIT:")] + "WAIT:\nret;\n}"
    with verdict("in_flight", "TMA load"):
        launch(
            text,
            tensor_map(random_bytes(BOX.tensor_bytes), "bf16", BOX),
            np.zeros(NBYTES, np.uint8),
            (0, 0),
            NBYTES,
            "lazy",
        )


def test_store_to_a_read_only_array() -> None:
    data = random_bytes(512)
    data.flags.writeable = False
    with verdict("read_only", "bulk store"):
        launch(store_ptx(STORE_ALL, 256, 0), dummy_map(), data, (), 256)


# ---- clusters ------------------------------------------------------------------------------------


def run_pair(body: str, size: int = 2, wait: str = WAIT_ALL) -> None:
    memory = random_bytes(BOX.tensor_bytes)
    out = np.zeros((size, NBYTES), np.uint8)
    text = CLUSTER.format(body=body, bytes=NBYTES, words=NBYTES // 4, wait=wait)
    emulator.load(text).launch(
        grid=(size, 1, 1),
        block=(32, 1, 1),
        cluster=(size, 1, 1),
        shared_bytes=NBYTES + 64,
        params=[tensor_map(memory, "bf16", BOX), out],
    )


EXPECT = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {NBYTES};\n"
REMOTE = """xor.b32 %t, %rank, 1;
mapa.shared::cluster.u32 %remote, %smem, %t;
mapa.shared::cluster.u32 %remotebar, %bar, %t;
"""
CLUSTER_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def test_barrier_of_another_cta_without_cta_group_2() -> None:
    with verdict("illegal_operand", "cta_group::1 allows the same CTA"):
        run_pair(f"{EXPECT}{REMOTE}{CLUSTER_LOAD} [%smem], [%map, {{0, 0}}], [%remotebar];")


def test_shared_cta_destination_in_another_cta() -> None:
    body = f"{EXPECT}{REMOTE}{load_instruction(2).replace('[%smem]', '[%remote]').replace('{coords}', '{0, 0}')}"
    with verdict("illegal_operand", "executing CTA"):
        run_pair(body)


@pytest.mark.parametrize("mask", [0, 4, 0x8001])
def test_multicast_mask_beyond_the_cluster(mask: int) -> None:
    with verdict("illegal_operand", "CTA mask"):
        run_pair(
            f"{EXPECT}mov.b16 %mask, {mask};\n"
            f"{CLUSTER_LOAD}.multicast::cluster [%smem], [%map, {{0, 0}}], [%bar], %mask;"
        )


def test_bulk_copy_to_the_own_cta() -> None:
    body = (
        f"{EXPECT}cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%smem], [%smem], 64, [%bar];"
    )
    with verdict("illegal_operand", "another CTA"):
        run_pair(body)


def test_address_outside_the_cluster() -> None:
    with verdict("out_of_bounds", "cluster"):
        run_pair(f"{EXPECT}add.s32 %remote, %smem, 0x05000000;\n{CLUSTER_LOAD} [%remote], [%map, {{0, 0}}], [%bar];")


# ---- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.TX [%smem], [%map, {0, 0, 0}], [%bar], {1};",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.TX [%map, {0, 0}], [%smem];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.bulk_group [%smem], [%map, {0, 0}], [%bar];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.TX [%smem], [%map, {0, 0, 0}], [%bar];",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.TX.multicast::cluster [%smem], [%map, {0, 0}], [%bar], 1;",
        "cp.async.bulk.tensor.3d.shared::cta.global.tile::gather4.TX [%smem], [%map, {0, 0, 0, 0, 0}], [%bar];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%array], [%smem], 64;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%array], [%smem], 64;",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group [%map, {0, 0}], [%smem];",
        "multimem.cp.async.bulk.global.shared::cta.bulk_group [%array], [%smem], 64;",
        "cp.async.bulk.wait_group -1;",
    ],
)
def test_forms_that_do_not_exist_are_refused(instruction: str) -> None:
    with verdict("unsupported", r"cp\.|wait_group"):
        emulator.load(load_ptx(instruction.replace(".TX", ".mbarrier::complete_tx::bytes"), NBYTES, 0))
