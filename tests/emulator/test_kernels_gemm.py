"""tcgen05.mma in every operand form, as the kernel DSL emits it: exact on integers, independent of the schedule."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator.kernels import build, gemm

pytestmark = pytest.mark.emulator

AXES = {
    "source": ("SS", "TS"),
    "cta_group": (1, 2),
    "m": (64, 128, 256),
    "dtype": ("f16", "bf16", "tf32", "e4m3"),
    "a_major": ("K", "MN"),
    "b_major": ("K", "MN"),
    "swizzle": ("32B", "64B", "128B"),
}
NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}


def _config(**values) -> gemm.Config:
    """The smallest N at which the transposed B of each CTA has a whole swizzle row."""
    n = 64 * values["cta_group"]
    if values["dtype"] == "e4m3" and values["b_major"] == "MN":
        n *= 2
    return gemm.Config(n=n, **values)


def all_legal() -> list[gemm.Config]:
    every = (_config(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values()))
    return [config for config in every if config.illegal() is None]


def _pairs(config: gemm.Config) -> set[tuple]:
    return set(itertools.combinations([(axis, getattr(config, axis)) for axis in AXES], 2))


def pairwise() -> list[gemm.Config]:
    """Few configurations in which every legal pair of values of two axes occurs."""
    candidates = all_legal()
    left = set().union(*map(_pairs, candidates))
    chosen = []
    while left:
        best = max(candidates, key=lambda c: len(_pairs(c) & left))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def label(config: gemm.Config) -> str:
    return "-".join(str(getattr(config, axis)) for axis in AXES)


# forms that the attention kernels live on, whether the pairs need them or not
IMPORTANT = [
    _config(source=source, cta_group=group, m=m, dtype="bf16", a_major=a_major, b_major=b_major, swizzle="128B")
    for source, group, m, a_major, b_major in (
        ("SS", 1, 128, "K", "K"),
        ("SS", 1, 128, "MN", "MN"),
        ("SS", 2, 128, "K", "K"),
        ("SS", 2, 256, "MN", "MN"),
        ("TS", 1, 128, "K", "MN"),
        ("TS", 2, 128, "K", "K"),
        ("TS", 2, 256, "K", "MN"),
    )
]
CHOSEN = list(dict.fromkeys(pairwise() + IMPORTANT))


@pytest.fixture(scope="module", autouse=True)
def compiled():
    build.prepare(CHOSEN)


def operands(config: gemm.Config, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A [M, K] and B [N, K], small integers: every sum is exact in fp32, whatever the order."""
    rng = np.random.default_rng(seed)
    dtype = NUMPY[config.dtype]
    a, b = (rng.integers(-3, 4, (rows, config.k)).astype(dtype) for rows in (config.m, config.n))
    return a, b


def tensor_map(config: gemm.Config, operand: str, array: np.ndarray) -> emulator.TensorMap:
    dtype = {"e4m3": "u8"}.get(config.dtype, config.dtype)
    return emulator.TensorMap(array, dtype=dtype, **config.map_of(operand))


def run(
    config: gemm.Config, a: np.ndarray, b: np.ndarray, schedule: emulator.Schedule
) -> tuple[np.ndarray, emulator.Report]:
    memory_a = np.ascontiguousarray(a if config.a_major == "K" else a.T)
    memory_b = np.ascontiguousarray(b if config.b_major == "K" else b.T)
    c = np.full((config.m, config.n), np.nan, np.float32)
    params = [tensor_map(config, "b", memory_b), bytes(8)]
    params = (
        [tensor_map(config, "a", memory_a), bytes(8), *params, c] if config.source == "SS" else [*params, memory_a, c]
    )
    report = emulator.load(build.ptx(config)).launch(
        grid=(config.cta_group, 1, 1),
        block=(128, 1, 1),
        cluster=(config.cta_group, 1, 1),
        shared_bytes=config.shared_bytes,
        params=params,
        schedule=schedule,
    )
    return c, report


def check(config: gemm.Config, seed: int, schedule: emulator.Schedule) -> emulator.Report:
    a, b = operands(config, seed)
    c, report = run(config, a, b, schedule)
    np.testing.assert_array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)
    return report


@pytest.mark.parametrize("config", CHOSEN, ids=label)
def test_exact(config: gemm.Config):
    check(config, 1, emulator.Schedule(seed=1, async_="random", spurious_wait=0.1))


@pytest.mark.parametrize("config", [c for c in CHOSEN if c.dtype in ("f16", "e4m3")][::2], ids=label)
def test_schedules_agree_bit_for_bit(config: gemm.Config):
    rng = np.random.default_rng(5)
    dtype = NUMPY[config.dtype]
    a, b = (rng.standard_normal((rows, config.k)).astype(dtype) for rows in (config.m, config.n))
    schedules = [
        emulator.Schedule(seed=seed, async_=async_, spurious_wait=spurious)
        for seed, async_, spurious in ((0, "eager", 0.0), (1, "lazy", 0.0), (2, "lazy", 0.3), (3, "random", 0.3))
    ]
    results = [run(config, a, b, schedule)[0].view(np.uint32) for schedule in schedules]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    # fp32 accumulation truncates once a step of 32 bytes: 25 bits of the largest term each
    scale = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
    assert np.all(np.abs(results[0].view(np.float32) - exact) <= 2.0**-22 * scale * gemm.K_TILES * 4)


@pytest.mark.long
def test_every_legal_combination():
    configs = all_legal()
    build.prepare(configs)
    for seed, config in enumerate(configs):
        check(config, seed, emulator.Schedule(seed=seed, async_="random", spurious_wait=0.1))


def test_report_counts_the_work():
    config = gemm.Config(cta_group=2, m=256, n=128)
    report = check(config, 3, emulator.Schedule(seed=0))
    steps = gemm.K_TILES * config.k_tile // 16
    assert sum(report.mma.values()) == steps, report.mma
    assert report.tmem_peak_columns == 128
    assert report.tma_bytes_in == gemm.K_TILES * config.k_tile * 2 * (config.m + config.n)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": 256}, "M is 64 or 128"),
        ({"cta_group": 2, "m": 64}, "128 or 256"),
        ({"n": 12}, "multiple of 8"),
        ({"source": "TS", "a_major": "MN"}, "K-major"),
        ({"dtype": "tf32", "b_major": "MN"}, "32-byte swizzle atom"),
        ({"dtype": "e4m3", "a_major": "MN", "m": 64}, "does not divide 64"),
    ],
)
def test_illegal_combinations_say_why(changes: dict, reason: str):
    assert reason in str(gemm.Config(**changes).illegal())
