import functools
import inspect
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_cases import DTYPES, check_same, inputs, random_mask
from jax_fa_blackwell.attention import flash_attention
from jax_fa_blackwell.flax_attention import attend
from jax_fa_blackwell.linen import AttentionFn, MultiHeadAttention, attention_fn

# What these tests check does not depend on the implementation; this one compiles fastest.
REFERENCE = AttentionFn(implementation="reference")


def init(layer, *args, **options):
    """Variables of the right names and shapes with random values, without compiling the initialisers."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(functools.partial(layer.init, **options), jax.random.key(0), *args)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), shapes)


def run(function, *args, **options):
    """Calls the function under jit, arrays traced and everything else static: one compilation, not one an operation."""
    arrays: dict[str, Any] = {name: option for name, option in options.items() if isinstance(option, jax.Array)}
    static = {name: option for name, option in options.items() if name not in arrays}
    return jax.jit(lambda args, arrays: function(*args, **arrays, **static))(args, arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_flax_layer_with_our_attention_fn(batch, dtype):
    query, key = inputs(batch, dtype=dtype)
    mask = random_mask((*batch, 4, 12, 16))
    theirs = nn.MultiHeadDotProductAttention(4, dtype=jnp.dtype(dtype))
    ours = nn.MultiHeadDotProductAttention(4, dtype=jnp.dtype(dtype), attention_fn=attention_fn)
    variables = init(theirs, query, key)
    check_same(
        run(ours.apply, variables, query, key, mask=mask), run(theirs.apply, variables, query, key, mask=mask), dtype
    )


@pytest.mark.parametrize(
    "function",
    [
        AttentionFn(implementation="reference"),
        functools.partial(REFERENCE, sinks=None),
        functools.partial(
            AttentionFn(local_window_size=100, implementation="reference"), key_value_seq_lengths=jnp.array([16, 16])
        ),
    ],
    ids=["options", "partial", "partial of options"],
)
def test_linen_filter_keeps_the_mask(function):
    query, key = inputs()
    mask = random_mask((2, 1, 12, 16))
    theirs = nn.MultiHeadDotProductAttention(4)
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=function)
    variables = init(theirs, query, key)
    masked = run(ours.apply, variables, query, key, mask=mask)
    check_same(masked, run(theirs.apply, variables, query, key, mask=mask))
    assert np.abs(masked - run(ours.apply, variables, query, key)).max() > 1e-2


def test_signature_has_every_argument_that_linen_passes():
    passed = set(inspect.signature(nn.dot_product_attention).parameters)
    assert passed <= set(inspect.signature(attention_fn).parameters)


def test_numeric_mask_of_flax():
    tokens = jnp.ones((2, 12))
    query, _ = inputs()
    mask = nn.make_causal_mask(tokens)
    assert mask.dtype == jnp.float32
    theirs = nn.MultiHeadDotProductAttention(4)
    variables = init(theirs, query)
    causal = nn.MultiHeadDotProductAttention(4, attention_fn=AttentionFn(is_causal=True, implementation="reference"))
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=REFERENCE)
    expected = run(theirs.apply, variables, query, mask=mask)
    check_same(run(ours.apply, variables, query, mask=mask), expected)
    check_same(run(causal.apply, variables, query), expected)


def test_gradients_of_flax_layer():
    query, key = inputs()
    mask = random_mask((2, 4, 12, 16))
    theirs = nn.MultiHeadDotProductAttention(4)
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn)
    variables = init(theirs, query, key)

    def gradients(layer):
        return jax.jit(jax.grad(lambda v: (layer.apply(v, query, key, mask=mask) ** 2).sum()))(variables)

    chex.assert_trees_all_close(gradients(ours), gradients(theirs), rtol=1e-4, atol=1e-4)


def test_decode_cache_of_flax_layer():
    query, _ = inputs(T=6)
    outputs = []
    for function in (REFERENCE, nn.dot_product_attention):
        layer = nn.MultiHeadDotProductAttention(4, decode=True, attention_fn=function)
        variables = init(layer, query)
        variables["cache"] = jax.tree.map(jnp.zeros_like, variables["cache"])
        step = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
        steps = []
        for i in range(query.shape[1]):
            out, cache = step(variables, query[:, i : i + 1])
            variables = {**variables, **cache}
            steps.append(out)
        outputs.append(jnp.concatenate(steps, axis=1))
    check_same(*outputs)


def test_dropout():
    query, _ = inputs()
    layer = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, attention_fn=REFERENCE)
    variables = init(layer, query, deterministic=True)
    plain = run(nn.MultiHeadDotProductAttention(4).apply, variables, query)
    check_same(run(layer.apply, variables, query, deterministic=True), plain)
    with pytest.raises(NotImplementedError, match=r"dropout is not supported; got dropout_rate 0\.1"):
        run(layer.apply, variables, query, deterministic=False, dropout_rng=jax.random.key(1))


@pytest.mark.parametrize(
    ("layer_options", "call_options", "message"),
    [
        ({}, {"sow_weights": True}, "sow_weights"),
        ({"precision": "highest"}, {}, "precision must be None or default; got 'highest'"),
        ({"precision": jax.lax.Precision.HIGH}, {}, "precision must be None or default"),
        (
            {
                "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
                "attn_weights_value_einsum_cls": lambda: jnp.einsum,
            },
            {},
            "qk_attn_weights_einsum",
        ),
    ],
)
def test_what_cannot_be_honoured_raises(layer_options, call_options, message):
    query, _ = inputs()
    variables = init(nn.MultiHeadDotProductAttention(4), query)
    layer = nn.MultiHeadDotProductAttention(4, attention_fn=REFERENCE, **layer_options)
    with pytest.raises(NotImplementedError, match=message):
        run(layer.apply, variables, query, **call_options)


def test_default_precision_and_fp32_softmax_are_honoured():
    query, _ = inputs()
    options: dict[str, Any] = {"precision": jax.lax.Precision.DEFAULT, "force_fp32_for_softmax": True}
    theirs = nn.MultiHeadDotProductAttention(4, **options)
    variables = init(theirs, query)
    ours = nn.MultiHeadDotProductAttention(4, attention_fn=REFERENCE, **options)
    check_same(run(ours.apply, variables, query), run(theirs.apply, variables, query))


def test_attention_fn_options_reach_flash_attention():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((2, 12, n, 8)), "float32") for n in (4, 2, 2))
    ids = jnp.repeat(jnp.arange(3), 4)[None].repeat(2, 0)
    bias, sinks = jnp.asarray(rng.standard_normal((4, 12, 12)), "float32"), jnp.arange(4.0)
    arrays: dict[str, Any] = {"query_segment_ids": ids, "key_value_segment_ids": ids, "sinks": sinks}
    options: dict[str, Any] = {
        "scale": 0.3,
        "local_window_size": (2, 1),
        "logits_soft_cap": 2.0,
        "causal_alignment": "bottom_right",
    }
    options["implementation"] = "reference"
    function = functools.partial(AttentionFn(**options, deterministic_gradient=True), **arrays)
    expected = run(flash_attention, query, key, value, bias, **options, **arrays)
    chex.assert_trees_all_equal(run(function, query, key, value, bias, dropout_rate=0.5, deterministic=True), expected)
    for name in (*options, *arrays):
        fewer = {k: v for k, v in (options | arrays).items() if k != name and not (name[-3:] == k[-3:] == "ids")}
        if name in ("causal_alignment", "implementation"):
            continue  # T = S, so that the alignments are the same
        assert np.abs(run(flash_attention, query, key, value, bias, **fewer) - expected).max() > 1e-3, name


def test_dtype_of_attention_fn():
    query = jnp.ones((2, 3, 4, 8), "bfloat16")
    key = jnp.ones((2, 5, 4, 8), "float32")
    assert REFERENCE(query, key, key).dtype == jnp.float32
    assert REFERENCE(query, key, key, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_attention_fn_options_compare_by_value():
    assert AttentionFn(local_window_size=3) == AttentionFn(local_window_size=3) != AttentionFn()
    assert hash(AttentionFn(scale=0.5)) == hash(AttentionFn(scale=0.5))


def test_attend_merges_batch_dimensions_of_every_option():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((2, 3, t, 4, 8)), "float32") for t in (6, 7))
    options: dict[str, Any] = {
        "mask": random_mask((2, 1, 1, 6, 7)),
        "bias": jnp.asarray(rng.standard_normal((3, 4, 1, 7)), "float32"),
        "query_seq_lengths": jnp.array([[6, 5, 4], [3, 6, 6]]),
        "key_value_seq_lengths": jnp.array([[7, 6, 5], [7, 7, 1]]),
        "query_segment_ids": jnp.asarray(np.sort(rng.integers(0, 2, (2, 3, 6)))),
        "key_value_segment_ids": jnp.asarray(np.sort(rng.integers(0, 2, (2, 3, 7)))),
    }
    out = run(attend, query, key, key, **options, implementation="reference")
    single = jax.jit(functools.partial(flash_attention, implementation="reference"))
    for i in np.ndindex(2, 3):
        one = {
            name: jnp.broadcast_to(x, (2, 3, *x.shape[-3:]))[i] if name in ("mask", "bias") else x[i]
            for name, x in options.items()
        }
        expected = single(query[i], key[i], key[i], **one)
        chex.assert_trees_all_close(out[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_seq_lengths": jnp.array([1, 2])}, "query_seq_lengths must begin with the batch dimensions"),
        ({"mask": jnp.ones((3, 2, 1, 6, 6))}, "mask must broadcast to the batch dimensions"),
        ({"return_lse": True}, "unknown attention options"),
    ],
)
def test_attend_names_what_is_malformed(options, message):
    x = jnp.ones((2, 3, 6, 4, 8))
    with pytest.raises((ValueError, TypeError), match=message):
        attend(x, x, x, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_layer_has_parameters_and_output_of_flax_layer(cross, dtype):
    query, key = inputs(dtype=dtype)
    key = key if cross else query
    mask = random_mask((2, 4, 12, key.shape[1]))
    options: dict[str, Any] = {"qkv_features": 32, "out_features": 20, "use_bias": cross}
    theirs = nn.MultiHeadDotProductAttention(4, dtype=jnp.dtype(dtype), **options)
    ours = MultiHeadAttention(4, dtype=jnp.dtype(dtype), **options)
    variables = init(theirs, query, key)
    chex.assert_trees_all_equal_shapes_and_dtypes(init(ours, query, key), variables)
    check_same(
        run(ours.apply, variables, query, key, mask=mask, implementation="reference"),
        run(theirs.apply, variables, query, key, mask=mask),
        dtype,
    )


def test_layer_has_initial_values_of_flax_layer():
    query, _ = inputs()
    options: dict[str, Any] = {
        "kernel_init": nn.initializers.normal(0.1),
        "out_bias_init": nn.initializers.constant(2.0),
    }
    ours, theirs = MultiHeadAttention(4, **options), nn.MultiHeadDotProductAttention(4, **options)
    chex.assert_trees_all_equal(*(layer.init(jax.random.key(0), query) for layer in (ours, theirs)))


def test_layer_with_separate_values():
    query, key = inputs()
    value = 2 * key + 1
    theirs, ours = nn.MultiHeadDotProductAttention(4), MultiHeadAttention(4)
    variables = init(theirs, query, key)
    check_same(
        run(ours.apply, variables, query, key, value, implementation="reference"),
        run(theirs.apply, variables, query, key, value),
    )
    with pytest.raises(ValueError, match="inputs_v was given without inputs_k"):
        run(ours.apply, variables, query, None, value, implementation="reference")


def test_grouped_heads_are_repeated_heads():
    query, key = inputs()
    grouped, full = MultiHeadAttention(4, 2), MultiHeadAttention(4)
    variables = init(grouped, query, key)
    repeated = jax.tree.map(lambda x: x, variables)
    for name in ("key", "value"):
        repeated["params"][name] = {k: jnp.repeat(x, 2, axis=-2) for k, x in variables["params"][name].items()}
    check_same(
        run(grouped.apply, variables, query, key, implementation="reference"),
        run(full.apply, repeated, query, key, implementation="reference"),
    )


def test_head_dims_of_their_own():
    query, key = inputs()
    layer = MultiHeadAttention(4, 2, head_dim=24, value_head_dim=8, param_dtype=jnp.bfloat16)
    variables = init(layer, query, key)
    shapes = jax.tree.map(lambda x: x.shape, variables["params"])
    assert {name: leaf["kernel"] for name, leaf in shapes.items()} == {
        "query": (24, 4, 24),
        "key": (24, 2, 24),
        "value": (24, 2, 8),
        "out": (4, 8, 24),
    }
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("bfloat16")}
    chex.assert_shape(run(layer.apply, variables, query, key, implementation="reference"), query.shape)


def test_rotary_is_applied_to_query_and_key():
    query, _ = inputs()

    def shift(query, key):
        assert (query.shape, key.shape) == ((2, 12, 4, 6), (2, 12, 2, 6))
        return 2 * query, 3.0 * key

    layer = MultiHeadAttention(4, 2)
    variables = init(layer, query)
    check_same(
        run(layer.apply, variables, query, rotary=shift, implementation="reference"),
        run(layer.apply, variables, query, scale=6 / 6**0.5, implementation="reference"),
    )
    with pytest.raises(ValueError, match="rotary must keep the shapes"):
        run(layer.apply, variables, query, rotary=lambda q, k: (q[..., :4], k[..., :4]))


def test_layer_hands_on_every_option():
    query, _ = inputs()
    rng = np.random.default_rng(3)
    layer = MultiHeadAttention(4, 2, use_bias=False)
    variables = init(layer, query)
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
    params = variables["params"]
    query_heads, key_heads, value_heads = (
        jnp.einsum("btf,fnh->btnh", query, params[name]["kernel"]) for name in ("query", "key", "value")
    )
    attended = run(flash_attention, query_heads, key_heads, value_heads, **options)
    expected = jnp.einsum("btnh,nhf->btf", attended, params["out"]["kernel"])
    check_same(run(layer.apply, variables, query, **options), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "qkv_features 24 must be a multiple of num_heads 5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"num_heads": 4, "head_dim": 8, "qkv_features": 32}, "not both"),
        ({"num_heads": 4, "value_head_dim": 0}, "value_head_dim must be positive"),
    ],
)
def test_layer_names_what_is_malformed(options, message):
    query, _ = inputs()
    with pytest.raises(ValueError, match=message):
        init(MultiHeadAttention(**options), query)


def test_logical_partitioning():
    query, _ = inputs()
    normal = nn.initializers.lecun_normal()
    layer = MultiHeadAttention(
        4,
        kernel_init=nn.with_logical_partitioning(normal, ("embed", "heads", "kv")),
        out_kernel_init=nn.with_logical_partitioning(normal, ("heads", "kv", "embed")),
    )
    specs = nn.get_partition_spec(init(layer, query))["params"]
    assert tuple(specs["query"]["kernel"]) == tuple(specs["value"]["kernel"]) == ("embed", "heads", "kv")
    assert tuple(specs["out"]["kernel"]) == ("heads", "kv", "embed")
