"""Attention over sequences that are sharded over devices: to be called in ``jax.shard_map``.

``ring_attention`` keeps queries where they are and passes keys and values around a ring of devices (Liu, Zaharia and
Abbeel, Ring Attention, arXiv:2310.01889); each step attends to one device's keys, and partial results are merged by
their log-sum-exp. ``ulysses_attention`` exchanges sequence shards for head shards and back (Jacobs et al., DeepSpeed
Ulysses, arXiv:2309.14509). The first scales to any number of devices and hides its communication behind the steps; the
second needs at least as many query heads as devices, and runs one unchanged attention call.

A mask is one interval of global keys for each query row (``masks``). The keys of a device are in ascending order of
their global positions, so what a row sees of them is again one interval: it begins after as many of them as come
before the global bound. Every step is therefore an ordinary call with per-row intervals.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell.arguments import Arguments, check_arguments
from jax_fa_blackwell.attention import CHECKPOINT_NAME, choose, flash_attention, make_spec, passes
from jax_fa_blackwell.differentiation import Passes, attend
from jax_fa_blackwell.masks import KvIntervals, kv_intervals, query_intervals
from jax_fa_blackwell.operands import Gradients, Operands
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.sharding import vary_alike, varying_axes

ORDERS = ("contiguous", "zigzag")


def zigzag_permutation(length: int, devices: int) -> np.ndarray:
    """The order of positions that gives causal attention equal work on every device.

    The sequence is cut into ``2 * devices`` pieces; device d gets pieces d and ``2 * devices - 1 - d``, one from either
    end, so that early rows, which see little, stand beside late rows, which see much.

    Args:
      length: positions of the sequence; a multiple of ``2 * devices``.
      devices: the size of the mesh axis that the sequence is sharded over.

    Returns:
      int [length]: ``array[permutation]``, sharded into ``devices`` equal parts, is in zigzag order. ``numpy.argsort``
      of it leads back.

    Raises:
      ValueError: the length is not such a multiple.
    """
    if devices < 1 or length % (2 * devices):
        raise ValueError(f"length must be a multiple of 2 * devices = {2 * devices}; got {length}")
    pieces = np.arange(length).reshape(2 * devices, -1)
    return np.stack([pieces[:devices], pieces[devices:][::-1]], axis=1).reshape(-1)


def to_zigzag(array: Any, devices: int, axis: int = 1) -> jax.Array:
    """An array with one of its axes, a sequence, in zigzag order; see ``zigzag_permutation``."""
    return jnp.take(array, zigzag_permutation(np.shape(array)[axis], devices), axis=axis)


def from_zigzag(array: Any, devices: int, axis: int = 1) -> jax.Array:
    """The inverse of ``to_zigzag``."""
    return jnp.take(array, np.argsort(zigzag_permutation(np.shape(array)[axis], devices)), axis=axis)


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str,
    order: str = "contiguous",
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    implementation: str | None = None,
    checkpoint_name: str = CHECKPOINT_NAME,
) -> Any:
    """Exact attention of a sequence that is sharded over a mesh axis, in ``jax.shard_map``.

    Shapes are those of one device of n: T and S are the local lengths, and the sequences n * T and n * S long. Every
    device passes its keys and values on n - 1 times; the next are on their way while the present ones are used. The
    backward pass rebuilds all weights from the global log-sum-exp and passes the gradients of keys and values, in
    float32, along with them. A device's memory is O(T + S), forward and backward, beside two or, for segments, some
    int32 arrays as long as the whole sequence.

    Partial outputs and gradients are merged in float32. Steps of "xla" return them so; those of kernels are in query's
    dtype.

    Args:
      query: [B, T, N, H] or [T, N, H]; as for ``flash_attention``.
      key: [B, S, K, H] or [S, K, H]; N is a multiple of K.
      value: [B, S, K, Hv] or [S, K, Hv].
      axis_name: the mesh axis, manual in the ``jax.shard_map`` around.
      order: which positions a device d holds: "contiguous", the d-th of n parts; "zigzag", parts d and 2n - 1 - d of
        2n, which balances causal work (``to_zigzag`` brings arrays into this order). The same for queries and keys.
      scale: as for ``flash_attention``.
      is_causal: as for ``flash_attention``, on positions in the whole sequence.
      causal_alignment: the same.
      local_window_size: the same.
      query_seq_lengths: integers [B], lengths in the whole sequence, the same on every device of the axis.
      key_value_seq_lengths: integers [B], the same.
      query_segment_ids: int32 [B, T], the local part.
      key_value_segment_ids: int32 [B, S], the local part, given exactly if query_segment_ids is.
      logits_soft_cap: as for ``flash_attention``.
      sinks: floating [N], the same on every device of the axis.
      return_lse: whether to return the log-sum-exp too.
      implementation: what runs a step: "cuda", "xla", or None for the best available.
      checkpoint_name: of the local output and LSE, for ``jax.checkpoint`` policies.

    Returns:
      The local output [B, T, N, Hv] in query's dtype; with return_lse a pair of it and the local LSE [B, T, N]. Both
      are differentiable as those of ``flash_attention`` are; what was replicated gets the sum of its gradients over
      the axis, as usual in ``jax.shard_map``.

    Raises:
      ValueError: an argument is malformed; the message names it, what it was and what was expected.
      NotImplementedError: implementation="cuda" and no kernel takes a step; the message names the limit. Or a
        derivative that kernels do not have.
      NameError: the axis is not manual here.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}; got {order!r}")
    if implementation not in ("cuda", "xla", None):
        raise ValueError(f"implementation must be 'cuda', 'xla' or None; got {implementation!r}")
    if not isinstance(return_lse, bool):
        raise ValueError(f"return_lse must be a Python bool, known when JAX traces; got {return_lse!r}")
    arguments = check_arguments(
        query,
        key,
        value,
        None,
        None,
        scale=scale,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=local_window_size,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    devices = jax.lax.axis_size(axis_name)
    T, S = arguments.query.shape[1], arguments.key.shape[1]
    for name, length in (("query", T), ("key", S)):
        if order == "zigzag" and length % 2:
            raise ValueError(f"{name} must have an even local length for order='zigzag'; got {length}")
    ring = _Ring(axis_name, devices, order)
    lengths = {"query_seq_lengths": (query_seq_lengths, T), "key_value_seq_lengths": (key_value_seq_lengths, S)}
    lengths = {
        name: _check_lengths(name, given, arguments, devices * extent) for name, (given, extent) in lengths.items()
    }
    masks = dataclasses.replace(
        arguments.masks,
        query_length=devices * T,
        key_value_length=devices * S,
        query_segment_ids=ring.gather(arguments.masks.query_segment_ids),
        key_value_segment_ids=ring.gather(arguments.masks.key_value_segment_ids),
        **lengths,
    )
    intervals = kv_intervals(masks)
    form = "none" if intervals.form == "none" else "rows"
    local = KvIntervals(T, S, lower=-T, upper=S)
    spec = dataclasses.replace(make_spec(arguments, local, deterministic=False), mask_form=form, has_sinks=False)
    choice = choose(spec, implementation)
    rows = columns = None
    if form == "rows":
        here = jax.lax.axis_index(axis_name)
        rows = _bounds_at(intervals, ring.positions(here, T), arguments.masks.batch)
        if choice.name == "cuda":
            columns = _bounds_at(query_intervals(masks), ring.positions(here, S), arguments.masks.batch)
    call = _Call(choice.name, spec, ring)
    operands = _RingOperands(arguments.query, arguments.key, arguments.value, arguments.sinks, rows, columns)
    axes = varying_axes(operands) | varying_axes(jax.lax.axis_index(axis_name))
    out, lse = attend(_ring_passes(choice.name), call, checkpoint_name, vary_alike(operands, axes))
    if not arguments.has_batch:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def ulysses_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: str,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Exact attention of a sequence that is sharded over a mesh axis, by exchanging sequence shards for head shards.

    Shapes are those of one device of n: T and S are the local lengths; device d holds the d-th of n parts. While it
    attends, a device has N / n heads of the whole sequence: its memory is O(n * T * N / n), as much as its shard. If
    the key heads are no multiple of n, each is copied lcm(K, n) / K times first.

    Args:
      query: [B, T, N, H]; N is a multiple of n.
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      axis_name: the mesh axis, manual in the ``jax.shard_map`` around.
      query_segment_ids: int32 [B, T], the local part.
      key_value_segment_ids: int32 [B, S], the local part.
      sinks: floating [N], the same on every device of the axis.
      return_lse: whether to return the log-sum-exp too.
      **options: the other keyword arguments of ``flash_attention``, for the whole sequence. Sequence lengths must be
        the same on every device of the axis.

    Returns:
      The local output [B, T, N, Hv] in query's dtype; with return_lse a pair of it and the local LSE [B, T, N].
      Differentiable as ``flash_attention`` is.

    Raises:
      ValueError: an argument is malformed, or the query heads are no multiple of the devices.
      NotImplementedError: implementation="cuda" and no kernel takes the call.
      NameError: the axis is not manual here.
    """
    for name in ("bias", "mask"):
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None: ulysses_attention takes no arrays of [T, S]")
    devices = jax.lax.axis_size(axis_name)
    shapes = {"query": np.shape(query), "key": np.shape(key), "value": np.shape(value)}
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(f"{name} must have a batch axis and 4 axes in all; got shape {list(shape)}")
    N, K = shapes["query"][2], shapes["key"][2]
    if N % devices:
        raise ValueError(
            f"query must have a multiple of the {devices} devices of mesh axis {axis_name!r} as heads, each of which"
            f" gets as many; got {N}. ring_attention has no such limit"
        )
    if K == 0 or N % K or shapes["value"][2] != K:
        raise ValueError(f"query must have a multiple of the heads of key and value; got N = {N}, K = {K}")
    copies = math.lcm(K, devices) // K

    def to_heads(array, copies=1):
        array = jnp.repeat(array, copies, axis=2) if copies > 1 else array
        return jax.lax.all_to_all(array, axis_name, split_axis=2, concat_axis=1, tiled=True)

    def gather(ids):
        return None if ids is None else jax.lax.all_gather(ids, axis_name, axis=1, tiled=True)

    if sinks is not None:
        if np.shape(sinks) != (N,):
            raise ValueError(f"sinks must have shape [N] = ({N},); got {list(np.shape(sinks))}")
        start = jax.lax.axis_index(axis_name) * (N // devices)
        sinks = jax.lax.dynamic_slice_in_dim(jnp.asarray(sinks), start, N // devices)
    out, lse = flash_attention(
        to_heads(query),
        to_heads(key, copies),
        to_heads(value, copies),
        query_segment_ids=gather(query_segment_ids),
        key_value_segment_ids=gather(key_value_segment_ids),
        sinks=sinks,
        return_lse=True,
        **options,
    )
    back = functools.partial(jax.lax.all_to_all, axis_name=axis_name, split_axis=1, concat_axis=2, tiled=True)
    return (back(out), back(lse)) if return_lse else back(out)


def _check_lengths(name: str, given: Any, arguments: Arguments, limit: int) -> jax.Array | None:
    """Sequence lengths, which count in the whole sequence, as int32 [B]."""
    if given is None:
        return None
    array = jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must have an integer dtype; got {array.dtype}")
    if not arguments.has_batch and array.ndim == 0:
        array = array[None]
    if array.shape != (arguments.masks.batch,):
        expected = [arguments.masks.batch] if arguments.has_batch else []
        raise ValueError(f"{name} must have shape {expected}; got {list(array.shape)}")
    return jnp.clip(array, 0, limit).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """A mesh axis and which positions of a sequence each of its devices holds."""

    axis_name: str
    devices: int
    order: str

    def pieces(self, device: Any, length: int) -> list[tuple[Any, int]]:
        """Start and length of each run of positions that a device holds of a sequence, given its local length."""
        if self.order == "contiguous":
            return [(device * length, length)]
        half = length // 2
        return [(device * half, half), ((2 * self.devices - 1 - device) * half, half)]

    def positions(self, device: Any, length: int) -> jax.Array:
        """The global positions that a device holds, ascending: int32 [length]."""
        return jnp.concatenate(
            [start + jnp.arange(size, dtype=jnp.int32) for start, size in self.pieces(device, length)]
        )

    def count_before(self, bounds: jax.Array, device: Any, length: int) -> jax.Array:
        """How many of a device's positions come before each of some global ones."""
        parts = [jnp.clip(bounds - start, 0, size) for start, size in self.pieces(device, length)]
        return functools.reduce(jnp.add, parts)

    def gather(self, ids: jax.Array | None) -> jax.Array | None:
        """The whole sequence's segment ids [B, n * T], in order, of every device's [B, T]."""
        if ids is None:
            return None
        gathered = jax.lax.all_gather(ids, self.axis_name, axis=1, tiled=True)
        return gathered if self.order == "contiguous" else from_zigzag(gathered, self.devices)

    def pass_on(self, tree: Any) -> Any:
        """What the previous device has."""
        pairs = [(device, (device + 1) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, self.axis_name, pairs), tree)

    def source(self, step: Any) -> Any:
        """The device whose keys are here in a step."""
        return (jax.lax.axis_index(self.axis_name) - step) % self.devices


class _Call(NamedTuple):
    """The static part of a call; the spec is that of one step."""

    implementation: str
    spec: AttentionSpec
    ring: _Ring


class _RingOperands(NamedTuple):
    """Local arrays. Rows and columns are the global intervals of keys that each row sees, of rows that see each key."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    sinks: jax.Array | None
    rows: tuple[jax.Array, jax.Array] | None
    columns: tuple[jax.Array, jax.Array] | None


class _Keys(NamedTuple):
    """What travels around the ring."""

    key: jax.Array
    value: jax.Array
    columns: tuple[jax.Array, jax.Array] | None


def _bounds_at(intervals: KvIntervals, positions: jax.Array, batch: int) -> tuple[jax.Array, jax.Array]:
    """The intervals of some rows, int32 [B, rows]."""
    if intervals.lo is not None and intervals.hi is not None:
        return jnp.take(intervals.lo, positions, axis=1), jnp.take(intervals.hi, positions, axis=1)
    lo = jnp.maximum(0, positions + intervals.lower)
    hi = jnp.minimum(intervals.key_value_length, positions + intervals.upper)
    shape = (batch, *positions.shape)
    return jnp.broadcast_to(lo, shape), jnp.broadcast_to(hi, shape)


def _local_bounds(ring: _Ring, bounds: Any, device: Any, length: int) -> tuple[Any, Any]:
    """Global intervals as intervals of a device's positions; empty ones are (length, 0), as ``masks`` has them."""
    if bounds is None:
        return None, None
    lo, hi = (ring.count_before(bound, device, length) for bound in bounds)
    empty = lo >= hi
    return jnp.where(empty, length, lo), jnp.where(empty, 0, hi)


def _step_operands(call: _Call, operands: _RingOperands, keys: _Keys, step: Any) -> Operands:
    spec, ring = call.spec, call.ring
    lo, hi = _local_bounds(ring, operands.rows, ring.source(step), spec.key_value_length)
    here = jax.lax.axis_index(ring.axis_name)
    key_lo, key_hi = _local_bounds(ring, keys.columns, here, spec.query_length)
    return Operands(operands.query, keys.key, keys.value, lo=lo, hi=hi, key_lo=key_lo, key_hi=key_hi)


def _step_options(call: _Call) -> dict[str, str]:
    """What makes a step return its parts in the dtype that they are merged in; kernels cannot."""
    return {"result_dtype": call.spec.accumulator_dtype} if call.implementation == "xla" else {}


def _forward(call: _Call, operands: _RingOperands) -> tuple[jax.Array, jax.Array]:
    spec, ring = call.spec, call.ring
    wide = jnp.dtype(spec.accumulator_dtype)
    sinks = -jnp.inf if operands.sinks is None else operands.sinks.astype(wide)
    shape = (spec.batch, spec.query_length, spec.query_heads)
    # A sink is a key whose value is zero: the merge begins with it.
    state = jnp.zeros((*shape, spec.value_head_dim), wide), jnp.broadcast_to(jnp.asarray(sinks, wide), shape)
    state = vary_alike(state, varying_axes(operands))

    run = functools.partial(passes(call.implementation).forward, spec, **_step_options(call))

    def merge_step(state, keys, step):
        return _merge(state, run(_step_operands(call, operands, keys, step)))

    def visit(carry, step):
        state, keys = carry
        coming = ring.pass_on(keys)  # before the step, which hides it
        return (merge_step(state, keys, step), coming), None

    keys = _Keys(operands.key, operands.value, operands.columns)
    last = ring.devices - 1
    if last:
        (state, keys), _ = jax.lax.scan(visit, (state, keys), jnp.arange(last))
    out, lse = merge_step(state, keys, last)
    return out.astype(spec.dtype), lse


def _merge(state: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Outputs over two disjoint sets of keys as the output over both; rows that see nothing have an LSE of -inf."""
    (out, lse), (part_out, part_lse) = state, part
    peak = jnp.maximum(lse, part_lse)
    safe_peak = jnp.where(peak == -jnp.inf, 0, peak)
    weight, part_weight = jnp.exp(lse - safe_peak), jnp.exp(part_lse - safe_peak)
    total = weight + part_weight
    safe_total = jnp.where(total == 0, 1, total)
    merged = out * (weight / safe_total)[..., None] + part_out.astype(out.dtype) * (part_weight / safe_total)[..., None]
    return merged, jnp.where(total == 0, -jnp.inf, safe_peak + jnp.log(safe_total))


def _backward(
    call: _Call, operands: _RingOperands, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> Gradients:
    spec, ring = call.spec, call.ring
    wide = jnp.dtype(spec.accumulator_dtype)
    d_sinks = None
    sinks = -jnp.inf if operands.sinks is None else operands.sinks.astype(wide)
    # A row whose LSE is its sink's saw nothing: its output is constant and its cotangent must not count, not even NaN.
    d_out = jnp.where((lse <= sinks)[..., None], 0, d_out)
    if operands.sinks is not None:
        delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
        d_sinks = -jnp.sum(jnp.exp(sinks - lse) * delta, axis=(0, 1)).astype(operands.sinks.dtype)

    run = functools.partial(passes(call.implementation).backward, spec, **_step_options(call))

    def gradients_of(keys, step):
        """The step's gradients of query and of its keys and values, to be summed in the accumulator dtype."""
        gradients = run(_step_operands(call, operands, keys, step), out, lse, d_out, d_lse)
        return gradients.query.astype(wide), (gradients.key.astype(wide), gradients.value.astype(wide))

    def add(some, others):
        return jax.tree.map(jnp.add, some, others)

    def visit(carry, step):
        d_query, d_keys, keys = carry
        coming = ring.pass_on(keys)  # both before the step, which hides them
        d_keys = ring.pass_on(d_keys)
        step_query, step_keys = gradients_of(keys, step)
        return (d_query + step_query, add(d_keys, step_keys), coming), None

    keys, last = _Keys(operands.key, operands.value, operands.columns), ring.devices - 1
    coming = ring.pass_on(keys) if last else keys
    d_query, d_keys = gradients_of(keys, 0)
    if last > 1:
        (d_query, d_keys, coming), _ = jax.lax.scan(visit, (d_query, d_keys, coming), jnp.arange(1, last))
    if last:
        d_keys = ring.pass_on(d_keys)
        step_query, step_keys = gradients_of(coming, last)
        d_query = d_query + step_query
        d_keys = ring.pass_on(add(d_keys, step_keys))  # home
    d_query, d_key, d_value = (array.astype(spec.dtype) for array in (d_query, *d_keys))
    return Gradients(d_query, d_key, d_value, None, d_sinks)


@functools.cache
def _ring_passes(implementation: str) -> Passes:
    return Passes(implementation, _forward, _backward, passes(implementation).has_forward_mode)
