"""Kernels of the DSL: TMA tiles and multicast, cluster exchange, cluster launch control, a warp-specialised GEMM."""

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator.kernels import build, exchange, persistent, pipeline, tiles

pytestmark = pytest.mark.emulator

TILES = [
    tiles.Config(swizzle=swizzle, dtype=dtype, cluster=cluster, reduce=reduce)
    for swizzle, dtype, cluster, reduce in (
        ("none", "f32", 1, False),
        ("32B", "bf16", 2, False),
        ("64B", "f16", 4, False),
        ("128B", "bf16", 2, False),
        ("128B", "f32", 4, False),
        ("none", "f32", 2, True),
        ("32B", "f16", 1, True),
        ("64B", "f32", 4, True),
        ("128B", "bf16", 2, True),
    )
]
EXCHANGES = [exchange.Config(cluster=2), exchange.Config(cluster=4, rounds=4)]
PERSISTENT = [persistent.Config(), persistent.Config(cluster=2)]
PIPELINE = pipeline.Config()
NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
SCHEDULES = [
    emulator.Schedule(seed=0, async_="eager"),
    emulator.Schedule(seed=1, async_="lazy", spurious_wait=0.2),
    emulator.Schedule(seed=2, async_="random", spurious_wait=0.2),
]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    build.prepare([*TILES, *EXCHANGES, *PERSISTENT, PIPELINE])


def schedule_name(schedule: emulator.Schedule) -> str:
    return schedule.async_


@pytest.mark.parametrize(
    "config", TILES, ids=lambda c: f"{c.dtype}-{c.swizzle}-{c.cluster}{'-reduce' if c.reduce else ''}"
)
def test_tiles(config: tiles.Config):
    """Rows and columns that no tile divides; what lies outside the matrix stays as it was."""
    rng = np.random.default_rng(7)
    dtype = NUMPY[config.dtype]
    rows, columns = 2 * config.tile_rows + 5, config.tile_columns * 3 - 8
    source = rng.integers(-8, 9, (rows, columns)).astype(dtype)
    copies = 1 if config.reduce else config.cluster
    start = rng.integers(-8, 9, (copies, rows, columns)).astype(dtype)
    size = dtype().itemsize if config.dtype != "bf16" else 2
    grid = (config.cluster * -(-rows // config.tile_rows), -(-columns // config.tile_columns), 1)
    box = (config.tile_columns, config.tile_rows)
    program = emulator.load(build.ptx(config))
    for schedule in SCHEDULES:
        target = start.copy()
        map_in = emulator.TensorMap(
            source,
            dtype=config.dtype,
            dims=(columns, rows),
            strides_bytes=(columns * size,),
            box=(box[0], box[1] // config.cluster),
            swizzle=config.swizzle,
        )
        map_out = emulator.TensorMap(
            target,
            dtype=config.dtype,
            dims=(columns, rows, copies),
            strides_bytes=(columns * size, rows * columns * size),
            box=(*box, 1),
            swizzle=config.swizzle,
        )
        program.launch(
            grid=grid,
            block=(64, 1, 1),
            cluster=(config.cluster, 1, 1),
            shared_bytes=1024 + config.tile_rows * config.tile_columns * size,
            params=[map_in, bytes(8), map_out, bytes(12)],
            schedule=schedule,
        )
        if config.reduce:
            want = start.astype(np.float32) + config.cluster * source.astype(np.float32)
        else:
            want = np.broadcast_to(source, target.shape).astype(np.float32)
        np.testing.assert_array_equal(target.astype(np.float32), want)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize("config", EXCHANGES, ids=lambda c: f"{c.cluster}-{c.rounds}")
def test_exchange(config: exchange.Config, schedule: emulator.Schedule):
    out = np.zeros((config.cluster, 2, exchange.THREADS), np.int32)
    emulator.load(build.ptx(config)).launch(
        grid=(config.cluster, 1, 1),
        block=(exchange.THREADS, 1, 1),
        cluster=(config.cluster, 1, 1),
        shared_bytes=32 + 16 * exchange.THREADS,
        params=[out],
        schedule=schedule,
    )
    np.testing.assert_array_equal(out, np.array(exchange.expected(config)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize("config", PERSISTENT, ids=lambda c: f"cluster{c.cluster}")
def test_persistent_with_cluster_launch_control(config: persistent.Config, schedule: emulator.Schedule):
    """Each work item is done once, by whichever cluster gets it."""
    items = 37
    rng = np.random.default_rng(3)
    source = rng.integers(-1000, 1000, items * config.cluster * persistent.THREADS).astype(np.int32)
    out, visits = np.zeros_like(source), np.zeros(items, np.int32)
    emulator.load(build.ptx(config)).launch(
        grid=(items * config.cluster, 1, 1),
        block=(persistent.THREADS, 1, 1),
        cluster=(config.cluster, 1, 1),
        shared_bytes=64,
        params=[source, out, visits],
        schedule=schedule,
    )
    np.testing.assert_array_equal(visits, config.cluster)
    np.testing.assert_array_equal(out, 3 * source + 1)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize(("m", "n", "k", "ctas"), [(200, 120, 328, 2), (128, 64, 64, 1), (129, 200, 8, 3)])
def test_pipeline(m: int, n: int, k: int, ctas: int, schedule: emulator.Schedule):
    """Partial tiles in every dimension, more and fewer tiles than CTAs, less K than the ring holds and more."""
    rng = np.random.default_rng(m)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    c = np.full((m, n), np.nan, np.float32)
    maps = [
        emulator.TensorMap(x, dtype="bf16", dims=(k, len(x)), strides_bytes=(2 * k,), box=(64, rows), swizzle="128B")
        for x, rows in ((a, 128), (b, 64))
    ]
    emulator.load(build.ptx(PIPELINE)).launch(
        grid=(ctas, 1, 1),
        block=(pipeline.THREADS, 1, 1),
        shared_bytes=1024 + pipeline.STAGES * 2 * 64 * (128 + 64),
        params=[maps[0], bytes(8), maps[1], bytes(8), c, np.int32(m), np.int32(n), np.int32(k)],
        schedule=schedule,
    )
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)
