"""The Blackwell kernels' PTX over shapes, masks and options, forward and backward, by the rule of attention_cases."""

import ml_dtypes
import numpy as np
import pytest

import attention_cases
import emulator
from attention_grid import random_case
from emulator import attention_kernels
from jax_fa_blackwell import export

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

GRID = 320
LONG_SWEEP = 3000


def check(seed: int, schedule: emulator.Schedule):
    case, magnitude = random_case(seed)
    dtype = ml_dtypes.bfloat16 if seed % 3 else np.float16
    inputs = attention_cases.make_inputs(case, seed, dtype, magnitude)
    cotangents = attention_cases.make_cotangents(case, seed, dtype)
    expected = attention_cases.definition(case, inputs, cotangents)
    plain = attention_cases.yardstick(case, inputs, cotangents, attention_kernels.tensor_core_einsum)
    poisoned = attention_cases.poison(case, inputs, cotangents)
    results = attention_kernels.evaluate(case, *poisoned, schedule=schedule)
    attention_cases.check_results(case, results, expected, plain)


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
