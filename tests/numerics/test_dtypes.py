"""16-bit and float32 inputs by the rule that kernels must meet too, and scores of any size."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import attention_cases as cases

# Every extra once; each costs a compilation for each dtype.
DTYPE_CASES = cases.CASES[::5]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def test_selection_has_every_extra():
    for attribute in ("lengths", "segments", "bias", "mask", "sinks"):
        assert any(getattr(case, attribute) for case in DTYPE_CASES), attribute
    for option in ("is_causal", "logits_soft_cap", "local_window_size", "causal_alignment"):
        assert any(case.option(option) for case in DTYPE_CASES), option


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DTYPE_CASES, ids=lambda case: case.name)
def test_error_is_that_of_the_dtype(case, dtype):
    for variant in (0, 1, 2):
        inputs = cases.make_inputs(case, variant, DTYPES[dtype])
        cotangents = cases.make_cotangents(case, variant, DTYPES[dtype])
        expected, plain = cases.oracle(case, inputs, cotangents), cases.yardstick(case, inputs, cotangents)
        results = cases.implementation(case, "xla")(inputs, cotangents)
        assert results["out"].dtype == results["d_query"].dtype == dtype
        assert results["lse"].dtype == jnp.float32
        cases.check_results(case, results, expected, plain)
        poisoned = cases.implementation(case, "xla")(*cases.poison(case, inputs, cotangents))
        cases.check_results(case, poisoned, expected, plain)


@pytest.mark.parametrize("case", DTYPE_CASES[::3], ids=lambda case: case.name)
def test_float32(case):
    inputs = cases.make_inputs(case, 0, np.float32)
    cotangents = cases.make_cotangents(case, 0, np.float32)
    expected = cases.oracle(case, inputs, cotangents)
    results = cases.implementation(case, "xla")(inputs, cotangents)
    for name, array in results.items():
        assert array.dtype == np.float32
        scale = 1 + np.abs(expected[name][np.isfinite(expected[name])]).max()
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=2e-6 * scale, err_msg=name)


SCORES = cases.Case("scores", cases.Shape(1, 40, 56, 2, 1, 16, 16), (("is_causal", True),), lengths="key")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_of_1e4(dtype):
    inputs = cases.make_inputs(SCORES, 0, DTYPES[dtype], magnitude=100.0)
    cotangents = cases.make_cotangents(SCORES, 0, DTYPES[dtype])
    expected = cases.oracle(SCORES, inputs, cotangents)
    assert np.abs(expected["lse"]).max() > 1e4
    cases.check_results(
        SCORES,
        cases.implementation(SCORES, "xla")(inputs, cotangents),
        expected,
        cases.yardstick(SCORES, inputs, cotangents),
    )


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_float16_logits_beyond_its_range(name):
    inputs = cases.make_inputs(SCORES, 0, np.float16, magnitude=4e3)
    cotangents = cases.make_cotangents(SCORES, 0, np.float16)
    results = cases.implementation(SCORES, name)(inputs, cotangents)
    assert np.abs(results["lse"]).max() > 65504
    assert np.isfinite(np.asarray(results["out"], np.float32)).all()
    # One key takes each row's whole weight here, so the output is one value.
    wanted = cases.oracle(SCORES, inputs, cotangents)
    np.testing.assert_array_equal(results["out"], wanted["out"].astype(np.float16))


def test_check_results_refuses_what_is_wrong():
    case = DTYPE_CASES[0]
    inputs = cases.make_inputs(case, 0, ml_dtypes.bfloat16)
    cotangents = cases.make_cotangents(case, 0, ml_dtypes.bfloat16)
    expected, plain = cases.oracle(case, inputs, cotangents), cases.yardstick(case, inputs, cotangents)
    results = {name: np.array(array) for name, array in cases.implementation(case, "xla")(inputs, cotangents).items()}
    cases.check_results(case, results, expected, plain)
    for name, array in results.items():
        wrong = array.copy()
        wrong.flat[3] += np.abs(array.astype(np.float32)).max() / 16
        with pytest.raises(AssertionError, match=name):
            cases.check_results(case, {**results, name: wrong}, expected, plain)
        wrong.flat[3] = np.nan
        with pytest.raises(AssertionError, match="NaN"):
            cases.check_results(case, {**results, name: wrong}, expected, plain)
