"""Attention by the GPU kernels: launch plans, cubins and custom calls, forward and backward.

Only the branch for CUDA launches kernels; on another platform the same program computes the same with ``xla``. Which
kernels exist is stated in ``plan/``; what they do not take never comes here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa_blackwell import cubins, custom_call, lowering, mapped_queries, xla
from jax_fa_blackwell.blocks import blocks_of_groups
from jax_fa_blackwell.delta import delta
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.operands import Gradients, Operands
from jax_fa_blackwell.plan import attention as attention_plan
from jax_fa_blackwell.plan.launch import LaunchPlan
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target
from jax_fa_blackwell.sharding import partition

MakePlan = Callable[[AttentionSpec, str], LaunchPlan]


def forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, Hv] and float32 LSE [B, T, N]."""
    if spec.is_empty:
        return xla.forward(spec, operands)
    out, lse = _batched(_forward, spec)(_with_batched_sinks(spec, operands))
    return out, lse


def backward(
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    grad_out: jax.Array,
    grad_lse: jax.Array,
) -> Gradients:
    """Gradients of query, key, value and sinks from the cotangents of both results."""
    if spec.is_empty:
        return xla.backward(spec, operands, out, lse, grad_out, grad_lse)
    grad_lse = grad_lse.astype(jnp.float32)
    batched = _with_batched_sinks(spec, operands)
    d_query, d_key, d_value, deltas = _batched(_backward, spec)(batched, out, lse, grad_out, grad_lse)
    d_sinks = None
    if operands.sinks is not None:
        sinks = operands.sinks.astype(jnp.float32)
        # A row whose LSE is its sink's saw nothing: its output is constant and its cotangent must not count.
        deltas = jnp.where(lse <= sinks, -grad_lse, deltas.swapaxes(1, 2))
        d_sinks = -jnp.sum(jnp.exp(sinks - lse) * deltas, axis=(0, 1)).astype(operands.sinks.dtype)
    return Gradients(d_query, d_key, d_value, None, d_sinks)


def _with_batched_sinks(spec: AttentionSpec, operands: Operands) -> Operands:
    """Sinks as float32 [B, N], so that a vmap over them too is one launch."""
    if operands.sinks is None:
        return operands
    sinks = jnp.broadcast_to(operands.sinks.astype(jnp.float32), (spec.batch, spec.query_heads))
    return operands._replace(sinks=sinks)


@functools.cache
def _batched(function: Callable, spec: AttentionSpec, flags: tuple[tuple[bool, ...], ...] = ()) -> Callable:
    """``function(spec, ...)`` partitioned over devices, with a rule for vmap by which one launch runs a mapped axis.

    Mapped axes are folded within each device's part, so that they, too, may be sharded.

    Args:
      function: ``_forward`` or ``_backward``.
      spec: one call, without mapped axes.
      flags: for each mapped axis, the outermost first, which of the flat arguments have it as a leading axis.
    """

    @jax.custom_batching.custom_vmap
    def run(*arguments):
        return _partitioned(function, spec, flags)(*arguments)

    @run.def_vmap
    def _map(axis_size, in_batched, *arguments):
        del axis_size
        results = _batched(function, spec, (tuple(jax.tree.leaves(in_batched)), *flags))(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return run


_OPERAND_AXES: dict[str, Any] = {"query": "b t n h", "key": "b s k h", "value": "b s k v"}
_INTERVAL_AXES: dict[str, Any] = {"lo": "b t", "hi": "b t", "key_lo": "b s", "key_hi": "b s"}


def _partitioned(function: Callable, spec: AttentionSpec, flags: tuple[tuple[bool, ...], ...]) -> Callable:
    """The function partitioned over devices by mapped axes, batch and heads."""
    axes = Operands(**_OPERAND_AXES, **(_INTERVAL_AXES if spec.mask_form == "rows" else {}))
    if spec.has_sinks:
        axes = axes._replace(sinks="b n")  # pyright: ignore[reportArgumentType]
    results = ("b t n v", "b t n")
    operands = (axes,)
    if function is _backward:
        operands, results = (axes, *results, *results), ("b t n h", "b s k h", "b s k v", "b n t")
    if not flags:
        return partition(function, spec, operands, results)

    def mapped(axes, has_axis):
        return " ".join([f"a{level}" for level, has in enumerate(has_axis) if has] + [axes])

    leaves, tree = jax.tree.flatten(operands)
    leaves = [mapped(axes, has_axis) for axes, has_axis in zip(leaves, zip(*flags, strict=True), strict=True)]
    results = [mapped(axes, (True,) * len(flags)) for axes in results]
    return partition(functools.partial(_fold, function, flags), spec, jax.tree.unflatten(tree, leaves), results)


def _fold(function: Callable, flags: tuple[tuple[bool, ...], ...], spec: AttentionSpec, *arguments):
    """Runs all elements of the mapped axes at once: those of queries alone as more heads, the others in the batch."""
    leaves, tree = jax.tree.flatten(arguments)
    of_leaves = list(zip(*flags, strict=True))
    levels = range(len(flags))
    extents = [
        next(leaf.shape[sum(has[:level])] for leaf, has in zip(leaves, of_leaves, strict=True) if has[level])
        for level in levels
    ]

    def shares_keys(level):
        operands = jax.tree.unflatten(tree, flags[level])[0]
        return not (operands.key or operands.value or operands.lo or operands.hi)

    heads = [level for level in levels if function is _forward and shares_keys(level)]
    batch = [level for level in levels if level not in heads]

    def merge(leaf, has_axis):
        """The mapped axes as at most two, of heads and of the batch; each is there if the array has any of its axes."""
        present = [level for level in levels if has_axis[level]]
        rest = leaf.shape[len(present) :]
        order = [present.index(level) for level in (*heads, *batch) if has_axis[level]]
        leaf = leaf.transpose(*order, *range(len(present), leaf.ndim))
        kinds = [kind for kind in (heads, batch) if any(has_axis[level] for level in kind)]
        ones = [extents[level] if has_axis[level] else 1 for kind in kinds for level in kind]
        full = [extents[level] for kind in kinds for level in kind]
        sizes = [math.prod(extents[level] for level in kind) for kind in kinds]
        return jnp.broadcast_to(leaf.reshape(*ones, *rest), (*full, *rest)).reshape(*sizes, *rest)

    merged = jax.tree.unflatten(tree, list(map(merge, leaves, of_leaves)))
    run = function
    for kind, fold in ((batch, _fold_into_batch), (heads, _fold_into_heads)):
        if kind:
            is_mapped = jax.tree.unflatten(tree, [any(has[level] for level in kind) for has in of_leaves])
            run = functools.partial(fold, run, math.prod(extents[level] for level in kind), is_mapped)
    order = [*heads, *batch]
    results = []
    for result in run(spec, *merged):
        rest = result.shape[bool(heads) + bool(batch) :]
        result = result.reshape(*(extents[level] for level in order), *rest)
        results.append(result.transpose(*map(order.index, levels), *range(len(levels), result.ndim)))
    return tuple(results)


def _fold_into_batch(function: Callable, size: int, is_mapped: Any, spec: AttentionSpec, *arguments):
    """A mapped axis, axis 0 of the arrays that have it, becomes part of the batch."""

    def fold(array, mapped):
        array = array if mapped else jnp.broadcast_to(array, (size, *array.shape))
        return array.reshape(-1, *array.shape[2:])

    larger = dataclasses.replace(spec, batch=spec.batch * size)
    results = function(larger, *jax.tree.map(fold, arguments, is_mapped))
    return [result.reshape(size, spec.batch, *result.shape[1:]) for result in results]


def _fold_into_heads(function: Callable, size: int, is_mapped: Any, spec: AttentionSpec, operands: Operands):
    """Queries with a mapped axis, axis 0, over keys and values without it.

    This is for the forward only. The gradients of keys and values are one for each element of the mapped axis, whereas
    a head's gradient is the sum over its group; and arrays as large as a copy of keys and values are what the backward
    has to return. Where their sum is wanted, ``differentiation`` folds before it comes here.
    """
    K, (mapped,) = spec.key_value_heads, is_mapped
    sinks = operands.sinks
    if sinks is not None:
        sinks = sinks if mapped.sinks else jnp.broadcast_to(sinks, (size, *sinks.shape))
        sinks = mapped_queries.fold(sinks, K, sinks.ndim - 2)
    # At least one argument has the axis, and if it is the sinks alone queries are as good as mapped.
    query = operands.query if mapped.query else jnp.broadcast_to(operands.query, (size, *operands.query.shape))
    operands = operands._replace(query=mapped_queries.fold(query, K, query.ndim - 3), sinks=sinks)
    out, lse = function(dataclasses.replace(spec, query_heads=size * spec.query_heads), operands)
    return [mapped_queries.unfold(out, size, K, out.ndim - 2), mapped_queries.unfold(lse, size, K, lse.ndim - 1)]


def _forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, ...]:
    B, T, N = spec.batch, spec.query_length, spec.query_heads
    results = (
        jax.ShapeDtypeStruct((B, T, N, spec.value_head_dim), operands.query.dtype),
        jax.ShapeDtypeStruct((B, T, N), jnp.float32),
    )
    arrays = _arrays(spec, operands)
    if operands.sinks is not None:
        arrays["sinks"] = operands.sinks

    return execute(make_forward_plan, spec, arrays, results, _xla_forward, (operands,))


def _backward(spec: AttentionSpec, operands: Operands, out, lse, grad_out, grad_lse) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, and delta [B, N, T]."""
    deltas = delta(out, grad_out, grad_lse)
    arrays = _arrays(spec, operands) | {"grad_out": grad_out, "lse": lse.swapaxes(1, 2), "delta": deltas}
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands.query, operands.key, operands.value)]

    rest = (operands, out, lse, grad_out, grad_lse)
    return *execute(make_backward_plan, spec, arrays, results, _xla_backward, rest), deltas


def _arrays(spec: AttentionSpec, operands: Operands) -> dict[str, jax.Array]:
    """What forward and backward are given, by the names of ``plan.attention.Argument``."""
    arrays = {"query": operands.query, "key": operands.key, "value": operands.value}
    if spec.mask_form == "rows":
        intervals = operands.lo, operands.hi, operands.key_lo, operands.key_hi
        for name, array in zip(("query_low", "query_high", "key_low", "key_high"), intervals, strict=True):
            assert array is not None
            arrays[name] = array
    return arrays


def _xla_forward(spec: AttentionSpec, operands: Operands):
    return _entries(xla.forward, spec, operands)


def _xla_backward(spec: AttentionSpec, operands: Operands, *others):
    return _entries(xla.backward, spec, operands, *others)[:3]


def _entries(function: Callable, spec: AttentionSpec, operands: Operands, *others):
    """A function of ``xla`` on operands whose sinks have a batch axis: entry by entry if there are any."""
    if operands.sinks is None:
        return function(spec, operands, *others)
    arrays = jax.tree.map(lambda x: x[:, None], (operands._replace(sinks=None), *others))
    arrays = (arrays[0]._replace(sinks=operands.sinks), *arrays[1:])
    results = jax.vmap(functools.partial(function, dataclasses.replace(spec, batch=1)))(*arrays)
    return jax.tree.map(lambda x: x[:, 0] if x.ndim > 2 else x, results)


def execute(
    make_plan: MakePlan,
    spec: AttentionSpec,
    arrays: Mapping[str, jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    fallback: Callable[..., Any],
    fallback_arguments: tuple,
) -> tuple[jax.Array, ...]:
    """Runs a plan where the program is lowered for CUDA, and ``fallback(spec, ...)`` elsewhere.

    Neither is traced before it is lowered: a program pays for the one it runs.

    Args:
      make_plan: makes the launch plan for one architecture; of module level.
      spec: the call.
      arrays: what the plan's arguments are made from, by the names of ``plan.attention.Argument``.
      results: shapes and dtypes of the plan's results.
      fallback: the same computation in JAX; of module level.
      fallback_arguments: its arguments after the spec.
    """
    leaves, tree = jax.tree.flatten(fallback_arguments)
    launch, run = (make_plan, spec, tuple(arrays), tuple(results)), (fallback, spec, len(arrays), tree)

    def like(*everything):
        # Zeros that depend on every argument, and so vary over every mesh axis that an argument varies over.
        anchor = sum(jnp.zeros((), x.dtype) * x.ravel()[0] for x in map(jnp.asarray, everything) if x.size)
        return tuple(jnp.zeros(result.shape, result.dtype) + jnp.asarray(anchor, result.dtype) for result in results)

    return jax.lax.platform_dependent(
        *arrays.values(),
        *leaves,
        cuda=lambda *everything: lowering.deferred(_launch, launch, everything, like),
        default=lambda *everything: lowering.deferred(_fall_back, run, everything, like),
    )


def _launch(static, *everything):
    """Traced when lowering for CUDA: one program for each architecture that the kernels take the call on."""
    make_plan, spec, names, results = static
    arches = [arch for arch in lowering.arches() if attention_plan.supports(spec, get_target(arch)) is None]
    if not arches:
        raise NotImplementedError(f"no kernel takes the call on {', '.join(lowering.arches())}: {spec.describe()}")
    given = [attention_plan.arguments(spec, get_target(arch), "grad_out" in names) for arch in arches]
    plan, wanted = attention_plan.merge([(make_plan(spec, arch), g) for arch, g in zip(arches, given, strict=True)])
    arrays = make_arguments(wanted, dict(zip(names, everything, strict=False)))
    workspaces = [jax.ShapeDtypeStruct((size // 4,), jnp.float32) for size in plan.result_bytes[len(results) :]]
    return tuple(custom_call.call(plan, arrays, [*results, *workspaces])[: len(results)])


def make_arguments(
    arguments: Sequence[attention_plan.Argument], arrays: Mapping[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """The arrays that a plan is given: those named, and lists of work made from the intervals."""

    def make(argument: attention_plan.Argument) -> jax.Array:
        if isinstance(argument, str):
            return arrays[argument]
        side = "key" if argument.of_keys else "query"
        return blocks_of_groups(arrays[f"{side}_low"], arrays[f"{side}_high"], argument.rows, argument.columns)

    return tuple(map(make, arguments))


def _fall_back(static, *everything):
    """Traced when lowering for another platform."""
    fallback, spec, count, tree = static
    return tuple(fallback(spec, *jax.tree.unflatten(tree, everything[count:])))


def _find(name: str, arch: str) -> tuple[str, str, str]:
    """(kernel name, sha256, symbol) of a variant's cubin, which the executor can find from here on."""
    cubin = cubins.find(registry.get_variant(name), arch)
    custom_call.add_cubin_directory(cubin.folder)
    return name, cubin.sha256, cubin.symbol


def make_forward_plan(spec: AttentionSpec, arch: str, find: Callable = _find) -> LaunchPlan:
    """The forward's launch plan for one architecture."""
    return attention_plan.launch_forward(spec, get_target(arch), functools.partial(find, arch=arch))


def make_backward_plan(spec: AttentionSpec, arch: str, find: Callable = _find) -> LaunchPlan:
    """The backward's launch plan for one architecture."""
    return attention_plan.launch_backward(spec, get_target(arch), functools.partial(find, arch=arch))
