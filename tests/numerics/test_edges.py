"""Empty shapes, rows without keys, infinite biases, and the transformations of JAX."""

import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_cases as cases
from jax_fa_blackwell import flash_attention, xla

IMPLEMENTATIONS = ["xla", "reference"]
attend: Any = functools.partial(flash_attention, return_lse=True)


def random(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0), (0, 0, 0)])
def test_empty_shapes(B, T, S, name):
    sinks = random(2)
    options = {
        "bias": random(1, 2, T, 1),
        "mask": np.ones((B, 1, 1, S), bool),
        "sinks": sinks,
        "query_segment_ids": np.zeros((B, T), np.int32),
        "key_value_segment_ids": np.zeros((B, S), np.int32),
        "query_seq_lengths": np.zeros(B, np.int32),
    }
    arrays = random(B, T, 2, 4), random(B, S, 1, 4), random(B, S, 1, 5)
    every: tuple[dict[str, Any], ...] = ({}, {"is_causal": True}, {"sinks": sinks}, options)

    @cases.quick_jit
    def run(*arrays):
        results = []
        for given in every:
            (out, lse), pullback = jax.vjp(lambda *x, given=given: attend(*x, implementation=name, **given), *arrays)
            results.append((out, lse, pullback((out, lse))))
        return results

    for given, (out, lse, gradients) in zip(every, run(*arrays), strict=True):
        chex.assert_shape([out, lse], [(B, T, 2, 5), (B, T, 2)])
        expected = sinks if "sinks" in given else np.full(2, -np.inf)
        np.testing.assert_array_equal(lse, np.broadcast_to(expected, lse.shape))
        assert not out.any()
        for gradient, array in zip(gradients, arrays, strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(array.shape))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sinks_of_an_empty_call_get_the_gradient_of_the_lse(name):
    query, key, value = random(2, 3, 2, 4), random(2, 0, 1, 4), random(2, 0, 1, 4)
    total = cases.quick_jit(jax.grad(lambda x: attend(query, key, value, sinks=x, implementation=name)[1].sum()))
    np.testing.assert_allclose(total(random(2)), [6, 6])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sinks_of_blind_rows_get_the_gradient_of_the_lse_only(name):
    query, key, value, sinks = random(1, 5, 2, 4), random(1, 6, 2, 4), random(1, 6, 2, 4), random(2)

    def f(sinks):
        out, lse = attend(query, key, value, sinks=sinks, query_seq_lengths=[0], implementation=name)
        return jnp.sum(out) + jnp.sum(lse)

    np.testing.assert_allclose(cases.quick_jit(jax.grad(f))(sinks), [5, 5])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bias_of_minus_infinity_hides_like_a_mask(name):
    arrays = random(1, 20, 2, 4), random(1, 26, 2, 4), random(1, 26, 2, 4)
    mask = np.random.default_rng(0).random((1, 2, 20, 26)) < 0.5
    mask[:, :, 3] = False

    @cases.quick_jit
    def results(options):
        (out, lse), pullback = jax.vjp(lambda *x: attend(*x, implementation=name, **options), *arrays)
        return out, lse, pullback((jnp.cos(out), jnp.where(lse == -jnp.inf, 0, lse)))

    hidden = results({"bias": np.where(mask, 0, -np.inf)})
    chex.assert_trees_all_close(hidden, results({"mask": mask}), rtol=1e-12, atol=1e-12)


def test_one_sink_is_one_more_key_with_value_zero():
    query, key, value = random(1, 20, 1, 4), random(1, 26, 1, 4), random(1, 26, 1, 4)
    zero = np.zeros((1, 1, 1, 4))
    longer = [np.concatenate([array, zero], axis=1) for array in (key, value)]
    expected = cases.quick_jit(lambda *x: attend(*x, implementation="reference"))(query, *longer)
    results = cases.quick_jit(lambda *x: attend(*x, sinks=np.zeros(1), implementation="xla"))(query, key, value)
    chex.assert_trees_all_close(results, expected)


def test_segments_are_separate_calls():
    lengths_q, lengths_k, ids = (7, 0, 20, 6), (9, 3, 14, 10), (4, 9, 1, 5)
    T, S = sum(lengths_q), sum(lengths_k)
    query, key, value = random(1, T, 2, 4), random(1, S, 1, 4), random(1, S, 1, 4)
    options: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom_right", "local_window_size": (6, None)}
    order = [2, 0, 3, 1]  # of the keys' segments
    starts = np.concatenate([[0], np.cumsum([lengths_k[i] for i in order])])
    key_ids = np.repeat([ids[i] for i in order], [lengths_k[i] for i in order])[None].astype(np.int32)
    query_ids = np.repeat(ids, lengths_q)[None].astype(np.int32)
    packed = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    rows_of, keys_of, first = [], [], 0
    for index, length in enumerate(lengths_q):
        start = int(starts[order.index(index)])
        rows_of.append(slice(first, first + length))
        keys_of.append(slice(start, start + lengths_k[index]))
        first += length

    @cases.quick_jit
    def run(query, key, value):
        together = attend(query, key, value, implementation="xla", **packed, **options)
        alone = [
            attend(query[:, rows], key[:, keys], value[:, keys], implementation="reference", **options)
            for rows, keys in zip(rows_of, keys_of, strict=True)
        ]
        return [tuple(array[:, rows] for array in together) for rows in rows_of], alone

    together, alone = run(query, key, value)
    chex.assert_trees_all_close(together, alone, rtol=1e-12)


def scan_lengths(jaxpr):
    """The trip counts of all scans in a jaxpr, outer ones first."""
    lengths = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            lengths.append(equation.params["length"])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                lengths += scan_lengths(inner) if hasattr(inner, "eqns") else []
    return lengths


def test_xla_runs_only_blocks_that_some_row_sees():
    """A window's cost must not grow with the square of the length: the loops' trip counts say so."""

    def trips(T, **options):
        query = jax.ShapeDtypeStruct((1, T, 1, 4), np.float32)
        jaxpr = jax.make_jaxpr(lambda *x: flash_attention(*x, implementation="xla", **options))(query, query, query)
        return scan_lengths(jaxpr.jaxpr)

    rows, keys = xla.QUERY_BLOCK, xla.KV_BLOCK
    assert trips(rows * keys) == [keys, rows]
    for T in (rows * keys, 4 * rows * keys):
        outer, inner = trips(T, local_window_size=(keys, 0))
        assert outer == T // rows
        assert inner <= (rows + keys) // keys + 2


EVERYTHING = cases.Case(
    "transformations",
    cases.Shape(2, 20, 26, 2, 1, 4, 6),
    (("is_causal", True), ("logits_soft_cap", 2.0)),
    lengths="both",
    bias="1NTS",
    mask="B1TS",
    sinks=True,
)


def everything(name: str = "xla") -> tuple[cases.Arrays, Any]:
    inputs = cases.make_inputs(EVERYTHING, 0)
    function = functools.partial(attend, implementation=name, **dict(EVERYTHING.options))
    return inputs, function


def test_vmap_over_every_argument_and_over_some():
    axes = [cases.make_inputs(EVERYTHING, variant) for variant in range(2)]
    _, function = everything()

    def gradient(inputs):
        wanted = {name: inputs[name] for name in cases.DIFFERENTIABLE}

        def value(wanted):
            out, lse = function(**{**inputs, **wanted})
            return jnp.sum(jnp.cos(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

        return jax.grad(value, has_aux=True)(wanted)

    one = cases.quick_jit(gradient)
    for mapped in (tuple(axes[0]), ("query",), ("key_value_seq_lengths", "bias"), ("mask", "sinks")):
        inputs = {**axes[0], **{name: np.stack([axis[name] for axis in axes]) for name in mapped}}
        in_axes = ({name: 0 if name in mapped else None for name in inputs},)
        each = [one({**axes[0], **{name: axis[name] for name in mapped}}) for axis in axes]
        expected = jax.tree.map(lambda *x: jnp.stack(x), *each)
        results = cases.quick_jit(jax.vmap(gradient, in_axes=in_axes))(inputs)
        chex.assert_trees_all_close(results, expected, rtol=1e-10, atol=1e-12)


def test_linearize():
    inputs, function = everything()
    query = inputs["query"]

    def tangent(implementation):
        def value(query):
            return function(**{**inputs, "query": query}, implementation=implementation)[0]

        return jax.linearize(value, query)[1](jnp.cos(query))

    chex.assert_trees_all_close(tangent("xla"), tangent("reference"), rtol=1e-10, atol=1e-12)


def test_scan_over_layers():
    inputs, function = everything()
    inputs["value"] = random(2, 26, 1, 4)

    def layers(implementation):
        step = functools.partial(function, **{k: v for k, v in inputs.items() if k != "query"})

        def layer(query, _):
            return query + step(query, implementation=implementation)[0], None

        return cases.quick_jit(jax.grad(lambda query: jnp.sum(jax.lax.scan(layer, query, None, length=3)[0] ** 2)))

    query = inputs["query"]
    chex.assert_trees_all_close(layers("xla")(query), layers("reference")(query), rtol=1e-10)


@pytest.mark.parametrize("policy", ["nothing_saveable", "context"])
def test_remat(policy):
    inputs, function = everything()
    policies = jax.checkpoint_policies
    saveable = policies.nothing_saveable if policy == "nothing_saveable" else policies.save_only_these_names("context")

    def value(query):
        out, lse = function(**{**inputs, "query": jnp.sin(query)})
        return jnp.sum(out**2) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

    gradient = jax.grad(jax.checkpoint(value, policy=saveable))
    results, expected = (cases.quick_jit(f)(inputs["query"]) for f in (gradient, jax.grad(value)))
    chex.assert_trees_all_close(results, expected, rtol=1e-10)
    # The forward pass has two scans and the backward pass two: saved under its name, the forward pass runs once.
    scans = scan_lengths(jax.make_jaxpr(gradient)(inputs["query"]).jaxpr)
    assert len(scans) == {"nothing_saveable": 6, "context": 4}[policy]


def test_forward_mode_of_the_reference_agrees_with_reverse_mode():
    inputs, function = everything()
    names = ("query", "key", "value", "bias", "sinks")
    tangents = {name: random(*inputs[name].shape, seed=1) for name in names}

    def value(implementation):
        def f(wanted):
            out, lse = function(**{**inputs, **wanted}, implementation=implementation)
            return jnp.sum(out**2) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

        return f

    wanted = {name: inputs[name] for name in names}
    _, expected = cases.quick_jit(lambda *x: jax.jvp(value("reference"), *x))((wanted,), (tangents,))
    gradient = cases.quick_jit(jax.grad(value("xla")))(wanted)
    slope = sum(jnp.sum(gradient[name] * tangents[name]) for name in names)
    np.testing.assert_allclose(slope, expected, rtol=1e-10)


def test_integer_and_bool_arguments_have_float0_gradients():
    inputs, function = everything()

    def f(query_seq_lengths, mask):
        return function(**{**inputs, "query_seq_lengths": query_seq_lengths, "mask": mask})[0].sum()

    gradients = jax.grad(f, argnums=(0, 1), allow_int=True)(inputs["query_seq_lengths"], inputs["mask"])
    assert [gradient.dtype for gradient in gradients] == [jax.dtypes.float0] * 2


def test_no_batch_axis():
    arrays = random(20, 2, 4), random(26, 1, 4), random(26, 1, 5)
    lengths = {"query_seq_lengths": np.int32(15), "key_value_seq_lengths": np.int32(20)}
    ids = {"query_segment_ids": np.zeros(20, np.int32), "key_value_segment_ids": np.zeros(26, np.int32)}
    dense = {"bias": random(2, 20, 26), "mask": np.arange(26) < 9}
    run = cases.quick_jit(lambda *x: attend(*x[:-1], **x[-1], implementation="xla"))
    for options in (lengths, ids, dense):
        batched = {name: array if name in dense else np.asarray(array)[None] for name, array in options.items()}
        expected = run(*(array[None] for array in arrays), batched)
        out, lse = run(*arrays, options)
        chex.assert_trees_all_equal((out[None], lse[None]), expected)


def test_bit_for_bit_the_same_in_every_run():
    inputs, function = everything()
    gradient = jax.jit(jax.grad(lambda query: function(**{**inputs, "query": query}, deterministic=True)[0].sum()))
    first = gradient(inputs["query"])
    for _ in itertools.repeat(None, 3):
        chex.assert_trees_all_equal(gradient(inputs["query"]), first)
