"""Every mask with every extra, in float64: XLA path against reference, finite differences and jax.nn."""

import jax
import numpy as np
import pytest

import attention_cases as cases

GRID = [
    pytest.param(case, variant, id=f"{case.name}-{variant}")
    for case in cases.CASES
    for variant in range(cases.VARIANTS)
]


def assert_close(results, expected, tolerance=1e-11):
    assert results.keys() == expected.keys()
    for name, wanted in expected.items():
        wanted = np.asarray(wanted)
        scale = 1 + np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(results[name], wanted, rtol=0, atol=tolerance * scale, err_msg=name)


def loss(results, cotangents):
    """The scalar whose gradient the cotangents ask for; an LSE of -inf is a constant."""
    lse = np.asarray(results["lse"])
    return np.sum(results["out"] * cotangents[0]) + np.sum(np.where(np.isfinite(lse), lse, 0) * cotangents[1])


def test_grid_has_200_gradient_cases():
    assert len(GRID) >= 200
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


@pytest.mark.parametrize(("case", "variant"), GRID)
def test_gradients(case, variant):
    inputs, cotangents = cases.make_inputs(case, variant), cases.make_cotangents(case, variant)
    evaluate = cases.implementation(case, "xla")
    results = evaluate(inputs, cotangents)
    assert_close(results, cases.implementation(case, "reference")(inputs, cotangents))

    # Rows that see nothing, from the definition and not from another implementation.
    blind = np.logical_not(cases.visibility(case, inputs).any(-1)).swapaxes(1, 2)
    assert not np.any(np.asarray(results["out"])[blind])
    assert not np.any(np.asarray(results["d_query"])[blind])
    sink = np.broadcast_to(inputs.get("sinks", -np.inf), blind.shape)
    np.testing.assert_array_equal(np.asarray(results["lse"])[blind], sink[blind])

    # Directional derivatives, one input at a time.
    rng = np.random.default_rng(variant)
    for name in cases.DIFFERENTIABLE:
        if name not in inputs:
            continue
        direction = rng.standard_normal(inputs[name].shape)
        step = 1e-5
        ahead = evaluate({**inputs, name: inputs[name] + step * direction}, cotangents)
        behind = evaluate({**inputs, name: inputs[name] - step * direction}, cotangents)
        difference = (loss(ahead, cotangents) - loss(behind, cotangents)) / (2 * step)
        slope = np.sum(results[f"d_{name}"] * direction)
        assert abs(difference - slope) <= 1e-7 * (1 + np.linalg.norm(results[f"d_{name}"])), name


@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_nothing_masked_reaches_a_result(case, name):
    evaluate = cases.implementation(case, name)
    for variant in (1, 2):
        inputs, cotangents = cases.make_inputs(case, variant), cases.make_cotangents(case, variant)
        clean = evaluate(inputs, cotangents)
        poisoned = evaluate(*cases.poison(case, inputs, cotangents))
        assert_close(poisoned, clean)


def _agrees_with_jax_nn(case):
    return not (
        case.segments
        or case.sinks
        or case.shape.Hv != case.shape.H
        or case.option("logits_soft_cap") is not None
        or case.option("causal_alignment") == "bottom_right"
        or None in np.atleast_1d(np.array(case.option("local_window_size", 0), object))
    )


JAX_NN_CASES = [case for case in cases.CASES if _agrees_with_jax_nn(case)]


@pytest.mark.parametrize("case", JAX_NN_CASES, ids=lambda case: case.name)
def test_against_jax_nn(case):
    def attention(query, key, value, **options):
        return jax.nn.dot_product_attention(query, key, value, implementation="xla", return_residual=True, **options)

    evaluate = cases.quick_jit(cases.evaluator(case, attention))
    for variant in range(cases.VARIANTS):
        inputs = cases.make_inputs(case, variant)
        out_cotangent, lse_cotangent = cases.make_cotangents(case, variant)
        # jax.nn has no gradient through the LSE and gives a row that sees nothing the mean of all values.
        blind = np.logical_not(cases.visibility(case, inputs).any(-1)).swapaxes(1, 2)
        out_cotangent[blind] = 0
        cotangents = out_cotangent, np.zeros_like(lse_cotangent)
        results, expected = (dict(run(inputs, cotangents)) for run in (cases.implementation(case, "xla"), evaluate))
        for results_of in (results, expected):
            for name in ("out", "lse"):
                results_of[name] = np.asarray(results_of[name])[~blind]
        # jax.nn's softmax is float32 even for float64 inputs.
        assert_close(results, expected, tolerance=2e-6)


def test_jax_nn_comparison_covers_every_option_that_both_have():
    names = {name for case in JAX_NN_CASES for name, _ in case.options}
    assert {"is_causal", "local_window_size"} <= names
    for attribute in ("lengths", "bias", "mask"):
        assert any(getattr(case, attribute) for case in JAX_NN_CASES), attribute


EVERYTHING = cases.Case(
    "everything",
    cases.Shape(1, 20, 26, 2, 1, 4, 6),
    (("logits_soft_cap", 2.0),),
    lengths="both",
    bias="1NTS",
    mask="B1TS",
    sinks=True,
)
HIGHER = [cases.Case("causal", cases.Shape(1, 20, 20, 2, 1, 4, 4), (("is_causal", True),)), EVERYTHING]


@pytest.mark.parametrize("case", HIGHER, ids=lambda case: case.name)
def test_second_order(case):
    """The gradient of a gradient's inner product with a direction, against the reference's."""
    inputs, cotangents = cases.make_inputs(case, 2), cases.make_cotangents(case, 2)
    poisoned, _ = cases.poison(case, inputs, cotangents)
    rng = np.random.default_rng(0)
    names = [name for name in cases.DIFFERENTIABLE if name in inputs]
    directions = {name: rng.standard_normal(inputs[name].shape) for name in names}

    def second(implementation, inputs):
        attend = cases.flash_evaluator(case, implementation)

        def inner_product(wanted):
            results = attend({**inputs, **wanted}, cotangents)
            return sum(jax.numpy.sum(results[f"d_{name}"] * directions[name]) for name in names)

        return cases.quick_jit(jax.grad(inner_product))({name: inputs[name] for name in names})

    expected = second("reference", inputs)
    assert_close(second("xla", inputs), expected)
    assert_close(second("xla", poisoned), expected)
