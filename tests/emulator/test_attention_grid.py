"""The Blackwell kernels' PTX over shapes, masks and options, forward and backward, by the rule of attention_cases."""

import dataclasses
import functools

import pytest

import attention_grid
import emulator
from attention_cases import Case, Shape
from emulator import attention_kernels
from jax_fa_blackwell import export
from jax_fa_blackwell.plan import target

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

ARCH = "sm_100a"
GRID = 320
LONG_SWEEP = 3000
CAUSAL = (("is_causal", True),)
# For each form, several work items for a block of a small grid. Windows of more queries than keys leave the items that
# come first without keys; those of "many" of them let one role run far ahead of another.
CASES = {
    "two tiles": Case("two", Shape(2, 500, 400, 2, 1, 64, 64), CAUSAL),
    "two tiles, items without keys": Case("none", Shape(1, 1500, 100, 1, 1, 80, 64), (("local_window_size", (5, 5)),)),
    "lengths": Case("lengths", Shape(2, 300, 400, 4, 2, 128, 128), lengths="both"),
    "one tile": Case("one", Shape(3, 100, 300, 3, 3, 192, 160), CAUSAL, sinks=True),
    "pair": Case("pair", Shape(2, 500, 300, 3, 1, 192, 192), (("is_causal", True), ("logits_soft_cap", 5.0))),
    "pair, many without keys": Case("skip", Shape(1, 2500, 200, 2, 1, 192, 192), (("local_window_size", (5, 5)),)),
    "pair, packed": Case("packed", Shape(1, 600, 600, 1, 1, 256, 256), CAUSAL, segments=True, lengths="both"),
    "chunks": Case("chunks", Shape(1, 300, 260, 2, 1, 320, 320), CAUSAL),
}


def check(case: Case, magnitude: float, seed: int, schedule: emulator.Schedule):
    attention_grid.check(case, magnitude, seed, functools.partial(attention_kernels.evaluate, schedule=schedule))


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    attention_kernels.prepare()


@pytest.mark.parametrize("seed", range(GRID))
def test_right(seed):
    modes = ("eager", "lazy", "random")
    check(*attention_grid.random_case(seed), seed, emulator.Schedule(seed=seed, async_=modes[seed % 3]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [2, 4])
def test_items_of_a_persistent_block(name, blocks, monkeypatch):
    """Rings and phases over several items of a block or pair, some of them without keys."""
    monkeypatch.setitem(target.TARGETS, ARCH, dataclasses.replace(target.get_target(ARCH), sm_count=blocks))
    for seed, mode in enumerate(("eager", "lazy", "random")):
        check(CASES[name], 1.0, seed, emulator.Schedule(seed=seed, async_=mode, spurious_wait=0.3))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10_000, 10_000 + LONG_SWEEP))
def test_long_sweep(seed):
    schedule = emulator.Schedule(seed=seed, async_="random", spurious_wait=0.1)
    check(*attention_grid.random_case(seed), seed, schedule)
