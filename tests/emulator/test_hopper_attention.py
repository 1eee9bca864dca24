"""The Hopper kernels' PTX over the cases of the Blackwell kernels, forward and backward."""

import dataclasses
import functools

import ml_dtypes
import pytest

import attention_cases
import attention_grid
import emulator
from attention_cases import Case, Shape
from attention_grid import random_case
from emulator import attention_kernels
from jax_fa_blackwell import export
from jax_fa_blackwell.plan import hopper, hopper_forward, target

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

GRID = 240
LONG_SWEEP = 3000
MODES = ("eager", "lazy", "random")
CAUSAL = (("is_causal", True),)
# A case for each class of head dims, with several work items for each block of a small grid.
CASES = {
    "64": Case("h64", Shape(2, 500, 400, 2, 1, 64, 64), CAUSAL),
    "80": Case("h80", Shape(1, 400, 500, 2, 2, 72, 80), (("is_causal", True), ("logits_soft_cap", 5.0))),
    "96": Case("h96", Shape(2, 300, 400, 2, 1, 96, 96), CAUSAL, segments=True),
    "128": Case("h128", Shape(2, 300, 400, 4, 2, 128, 128), lengths="both"),
    "160": Case("h160", Shape(1, 300, 300, 2, 1, 160, 136), CAUSAL, sinks=True),
    "192 by 128": Case("h192v128", Shape(1, 300, 300, 2, 2, 192, 128), (("local_window_size", (100, 30)),)),
    "192": Case("h192", Shape(2, 200, 200, 1, 1, 192, 192), CAUSAL),
    "256": Case("h256", Shape(1, 300, 200, 2, 1, 256, 256), (("scale", -0.2),)),
}


def supported(first: int):
    """Seeds from ``first`` whose cases the kernels take."""
    seed = first
    while True:
        spec = attention_kernels.make_spec(random_case(seed)[0], ml_dtypes.bfloat16)
        if hopper_forward.supports(spec, target.get_target(hopper.ARCH)) is None:
            yield seed
        seed += 1


def seeds(first: int, count: int) -> list[int]:
    """The first ``count`` of ``supported``."""
    return [seed for seed, _ in zip(supported(first), range(count), strict=False)]


def check(case: Case, magnitude: float, seed: int, schedule: emulator.Schedule):
    evaluate = functools.partial(attention_kernels.evaluate, arch=hopper.ARCH, schedule=schedule)
    attention_grid.check(case, magnitude, seed, evaluate)


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    attention_kernels.prepare(hopper.ARCH)


@pytest.mark.parametrize("seed", seeds(0, GRID))
def test_right(seed):
    check(*random_case(seed), seed, emulator.Schedule(seed=seed, async_=MODES[seed % 3]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_items_of_a_persistent_block(name, blocks, monkeypatch):
    """Rings, phases and the consumers' token over several items of a block, some of them without keys."""
    small = dataclasses.replace(target.get_target(hopper.ARCH), sm_count=blocks)
    monkeypatch.setitem(target.TARGETS, hopper.ARCH, small)
    check(CASES[name], 1.0, blocks, emulator.Schedule(seed=blocks, async_=MODES[blocks % 3], spurious_wait=0.1))


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_order_of_work(name):
    case = dataclasses.replace(CASES[name], options=(*CASES[name].options, ("deterministic", True)))
    inputs = attention_cases.make_inputs(case, 0, ml_dtypes.bfloat16)
    cotangents = attention_cases.make_cotangents(case, 0, ml_dtypes.bfloat16)
    first = None
    for seed in range(4):
        schedule = emulator.Schedule(seed=seed, async_=MODES[seed % 3], spurious_wait=0.1 * (seed % 2))
        results = attention_kernels.evaluate(case, inputs, cotangents, arch=hopper.ARCH, schedule=schedule)
        bits = {name: array.tobytes() for name, array in results.items()}
        assert first is None or bits == first
        first = bits


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(10_000, LONG_SWEEP))
def test_long_sweep(seed):
    check(*random_case(seed), seed, emulator.Schedule(seed=seed, async_="random", spurious_wait=0.1))
