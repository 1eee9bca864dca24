import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa_blackwell.attention
from jax_fa_blackwell import flash_attention
from jax_fa_blackwell.plan import spec as spec_module
from jax_fa_blackwell.plan.spec import AttentionSpec, choose_implementation

Q, K, V = (2, 8, 4, 16), (2, 12, 2, 16), (2, 12, 2, 24)


def struct(shape, dtype: Any = np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(query: Any = Q, key: Any = K, value: Any = V, dtype: Any = np.float32, **arguments: Any):
    """The result's shapes; arrays among the arguments are traced, so that every check happens at trace time."""
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: struct(given, dtype) if isinstance(given, tuple) else given for name, given in arrays.items()}
    arrays |= {name: given for name, given in arguments.items() if isinstance(given, jax.ShapeDtypeStruct)}
    static = {name: given for name, given in arguments.items() if name not in arrays}
    return jax.eval_shape(lambda arrays: flash_attention(**arrays, **static), arrays)


def test_result_shapes_and_dtypes():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for implementation in (None, "xla", "reference"):
            out, lse = trace(dtype=dtype, return_lse=True, implementation=implementation)
            assert (out.shape, out.dtype) == ((2, 8, 4, 24), dtype)
            assert (lse.shape, lse.dtype) == ((2, 8, 4), jnp.float32)
    assert trace(Q[1:], K[1:], V[1:]).shape == (8, 4, 24)


def test_numpy_and_python_arguments_are_taken():
    zeros = [np.zeros(shape, np.float32) for shape in (Q, K, V)]
    out = flash_attention(*zeros, query_seq_lengths=[3, 8], key_value_seq_lengths=np.array([4, 12]), scale=0.5)
    assert isinstance(out, jax.Array)
    assert trace(local_window_size=np.int64(3), scale=np.float32(0.5)).shape == (2, 8, 4, 24)
    assert trace(bias=struct((8, 12)), mask=struct((4, 1, 12), bool)).shape == (2, 8, 4, 24)


INT = np.int32
MALFORMED = [
    # name in the message, what it was, arguments
    ("query", r"\[8, 16\]", {"query": (8, 16)}),
    ("query", "None", {"query": None}),
    ("key", r"\[12, 2, 16\]", {"key": K[1:]}),
    ("value", r"\[1, 2, 12, 2, 24\]", {"value": (1, *V)}),
    ("query", "int32", {"dtype": INT}),
    ("query", "float8_e4m3fn", {"dtype": jnp.float8_e4m3fn}),
    ("key", "bfloat16", {"key": struct(K, jnp.bfloat16)}),
    ("value", "float16", {"value": struct(V, jnp.float16)}),
    ("key", r"\[3, 12, 2, 16\]", {"key": (3, 12, 2, 16)}),
    ("key", r"H = 16.*\[2, 12, 2, 8\]", {"key": (2, 12, 2, 8)}),
    ("value", r"\[2, 11, 2, 24\]", {"value": (2, 11, 2, 24)}),
    ("value", r"\[2, 12, 1, 24\]", {"value": (2, 12, 1, 24)}),
    ("query", "N = 4 and K = 3", {"key": (2, 12, 3, 16), "value": (2, 12, 3, 24)}),
    ("query", "K = 0", {"key": (2, 12, 0, 16), "value": (2, 12, 0, 24)}),
    ("value", r"\[2, 12, 2, 0\]", {"value": (2, 12, 2, 0)}),
    ("bias", r"\[2, 4, 8, 12\].*\[2, 4, 12, 8\]", {"bias": struct((2, 4, 12, 8))}),
    ("bias", r"\[1, 2, 4, 8, 12\]", {"bias": struct((1, 2, 4, 8, 12))}),
    ("bias", "int32", {"bias": struct((8, 12), INT)}),
    ("mask", r"\[3, 1, 1, 1\]", {"mask": struct((3, 1, 1, 1), bool)}),
    ("mask", "float32", {"mask": struct((8, 12))}),
    ("scale", "float32", {"scale": struct(())}),
    ("scale", "'big'", {"scale": "big"}),
    ("scale", "True", {"scale": True}),
    ("scale", "nan", {"scale": float("nan")}),
    ("is_causal", "1", {"is_causal": 1}),
    ("is_causal", "bool", {"is_causal": struct((), bool)}),
    ("causal_alignment", "'left'", {"causal_alignment": "left"}),
    ("causal_alignment", "None", {"causal_alignment": None}),
    ("local_window_size", "-1", {"local_window_size": -1}),
    ("local_window_size", r"\(-1, 0\)", {"local_window_size": (-1, 0)}),
    ("local_window_size", r"\(1, 2, 3\)", {"local_window_size": (1, 2, 3)}),
    ("local_window_size", "1.5", {"local_window_size": 1.5}),
    ("local_window_size", "True", {"local_window_size": True}),
    ("local_window_size", "int32", {"local_window_size": struct((), INT)}),
    ("query_seq_lengths", r"\[2\].*\[3\]", {"query_seq_lengths": struct((3,), INT)}),
    ("query_seq_lengths", "float32", {"query_seq_lengths": struct((2,))}),
    ("key_value_seq_lengths", r"\[2\].*\[\]", {"key_value_seq_lengths": struct((), INT)}),
    ("query_segment_ids", "without key_value_segment_ids", {"query_segment_ids": struct(Q[:2], INT)}),
    ("query_segment_ids", "without query_segment_ids", {"key_value_segment_ids": struct(K[:2], INT)}),
    (
        "key_value_segment_ids",
        r"\[2, 12\].*\[2, 8\]",
        {"query_segment_ids": struct((2, 8), INT), "key_value_segment_ids": struct((2, 8), INT)},
    ),
    (
        "query_segment_ids",
        "float32",
        {"query_segment_ids": struct((2, 8)), "key_value_segment_ids": struct((2, 12), INT)},
    ),
    (
        "query_segment_ids",
        "uint32",
        {"query_segment_ids": struct((2, 8), np.uint32), "key_value_segment_ids": struct((2, 12), INT)},
    ),
    ("logits_soft_cap", "0", {"logits_soft_cap": 0}),
    ("logits_soft_cap", "-2", {"logits_soft_cap": -2.0}),
    ("logits_soft_cap", "float32", {"logits_soft_cap": struct(())}),
    ("sinks", r"\[4\]|\(4,\).*\[2\]", {"sinks": struct((2,))}),
    ("sinks", "int32", {"sinks": struct((4,), INT)}),
    ("return_lse", "1", {"return_lse": 1}),
    ("deterministic", "None", {"deterministic": None}),
    ("implementation", "'cudnn'", {"implementation": "cudnn"}),
]


@pytest.mark.parametrize(("name", "was", "arguments"), MALFORMED)
def test_malformed_arguments_are_named_with_what_they_were(name, was, arguments):
    with pytest.raises(ValueError, match=rf"^{name} .*({was})"):
        trace(**arguments)


def make_spec(**fields: Any):
    shape = {"batch": 2, "query_length": 8, "key_value_length": 12, "query_heads": 4, "key_value_heads": 2}
    defaults = {**shape, "head_dim": 16, "value_head_dim": 24, "dtype": "bfloat16", "scale": 0.25}
    return AttentionSpec(**{**defaults, **fields})


def test_spec_of_a_call(monkeypatch):
    seen = []

    def choose(spec, requested, arch):
        seen.append(spec)
        return choose_implementation(spec, "xla", arch)

    monkeypatch.setattr(jax_fa_blackwell.attention, "choose_implementation", choose)
    trace(dtype=jnp.bfloat16)
    trace(dtype=jnp.bfloat16, is_causal=True, causal_alignment="bottom_right", local_window_size=3)
    trace(dtype=jnp.bfloat16, query_seq_lengths=struct((2,), INT), sinks=struct((4,)), logits_soft_cap=2)
    trace(dtype=jnp.bfloat16, bias=struct((8, 12)), mask=struct((1, 12), bool), scale=1, deterministic=True)
    assert seen == [
        make_spec(),
        make_spec(mask_form="affine", lower=1, upper=5),
        make_spec(mask_form="rows", has_sinks=True, logits_soft_cap=2.0),
        make_spec(bias_shape=(1, 1, 8, 12), mask_shape=(1, 1, 1, 12), scale=1.0, deterministic=True),
    ]
    assert len({hash(spec) for spec in seen}) == 4


@pytest.mark.parametrize("arch", [None, "sm_90a", "sm_100a"])
def test_cuda_without_a_kernel_names_the_limit(monkeypatch, arch):
    monkeypatch.setattr(spec_module, "KERNELS", {})
    with pytest.raises(NotImplementedError, match=r"no forward kernel.*bfloat16 2x8x12.*sinks"):
        choose_implementation(make_spec(has_sinks=True), "cuda", arch)
    assert choose_implementation(make_spec(), None, arch).name == "xla"


def test_a_kernel_plugs_in_by_its_rule(monkeypatch):
    def supports(spec, target):
        return None if spec.head_dim <= target.tensor_memory_columns // 4 else f"head dim {spec.head_dim} above 128"

    monkeypatch.setattr(spec_module, "KERNELS", {"forward": supports})
    assert choose_implementation(make_spec(), None, "sm_100a").name == "cuda"
    assert choose_implementation(make_spec(), "xla", "sm_100a").name == "xla"
    assert choose_implementation(make_spec(), None, None).name == "xla"
    refused = choose_implementation(make_spec(head_dim=192), None, "sm_100a")
    assert refused.name == "xla"
    assert "head dim 192 above 128" in refused.reason
    with pytest.raises(NotImplementedError, match="head dim 192 above 128"):
        choose_implementation(make_spec(head_dim=192), "cuda", "sm_100a")


def test_lengths_are_clipped_to_the_axis():
    arrays = [np.ones(shape, np.float32) for shape in (Q, K, V)]
    clipped = flash_attention(*arrays, query_seq_lengths=[-3, 2**31 - 1], key_value_seq_lengths=np.array([5, 99]))
    expected = flash_attention(*arrays, query_seq_lengths=[0, 8], key_value_seq_lengths=[5, 12])
    np.testing.assert_array_equal(clipped, expected)


def test_fallback_is_logged_once(caplog):
    jax_fa_blackwell.attention._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jax_fa_blackwell"):
        trace()
        trace(is_causal=True)
        trace(implementation="xla")
    assert len(caplog.records) == 1
    assert "'xla'" in caplog.records[0].getMessage()


def test_checks_come_before_the_implementation_is_chosen():
    with pytest.raises(ValueError, match="logits_soft_cap"):
        trace(implementation="cuda", logits_soft_cap=-1)
