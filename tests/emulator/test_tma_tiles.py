"""TMA tile loads, stores and reductions against the numpy model: swizzles, types, ranks, edges, strides."""

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator.tma_kernels import load_ptx, store_ptx
from emulator.tma_model import Box, shared_positions

BYTES = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "u64": 8, "s64": 8, "f64": 8}
MODES = ("eager", "lazy", "random")


def tensor_map(memory: np.ndarray, dtype: str, box: Box, **options) -> emulator.TensorMap:
    steps = box.steps or None
    return emulator.TensorMap(
        memory, dtype=dtype, dims=box.dims, strides_bytes=box.strides, box=box.box, element_strides=steps, **options
    )


def random_bytes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def launch(
    text: str, tensor, array: np.ndarray, coords: tuple[int, ...], nbytes: int, mode: str = "random", seed: int = 0
):
    return emulator.load(text).launch(
        grid=(1, 1, 1),
        block=(128, 1, 1),
        shared_bytes=nbytes + 64,
        params=[tensor, array, *(np.int32(c) for c in coords)],
        schedule=emulator.Schedule(seed=seed, async_=mode),
    )


def load_instruction(rank: int, mode: str = "tile") -> str:
    name = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.{mode}.mbarrier::complete_tx::bytes"
    return name + " [%smem], [%map, {coords}], [%bar];"


def check_load(
    dtype: str, box: Box, coords: tuple[int, ...], swizzle: str, fill: str = "zero", mode: str = "random"
) -> None:
    memory = random_bytes(box.tensor_bytes)
    nbytes, row = box.nbytes, box.shape[0] * box.item
    at = shared_positions(nbytes, swizzle, row=row)
    shared = -(-(at.max() + 1) // 128) * 128
    out = np.zeros(shared, np.uint8)
    tensor = tensor_map(memory, dtype, box, swizzle=swizzle, fill=fill)
    text = load_ptx(load_instruction(len(box.dims)), nbytes, len(coords), shared_bytes=shared)
    report = launch(text, tensor, out, coords, shared, mode)
    pattern = b"\xf7\x7f" * (box.item // 2) if fill == "nan" else bytes(box.item)
    want = box.load(memory, coords, pattern)
    np.testing.assert_array_equal(out[at], want)
    assert report.tma_bytes_in == nbytes


SWIZZLES = [("none", 256), ("32B", 32), ("64B", 64), ("128B", 128)]


@pytest.mark.parametrize(("swizzle", "span"), SWIZZLES)
@pytest.mark.parametrize("dtype", ["u8", "bf16", "f32", "u64"])
def test_load_swizzles(dtype: str, swizzle: str, span: int) -> None:
    item = BYTES[dtype]
    columns = span // item
    box = Box(item, (3 * columns, 40), (3 * span + 16,), (min(columns, 256), 24))
    check_load(dtype, box, (columns, 5), swizzle)


@pytest.mark.parametrize(
    "coords", [(0, 0), (-8, -3), (40, 30), (-64, 0), (64, 40), (24, -24), (-2147483648, 2147483647)]
)
@pytest.mark.parametrize("fill", ["zero", "nan"])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_load_beyond_every_edge(swizzle: str, fill: str, coords: tuple[int, int]) -> None:
    box = Box(2, (61, 37), (144,), (64, 24))
    check_load("bf16", box, coords, swizzle, fill)


RANKS = [
    (Box(4, (100,), (), (32,)), (88,)),
    (Box(2, (24, 7, 5), (64, 512), (16, 4, 3)), (16, 5, -1)),
    (Box(2, (24, 7, 5, 3), (64, 512, 2560), (16, 2, 3, 2)), (-8, 6, 3, 2)),
    (Box(1, (48, 3, 4, 3, 2), (64, 256, 1024, 4096), (32, 2, 2, 2, 2)), (16, -1, 3, 1, 1)),
    (Box(4, (16, 5, 1, 3, 2), (64, 0, 320, 960), (16, 3, 1, 2, 2)), (0, 3, 0, 2, 0)),
]


@pytest.mark.parametrize(("box", "coords"), RANKS, ids=[f"{len(b.dims)}d-{i}" for i, (b, _) in enumerate(RANKS)])
@pytest.mark.parametrize("swizzle", ["none", "32B"])
def test_load_ranks(box: Box, coords: tuple[int, ...], swizzle: str) -> None:
    if swizzle == "32B" and box.box[0] * box.item > 32:
        box = Box(box.item, box.dims, box.strides, (32 // box.item, *box.box[1:]))
    check_load({1: "u8", 2: "f16", 4: "s32"}[box.item], box, coords, swizzle)


@pytest.mark.parametrize("coords", [(0, 0, 0), (4, -2, 1), (-4, 17, 5)])
def test_load_element_strides(coords: tuple[int, ...]) -> None:
    box = Box(4, (20, 19, 9), (96, 2048), (16, 9, 4), (1, 4, 2))
    assert box.shape == (16, 3, 2)
    check_load("f32", box, coords, "none")


@pytest.mark.parametrize(("swizzle", "columns"), [("32B", 8), ("64B", 16), ("128B", 32), ("128B", 8)])
def test_rows_narrower_than_the_span_take_the_span(swizzle: str, columns: int) -> None:
    check_load("bf16", Box(2, (40, 12), (96,), (columns, 9)), (8, 2), swizzle)


@pytest.mark.parametrize("mode", MODES)
def test_load_lands_under_every_schedule(mode: str) -> None:
    check_load("bf16", Box(2, (64, 64), (128,), (64, 64)), (0, 0), "128B", mode=mode)


def test_load_at_an_offset_swizzles_absolute_addresses() -> None:
    """A tile that does not start on a 1024-byte boundary takes the pattern of the addresses it lies at."""
    box = Box(2, (64, 16), (128,), (64, 16))
    memory, out = random_bytes(box.tensor_bytes), np.zeros(4096, np.uint8)
    text = load_ptx(
        "add.s32 %smem, %smem, 384;\n" + load_instruction(2) + "\nsub.s32 %smem, %smem, 384;",
        box.nbytes,
        2,
        shared_bytes=4096,
    )
    launch(text, tensor_map(memory, "bf16", box, swizzle="128B"), out, (0, 0), 4096)
    np.testing.assert_array_equal(out[shared_positions(box.nbytes, "128B", 384)], box.load(memory, (0, 0), b"\0\0"))


def test_load_with_32_byte_atoms() -> None:
    """The layout of transposed tf32 operands: 32-byte chunks, exchanged by the line modulo 4."""
    box = Box(4, (32, 16), (128,), (32, 16))
    memory, out = random_bytes(box.tensor_bytes), np.zeros(2048, np.uint8)
    tensor = tensor_map(memory, "f32", box, swizzle="128B_ATOM_32B")
    launch(load_ptx(load_instruction(2), 2048, 2), tensor, out, (0, 0), 2048)
    lines = memory.reshape(16, 4, 32)
    want = np.stack([lines[r][[c ^ (r % 4) for c in range(4)]] for r in range(16)])
    np.testing.assert_array_equal(out, want.ravel())


def test_load_rounds_to_tf32() -> None:
    """To nearest even at 10 mantissa bits; infinities and NaNs pass unchanged."""
    words = np.array(
        [0x3F801000, 0x3F803000, 0x3F801001, 0x3FFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x80000001], np.uint32
    )
    memory = np.resize(words, 64).copy()
    box = Box(4, (64,), (), (64,))
    out = np.zeros(64, np.uint32)
    launch(load_ptx(load_instruction(1), 256, 1), tensor_map(memory, "tf32", box), out, (0,), 256)
    np.testing.assert_array_equal(
        out[:8], [0x3F800000, 0x3F804000, 0x3F802000, 0x40000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x80000000]
    )


# ---- gather and scatter --------------------------------------------------------------------------

ROWS = (7, 0, 60, 33)


def test_gather4() -> None:
    box = Box(2, (128, 50), (256,), (64, 1))
    memory, out = random_bytes(box.tensor_bytes), np.zeros(512, np.uint8)
    text = load_ptx(load_instruction(2, "tile::gather4"), 512, 5)
    launch(text, tensor_map(memory, "bf16", box, swizzle="128B"), out, (80, *ROWS), 512)
    want = np.concatenate([box.load(memory, (80, row), b"\0\0") for row in ROWS])  # row 60 is outside
    np.testing.assert_array_equal(out[shared_positions(512, "128B")], want)


def test_scatter4() -> None:
    box = Box(2, (128, 50), (256,), (32, 1))
    memory, data = random_bytes(box.tensor_bytes), random_bytes(256, 1)
    want = memory.copy()
    rows = data[shared_positions(256, "64B")].reshape(4, 64)
    for row, values in zip(ROWS, rows, strict=True):
        box.store(want, (104, row), values)
    text = store_ptx(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%map, {coords}], [%smem];", 256, 5
    )
    launch(text, tensor_map(memory, "bf16", box, swizzle="64B"), data, (104, *ROWS), 256)
    np.testing.assert_array_equal(memory, want)


# ---- stores --------------------------------------------------------------------------------------


def store_instruction(rank: int, operation: str = "") -> str:
    reduce = "reduce." if operation else ""
    op = f".{operation}" if operation else ""
    return f"cp.{reduce}async.bulk.tensor.{rank}d.global.shared::cta{op}.tile.bulk_group [%map, {{coords}}], [%smem];"


STORES = [
    (Box(2, (61, 37), (144,), (64, 24)), (0, 0)),
    (Box(2, (61, 37), (144,), (64, 24)), (32, 30)),
    (Box(2, (61, 37), (144,), (64, 24)), (64, 0)),  # wholly outside
    (Box(4, (100,), (), (32,)), (88,)),
    (Box(1, (48, 3, 4, 3, 2), (64, 256, 1024, 4096), (32, 2, 2, 2, 2)), (16, 2, 3, 1, 1)),
    (Box(4, (20, 19, 9), (96, 2048), (16, 9, 4), (1, 4, 2)), (4, 2, 1)),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("box", "coords"), STORES, ids=range(len(STORES)))
def test_store_clips_and_spares_the_padding(box: Box, coords: tuple[int, ...], mode: str) -> None:
    swizzle = "128B" if box.box[0] * box.item == 128 else "none"
    memory, data = random_bytes(box.tensor_bytes), random_bytes(box.nbytes, 1)
    want = memory.copy()
    box.store(want, coords, data[shared_positions(box.nbytes, swizzle)])
    dtype = {1: "u8", 2: "bf16", 4: "f32"}[box.item]
    report = launch(
        store_ptx(store_instruction(len(coords)), box.nbytes, len(coords)),
        tensor_map(memory, dtype, box, swizzle=swizzle), data, coords, box.nbytes, mode,
    )  # fmt: skip
    np.testing.assert_array_equal(memory, want)
    assert report.tma_bytes_out == box.nbytes


def integer_reduction(operation: str, d: np.ndarray, s: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return {
            "add": lambda: d + s,
            "min": lambda: np.minimum(d, s),
            "max": lambda: np.maximum(d, s),
            "and": lambda: d & s,
            "or": lambda: d | s,
            "xor": lambda: d ^ s,
            "inc": lambda: np.where(d >= s, 0, d + 1).astype(d.dtype),
            "dec": lambda: np.where((d == 0) | (d > s), s, d - 1).astype(d.dtype),
        }[operation]()


REDUCTIONS = [
    *((dtype, op) for dtype in ("u32", "s32", "u64") for op in ("add", "min", "max", "and", "or", "xor")),
    *(("s64", op) for op in ("min", "max", "and", "or", "xor")),
    ("u32", "inc"),
    ("u32", "dec"),
]


@pytest.mark.parametrize(("dtype", "operation"), REDUCTIONS)
def test_integer_reductions(dtype: str, operation: str) -> None:
    numpy_type = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}[dtype]
    box = Box(BYTES[dtype], (28, 9), (256,), (16, 8))
    memory, data = random_bytes(box.tensor_bytes), random_bytes(box.nbytes, 1)
    if operation in ("inc", "dec"):  # small numbers make the limits matter
        memory, data = ((x.view(np.uint32) & 3).view(np.uint8) for x in (memory, data))
    coords = (20, 3)
    d = box.load(memory, coords, bytes(box.item)).view(numpy_type)
    want = memory.copy()
    box.store(want, coords, integer_reduction(operation, d, data.view(numpy_type)).view(np.uint8))
    launch(
        store_ptx(store_instruction(2, operation), box.nbytes, 2),
        tensor_map(memory, dtype, box),
        data,
        coords,
        box.nbytes,
    )
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize(
    ("dtype", "numpy_type"), [("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f16", np.float16)]
)
def test_float_add_rounds_to_nearest_even(dtype: str, numpy_type) -> None:
    rng = np.random.default_rng(3)
    box = Box(BYTES[dtype], (32, 8), (BYTES[dtype] * 40,), (32, 8))
    memory = rng.standard_normal(box.tensor_bytes // box.item).astype(numpy_type)
    data = rng.standard_normal(256).astype(numpy_type)
    memory[:2], data[:2] = [1.0, 1.0078125], [2.0**-8, 2.0**-8]  # as measured on an H200 in bf16: 1 and 1.015625
    d = box.load(memory.view(np.uint8), (0, 0), bytes(box.item)).view(numpy_type)
    want = memory.copy()
    exact = (d.astype(np.float64) + data.astype(np.float64)).astype(np.float32).astype(numpy_type)
    box.store(want.view(np.uint8), (0, 0), exact.view(np.uint8))
    launch(
        store_ptx(store_instruction(2, "add"), box.nbytes, 2), tensor_map(memory, dtype, box), data, (0, 0), box.nbytes
    )
    np.testing.assert_array_equal(memory.view(np.uint8), want.view(np.uint8))
    if dtype == "bf16":
        assert [float(x) for x in memory[:2]] == [1.0, 1.015625]


@pytest.mark.parametrize(("dtype", "one"), [("bf16", 0x3F80), ("f16", 0x3C00)])
def test_stores_take_in_whole_chunks(dtype: str, one: int) -> None:
    """Where a row does not end on 16 bytes, an H200 writes the padding too, up to the next multiple."""
    box = Box(2, (20, 8), (64,), (16, 8))
    memory, data = np.full(8 * 32, one, np.uint16), np.full(128, one, np.uint16)
    launch(store_ptx(store_instruction(2, "add"), 256, 2), tensor_map(memory, dtype, box), data, (16, 0), 256)
    changed = (memory != one).reshape(8, 32)
    assert changed[:, 16:24].all()
    assert changed.sum() == 64
    launch(store_ptx(store_instruction(2), 256, 2), tensor_map(memory, dtype, box), data, (16, 0), 256)
    assert (memory == one).all()


def test_prefetches_have_no_effect() -> None:
    box = Box(2, (64, 8), (128,), (64, 8))
    memory, out = random_bytes(box.tensor_bytes), np.zeros(1024, np.uint8)
    text = load_ptx(
        "prefetch.tensormap [%map];\ncp.async.bulk.prefetch.tensor.2d.L2.global.tile [%map, {coords}];\n"
        + load_instruction(2),
        1024,
        2,
    )
    launch(text, tensor_map(memory, "bf16", box), out, (0, 0), 1024)
    np.testing.assert_array_equal(out, memory)


# ---- tensor maps ---------------------------------------------------------------------------------

LEGAL = {"dtype": "bf16", "dims": (64, 8), "strides_bytes": (128,), "box": (64, 8)}
ILLEGAL = [
    ({"dims": (64, 0)}, "dimension 1 is 0"),
    ({"strides_bytes": (120,)}, "multiple of 16"),
    ({"strides_bytes": (1 << 40,)}, "2\\^40"),
    ({"box": (64, 257)}, "box dimension 1 is 257"),
    ({"box": (0, 8)}, "box dimension 0 is 0"),
    ({"box": (60, 8)}, "120 bytes, expected a multiple of 16"),
    ({"box": (128, 8), "swizzle": "128B"}, "at most the swizzle's 128"),
    ({"box": (64, 8), "swizzle": "64B"}, "at most the swizzle's 64"),
    ({"element_strides": (1, 9)}, "element stride 1 is 9"),
    ({"offset_bytes": 8}, "multiple of 16"),
    ({"dtype": "u16", "fill": "nan"}, "fill is NaN"),
]


@pytest.mark.parametrize(("change", "message"), ILLEGAL, ids=[m for _, m in ILLEGAL])
def test_illegal_tensor_maps_are_refused(change: dict, message: str) -> None:
    memory, out = np.zeros(4096, np.uint8), np.zeros(1024, np.uint8)
    text = load_ptx(load_instruction(2), 1024, 2)
    with pytest.raises((ValueError, emulator.Verdict), match=message):
        launch(text, emulator.TensorMap(memory, **{**LEGAL, **change}), out, (0, 0), 1024)
