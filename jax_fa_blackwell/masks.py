"""Mask arguments as intervals: query row i sees the keys lo(i) <= j < hi(i).

Causal masks of either alignment, windows, sequence lengths and packed segments are all intervals, because segments are
contiguous runs. Where nothing depends on array values the interval is affine in the row (two integers known when JAX
traces); otherwise it is two int32 arrays. Nothing here needs more than O(T + S) memory.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class MaskArguments:
    """The mask arguments of one call, validated and with a batch axis.

    Attributes:
      batch, query_length, key_value_length: B, T, S.
      left, right: the keys a row sees before and after its diagonal; None is unbounded. Causal is right = 0.
      bottom_right: whether the diagonal ends at the last key (else it begins at the first).
      query_seq_lengths, key_value_seq_lengths: int32 [B] within 0 and T or S, or None.
      query_segment_ids, key_value_segment_ids: int32 [B, T] and [B, S], both or neither; negative is padding.
    """

    batch: int
    query_length: int
    key_value_length: int
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    query_segment_ids: jax.Array | None = None
    key_value_segment_ids: jax.Array | None = None

    def transpose(self) -> MaskArguments:
        """The same mask with queries and keys in each other's role."""
        return MaskArguments(
            self.batch,
            self.key_value_length,
            self.query_length,
            self.right,
            self.left,
            self.bottom_right,
            self.key_value_seq_lengths,
            self.query_seq_lengths,
            self.key_value_segment_ids,
            self.query_segment_ids,
        )


@dataclasses.dataclass(frozen=True)
class KvIntervals:
    """The keys each query row sees: ``lo(i) <= j < hi(i)``.

    Either affine, ``lo = max(0, i + lower)`` and ``hi = min(S, i + upper)`` with two integers, or ``lo`` and ``hi`` as
    int32 arrays [B, T]. In the arrays a row that sees nothing has lo = S and hi = 0, so that the least lo and the
    greatest hi of a tile of rows are those of the rows that do see something.
    """

    query_length: int
    key_value_length: int
    lower: int = 0
    upper: int = 0
    lo: jax.Array | None = None
    hi: jax.Array | None = None

    @property
    def form(self) -> str:
        """Which AttentionSpec.mask_form this is: "none", "affine" or "rows"."""
        if self.lo is not None:
            return "rows"
        sees_all = self.lower <= 1 - self.query_length and self.upper >= self.key_value_length
        return "none" if sees_all else "affine"

    def rows(self, batch: int) -> tuple[jax.Array, jax.Array]:
        """The intervals as two int32 arrays [B, T], whatever the form."""
        if self.lo is not None and self.hi is not None:
            return self.lo, self.hi
        row = jnp.arange(self.query_length, dtype=jnp.int32)
        lo = jnp.maximum(0, row + self.lower)
        hi = jnp.minimum(self.key_value_length, row + self.upper)
        lo, hi = _canonical(lo, hi, self.key_value_length)
        shape = (batch, self.query_length)
        return jnp.broadcast_to(lo, shape), jnp.broadcast_to(hi, shape)


def kv_intervals(arguments: MaskArguments) -> KvIntervals:
    """Returns the interval of keys that each query row sees."""
    T, S = arguments.query_length, arguments.key_value_length
    has_lengths = arguments.query_seq_lengths is not None or arguments.key_value_seq_lengths is not None
    has_segments = arguments.query_segment_ids is not None
    if not has_lengths and not has_segments:
        offset = S - T if arguments.bottom_right else 0
        # Bounds beyond every key mean the same as unbounded ones; clipping keeps row + bound within int32.
        lower = -T if arguments.left is None else max(-T, offset - arguments.left)
        upper = S if arguments.right is None else min(S, offset + arguments.right + 1)
        return KvIntervals(T, S, min(lower, S), max(upper, -T))
    if T == 0 or S == 0 or arguments.batch == 0:
        empty = jnp.zeros((arguments.batch, T), jnp.int32)
        return KvIntervals(T, S, lo=empty, hi=empty)
    if has_segments:
        row, row_count, first, key_count, valid = _positions_in_segments(arguments)
    else:
        row = jnp.arange(T, dtype=jnp.int32)[None]
        row_count = _lengths(arguments.query_seq_lengths, T)[:, None]
        key_count = _lengths(arguments.key_value_seq_lengths, S)[:, None]
        first, valid = jnp.int32(0), row < row_count
    diagonal = first + row + (key_count - row_count if arguments.bottom_right else 0)
    lo, hi = first, first + key_count
    if arguments.left is not None:
        lo = jnp.maximum(lo, diagonal - min(arguments.left, T + S))
    if arguments.right is not None:
        hi = jnp.minimum(hi, diagonal + min(arguments.right, T + S) + 1)
    hi = jnp.where(valid, hi, 0)
    lo, hi = _canonical(lo, hi, S)
    shape = (arguments.batch, T)
    return KvIntervals(T, S, lo=jnp.broadcast_to(lo, shape), hi=jnp.broadcast_to(hi, shape))


def query_intervals(arguments: MaskArguments) -> KvIntervals:
    """Returns the interval of query rows that see each key: the bounds of a backward pass over keys.

    Within a pair of segments, row and key see each other or not by the difference of their positions, so the mask
    with the roles exchanged is a mask of the same kind.
    """
    return kv_intervals(arguments.transpose())


def _canonical(lo, hi, key_value_length: int) -> tuple[jax.Array, jax.Array]:
    """Gives every empty interval the form (S, 0)."""
    empty = lo >= hi
    return jnp.where(empty, key_value_length, lo), jnp.where(empty, 0, hi)


def _lengths(lengths: jax.Array | None, limit: int) -> jax.Array:
    if lengths is None:
        return jnp.full((1,), limit, jnp.int32)
    return lengths


def _positions_in_segments(arguments: MaskArguments):
    """For each row: its position and the rows in its segment, the first key and the keys of the segment of equal id."""
    T, S = arguments.query_length, arguments.key_value_length
    assert arguments.query_segment_ids is not None
    assert arguments.key_value_segment_ids is not None
    query_ids = _cut(arguments.query_segment_ids, arguments.query_seq_lengths, T)
    key_ids = _cut(arguments.key_value_segment_ids, arguments.key_value_seq_lengths, S)
    start, row_count = _find_runs(query_ids, query_ids)
    first, key_count = _find_runs(key_ids, query_ids)
    row = jnp.arange(T, dtype=jnp.int32) - start
    return row, row_count, first, key_count, query_ids >= 0


def _cut(ids: jax.Array, lengths: jax.Array | None, limit: int) -> jax.Array:
    """Makes everything at or beyond the sequence length padding."""
    if lengths is None:
        return ids
    return jnp.where(jnp.arange(limit) < lengths[:, None], ids, -1)


def _find_runs(ids: jax.Array, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the run of each wanted id begins in ``ids`` and how long it is; [B, S], [B, T] to two [B, T].

    A stable sort brings runs into ascending order without changing the order within them, so that runs may stand in
    any order of ids; a binary search then costs O((T + S) log S) and no [T, S] array.
    """

    def find(ids, wanted):
        order = jnp.argsort(ids, stable=True).astype(jnp.int32)
        ascending = ids[order]
        begin = jnp.searchsorted(ascending, wanted, side="left").astype(jnp.int32)
        end = jnp.searchsorted(ascending, wanted, side="right").astype(jnp.int32)
        # An id that does not occur has begin == end, perhaps one past the last key; its start is never used.
        start = order[jnp.minimum(begin, ids.shape[0] - 1)]
        return start, end - begin

    return jax.vmap(find)(ids, wanted)


def block_spans(intervals: KvIntervals, first_rows: np.ndarray, rows: int, block: int):
    """The span of KV blocks that each block of query rows needs.

    Args:
      intervals: the mask.
      first_rows: the first row of each block of query rows, known at trace time.
      rows: query rows of a block.
      block: keys of a KV block; block j has the keys from j * block on.

    Returns:
      begin, end: the first KV block and one past the last, for each block of rows: numpy arrays for an affine mask,
      else JAX arrays; and the greatest number of blocks in a span, an int.
    """
    S = intervals.key_value_length
    blocks = -(-S // block)
    if intervals.lo is not None and intervals.hi is not None:
        index = first_rows[:, None] + np.arange(rows)
        least = jnp.min(intervals.lo[:, index], axis=(0, 2))
        greatest = jnp.max(intervals.hi[:, index], axis=(0, 2))
        begin, end = least // block, -(-greatest // block)
        return begin, jnp.maximum(begin, end), blocks
    least = np.maximum(0, first_rows + intervals.lower)
    greatest = np.clip(first_rows + rows - 1 + intervals.upper, 0, S)
    begin, end = np.minimum(least // block, blocks), -(-greatest // block)
    end = np.maximum(begin, end)
    return begin, end, int(np.max(end - begin, initial=0))
