"""flash_attention on an emulated GPU: choice of the kernels, plans, masks, gradients, vmap, Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emulator import emulated_gpu
from jax_fa_blackwell import export, flash_attention

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]


@pytest.fixture
def emulated(monkeypatch):
    """A machine whose GPU is an emulated B200; returns the list of launched plans' names."""
    return emulated_gpu.install(monkeypatch.setattr)


def make_inputs(B=2, T=70, S=90, N=4, K=2, H=72, Hv=64, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def segments(length, *lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.asarray(np.pad(ids, (0, length - len(ids)), constant_values=-1)[None].repeat(2, 0), jnp.int32)


OPTIONS = {
    "causal": {"is_causal": True},
    "bottom right window": {"is_causal": True, "causal_alignment": "bottom_right", "local_window_size": (20, 0)},
    "cap and sinks": {"logits_soft_cap": 5.0, "sinks": jnp.array([0.5, -1.0, 2.0, 0.0])},
    "lengths": {"query_seq_lengths": jnp.array([70, 33]), "key_value_seq_lengths": jnp.array([90, 0])},
    "segments": {
        "query_segment_ids": segments(70, 30, 25),
        "key_value_segment_ids": segments(90, 50, 25),
        "is_causal": True,
        "sinks": jnp.ones(4),
    },
}


def losses(implementation, options):
    """Value and gradients of a loss in output and LSE."""
    fixed = {name: value for name, value in options.items() if name != "sinks"}

    def loss(query, key, value, sinks):
        out, lse = flash_attention(
            query, key, value, sinks=sinks, return_lse=True, implementation=implementation, **fixed
        )
        seen = jnp.isfinite(lse)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.where(seen, lse, 0.0) ** 2)

    arguments = (0, 1, 2, 3) if "sinks" in options else (0, 1, 2)
    return jax.jit(jax.value_and_grad(loss, arguments))


def assert_close(results, expected):
    for got, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, atol=0.02 * max(np.abs(wanted).max(), 1e-6), rtol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_like_xla(emulated, name):
    options = OPTIONS[name]
    arguments = (*make_inputs(), options.get("sinks"))
    results = losses(None, options)(*arguments)
    assert emulated == ["make_forward_plan", "make_backward_plan"]
    assert_close(results, losses("xla", options)(*arguments))


def test_vmap_is_one_launch(emulated):
    query, key, value = make_inputs()
    query = jnp.stack([query, query[::-1], query * 2])
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal((3, 4)), jnp.float32)

    def attend(implementation, query, sinks):
        return flash_attention(query, key, value, sinks=sinks, is_causal=True, implementation=implementation)

    def loss(implementation, query, sinks):
        out = jax.vmap(functools.partial(attend, implementation))(query, sinks)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    results = jax.jit(jax.value_and_grad(functools.partial(loss, "cuda"), (0, 1)))(query, sinks)
    assert emulated == ["make_forward_plan", "make_backward_plan"]
    assert_close(results, jax.jit(jax.value_and_grad(functools.partial(loss, "xla"), (0, 1)))(query, sinks))


@pytest.mark.parametrize("sums", [True, False], ids=["gradient of vmap", "vmap of gradient"])
def test_vmap_over_queries_alone(emulated, sums):
    """Keys and values, of which there is one for all queries, have a gradient that is a sum, or one for each query."""
    query, key, value = make_inputs(B=1, T=40, S=50, N=4, K=2, H=16, Hv=16)
    queries = jnp.stack([query, query[:, ::-1], query * 0.5])

    def loss(implementation, query, key, value):
        out, lse = flash_attention(query, key, value, is_causal=True, return_lse=True, implementation=implementation)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(lse)

    def results(implementation):
        one = functools.partial(loss, implementation)
        axes = (0, None, None)
        if sums:
            function = jax.value_and_grad(lambda *arrays: jnp.sum(jax.vmap(one, axes)(*arrays)), (0, 1, 2))
        else:
            function = jax.vmap(jax.value_and_grad(one, (0, 1, 2)), axes)
        return jax.jit(function)(queries, key, value)

    kernels = results("cuda")
    assert emulated == ["make_forward_plan", "make_backward_plan"]
    assert kernels[1][1].shape == (key.shape if sums else (3, *key.shape))
    assert_close(kernels, results("xla"))


def test_what_kernels_do_not_take(emulated):
    query, key, value = make_inputs()
    bias = jnp.zeros((1, 1, 70, 90))
    with pytest.raises(NotImplementedError, match="bias and mask arrays"):
        flash_attention(query, key, value, bias, implementation="cuda")
    with pytest.raises(NotImplementedError, match="head_dim must be a multiple of 8"):
        flash_attention(query[..., :60], key[..., :60], value, implementation="cuda")
    with pytest.raises(NotImplementedError, match="dtype must be bfloat16 or float16"):
        flash_attention(*(x.astype(jnp.float32) for x in (query, key, value)), implementation="cuda")
    assert flash_attention(query, key, value, bias).shape == (2, 70, 4, 64)
    assert not emulated


def test_empty(emulated):
    query, key, value = make_inputs(S=0)
    out, lse = flash_attention(query, key, value, return_lse=True, implementation="cuda")
    assert not np.asarray(out, np.float32).any()
    assert np.isneginf(np.asarray(lse)).all()
    assert not emulated


@pytest.mark.parametrize("head_dim", [192, 256])
def test_training(emulated, head_dim):
    """20 steps of a two-layer model: the loss follows that of the XLA path within bf16 noise."""
    kernels, xla = emulated_gpu.train(head_dim, "cuda"), emulated_gpu.train(head_dim, "xla")
    assert emulated.count("make_backward_plan") == 40
    np.testing.assert_allclose(kernels, xla, atol=0.01)
    assert kernels[-1] < 0.7 * kernels[0]
