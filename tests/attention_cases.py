"""The cases that every attention implementation is checked on, their inputs, and the rule by which it passes.

A Case is static: one compilation. Its variants differ in the arrays: lengths, segments, masks, values. Everything here
is independent of how an implementation works; kernels run the same cases as the XLA path.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_fa_blackwell import flash_attention

Arrays = dict[str, np.ndarray]

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Extents of a call."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int

    def broadcastable(self, letters: str) -> tuple[int, ...]:
        """The shape that letters such as "1N1S" name."""
        return tuple(1 if letter == "1" else getattr(self, letter) for letter in letters)


@dataclasses.dataclass(frozen=True)
class Case:
    """The static part of a call.

    Attributes:
      name: for people.
      shape: the extents.
      options: static keyword arguments of flash_attention.
      lengths: which sequence lengths are given: "", "query", "key" or "both".
      segments: whether segment ids are given.
      bias, mask: the shape of bias or mask in letters such as "BNTS" and "1N1S", or "".
      sinks: whether there are sinks.
    """

    name: str
    shape: Shape
    options: tuple[tuple[str, Any], ...] = ()
    lengths: str = ""
    segments: bool = False
    bias: str = ""
    mask: str = ""
    sinks: bool = False

    def option(self, name: str, default: Any = None) -> Any:
        """The value of a static option."""
        return dict(self.options).get(name, default)


# What the masks are; each of them meets some of the extras below, in turn.
_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal bottom right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": 5},
    "window left only": {"local_window_size": (4, 0)},
    "window open left": {"local_window_size": (None, 3), "causal_alignment": "bottom_right"},
    "window causal bottom right": {
        "local_window_size": (6, None),
        "is_causal": True,
        "causal_alignment": "bottom_right",
    },
    "key lengths": {"lengths": "key"},
    "query lengths causal": {"lengths": "query", "is_causal": True},
    "lengths causal bottom right": {"lengths": "both", "is_causal": True, "causal_alignment": "bottom_right"},
    "lengths window": {"lengths": "both", "local_window_size": (3, 2)},
    "segments": {"segments": True},
    "segments causal": {"segments": True, "is_causal": True},
    "segments window bottom right": {
        "segments": True,
        "local_window_size": (3, 4),
        "causal_alignment": "bottom_right",
    },
    "segments lengths causal": {"segments": True, "lengths": "both", "is_causal": True},
}

_EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "BNTS"},
    "mask": {"mask": "BNTS"},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "narrow bias and mask": {"bias": "1N1S", "mask": "B11S"},
    "bias cap": {"bias": "11T1", "logits_soft_cap": 2.0, "scale": 0.5},
    "all": {"bias": "1NTS", "mask": "B1TS", "logits_soft_cap": 3.0, "sinks": True},
}

# Lengths that are no multiples of a tile, T = S and both T < S and T > S, every kind of head grouping, H != Hv.
_SHAPES = (
    Shape(2, 33, 33, 2, 2, 8, 8),
    Shape(2, 20, 45, 4, 2, 8, 12),
    Shape(1, 45, 20, 3, 1, 16, 4),
    Shape(2, 31, 40, 3, 1, 8, 8),
)


def _make_case(mask: str, extra: str, shape: Shape) -> Case:
    fields = {**_MASKS[mask], **_EXTRAS[extra]}
    own = {name: fields.pop(name) for name in ("lengths", "segments", "bias", "mask", "sinks") if name in fields}
    name = "-".join((mask, extra, f"T{shape.T}S{shape.S}")).replace(" ", "_")
    return Case(name, shape, tuple(sorted(fields.items())), **own)


def _make_cases() -> tuple[Case, ...]:
    extras, shapes = itertools.cycle(_EXTRAS), itertools.cycle(_SHAPES)
    cases = []
    for mask in _MASKS:
        for _ in range(3):
            cases.append(_make_case(mask, next(extras), next(shapes)))
        # Eight extras and four shapes: without this each extra would always meet the same shape.
        next(shapes)
    return tuple(cases)


CASES = _make_cases()
VARIANTS = 5


def make_inputs(case: Case, variant: int, dtype: Any = np.float64, magnitude: float = 1.0) -> Arrays:
    """Random arguments of flash_attention for a case; variant 0 has the longest lengths, variant 1 an empty sequence.

    Args:
      case: the case.
      variant: seed of everything random.
      dtype: of query, key and value; bias and sinks are float32, or float64 for float64.
      magnitude: standard deviation of query and key.
    """
    rng = np.random.default_rng([variant, sum(map(ord, case.name))])
    x = case.shape
    wide = np.float64 if dtype == np.float64 else np.float32
    inputs = {
        "query": (magnitude * rng.standard_normal((x.B, x.T, x.N, x.H))).astype(dtype),
        "key": (magnitude * rng.standard_normal((x.B, x.S, x.K, x.H))).astype(dtype),
        "value": rng.standard_normal((x.B, x.S, x.K, x.Hv)).astype(dtype),
    }
    if case.bias:
        inputs["bias"] = rng.standard_normal(x.broadcastable(case.bias)).astype(wide)
    if case.sinks:
        inputs["sinks"] = rng.standard_normal(x.N).astype(wide)
    if case.mask:
        inputs["mask"] = rng.random(x.broadcastable(case.mask)) < 0.7
    for side, limit, given in (("query", x.T, ("query", "both")), ("key_value", x.S, ("key", "both"))):
        if case.lengths in given:
            lengths = rng.integers(0, limit + 1, x.B)
            if variant < 2:
                lengths[0] = limit * (1 - variant)
            inputs[f"{side}_seq_lengths"] = lengths.astype(np.int32)
    if case.segments:
        ids = rng.permutation(12)  # in no order, some on one side only
        for side, length, offset in (("query", x.T, 0), ("key_value", x.S, 2)):
            rows = [_segments(rng, length, ids[offset : offset + 4]) for _ in range(x.B)]
            inputs[f"{side}_segment_ids"] = np.stack(rows)
    return inputs


def _segments(rng: np.random.Generator, length: int, ids: np.ndarray) -> np.ndarray:
    """Contiguous runs of the ids in a random order, with padding in between and at the end."""
    ids = rng.permutation(ids)
    parts = np.stack([ids, np.full_like(ids, -1)], axis=1).ravel()
    cuts = np.sort(rng.integers(0, length + 1, len(parts) - 1))
    counts = np.diff(np.concatenate([[0], cuts, [length]]))
    return np.repeat(parts, counts).astype(np.int32)


def make_cotangents(case: Case, variant: int, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """Random cotangents of output and LSE, also where a row sees nothing."""
    rng = np.random.default_rng([variant, 1, sum(map(ord, case.name))])
    x = case.shape
    wide = np.float64 if dtype == np.float64 else np.float32
    out = rng.standard_normal((x.B, x.T, x.N, x.Hv)).astype(dtype)
    return out, rng.standard_normal((x.B, x.T, x.N)).astype(wide)


def visibility(case: Case, inputs: Arrays) -> np.ndarray:
    """What is visible, bool [B, N, T, S]: the definition of every mask argument, one pair at a time."""
    x = case.shape
    mask = interval_mask(
        x.B,
        x.T,
        x.S,
        is_causal=case.option("is_causal", False),
        causal_alignment=case.option("causal_alignment", "top_left"),
        local_window_size=case.option("local_window_size"),
        **{name: array for name, array in inputs.items() if name.endswith(("_seq_lengths", "_segment_ids"))},
    )
    dense = np.broadcast_to(mask[:, None], (x.B, x.N, x.T, x.S))
    return dense & inputs["mask"] if case.mask else dense


def interval_mask(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
) -> np.ndarray:
    """The mask [B, T, S] of the arguments, from their definition, in plain Python."""
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    visible = np.zeros((B, T, S), bool)
    for b in range(B):
        T_b = T if query_seq_lengths is None else int(query_seq_lengths[b])
        S_b = S if key_value_seq_lengths is None else int(key_value_seq_lengths[b])
        query_ids = [0] * T if query_segment_ids is None else [int(i) for i in query_segment_ids[b]]
        key_ids = [0] * S if key_value_segment_ids is None else [int(j) for j in key_value_segment_ids[b]]
        for segment in {i for i in query_ids if i >= 0}:
            rows = [i for i in range(T) if query_ids[i] == segment and i < T_b]
            keys = [j for j in range(S) if key_ids[j] == segment and j < S_b]
            shift = len(keys) - len(rows) if causal_alignment == "bottom_right" else 0
            for p, i in enumerate(rows):
                for r, j in enumerate(keys):
                    distance = r - (p + shift)
                    visible[b, i, j] = (
                        (left is None or distance >= -left)
                        and (right is None or distance <= right)
                        and (not is_causal or distance <= 0)
                    )
    return visible


def poison(case: Case, inputs: Arrays, cotangents: tuple[np.ndarray, np.ndarray]):
    """Copies of inputs and cotangents with NaN and infinities wherever nothing may look."""
    x = case.shape
    visible = visibility(case, inputs)
    by_group = visible.reshape(x.B, x.K, x.N // x.K, x.T, x.S)
    blind_rows = np.logical_not(np.any(visible, axis=-1)).transpose(0, 2, 1)  # [B, T, N]
    unseen_keys = np.logical_not(np.any(by_group, axis=(2, 3))).transpose(0, 2, 1)  # [B, S, K]
    inputs = {name: array.copy() for name, array in inputs.items()}
    out_cotangent, lse_cotangent = (array.copy() for array in cotangents)
    inputs["query"][blind_rows] = np.nan
    inputs["key"][unseen_keys] = np.nan
    inputs["value"][unseen_keys] = np.inf
    out_cotangent[blind_rows] = np.nan
    if not case.sinks:
        lse_cotangent[blind_rows] = np.nan  # with sinks the LSE of such a row is its sink
    if case.bias:
        bias = inputs["bias"]
        axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        bias[~visible.any(axis=axes, keepdims=True)] = np.nan
    return inputs, (out_cotangent, lse_cotangent)


def evaluator(case: Case, attention: Callable[..., tuple[jax.Array, jax.Array]]):
    """A function (inputs, cotangents) -> results: out, lse, and the gradient of every differentiable input.

    Args:
      case: the case.
      attention: called as flash_attention is, without implementation and return_lse; returns output and LSE.
    """

    def evaluate(inputs, cotangents):
        fixed = {name: array for name, array in inputs.items() if name not in DIFFERENTIABLE}
        wanted = {name: array for name, array in inputs.items() if name in DIFFERENTIABLE}
        (out, lse), pullback = jax.vjp(lambda wanted: attention(**wanted, **fixed, **dict(case.options)), wanted)
        (gradients,) = pullback((cotangents[0].astype(out.dtype), cotangents[1].astype(lse.dtype)))
        return {"out": out, "lse": lse, **{f"d_{name}": gradient for name, gradient in gradients.items()}}

    return evaluate


def quick_jit(function: Callable[..., Any]) -> Any:
    """jax.jit for tests: their time is compile time, and on CPUs half of it goes without optimisation."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


def flash_evaluator(case: Case, name: str | None):
    """The evaluator of flash_attention's implementation ``name``."""
    return evaluator(case, functools.partial(flash_attention, implementation=name, return_lse=True))


@functools.cache
def implementation(case: Case, name: str | None):
    """The same, compiled; kept, since a case's variants share it."""
    return quick_jit(flash_evaluator(case, name))


def oracle(case: Case, inputs: Arrays, cotangents: tuple[np.ndarray, np.ndarray]) -> Arrays:
    """Results of the reference in float64 (float32 without x64) on the same, rounded, inputs."""
    wide = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
    widened = {name: array.astype(wide) if name in DIFFERENTIABLE else array for name, array in inputs.items()}
    evaluate = implementation(case, "reference")
    results = evaluate(widened, tuple(array.astype(wide) for array in cotangents))
    return {name: np.asarray(array, np.float64) for name, array in results.items()}


def definition(case: Case, inputs: Arrays, cotangents: tuple[np.ndarray, np.ndarray]) -> Arrays:
    """Results in float64 from the same, rounded, inputs, in numpy: the oracle where compiling one costs too much."""
    return _compute(case, inputs, cotangents, np.float64, np.einsum, late=False)


def yardstick(
    case: Case, inputs: Arrays, cotangents: tuple[np.ndarray, np.ndarray], einsum: Callable[..., np.ndarray] = np.einsum
) -> tuple[Arrays, Arrays]:
    """Results of the plain computation in the inputs' dtype; its error is the measure of every implementation's.

    Scores, softmax and their gradients are float32 and every matrix product sums in float32. What enters a product is
    rounded to the inputs' dtype, as a tensor core needs it, and the output is rounded before the gradient uses it. It
    is computed in two equally good orders, since in a small case the error of one is a matter of luck: factors that
    could come before or after a product (softmax's normalisation, the scale of the gradient) come before, or after.

    Args:
      case: the case.
      inputs, cotangents: of the case.
      einsum: computes the scores, as np.einsum does; a kernel's test may give one that sums as the hardware does.
    """
    early, late = (_compute(case, inputs, cotangents, np.float32, einsum, late) for late in (False, True))
    return early, late


def _compute(
    case: Case, inputs: Arrays, cotangents: tuple[np.ndarray, np.ndarray], wide: Any, einsum: Any, late: bool
) -> Arrays:
    """Attention and its gradients in ``wide``; float64 rounds nothing to the inputs' dtype."""
    x = case.shape
    dtype = inputs["query"].dtype

    def rounded(array):
        return array if wide == np.float64 else array.astype(dtype).astype(wide)

    def heads(array):
        return np.repeat(array.astype(wide), x.N // array.shape[2], axis=2)

    query, key, value, d_out = (
        heads(array) for array in (inputs["query"], inputs["key"], inputs["value"], cotangents[0])
    )
    scale = wide(case.option("scale") or x.H**-0.5)
    scores = einsum("btnh,bsnh->bnts", query, key) * scale
    scores = scores + inputs["bias"].astype(wide) if case.bias else scores
    cap = case.option("logits_soft_cap")
    tanh = np.tanh(scores / wide(cap)) if cap else np.zeros_like(scores)
    visible = visibility(case, inputs)
    scores = np.where(visible, wide(cap) * tanh if cap else scores, wide(-np.inf))
    sinks = inputs["sinks"] if case.sinks else np.full(x.N, -np.inf)
    sink = np.broadcast_to(sinks.astype(wide)[:, None], scores.shape[:3])
    peak = np.maximum(scores.max(-1), sink)
    safe_peak = np.where(np.isinf(peak), 0, peak)
    weights = np.exp(scores - safe_peak[..., None])
    total = weights.sum(-1) + np.exp(sink - safe_peak)
    with np.errstate(divide="ignore"):
        lse = safe_peak + np.log(total)
    total = np.where(total == 0, 1, total)
    sums = np.einsum("bnts,bsnh->btnh", rounded(weights), value) / total.swapaxes(1, 2)[..., None]
    weights /= total[..., None]
    out = rounded(sums if late else np.einsum("bnts,bsnh->btnh", rounded(weights), value))

    delta = np.einsum("btnh,btnh->bnt", d_out, out) - cotangents[1].astype(wide).swapaxes(1, 2)
    d_weights = np.einsum("btnh,bsnh->bnts", d_out, value)
    d_scores = weights * (d_weights - delta[..., None]) * (1 - tanh * tanh)
    d_products = rounded(d_scores) * scale if late else rounded(d_scores * scale)

    def groups(array):
        return array.reshape(*array.shape[:2], x.K, x.N // x.K, -1).sum(3)

    results = {
        "out": out,
        "lse": lse.swapaxes(1, 2),
        "d_query": np.einsum("bnts,bsnh->btnh", d_products, key),
        "d_key": groups(np.einsum("bnts,btnh->bsnh", d_products, query)),
        "d_value": groups(np.einsum("bnts,btnh->bsnh", rounded(weights), d_out)),
    }
    if case.bias:
        axes = tuple(axis for axis in range(4) if inputs["bias"].shape[axis] == 1)
        results["d_bias"] = d_scores.sum(axes, keepdims=True)
    if case.sinks:
        weight = np.exp(sink - np.where(np.isinf(lse), 0, lse))
        results["d_sinks"] = -np.einsum("bnt,bnt->n", weight, delta)
    return {
        name: (rounded(array) if name in ("d_query", "d_key", "d_value") else array).astype(np.float64)
        for name, array in results.items()
    }


def check_results(case: Case, results: dict[str, Any], expected: Arrays, plain: Sequence[Arrays]) -> None:
    """Asserts that results pass: the rule for every implementation with 16-bit inputs.

    For each result the greatest error is at most 2 times that of the plain computations in the same dtype (3 with a
    soft cap, whose tanh a kernel may approximate) plus 2 roundings of the expected value. In bfloat16 the cosine
    difference is at most 1e-5, or where the plain computation does not reach that (rows with one or two keys, whose
    gradient is a difference of nearly equal numbers) that many times its own. Infinities and NaN are where they are
    expected. Output and LSE are rounded to their own dtype. Gradients are rounded to that of the inputs, whatever their
    own: all of them use the rounded output, and those of sinks are so few that the plain computation's greatest error
    alone would be a matter of luck.

    Args:
      case: the case.
      results: from the implementation, in its dtypes.
      expected: from ``oracle``.
      plain: from ``yardstick``.
    """
    factor = 2 if case.option("logits_soft_cap") is None else 3
    input_dtype = np.dtype(results["out"].dtype)
    assert results.keys() == expected.keys()
    for name, array in results.items():
        dtype = input_dtype if name.startswith("d_") else np.dtype(array.dtype)
        actual, wanted = np.asarray(array, np.float64), expected[name]
        assert actual.shape == wanted.shape, f"{name}: shape {actual.shape}, expected {wanted.shape}"
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted), err_msg=f"{name}: NaN positions")
        infinite = np.isinf(wanted)
        np.testing.assert_array_equal(np.isinf(actual), infinite, err_msg=f"{name}: inf positions")
        np.testing.assert_array_equal(actual[infinite], wanted[infinite], err_msg=f"{name}: signs of inf")
        finite = np.isfinite(wanted)
        actual, wanted, baselines = actual[finite], wanted[finite], [one[name][finite] for one in plain]
        if not wanted.size:
            continue
        plain_error = max(np.abs(baseline - wanted).max() for baseline in baselines)
        half_ulp = rounding(wanted, dtype)
        bound = factor * plain_error + 2 * half_ulp
        error = np.abs(actual - wanted).max()
        assert error <= bound, f"{name}: error {error:.3g} above {bound:.3g} (half an ulp {half_ulp:.3g})"
        if input_dtype == ml_dtypes.bfloat16:
            difference = cosine_difference(actual, wanted)
            bound = max(1e-5, *(factor * cosine_difference(baseline, wanted) for baseline in baselines))
            assert difference <= bound, f"{name}: cosine difference {difference:.3g} above {bound:.3g}"


def rounding(array: np.ndarray, dtype: np.dtype) -> float:
    """The most that rounding to a dtype can change an element of the array: half an ulp of the greatest."""
    greatest = np.asarray(np.abs(array).max(), dtype)
    return float(np.nextafter(greatest, np.asarray(np.inf, dtype)).astype(np.float64) - greatest.astype(np.float64)) / 2


def cosine_difference(a: np.ndarray, b: np.ndarray) -> float:
    """1 - cos of the angle between two arrays; 0 if both are zero."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0:
        return 0.0 if np.array_equal(a, b) else 1.0
    return max(0.0, 1 - float(np.vdot(a, b)) / lengths)
