"""Blockwise attention in pure JAX: O(T + S) temporary memory, forward and backward, on every platform.

The forward pass is online softmax (Milakov and Gimelshein, arXiv:1805.02867) over blocks of keys for each block of
query rows; the backward pass recomputes the weights of each block from the log-sum-exp, as in FlashAttention-2 (Dao,
arXiv:2307.08691). Blocks that no row sees are skipped: outside a block of rows' span by the bounds of its loop, inside
it by a ``lax.cond``. Only scans are used, no loops of dynamic length, so that the backward pass can be differentiated.

Within a block, rows of one key and value head stand together: scores are [B, K, G, rows, keys] with G = N / K, and
keys and values are never repeated for the heads of a group.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell.masks import KvIntervals, block_spans
from jax_fa_blackwell.operands import Gradients, Operands
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.sharding import vary_alike, varying_axes

Array = jax.Array

QUERY_BLOCK = 256
"""Query rows of a block; chosen on CPUs, where a block's scores must stay in cache (benchmarks/xla_memory.py)."""
KV_BLOCK = 256
"""Keys of a block."""


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Blocks along one axis. The last block ends at the axis's end and so may overlap the one before it."""

    length: int
    block: int

    @property
    def count(self) -> int:
        return -(-self.length // self.block)

    @property
    def is_ragged(self) -> bool:
        return self.length % self.block != 0

    def start(self, index):
        """Where block ``index`` begins."""
        return jnp.minimum(index * self.block, self.length - self.block)


class _Call:
    """One call's blocks: slicing of operands, visibility and scores, shared by both passes."""

    def __init__(self, spec: AttentionSpec, operands: Operands):
        self.spec = spec
        self.dtype = jnp.dtype(spec.accumulator_dtype)
        self.varying = varying_axes(operands)
        self.rows = _Axis(spec.query_length, min(QUERY_BLOCK, spec.query_length))
        self.keys = _Axis(spec.key_value_length, min(KV_BLOCK, spec.key_value_length))
        # Heads before lengths, once for the whole call, so that every block is a plain batched matrix.
        self.query = operands.query.swapaxes(1, 2)
        self.key = operands.key.swapaxes(1, 2)
        self.value = operands.value.swapaxes(1, 2)
        self.bias, self.mask = operands.bias, operands.mask
        lower, upper = spec.lower, spec.upper
        if spec.mask_form == "none":
            lower, upper = -spec.query_length, spec.key_value_length
        self.intervals = KvIntervals(spec.query_length, spec.key_value_length, lower, upper, operands.lo, operands.hi)
        first_rows = np.minimum(np.arange(self.rows.count) * self.rows.block, self.rows.length - self.rows.block)
        self.begin, self.end, self.span = block_spans(self.intervals, first_rows, self.rows.block, self.keys.block)

    def spans(self) -> tuple[Array, Array, Array]:
        """What the scan over blocks of rows iterates over: block index, its first KV block and one past its last."""
        return jnp.arange(self.rows.count), jnp.asarray(self.begin), jnp.asarray(self.end)

    @property
    def all_blocks_run(self) -> bool:
        """Whether every iteration of the loops has work, so that no condition is needed."""
        known = isinstance(self.begin, np.ndarray)
        return known and bool(np.all(self.end - self.begin == self.span))

    def query_block(self, array: Array, index) -> Array:
        """Rows of [B, N, T, X] as [B, K, G * rows, X]."""
        block = jax.lax.dynamic_slice_in_dim(array, self.rows.start(index), self.rows.block, axis=2)
        return block.reshape(block.shape[0], self.spec.key_value_heads, -1, *block.shape[3:])

    def key_block(self, array: Array, index) -> Array:
        """Keys of [B, K, S, X] as [B, K, keys, X]."""
        return jax.lax.dynamic_slice_in_dim(array, self.keys.start(index), self.keys.block, axis=2)

    def bias_slice(self, shape: tuple[int, ...], row_index, key_index):
        """Starts and sizes of the part of a [B, N, T, S]-broadcastable array that a pair of blocks needs."""
        starts = [0, 0, self.rows.start(row_index), self.keys.start(key_index)]
        sizes = list(shape)
        for axis, blocks in ((2, self.rows), (3, self.keys)):
            if shape[axis] == 1:
                starts[axis] = 0
            else:
                sizes[axis] = blocks.block
        return starts, sizes

    def bias_block(self, array: Array, row_index, key_index) -> Array:
        """The part of a [B, N, T, S]-broadcastable array as an array that broadcasts to [B, K, G, rows, keys]."""
        block = jax.lax.dynamic_slice(array, *self.bias_slice(array.shape, row_index, key_index))
        batch, heads, rows, keys = block.shape
        groups = (1, 1) if heads == 1 else (self.spec.key_value_heads, self.spec.group_size)
        return block.reshape(batch, *groups, rows, keys)

    def visible(self, row_index, key_index, *, each_row_once: bool) -> Array | None:
        """What is visible in a pair of blocks, broadcasting to [B, K, G, rows, keys]; None if everything is.

        With each_row_once, rows that an earlier block has handled are hidden, as keys always are.
        """
        row_start, key_start = self.rows.start(row_index), self.keys.start(key_index)
        rows = (row_start + jnp.arange(self.rows.block))[:, None]
        keys = (key_start + jnp.arange(self.keys.block))[None, :]
        parts = []
        if self.intervals.form == "rows":
            assert self.intervals.lo is not None
            assert self.intervals.hi is not None
            cut = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=row_start, slice_size=self.rows.block, axis=1
            )
            lo, hi = (cut(bound)[:, None, None, :, None] for bound in (self.intervals.lo, self.intervals.hi))
            parts.append((keys >= lo) & (keys < hi))
        elif self.intervals.form == "affine":
            distance = keys - rows
            parts.append((distance >= self.intervals.lower) & (distance < self.intervals.upper))
        if self.keys.is_ragged:
            parts.append(keys >= key_index * self.keys.block)
        if self.rows.is_ragged and each_row_once:
            parts.append(rows >= row_index * self.rows.block)
        if self.mask is not None:
            parts.append(self.bias_block(self.mask, row_index, key_index))
        if not parts:
            return None
        visible = functools.reduce(jnp.logical_and, parts)
        return visible.reshape((1,) * (5 - visible.ndim) + visible.shape)

    def scores(self, query: Array, key: Array, row_index, key_index, visible) -> tuple[Array, Array | None]:
        """Scores [B, K, G, rows, keys] of a pair of blocks, and the tanh of the soft cap if there is one."""
        scores = _matmul("bkrh,bksh->bkrs", query, key, self.dtype) * self.spec.scale
        scores = self.split_group(scores)
        if self.bias is not None:
            bias = self.bias_block(self.bias, row_index, key_index).astype(self.dtype)
            # tanh(NaN) would make the second derivative NaN, masked or not.
            scores = scores + (bias if visible is None else jnp.where(visible, bias, 0))
        if self.spec.logits_soft_cap is None:
            return scores, None
        tanh = jnp.tanh(scores / self.spec.logits_soft_cap)
        return tanh * self.spec.logits_soft_cap, tanh

    def split_group(self, array: Array) -> Array:
        """[B, K, G * rows, ...] as [B, K, G, rows, ...]."""
        return array.reshape(*array.shape[:2], self.spec.group_size, self.rows.block, *array.shape[3:])

    def merge_group(self, array: Array) -> Array:
        """[B, K, G, rows, ...] as [B, K, G * rows, ...]."""
        return array.reshape(*array.shape[:2], -1, *array.shape[4:])


def forward(spec: AttentionSpec, operands: Operands, *, result_dtype: str | None = None) -> tuple[Array, Array]:
    """Computes attention block by block.

    Args:
      spec: the call.
      operands: its arrays.
      result_dtype: of the output; None is query's.

    Returns:
      The output [B, T, N, Hv] and the log-sum-exp [B, T, N] in the accumulator dtype.
    """
    result_dtype = result_dtype or spec.dtype
    call_dtype = jnp.dtype(spec.accumulator_dtype)
    B, T, N, Hv = spec.batch, spec.query_length, spec.query_heads, spec.value_head_dim
    sinks = jnp.full((N,), -jnp.inf, call_dtype) if operands.sinks is None else operands.sinks.astype(call_dtype)
    if spec.is_empty:
        return jnp.zeros((B, T, N, Hv), result_dtype), jnp.broadcast_to(sinks, (B, T, N))
    call = _Call(spec, operands)
    sink = sinks.reshape(1, spec.key_value_heads, spec.group_size, 1)

    def row_block(carry, item):
        out, lse = carry
        row_index, begin, end = item
        query = call.query_block(call.query, row_index)

        def step(state, key_index):
            return _online_softmax_step(call, query, state, row_index, key_index)

        def visit(state, offset):
            key_index = begin + offset
            if call.all_blocks_run:
                return step(state, key_index), None
            return jax.lax.cond(key_index < end, step, lambda state, _: state, state, key_index), None

        shape = (B, spec.key_value_heads, spec.group_size, call.rows.block)
        start = jnp.full(shape, -jnp.inf, call.dtype), jnp.zeros(shape, call.dtype), jnp.zeros((*shape, Hv), call.dtype)
        start = vary_alike(start, call.varying)
        (peak, total, weighted), _ = jax.lax.scan(visit, start, jnp.arange(call.span))
        block_out, block_lse = _finish(peak, total, weighted, sink)
        at = call.rows.start(row_index)
        block_out = block_out.reshape(B, N, call.rows.block, Hv).astype(out.dtype)
        out = jax.lax.dynamic_update_slice_in_dim(out, block_out, at, axis=2)
        block_lse = block_lse.reshape(B, N, call.rows.block)
        lse = jax.lax.dynamic_update_slice_in_dim(lse, block_lse, at, axis=2)
        return (out, lse), None

    start = jnp.zeros((B, N, T, Hv), result_dtype), jnp.zeros((B, N, T), call.dtype)
    (out, lse), _ = jax.lax.scan(row_block, vary_alike(start, call.varying), call.spans())
    return out.swapaxes(1, 2), lse.swapaxes(1, 2)


def _online_softmax_step(call: _Call, query: Array, state, row_index, key_index):
    """Adds one KV block to the running maximum, the running sum and the unnormalised output of a block of rows."""
    peak, total, weighted = state
    key, value = call.key_block(call.key, key_index), call.key_block(call.value, key_index)
    visible = call.visible(row_index, key_index, each_row_once=False)
    scores, _ = call.scores(query, key, row_index, key_index, visible)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
        value = _clean(value, _seen(visible))
    # The result does not depend on the peak, so neither does its derivative; and -inf - -inf stays out of that.
    new_peak = jax.lax.stop_gradient(jnp.maximum(peak, jnp.max(scores, axis=-1)))
    safe_peak = jnp.where(new_peak == -jnp.inf, 0, new_peak)
    weights = jnp.exp(scores - safe_peak[..., None])
    decay = jnp.exp(peak - safe_peak)
    total = total * decay + jnp.sum(weights, axis=-1)
    product = _matmul("bkrs,bksh->bkrh", call.merge_group(weights).astype(value.dtype), value, call.dtype)
    return new_peak, total, weighted * decay[..., None] + call.split_group(product)


def _finish(peak: Array, total: Array, weighted: Array, sink: Array) -> tuple[Array, Array]:
    """Normalises a block of rows; the sink enters here, once, as one more term of the sum."""
    full_peak = jax.lax.stop_gradient(jnp.maximum(peak, sink))
    safe_peak = jnp.where(full_peak == -jnp.inf, 0, full_peak)
    decay = jnp.exp(peak - safe_peak)
    total = total * decay + jnp.exp(sink - safe_peak)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, safe_peak + jnp.log(total))
    return weighted * (decay / total)[..., None], lse


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: Array,
    lse: Array,
    out_cotangent: Array,
    lse_cotangent: Array,
    *,
    result_dtype: str | None = None,
) -> Gradients:
    """Computes the cotangents of query, key, value, bias and sinks block by block.

    Args:
      spec: the call.
      operands: its arrays.
      out: [B, T, N, Hv], from ``forward``.
      lse: [B, T, N], from ``forward``.
      out_cotangent: [B, T, N, Hv].
      lse_cotangent: [B, T, N].
      result_dtype: of the cotangents of query, key and value; None is theirs.

    Returns:
      The cotangents of the operands.
    """
    result_dtype = result_dtype or spec.dtype
    if spec.is_empty:
        # No key is seen, so only the sinks matter, and they are the LSE.
        return Gradients(
            jnp.zeros_like(operands.query, result_dtype),
            jnp.zeros_like(operands.key, result_dtype),
            jnp.zeros_like(operands.value, result_dtype),
            None if operands.bias is None else jnp.zeros_like(operands.bias),
            None if operands.sinks is None else jnp.sum(lse_cotangent, axis=(0, 1)).astype(operands.sinks.dtype),
        )
    call = _Call(spec, operands)
    call.varying |= varying_axes((out_cotangent, lse_cotangent))
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.query_heads, spec.key_value_heads
    sinks = -jnp.inf if operands.sinks is None else operands.sinks.astype(call.dtype)
    # A row whose LSE is its sink's saw nothing: its output is constant and its cotangent must not count, not even NaN.
    saw_nothing = lse <= sinks
    out_cotangent = jnp.where(saw_nothing[..., None], 0, out_cotangent)
    # d loss / d score = weight * (dP - delta), where delta holds the normalisation's part and the LSE's cotangent.
    delta = jnp.sum(out_cotangent.astype(call.dtype) * out.astype(call.dtype), axis=-1) - lse_cotangent
    safe_lse = jnp.where(lse == -jnp.inf, 0, lse)
    d_sinks = None
    if operands.sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks - safe_lse) * delta, axis=(0, 1)).astype(operands.sinks.dtype)
    d_out, delta, safe_lse = (array.swapaxes(1, 2) for array in (out_cotangent, delta, safe_lse))

    def row_block(carry, item):
        d_query_all, keys_carry = carry
        row_index, begin, end = item
        rows = tuple(call.query_block(array, row_index) for array in (call.query, d_out, safe_lse, delta))

        def visit(state, offset):
            key_index = begin + offset
            parts: Any
            d_query, (d_key, d_value, d_bias) = state
            step = functools.partial(_gradient_step, call, rows, row_index)
            if call.all_blocks_run:
                parts = step(key_index)
            else:
                shapes = jax.eval_shape(step, key_index)
                nothing = jax.tree.map(lambda x: vary_alike(jnp.zeros(x.shape, x.dtype), varying_axes(x)), shapes)
                parts = jax.lax.cond(key_index < end, step, lambda _: nothing, key_index)
            at = call.keys.start(key_index)
            d_key = _add_block(d_key, parts.key, (0, 0, at, 0))
            d_value = _add_block(d_value, parts.value, (0, 0, at, 0))
            if d_bias is not None:
                d_bias = _add_block(d_bias, parts.bias, call.bias_slice(d_bias.shape, row_index, key_index)[0])
            return (d_query + parts.query, (d_key, d_value, d_bias)), None

        start = vary_alike(jnp.zeros(rows[0].shape, call.dtype), call.varying), keys_carry
        (d_query, keys_carry), _ = jax.lax.scan(visit, start, jnp.arange(call.span))
        d_query = d_query.reshape(B, N, call.rows.block, spec.head_dim).astype(d_query_all.dtype)
        return (_add_block(d_query_all, d_query, (0, 0, call.rows.start(row_index), 0)), keys_carry), None

    d_key = jnp.zeros((B, K, S, spec.head_dim), call.dtype)
    d_value = jnp.zeros((B, K, S, spec.value_head_dim), call.dtype)
    d_bias = None if operands.bias is None else jnp.zeros(operands.bias.shape, call.dtype)
    start = jnp.zeros((B, N, T, spec.head_dim), result_dtype), (d_key, d_value, d_bias)
    (d_query, (d_key, d_value, d_bias)), _ = jax.lax.scan(row_block, vary_alike(start, call.varying), call.spans())
    d_query, d_key, d_value = (array.swapaxes(1, 2).astype(result_dtype) for array in (d_query, d_key, d_value))
    if d_bias is not None:
        assert operands.bias is not None
        d_bias = d_bias.astype(operands.bias.dtype)
    return Gradients(d_query, d_key, d_value, d_bias, d_sinks)


def _gradient_step(call: _Call, rows, row_index, key_index) -> Gradients:
    """One pair of blocks' parts of the cotangents of query, key, value and bias."""
    query, d_out, lse, delta = rows
    key, value = call.key_block(call.key, key_index), call.key_block(call.value, key_index)
    visible = call.visible(row_index, key_index, each_row_once=True)
    if visible is not None:
        # A weight of zero does not hide NaN in what it multiplies.
        query, d_out = _clean(query, _sees(call, visible)), _clean(d_out, _sees(call, visible))
        key, value = _clean(key, _seen(visible)), _clean(value, _seen(visible))
    scores, tanh = call.scores(query, key, row_index, key_index, visible)
    exponent = scores - call.split_group(lse)[..., None]
    if visible is not None:
        exponent = jnp.where(visible, exponent, -jnp.inf)
    weights = jnp.exp(exponent)
    d_weights = call.split_group(_matmul("bkrh,bksh->bkrs", d_out, value, call.dtype))
    d_scores = weights * (d_weights - call.split_group(delta)[..., None])
    if tanh is not None:
        d_scores = d_scores * (1 - tanh * tanh)
    if visible is not None:
        d_scores = jnp.where(visible, d_scores, 0)
    d_bias = None if call.bias is None else _sum_to_bias(call, d_scores)
    weights = call.merge_group(weights).astype(d_out.dtype)
    d_products = call.merge_group(d_scores * call.spec.scale).astype(query.dtype)
    return Gradients(
        query=_matmul("bkrs,bksh->bkrh", d_products, key, call.dtype),
        key=_matmul("bkrs,bkrh->bksh", d_products, query, call.dtype),
        value=_matmul("bkrs,bkrh->bksh", weights, d_out, call.dtype),
        bias=d_bias,
    )


def _sum_to_bias(call: _Call, d_scores: Array) -> Array:
    """Sums [B, K, G, rows, keys] over the axes that bias broadcasts along; 4-D."""
    assert call.bias is not None
    B, K, G, rows, keys = d_scores.shape
    d_bias = d_scores.reshape(B, K * G, rows, keys)
    axes = tuple(axis for axis in range(4) if call.bias.shape[axis] == 1)
    return jnp.sum(d_bias, axis=axes, keepdims=True)


def _seen(visible: Array) -> Array:
    """Keys of a block that some row of the group sees: [B or 1, K or 1, keys]."""
    return jnp.any(visible, axis=(2, 3))


def _sees(call: _Call, visible: Array) -> Array:
    """Rows of a block that see some key: [B or 1, K or 1, G * rows]."""
    sees = jnp.any(visible, axis=-1)
    shape = (*sees.shape[:2], call.spec.group_size, call.rows.block)
    return call.merge_group(jnp.broadcast_to(sees, shape))


def _clean(array: Array, keep: Array) -> Array:
    return jnp.where(keep[..., None], array, 0)


def _add_block(array: Array, part: Array, starts) -> Array:
    old = jax.lax.dynamic_slice(array, starts, part.shape)
    return jax.lax.dynamic_update_slice(array, old + part, starts)


def _matmul(equation: str, a: Array, b: Array, dtype) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)
