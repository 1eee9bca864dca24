"""Checks the arguments of flash_attention and brings them into one form. Everything is checked at trace time."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell.masks import MaskArguments

DTYPES = ("bfloat16", "float16", "float32", "float64")
ALIGNMENTS = ("top_left", "bottom_right")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call in their one form: everything has a batch axis, bias and mask are 4-D.

    Attributes:
      query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv].
      bias, mask: 4-D, broadcast to [B, N, T, S], or None.
      sinks: [N] or None.
      masks: causal, windows, lengths, segments.
      scale, logits_soft_cap: static numbers.
      has_batch: whether the caller's arrays had a batch axis.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    sinks: jax.Array | None
    masks: MaskArguments
    scale: float
    logits_soft_cap: float | None
    has_batch: bool


def check_arguments(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any,
    is_causal: Any,
    causal_alignment: Any,
    local_window_size: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    logits_soft_cap: Any,
    sinks: Any,
) -> Arguments:
    """Returns the arguments of flash_attention in their one form.

    Raises:
      ValueError: an argument is malformed; the message names it, what it was and what was expected.
    """
    query, key, value, has_batch = _check_inputs(query, key, value)
    B, T, N, H = query.shape
    S = key.shape[1]
    scores = (B, N, T, S)
    bias = _check_broadcast("bias", bias, scores)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias must have a floating dtype; got {bias.dtype}")
    mask = _check_broadcast("mask", mask, scores)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask must have dtype bool (True attends); got {mask.dtype}; add a float mask as bias")
    sinks = _as_array("sinks", sinks)
    if sinks is not None and (sinks.shape != (N,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(f"sinks must be floating and have shape [N] = ({N},); got {sinks.dtype}{list(sinks.shape)}")

    _check_bool("is_causal", is_causal)
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment must be one of {ALIGNMENTS}; got {causal_alignment!r}")
    left, right = _check_window(local_window_size)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        given, missing = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            given, missing = missing, given
        raise ValueError(f"query_segment_ids and key_value_segment_ids go together; got {given} without {missing}")
    masks = MaskArguments(
        B,
        T,
        S,
        left,
        right,
        causal_alignment == "bottom_right",
        _check_lengths("query_seq_lengths", query_seq_lengths, B, T, has_batch),
        _check_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S, has_batch),
        _check_segment_ids("query_segment_ids", query_segment_ids, (B, T), has_batch),
        _check_segment_ids("key_value_segment_ids", key_value_segment_ids, (B, S), has_batch),
    )
    scale = 1 / math.sqrt(H) if scale is None else _check_number("scale", scale)
    if logits_soft_cap is not None:
        logits_soft_cap = _check_number("logits_soft_cap", logits_soft_cap)
        if logits_soft_cap <= 0:
            raise ValueError(f"logits_soft_cap must be positive, or None for no cap; got {logits_soft_cap}")
    return Arguments(query, key, value, bias, mask, sinks, masks, scale, logits_soft_cap, has_batch)


def _check_inputs(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """Query, key and value with a batch axis, and whether they had one."""
    layouts = {"query": "[B, T, N, H]", "key": "[B, S, K, H]", "value": "[B, S, K, Hv]"}
    arrays = {}
    for name, given in (("query", query), ("key", key), ("value", value)):
        array = _as_array(name, given)
        if array is None or array.ndim not in (3, 4):
            shape = "None" if array is None else f"shape {list(array.shape)}"
            raise ValueError(f"{name} must have shape {layouts[name]}, or the same without B; got {shape}")
        if array.dtype.name not in DTYPES:
            raise ValueError(f"{name} must have one of the dtypes {', '.join(DTYPES)}; got {array.dtype}")
        arrays[name] = array
    first = arrays["query"]
    for name, array in arrays.items():
        if array.ndim != first.ndim:
            raise ValueError(f"{name} must have query's rank {first.ndim}; got shape {list(array.shape)}")
        if array.dtype != first.dtype:
            raise ValueError(f"{name} must have query's dtype {first.dtype}; got {array.dtype}")
    has_batch = first.ndim == 4
    query, key, value = (array if has_batch else array[None] for array in arrays.values())
    B, _, N, H = query.shape
    _, S, K, _ = key.shape
    if key.shape[0] != B or key.shape[3] != H:
        expected = f"query's B = {B} and H = {H}" if has_batch else f"query's H = {H}"
        raise ValueError(f"key must have {expected}; got shape {list(arrays['key'].shape)}")
    if value.shape[:3] != (B, S, K):
        expected = f"key's B, S, K = {B}, {S}, {K}" if has_batch else f"key's S, K = {S}, {K}"
        raise ValueError(f"value must have {expected}; got shape {list(arrays['value'].shape)}")
    if K == 0 or N == 0 or N % K:
        raise ValueError(f"query must have a multiple of key's heads; got N = {N} and K = {K}")
    for name, array in (("query", query), ("value", value)):
        if array.shape[3] == 0:
            raise ValueError(f"{name} must have a head dim of at least 1; got shape {list(arrays[name].shape)}")
    return query, key, value, has_batch


def _as_array(name: str, given: Any) -> jax.Array | None:
    if given is None:
        return None
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array; got {type(given).__name__}") from error


def _check_broadcast(name: str, given: Any, scores: tuple[int, ...]) -> jax.Array | None:
    """A bias or mask as a 4-D array, leading axes added."""
    array = _as_array(name, given)
    if array is None:
        return None
    shape = (1,) * (4 - array.ndim) + array.shape
    fits = len(shape) == 4 and all(have in (1, want) for have, want in zip(shape, scores, strict=True))
    if not fits:
        expected = f"broadcast to [B, N, T, S] = {list(scores)}"
        raise ValueError(f"{name} must {expected}; got shape {list(array.shape)}")
    return array.reshape(shape)


def _check_lengths(name: str, given: Any, batch: int, limit: int, has_batch: bool) -> jax.Array | None:
    """Sequence lengths as int32 [B], clipped to 0 and the axis's length; any integer dtype."""
    array = _as_array(name, given)
    if array is None:
        return None
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must have an integer dtype; got {array.dtype}")
    return jnp.clip(_check_shape(name, array, (batch,), has_batch), 0, limit).astype(jnp.int32)


def _check_segment_ids(name: str, given: Any, shape: tuple[int, int], has_batch: bool) -> jax.Array | None:
    """Segment ids as int32 of the given shape; wider dtypes are refused, since two ids could become one."""
    array = _as_array(name, given)
    if array is None:
        return None
    if not (jnp.issubdtype(array.dtype, jnp.integer) and np.can_cast(array.dtype, np.int32)):
        raise ValueError(f"{name} must have dtype int32; got {array.dtype}")
    return _check_shape(name, array, shape, has_batch).astype(jnp.int32)


def _check_shape(name: str, array: jax.Array, shape: tuple[int, ...], has_batch: bool) -> jax.Array:
    """The array if it has the shape; where the inputs have no batch axis it may lack that axis too."""
    expected = list(shape) if has_batch else list(shape[1:])
    fitted = array if has_batch or array.ndim == len(shape) else array[None]
    if fitted.shape != shape:
        raise ValueError(f"{name} must have shape {expected}; got {list(array.shape)}")
    return fitted


def _check_bool(name: str, given: Any) -> None:
    if not isinstance(given, bool | np.bool_):
        raise ValueError(f"{name} must be a Python bool, known when JAX traces; got {_describe(given)}")


def _check_number(name: str, given: Any) -> float:
    """A finite static number."""
    is_number = isinstance(given, numbers.Real | np.integer | np.floating) and not isinstance(given, bool)
    if not is_number:
        raise ValueError(f"{name} must be a Python number, known when JAX traces; got {_describe(given)}")
    if not math.isfinite(given):
        raise ValueError(f"{name} must be finite; got {given}")
    return float(given)


def _check_window(given: Any) -> tuple[int | None, int | None]:
    """The window as (left, right)."""
    if given is None:
        return None, None
    sides = (given, given) if _is_integer(given) else given
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise ValueError(f"local_window_size must be an int or a pair (left, right); got {_describe(given)}")
    for side in sides:
        if side is not None and (not _is_integer(side) or side < 0):
            what = "of ints that are not negative, or None for unbounded"
            raise ValueError(f"local_window_size must be an int or a pair (left, right) {what}; got {_describe(given)}")
    left, right = (None if side is None else int(side) for side in sides)
    return left, right


def _is_integer(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _describe(given: Any) -> str:
    if isinstance(given, jax.Array):
        return f"an array {given.dtype}{list(given.shape)}"
    return repr(given)
