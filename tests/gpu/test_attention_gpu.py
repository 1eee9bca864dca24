"""flash_attention's kernels on whatever GPU there is, through the public function."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attention_cases
import attention_grid
from attention_cases import Case, Shape
from gpu_machine import why_not
from jax_fa_blackwell import custom_call, flash_attention, lowering
from jax_fa_blackwell.plan import attention as attention_plan
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "a GPU is there")]

GRID = 240
CAUSAL = (("is_causal", True),)


def takes(head_dim: int, value_head_dim: int) -> bool:
    """Whether this GPU's kernels take the head dims."""
    spec = AttentionSpec(1, 1, 1, 1, 1, head_dim, value_head_dim, "bfloat16", 1.0)
    return all(attention_plan.supports(spec, get_target(arch)) is None for arch in lowering.arches())


def evaluate(case: Case, inputs, cotangents):
    """Results and gradients by the kernels, compiled."""
    run = jax.jit(attention_cases.flash_evaluator(case, "cuda"))
    return {name: np.asarray(array) for name, array in run(inputs, cotangents).items()}


def check(case: Case, magnitude: float = 1.0, seed: int = 1):
    if not takes(case.shape.H, case.shape.Hv):
        pytest.skip("head dims beyond this GPU's kernels")
    attention_grid.check(case, magnitude, seed, evaluate)


@pytest.mark.parametrize("seed", range(GRID))
def test_right(seed):
    check(*attention_grid.random_case(seed), seed)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim):
    check(Case("dims", Shape(1, 130, 150, 2, 1, head_dim, head_dim), CAUSAL))
    check(Case("dims", Shape(1, 70, 150, 2, 2, head_dim, 264 - head_dim)))


LONG = {
    "causal": Case("causal", Shape(1, 2048, 2048, 16, 4, 128, 128), CAUSAL),
    "many": Case("many", Shape(16, 384, 300, 16, 16, 64, 64)),
    "packed": Case("packed", Shape(2, 1500, 1500, 16, 2, 80, 80), CAUSAL, segments=True),
    "wide": Case("wide", Shape(1, 1024, 1024, 24, 24, 256, 256), CAUSAL),
    "window": Case("window", Shape(1, 2000, 2000, 24, 8, 192, 128), (("is_causal", True), ("local_window_size", 300))),
    "one query": Case("one", Shape(40, 1, 1000, 8, 2, 128, 128), lengths="key"),
}


@pytest.mark.parametrize("name", LONG)
def test_many_items_for_each_block(name):
    """Against float32 by XLA on the same GPU; the poison and the rule are those of the small cases."""
    case = LONG[name]
    inputs = attention_cases.make_inputs(case, 1, ml_dtypes.bfloat16)
    cotangents = attention_cases.make_cotangents(case, 1, ml_dtypes.bfloat16)
    floats = {n: a.astype(np.float32) if n in attention_cases.DIFFERENTIABLE else a for n, a in inputs.items()}
    precise = attention_cases.flash_evaluator(case, "xla")
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(precise)(floats, tuple(array.astype(np.float32) for array in cotangents))
    plain = jax.jit(precise)(inputs, cotangents)
    results = evaluate(case, inputs, cotangents)
    wide = [{name: np.asarray(array, np.float64) for name, array in each.items()} for each in (expected, plain)]
    attention_cases.check_results(case, results, wide[0], wide[1:])


def arrays(case: Case, seed: int = 0):
    """Query, key and value of a case on the GPU."""
    inputs = attention_cases.make_inputs(case, seed, ml_dtypes.bfloat16)
    return [jnp.asarray(inputs[name]) for name in ("query", "key", "value")]


SMALL = Case("small", Shape(2, 300, 300, 4, 2, 72, 72), CAUSAL)


def attend(query, key, value, implementation="cuda"):
    return flash_attention(query, key, value, is_causal=True, implementation=implementation)


def loss(*operands, implementation="cuda"):
    weights = jnp.cos(jnp.arange(operands[0].shape[-1], dtype=jnp.float32))
    return (attend(*operands, implementation=implementation).astype(jnp.float32) * weights).sum()


gradient = jax.grad(loss, (0, 1, 2))


def same(got, wanted):
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))


def test_jit_runs_the_kernels_and_gives_the_same_bits():
    operands = arrays(SMALL)
    compiled = jax.jit(gradient).lower(*operands).compile()
    assert (compiled.as_text() or "").count(
        f'custom_call_target="{custom_call.TARGET}"'
    ) == 3  # forward, delta, backward
    same(compiled(*operands), gradient(*operands))


def test_scan():
    layers = [arrays(SMALL, seed) for seed in range(4)]
    stacked = [jnp.stack(each) for each in zip(*layers, strict=True)]
    _, results = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, gradient(*x)), 0, xs))(tuple(stacked))
    for index, layer in enumerate(layers):
        same([each[index] for each in results], jax.jit(gradient)(*layer))


def test_vmap():
    layers = [arrays(SMALL, seed) for seed in range(3)]
    stacked = [jnp.stack(each) for each in zip(*layers, strict=True)]
    results = jax.jit(jax.vmap(gradient))(*stacked)
    for index, layer in enumerate(layers):
        same([each[index] for each in results], jax.jit(gradient)(*layer))
    of_queries = jax.jit(jax.vmap(attend, (0, None, None)))(stacked[0], *layers[0][1:])
    for index in range(3):
        same(of_queries[index], jax.jit(attend)(stacked[0][index], *layers[0][1:]))


def test_remat():
    operands = arrays(SMALL)
    same(jax.jit(jax.grad(jax.checkpoint(loss), (0, 1, 2)))(*operands), jax.jit(gradient)(*operands))


def test_donated_buffers():
    operands = arrays(SMALL)

    def step(query, key, value):
        return tuple(x - y for x, y in zip((query, key, value), gradient(query, key, value), strict=True))

    wanted, donated = operands, [x + 0 for x in operands]
    for _ in range(4):
        wanted = jax.jit(step)(*wanted)
        donated = jax.jit(step, donate_argnums=(0, 1, 2))(*donated)
    same(donated, wanted)


RUNS = 1000


@pytest.mark.parametrize("kind", ["grouped", "packed"])
@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256)]
)
def test_deterministic_gradients_have_the_same_bits_every_time(dims, kind):
    """Within one program, which counts what differs from the first run; enough items that all SMs have several."""
    case = Case(kind, Shape(2, 900, 1000, 24, 6, *dims), CAUSAL, segments=kind == "packed")
    if not takes(*dims):
        pytest.skip("head dims beyond this GPU's kernels")
    inputs = jax.device_put(attention_cases.make_inputs(case, 0, ml_dtypes.bfloat16))
    cotangents = jax.device_put(attention_cases.make_cotangents(case, 0, ml_dtypes.bfloat16))
    attention = functools.partial(flash_attention, implementation="cuda", return_lse=True, deterministic=True)
    run = attention_cases.evaluator(case, attention)

    def bits(array):
        return jax.lax.bitcast_convert_type(array, jnp.uint32 if array.dtype == jnp.float32 else jnp.uint16)

    @functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 2**30})  # every run is counted
    def differences(inputs, cotangents, first):
        def again(_, count):
            # Never taken, but the compiler cannot know: otherwise it would move what does not change out of the loop.
            query = jnp.where(count < 0, 0, inputs["query"])
            results = run({**inputs, "query": query}, cotangents)
            return count + sum(jnp.sum(bits(results[name]) != bits(first[name])) for name in first)

        return jax.lax.fori_loop(0, RUNS, again, jnp.zeros((), jnp.int32))

    first = jax.jit(run)(inputs, cotangents)
    compiled = differences.lower(inputs, cotangents, first).compile()
    before = custom_call.execution_count()
    assert compiled(inputs, cotangents, first) == 0
    calls = (compiled.as_text() or "").count(f'custom_call_target="{custom_call.TARGET}"')
    assert calls >= 3  # forward, delta, backward
    assert custom_call.execution_count() - before == RUNS * calls
    changed = {**first, "d_query": first["d_query"].at[0, 1, 2, 3].add(1)}
    assert compiled(inputs, cotangents, changed) == RUNS


COMMAND_BUFFERS = """
import jax, numpy as np
from jax_fa_blackwell import custom_call
from test_attention_gpu import SMALL, arrays, gradient, same

step = jax.jit(gradient)
operands = [arrays(SMALL, seed) for seed in range(3)]
wanted = [[np.asarray(x) for x in gradient(*each)] for each in operands]
kept = []  # results stay alive, so that every call gets new buffers
for i in range(30):
    each = operands[i % 3]
    if i % 2:
        each = [x + 0 for x in each]  # other argument buffers, the same values
    kept.append(step(*each))
for i, results in enumerate(kept):
    same(results, wanted[i % 3])
before = custom_call.execution_count()
for _ in range(20):
    jax.block_until_ready(step(*operands[0]))  # results are freed, so that calls may get the same buffers
print("enqueued", custom_call.execution_count() - before)
print("right")
"""


@pytest.mark.parametrize("kinds", ["FUSION,CUSTOM_CALL", ""], ids=["on", "off"])
def test_command_buffers_with_moving_results(kinds):
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    )
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [os.path.dirname(os.path.abspath(__file__)), tests, os.environ.get("PYTHONPATH")]
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    command = [sys.executable, "-c", COMMAND_BUFFERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
    enqueued = int(re.findall(r"enqueued (\d+)", done.stdout)[0])
    assert (enqueued < 3 * 20) == bool(kinds)  # a replayed graph enqueues no plan
