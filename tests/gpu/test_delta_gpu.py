"""delta's kernel on a GPU, through the whole road: plan, custom call, executor, cubin."""

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu_machine import why_not
from jax_fa_blackwell import custom_call
from jax_fa_blackwell.delta import delta
from jax_fa_blackwell.plan import delta as plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "a GPU is there")]

SHAPES = [
    (1, 1, 1, 8),
    (2, 5, 3, 72),
    (1, 4096, 16, 128),
    (3, 1021, 7, 64),
    (5, 1, 33, 200),
    (2, 130, 1, 512),
    (1, 37, 250, 24),
    (1, 300, 12, 488),
    (2, 777, 6, 16),
    (64, 33, 5, 80),
    (1, 20000, 2, 256),
    (2, 513, 9, 40),
]


def inputs(shape, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    out, grad_out = (jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
    return out, grad_out, jnp.asarray(rng.standard_normal(shape[:-1], np.float32))


def assert_right(result, out, grad_out, grad_lse=None):
    """Within the bound of an fp32 sum in any order: H roundings, each half a unit of the sum of magnitudes."""
    out, grad_out = np.asarray(out, np.float64), np.asarray(grad_out, np.float64)
    exact, magnitude = (np.einsum("...tnh,...tnh->...nt", f(out), f(grad_out)) for f in (np.asarray, np.abs))
    if grad_lse is not None:
        subtrahend = np.swapaxes(np.asarray(grad_lse, np.float64), -1, -2)
        exact, magnitude = exact - subtrahend, magnitude + np.abs(subtrahend)
    assert result.dtype == jnp.float32
    assert result.shape == exact.shape
    error = np.abs(np.asarray(result, np.float64) - exact)
    assert (error <= (out.shape[-1] + 1) * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("with_lse", [False, True])
def test_values(shape, dtype, with_lse):
    arguments = inputs(shape, dtype)[: 3 if with_lse else 2]
    batch, tokens, heads, head_dim = shape
    assert plan.DeltaSpec(batch, tokens, heads, head_dim, np.dtype(dtype).name, with_lse).limit() is None
    compiled = jax.jit(delta).lower(*arguments).compile()
    assert custom_call.TARGET in (compiled.as_text() or "")
    result = compiled(*arguments)
    assert_right(result, *arguments)
    assert np.array_equal(result, delta(*arguments))  # not under jit; and again the same bits


@pytest.mark.parametrize("head_dim", range(8, 513, 8))
def test_every_head_dim(head_dim):
    arguments = inputs((2, 67, 5, head_dim), seed=head_dim)
    assert_right(jax.jit(delta)(*arguments), *arguments)


@pytest.mark.parametrize("config", [(4096, 16384, 1), (32768, 196608, 1), (8192, 98304, 2), (2048, 32768, 4)], ids=str)
def test_other_configurations(config, monkeypatch):
    monkeypatch.setattr(plan.make_plan, "__defaults__", (plan.DeltaConfig(*config),))
    jax.clear_caches()
    for shape in SHAPES[:6]:
        arguments = inputs(shape)
        assert_right(jax.jit(delta)(*arguments), *arguments)
    jax.clear_caches()


@pytest.mark.parametrize("shape", [(2, 37, 5, 72), (1, 130, 16, 128)], ids=str)
def test_nan_stays_in_its_row(shape):
    out, grad_out, grad_lse = inputs(shape)
    clean = np.asarray(jax.jit(delta)(out, grad_out, grad_lse))
    rng = np.random.default_rng(1)
    bad = rng.random(shape[:3]) < 0.3
    result = np.asarray(jax.jit(delta)(jnp.where(bad[..., None], jnp.nan, out), grad_out, grad_lse))
    bad = bad.swapaxes(1, 2)
    assert np.array_equal(np.isnan(result), bad)
    assert np.array_equal(result[~bad], clean[~bad])


def test_grad():
    arguments = inputs((2, 37, 5, 72))
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((2, 5, 37)), jnp.float32)
    loss = lambda *args: (weights * delta(*args) ** 2).sum()  # noqa: E731

    def plain(out, grad_out, grad_lse):
        sums = (out.astype(jnp.float32) * grad_out.astype(jnp.float32)).sum(-1) - grad_lse
        return (weights * sums.swapaxes(1, 2) ** 2).sum()

    argnums = (0, 1, 2)
    got = jax.jit(jax.grad(loss, argnums))(*arguments)
    for mine, theirs in zip(got, jax.jit(jax.grad(plain, argnums))(*arguments), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=1e-2, atol=1e-3)


def test_vmap_is_one_launch():
    out, grad_out, grad_lse = inputs((3, 2, 37, 5, 72))
    mapped = jax.jit(jax.vmap(delta, (0, 0, None)))
    text = mapped.lower(out, grad_out, grad_lse[0]).compile().as_text() or ""
    assert text.count(f'custom_call_target="{custom_call.TARGET}"') == 1
    result = mapped(out, grad_out, grad_lse[0])
    for i in range(3):
        assert_right(result[i], out[i], grad_out[i], grad_lse[0])


def test_scan():
    arrays = inputs((6, 2, 37, 5, 72))
    scanned = jax.jit(lambda xs: jax.lax.scan(lambda carry, x: (carry, delta(*x)), 0, xs)[1])
    result = scanned(arrays)
    for i in range(6):
        assert_right(result[i], *(array[i] for array in arrays))


def test_empty_needs_no_launch():
    assert jax.jit(delta)(*inputs((2, 0, 3, 64))).shape == (2, 3, 0)


def test_threads_and_devices():
    """Calls from several threads, on every device that the kernels know."""
    devices = jax.local_devices(backend="cuda")[:2]
    compiled = jax.jit(delta)
    failures = []

    def work(seed, device):
        try:
            arguments = [jax.device_put(array, device) for array in inputs((2, 257, 6, 128), seed=seed)]
            first = np.asarray(compiled(*arguments))
            assert_right(jnp.asarray(first), *arguments)
            results = [compiled(*arguments) for _ in range(50)]
            assert all(np.array_equal(first, result) for result in results)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i, devices[i % len(devices)])) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


COMMAND_BUFFERS = """
import jax, jax.numpy as jnp, numpy as np
from test_delta_gpu import assert_right, inputs
from jax_fa_blackwell.delta import delta

@jax.jit
def step(out, grad_out, grad_lse):
    first = delta(out, grad_out, grad_lse)
    second = delta(grad_out, out * 2)
    return first, second, first + second

arrays = [inputs((2, 129, 5, 72), seed=seed) for seed in range(3)]
kept = []  # results stay alive, so that every call gets new buffers
for i in range(30):
    arguments = arrays[i % 3]
    if i % 2:
        arguments = [array + 0 for array in arguments]  # other argument buffers, the same values
    kept.append(step(*arguments))
addresses = {result.unsafe_buffer_pointer() for results in kept for result in results}
assert len(addresses) == 3 * len(kept)
for i, (first, second, total) in enumerate(kept):
    out, grad_out, grad_lse = arrays[i % 3]
    assert_right(first, out, grad_out, grad_lse)
    assert_right(second, grad_out, out * 2)
    assert np.array_equal(total, np.asarray(first) + np.asarray(second))
print("right")
"""


@pytest.mark.parametrize("kinds", ["FUSION,CUSTOM_CALL", ""], ids=["on", "off"])
def test_command_buffers_with_moving_results(kinds):
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    )
    path = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", COMMAND_BUFFERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("right\n")
