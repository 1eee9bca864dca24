"""The Blackwell kernels' PTX over shapes, masks and options, forward and backward, by the rule of attention_cases."""

import functools

import pytest

import attention_grid
import emulator
from emulator import attention_kernels
from jax_fa_blackwell import export

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

GRID = 320
LONG_SWEEP = 3000


def check(seed: int, schedule: emulator.Schedule):
    attention_grid.check(
        *attention_grid.random_case(seed), seed, functools.partial(attention_kernels.evaluate, schedule=schedule)
    )


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    attention_kernels.prepare()


@pytest.mark.parametrize("seed", range(GRID))
def test_right(seed):
    modes = ("eager", "lazy", "random")
    check(seed, emulator.Schedule(seed=seed, async_=modes[seed % 3]))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10_000, 10_000 + LONG_SWEEP))
def test_long_sweep(seed):
    check(seed, emulator.Schedule(seed=seed, async_="random", spurious_wait=0.1))
