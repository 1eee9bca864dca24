"""Queries with a vmap axis over keys without one: more query heads for each key head, and no copy of the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_fa_blackwell.operands import Gradients, Operands
from jax_fa_blackwell.plan.spec import AttentionSpec


def fold(array: jax.Array, key_heads: int, axis: int) -> jax.Array:
    """[A, ..., N, ...] as [..., A * N, ...], with the queries of a key head together; ``axis`` is N's in the result."""
    size, heads = array.shape[0], array.shape[axis + 1]
    array = array.reshape(*array.shape[: axis + 1], key_heads, heads // key_heads, *array.shape[axis + 2 :])
    array = jnp.moveaxis(array, 0, axis + 1)
    return array.reshape(*array.shape[:axis], size * heads, *array.shape[axis + 3 :])


def unfold(array: jax.Array, size: int, key_heads: int, axis: int) -> jax.Array:
    """The inverse of ``fold``."""
    group = array.shape[axis] // size // key_heads
    array = array.reshape(*array.shape[:axis], key_heads, size, group, *array.shape[axis + 1 :])
    array = jnp.moveaxis(array, axis + 1, 0)
    return array.reshape(*array.shape[: axis + 1], key_heads * group, *array.shape[axis + 3 :])


def backward(
    function: Callable[..., Gradients],
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
) -> Gradients:
    """Gradients of queries with a mapped axis, and of keys and values the sum over it, which a group's gradient is.

    Args:
      function: a backward pass, of (spec, operands, out, lse, d_out, d_lse).
      spec: the call of one element of the mapped axis.
      operands: its arrays; query, and sinks if there are any, have the mapped axis as axis 0, nothing else has it, and
        there is no bias or mask.
      out: [A, ..., B, T, N, Hv], with the mapped axis, as all that follow; more axes after it are the function's.
      lse: [A, ..., B, T, N].
      d_out: like out.
      d_lse: like lse.
    """
    size, K = len(out), spec.key_value_heads
    larger = dataclasses.replace(spec, query_heads=size * spec.query_heads)
    sinks = None if operands.sinks is None else fold(operands.sinks, K, operands.sinks.ndim - 2)
    operands = operands._replace(query=fold(operands.query, K, operands.query.ndim - 3), sinks=sinks)
    out, d_out = (fold(array, K, array.ndim - 3) for array in (out, d_out))
    lse, d_lse = (fold(array, K, array.ndim - 2) for array in (lse, d_lse))
    gradients = function(larger, operands, out, lse, d_out, d_lse)
    d_query, d_sinks = gradients.query, gradients.sinks
    d_sinks = None if d_sinks is None else unfold(d_sinks, size, K, d_sinks.ndim - 1)
    return gradients._replace(query=unfold(d_query, size, K, d_query.ndim - 2), sinks=d_sinks)
