"""The definition of flash_attention in plain jnp: quadratic memory, gradients by autodiff. The oracle of every test.

It shares nothing with the other implementations: the mask is built here from the definition of its arguments, not from
intervals. Softmax is computed in float32, or in float64 for float64 inputs; 16-bit inputs are widened first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa_blackwell.masks import MaskArguments


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    sinks: jax.Array | None,
    mask_arguments: MaskArguments,
    *,
    scale: float,
    logits_soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention as it is defined.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H]; N is a multiple of K.
      value: [B, S, K, Hv].
      bias: broadcasts to [B, N, T, S]; added to the scaled scores.
      mask: bool, broadcasts to [B, N, T, S]; False hides.
      sinks: [N]; ``exp(sink)`` more in the softmax denominator.
      mask_arguments: causal, windows, lengths, segments.
      scale: factor of the scores.
      logits_soft_cap: c of ``c * tanh(s / c)``, applied after scale and bias, before masks.

    Returns:
      The output [B, T, N, Hv] in query's dtype, and the natural log-sum-exp [B, T, N] in float32 (float64 for float64).
    """
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    accumulator = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    visible = dense_mask(mask_arguments)[:, None]  # [B or 1, 1, T, S]
    if mask is not None:
        visible = visible & mask
    visible = jnp.broadcast_to(visible, (B, N, T, S)).reshape(B, K, N // K, T, S)
    sees = jnp.any(visible, axis=-1)  # [B, K, G, T]: rows with a key
    seen = jnp.any(visible, axis=(2, 3))  # [B, K, S]: keys with a row

    # Both the inputs and the scores are cleaned where nothing is visible: 0 * NaN is NaN, in sums and in gradients.
    q = query.astype(accumulator).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k = key.astype(accumulator).transpose(0, 2, 1, 3)
    v = value.astype(accumulator).transpose(0, 2, 1, 3)
    q = jnp.where(sees[..., None], q, 0)
    k = jnp.where(seen[..., None], k, 0)
    v = jnp.where(seen[..., None], v, 0)

    scores = jnp.einsum("bkgth,bksh->bkgts", q, k, precision="highest") * scale
    if bias is not None:
        dense_bias = jnp.broadcast_to(bias, (B, N, T, S)).reshape(scores.shape)
        scores = scores + jnp.where(visible, dense_bias.astype(accumulator), 0)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)

    # The maximum only keeps exp in range: the result does not depend on it, so neither does the gradient.
    peak = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(accumulator).reshape(1, K, N // K, 1), peak.shape)
        peak = jnp.maximum(peak, sink)
    peak = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    weights = jnp.exp(jnp.where(visible, scores - peak[..., None], -jnp.inf))
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sink - peak)
    has_weight = total > 0
    total = jnp.where(has_weight, total, 1)
    out = jnp.einsum("bkgts,bksh->bkgth", weights / total[..., None], v, precision="highest")
    out = jnp.where(sees[..., None], out, 0)
    lse = jnp.where(has_weight, peak + jnp.log(total), -jnp.inf)
    out = out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, Hv).astype(query.dtype)
    return out, lse.transpose(0, 3, 1, 2).reshape(B, T, N)


def dense_mask(arguments: MaskArguments) -> jax.Array:
    """The bool mask [B or 1, T, S] that the mask arguments stand for, from their definition."""
    T, S = arguments.query_length, arguments.key_value_length
    query_ids = _ids(arguments.query_segment_ids, arguments.query_seq_lengths, T)
    key_ids = _ids(arguments.key_value_segment_ids, arguments.key_value_seq_lengths, S)
    equal = query_ids[:, :, None] == key_ids[:, None, :]
    visible = equal & (query_ids >= 0)[:, :, None]
    diagonal = _position(query_ids)
    if arguments.bottom_right:
        rows = jnp.sum(query_ids[:, :, None] == query_ids[:, None, :], axis=-1)
        diagonal = diagonal + jnp.sum(equal, axis=-1) - rows
    distance = _position(key_ids)[:, None, :] - diagonal[:, :, None]
    if arguments.left is not None:
        visible = visible & (distance >= -min(arguments.left, T + S))
    if arguments.right is not None:
        visible = visible & (distance <= min(arguments.right, T + S))
    return visible


def _ids(ids: jax.Array | None, lengths: jax.Array | None, limit: int) -> jax.Array:
    """Segment ids [B or 1, L]; one segment where there are none; -1 at and beyond the length."""
    ids = jnp.zeros((1, limit), jnp.int32) if ids is None else ids
    return ids if lengths is None else jnp.where(jnp.arange(limit) < lengths[:, None], ids, -1)


def _position(ids: jax.Array) -> jax.Array:
    """The number of earlier members of each position's segment."""
    earlier = jnp.tri(ids.shape[1], k=-1, dtype=bool)
    return jnp.sum((ids[:, :, None] == ids[:, None, :]) & earlier, axis=-1, dtype=jnp.int32)
