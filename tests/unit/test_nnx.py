import functools
import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_cases import DTYPES, check_same, inputs, random_mask
from jax_fa_blackwell.attention import flash_attention
from jax_fa_blackwell.nnx import AttentionFn, MultiHeadAttention, attention_fn

# What these tests check does not depend on the implementation; this one compiles fastest.
REFERENCE = AttentionFn(implementation="reference")


def make(module, *args, **options):
    """A module of this shape with random parameters, without compiling the initialisers."""
    rng = np.random.default_rng(2)
    abstract = nnx.eval_shape(lambda: module(*args, **options, rngs=nnx.Rngs(0)))
    graph, parameters, others = nnx.split(abstract, nnx.Param, ...)
    parameters = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), parameters)
    others = jax.tree.map(lambda x: jnp.zeros((), x.dtype) if x.dtype == jnp.uint32 else jax.random.key(0), others)
    return nnx.merge(graph, parameters, others)


flax_layer = functools.partial(make, nnx.MultiHeadAttention, decode=False)


def run(module, *args, **options):
    """Calls the module under jit, arrays traced and everything else static."""
    arrays = {name: option for name, option in options.items() if isinstance(option, jax.Array)}
    static = {name: option for name, option in options.items() if name not in arrays}
    return nnx.jit(lambda module, args, arrays: module(*args, **arrays, **static))(module, args, arrays)


class Unsown(nnx.Module):
    def sow(self, *args, **kwargs):
        """Drops the attention weights."""


def explicit_attention(*args, **kwargs):
    """Flax's own attention by the path that takes any batch dimensions; a module to sow into selects it."""
    return nnx.dot_product_attention(*args, **{**kwargs, "module": Unsown()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_flax_layer_with_our_attention_fn(batch, dtype):
    query, key = inputs(batch, dtype=dtype)
    mask = random_mask((*batch, 4, 12, 16))
    theirs = flax_layer(4, 24, dtype=jnp.dtype(dtype), attention_fn=explicit_attention)
    ours = flax_layer(4, 24, dtype=jnp.dtype(dtype), attention_fn=attention_fn)
    masked = run(ours, query, key, mask=mask)
    check_same(masked, run(theirs, query, key, mask=mask), dtype)
    assert np.abs(masked - run(ours, query, key)).max() > 0.1


def test_signature_has_every_argument_that_flax_passes():
    passed = set(inspect.signature(nnx.dot_product_attention).parameters) - {"promote_dtype"}
    assert passed <= set(inspect.signature(attention_fn).parameters)


@pytest.mark.parametrize("fn_is_causal", [False, True])
@pytest.mark.parametrize("call_is_causal", [False, True])
def test_causal_by_option_or_by_call(fn_is_causal, call_is_causal):
    query, _ = inputs()
    theirs = flax_layer(4, 24)
    ours = flax_layer(4, 24, attention_fn=AttentionFn(is_causal=fn_is_causal, implementation="reference"))
    expected = run(theirs, query, is_causal=fn_is_causal or call_is_causal)
    check_same(run(ours, query, is_causal=call_is_causal), expected)


def test_grouped_heads_of_flax_layer():
    query, key = inputs()
    options: dict[str, Any] = {"num_kv_heads": 2, "qkv_features": 32}
    ours = flax_layer(4, 24, attention_fn=REFERENCE, **options)
    check_same(run(ours, query, key), run(flax_layer(4, 24, **options), query, key))


def test_decode_cache_of_flax_layer():
    query, _ = inputs(T=6)
    outputs = []
    for function in (REFERENCE, nnx.dot_product_attention):
        layer = make(nnx.MultiHeadAttention, 4, 24, decode=True, attention_fn=function)
        layer.init_cache(query.shape)
        step = nnx.jit(lambda layer, x: layer(x))
        outputs.append(jnp.concatenate([step(layer, query[:, i : i + 1]) for i in range(query.shape[1])], axis=1))
    check_same(*outputs)


def test_dropout():
    query, _ = inputs()
    layer = flax_layer(4, 24, dropout_rate=0.1, attention_fn=REFERENCE)
    check_same(run(layer, query, deterministic=True), run(flax_layer(4, 24), query))
    with pytest.raises(NotImplementedError, match=r"dropout is not supported; got dropout_rate 0\.1"):
        layer(query, deterministic=False)


@pytest.mark.parametrize(
    ("layer_options", "call_options", "message"),
    [
        ({}, {"sow_weights": True}, "sow_weights"),
        ({"precision": "highest"}, {}, "precision must be None or default; got 'highest'"),
    ],
)
def test_what_cannot_be_honoured_raises(layer_options, call_options, message):
    query, _ = inputs()
    layer = flax_layer(4, 24, attention_fn=attention_fn, **layer_options)
    with pytest.raises(NotImplementedError, match=message):
        layer(query, **call_options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_layer_has_parameters_and_output_of_flax_layer(cross, dtype):
    query, key = inputs(dtype=dtype)
    key = key[..., :20] if cross else query
    mask = random_mask((2, 4, 12, key.shape[1]))
    options: dict[str, Any] = {
        "qkv_features": 32,
        "out_features": 20,
        "num_kv_heads": 2,
        "in_kv_features": key.shape[-1],
        "use_bias": cross,
        "dtype": jnp.dtype(dtype),
    }
    theirs, ours = flax_layer(4, 24, **options), make(MultiHeadAttention, 4, 24, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs))
    )
    nnx.update(ours, nnx.state(theirs, nnx.Param))
    result = run(ours, query, key, mask=mask, implementation="reference")
    check_same(result, run(theirs, query, key, mask=mask), dtype)


def test_layer_has_initial_values_of_flax_layer():
    options: dict[str, Any] = {
        "kernel_init": nnx.initializers.normal(0.1),
        "out_bias_init": nnx.initializers.constant(2.0),
    }
    ours = MultiHeadAttention(4, 24, **options, rngs=nnx.Rngs(0))
    theirs = nnx.MultiHeadAttention(4, 24, **options, rngs=nnx.Rngs(0))
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(theirs)))


def test_layer_with_separate_values():
    query, key = inputs()
    value = 2 * key + 1
    ours = make(MultiHeadAttention, 4, 24)
    check_same(run(ours, query, key, value, implementation="reference"), run(flax_layer(4, 24), query, key, value))
    with pytest.raises(ValueError, match="inputs_v was given without inputs_k"):
        ours(query, None, value)


def test_head_dims_of_their_own():
    layer = make(MultiHeadAttention, 4, 24, num_kv_heads=2, head_dim=40, value_head_dim=8, param_dtype=jnp.bfloat16)
    state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert {name: leaf["kernel"].shape for name, leaf in state.items()} == {
        "query": (24, 4, 40),
        "key": (24, 2, 40),
        "value": (24, 2, 8),
        "out": (4, 8, 24),
    }
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}
    query, key = inputs()
    chex.assert_shape(run(layer, query, key, implementation="reference"), query.shape)


def test_layer_hands_on_every_option():
    query, _ = inputs()
    rng = np.random.default_rng(3)
    layer = make(MultiHeadAttention, 4, 24, num_kv_heads=2, use_bias=False)
    ids = jnp.repeat(jnp.arange(3), 4)[None].repeat(2, 0)
    options: dict[str, Any] = {
        "bias": jnp.asarray(rng.standard_normal((1, 4, 12, 12)), "float32"),
        "mask": random_mask((2, 1, 12, 12)),
        "scale": 0.9,
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "local_window_size": 2,
        "query_seq_lengths": jnp.array([12, 9]),
        "key_value_seq_lengths": jnp.array([7, 12]),
        "query_segment_ids": ids,
        "key_value_segment_ids": ids,
        "logits_soft_cap": 1.5,
        "sinks": jnp.arange(4.0),
        "deterministic": True,
        "implementation": "reference",
        "checkpoint_name": "attention",
    }
    assert set(options) | {"query", "key", "value", "return_lse"} == set(inspect.signature(flash_attention).parameters)

    def turned(query, key):
        return 2 * query, key[:, ::-1]

    def by_hand(layer, query):
        query_heads, key_heads = turned(layer.query(query), layer.key(query))
        return layer.out(flash_attention(query_heads, key_heads, layer.value(query), **options))

    check_same(run(layer, query, rotary=turned, **options), nnx.jit(by_hand)(layer, query))


def test_gradients_under_jit_with_the_default_implementation():
    query, key = inputs()
    mask = random_mask((2, 4, 12, 16))
    theirs, ours = flax_layer(4, 24), make(MultiHeadAttention, 4, 24)

    def loss(layer, query, key, mask):
        return (layer(query, key, mask=mask) ** 2).sum()

    def gradients(layer):
        return nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(layer, query, key, mask))

    chex.assert_trees_all_close(gradients(ours), gradients(theirs), rtol=1e-4, atol=1e-4)


def test_partitioning_by_initialisers():
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "heads", None))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("heads",))
    with jax.set_mesh(mesh):
        layer = MultiHeadAttention(4, 24, kernel_init=kernel_init, rngs=nnx.Rngs(0))
    assert layer.query.kernel.get_metadata()["out_sharding"] == (None, "heads", None)
    assert layer.value.kernel.shape == (24, 4, 6)
