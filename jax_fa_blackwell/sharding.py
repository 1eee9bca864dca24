"""Attention over several devices: batch and heads are partitioned, without any collective.

Three ways lead a sharded array to an attention call, and each is met in its own way:

- a mesh with explicit axes (``jax.sharding.AxisType.Explicit``): shardings are part of the types, so the call becomes
  a ``jax.shard_map`` over them (``map_explicit``);
- ``jax.shard_map`` around the call: everything is local already, and only how types vary over the mesh must agree
  (``vary_alike``), which also gives replicated operands the sum of their gradients;
- shardings that the compiler propagates (Shardy): pure JAX code is partitioned by the compiler, and kernels, whose
  custom calls it would gather for in silence, by a rule (``partition``, ``jax.experimental.custom_partitioning``).

Lengths and head dims are never partitioned here; ``context_parallel`` is for lengths.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_blackwell.plan.spec import AttentionSpec

_AXES = {
    "query": "b t n h",
    "key": "b s k h",
    "value": "b s k v",
    "bias": "b n t s",
    "mask": "b n t s",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "query_segment_ids": "b t",
    "key_value_segment_ids": "b s",
    "sinks": "n",
}
"""The axes of flash_attention's arrays."""

_NAMES = {"t": "query length", "s": "key and value length", "h": "head dim", "v": "value head dim"}
_HEADS = ("n", "k")


def varying_axes(tree: Any) -> frozenset:
    """The mesh axes, manual in the ``jax.shard_map`` around, that any array of a tree varies over."""
    return frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(tree)))


def vary_alike(tree: Any, axes: frozenset | None = None) -> Any:
    """The same arrays, each typed as varying over the given mesh axes, or over all that any of them varies over.

    Nothing is done at run time. In the gradient an array that was replicated over an axis gets the sum over it.
    """
    axes = varying_axes(tree) if axes is None else axes

    def vary(array):
        missing = tuple(sorted(axes - _varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)


def _varying(array: Any) -> frozenset:
    kind = array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
    manual = getattr(kind, "mat", None) or getattr(kind, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def gather_warning(arrays: Mapping[str, jax.Array]) -> str | None:
    """Which length or head dim is sharded, of arrays outside ``jax.jit``, so that the compiler gathers for "xla".

    Within ``jax.jit`` shardings that the compiler propagates are known to it alone: a callback into Python would tell
    them, but a program that has one can be neither exported nor found in JAX's compilation cache.
    """
    has_batch = arrays["query"].ndim == 4
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer) or not isinstance(array.sharding, NamedSharding):
            continue
        for letter, axes in zip(_letters(name, array.ndim, has_batch), array.sharding.spec, strict=False):
            if axes and letter in _NAMES:
                return _length_is_sharded(name, letter, axes, "the compiler gathers")
    return None


def kernel_limit() -> str | None:
    """Why kernels cannot run in the ``jax.shard_map`` around, or None if they can."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual, automatic = (
        tuple(name for name, kind in kinds.items() if kind == wanted) for wanted in (AxisType.Manual, AxisType.Auto)
    )
    if not (manual and automatic):
        return None
    return (
        f"kernels are not partitioned in a jax.shard_map that has mesh axes {manual!r} manual and leaves {automatic!r}"
        " to the compiler; give all of them to axis_names, or leave axis_names out"
    )


def map_explicit(
    function: Callable[..., Any], arrays: Mapping[str, jax.Array], *, has_lse: bool, checkpoint_name: str
) -> Any:
    """``function(**arrays)`` on each device's part, if the arrays are sharded over explicit mesh axes.

    Args:
      function: takes the arrays by name and returns the output, or it and the LSE.
      arrays: flash_attention's arrays that are given, by its argument names.
      has_lse: whether the LSE is returned.
      checkpoint_name: of the results within the function.

    Returns:
      The results, sharded like query along batch and heads; None if no array is sharded over an explicit axis.

    Raises:
      ValueError: a length or head dim is sharded, two arrays disagree, or the key heads cannot follow the query heads.
    """
    types = {name: jax.typeof(array) for name, array in arrays.items()}
    explicit = {name: _explicit_spec(aval) for name, aval in types.items()}
    sharded = [name for name, spec in explicit.items() if any(spec)]
    if not sharded:
        return None
    mesh = types[sharded[0]].sharding.mesh
    letters = {name: _letters(name, types[name].ndim, types["query"].ndim == 4) for name in arrays}
    found: dict[str, tuple[str, Any]] = {}
    for name in sharded:
        for letter, extent, axes in zip(letters[name], types[name].shape, explicit[name], strict=True):
            if axes is None:
                continue
            if letter in _NAMES:
                raise ValueError(_length_is_sharded(name, letter, axes))
            kind = "n" if letter in _HEADS else letter
            first, agreed = found.setdefault(kind, (name, axes))
            if agreed != axes:
                what = "batch" if kind == "b" else "heads"
                raise ValueError(
                    f"{name} has its {what} sharded over {axes!r}, but {first} over {agreed!r}; they must agree, or one"
                    f" of them be replicated (jax.sharding.reshard); got {name} of shape {extent}"
                )
    batch, heads = (found[kind][1] if kind in found else None for kind in ("b", "n"))
    query_type, key_type = types["query"], types["key"]
    _check_heads(query_type.shape[-2], key_type.shape[-2], heads, mesh)
    extents = dict(zip(letters["query"], query_type.shape, strict=True))
    if batch is not None and extents["b"] % _size(batch, mesh):
        raise ValueError(f"query's batch {extents['b']} is not a multiple of the mesh axes {batch!r}")

    def spec(name: str) -> P:
        entries = {"b": batch, "n": heads, "k": heads}
        return P(
            *(
                entries.get(letter) if extent != 1 or name not in ("bias", "mask") else None
                for letter, extent in zip(letters[name], types[name].shape, strict=True)
            )
        )

    specs = {name: spec(name) for name in arrays}
    placed = {name: jax.sharding.reshard(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    out = specs["query"]
    axis_names = {
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    }
    run = lambda local: function(**local)  # noqa: E731
    if AxisType.Manual in mesh.axis_types:
        # A jax.shard_map in another hands residuals that it computes out over the other's axes too, which is not legal
        # (JAX 0.10); arguments and results are handed on as they are.
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(checkpoint_name))
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(out, P(*out[:-1])) if has_lse else out,
        axis_names=axis_names,
    )(placed)


def _explicit_spec(aval: Any) -> tuple[Any, ...]:
    """For each axis of an array the mesh axes that its type says it is sharded over, or None."""
    spec = tuple(aval.sharding.spec) if getattr(aval, "sharding", None) is not None else ()
    return tuple(axes or None for axes in spec) + (None,) * (aval.ndim - len(spec))


def _letters(name: str, ndim: int, has_batch: bool) -> list[str]:
    letters = _AXES[name].split()
    if not has_batch and letters[0] == "b" and name not in ("bias", "mask"):
        letters = letters[1:]
    return letters[len(letters) - ndim :]


def _length_is_sharded(name: str, letter: str, axes: Any, gather: str = "flash_attention would have to gather") -> str:
    return (
        f"{name} has its {_NAMES[letter]} sharded over mesh axes {axes!r}, which {gather};"
        " batch and heads may be sharded. Reshard it, or for lengths call ring_attention or ulysses_attention of"
        " jax_fa_blackwell.context_parallel in jax.shard_map"
    )


def _check_heads(query_heads: int, key_heads: int, axes: Any, mesh: Any) -> None:
    shards = _size(axes, mesh)
    if key_heads % shards:
        raise ValueError(
            f"the {query_heads} query heads are sharded {shards} ways over mesh axes {axes!r}, which do not divide the"
            f" {key_heads} key and value heads: query heads would be split from the key head of their group. Shard"
            f" heads at most {math.gcd(key_heads, shards)} ways, or repeat key and value heads"
        )


def _size(axes: Any, mesh: Any) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[name] for name in names)


def partition(
    function: Callable[..., Any],
    spec: AttentionSpec,
    operand_axes: Any,
    result_axes: Sequence[str],
) -> Callable[..., Any]:
    """``function(spec, *operands)`` such that the compiler partitions it by batch, heads and axes of any other name.

    In ``jax.shard_map`` with every mesh axis manual, and on one device, it is the function itself.

    Args:
      function: on local operands with a local spec.
      spec: the whole call.
      operand_axes: for each operand, in the tree of the operands, its axes such as "b t n h"; query, key and value
        come first.
      result_axes: the same for each result; results are a flat tuple.

    Returns:
      A function of the operands. When the compiler partitions it, it raises ValueError if query, key or value have
      a length or head dim sharded, or the key heads cannot follow the query heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_types and all(kind == AxisType.Manual for kind in mesh.axis_types):
        return functools.partial(function, spec)
    operand_letters = [axes.split() for axes in jax.tree.leaves(operand_axes)]
    result_letters = [axes.split() for axes in result_axes]

    def local_call(mesh, operand_shapes, result_shapes):
        del result_shapes  # of results that their users want elsewhere, the compiler moves our part
        leaves, tree = jax.tree.flatten(operand_shapes)
        names = ("query", "key", "value")
        for name, letters, leaf in zip(names, operand_letters, leaves, strict=False):
            for letter, axes in zip(letters, leaf.sharding.spec, strict=True):
                if axes and letter in _NAMES:
                    raise ValueError(_length_is_sharded(name, letter, axes))
        free = {letter for letters in operand_letters for letter in letters} - _NAMES.keys()
        entries = {letter: _first(letter, operand_letters, leaves) for letter in free}
        heads = entries["n"] or entries["k"]
        _check_heads(spec.query_heads, spec.key_value_heads, heads, mesh)
        entries["n"] = entries["k"] = heads
        local = dataclasses.replace(
            spec,
            batch=spec.batch // _size(entries["b"], mesh),
            query_heads=spec.query_heads // _size(heads, mesh),
            key_value_heads=spec.key_value_heads // _size(heads, mesh),
        )

        def place(letters):
            return NamedSharding(mesh, P(*(entries.get(letter) for letter in letters)))

        operand_shardings = jax.tree.unflatten(tree, [place(letters) for letters in operand_letters])
        result_shardings = tuple(place(letters) for letters in result_letters)
        return mesh, functools.partial(function, local), result_shardings, operand_shardings

    rule = ", ".join(_rule(letters, spec) for letters in operand_letters)
    rule += " -> " + ", ".join(_rule(letters, spec) for letters in result_letters)
    call = custom_partitioning(functools.partial(_call, function, spec))
    call.def_partition(local_call, sharding_rule=rule)

    def run(*operands):
        # Run op by op, the custom calls would have their operands gathered: under jit also where the caller has none.
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands))
        return (call if traced else jax.jit(call))(*operands)

    return run


def _call(function, spec, *operands):
    return function(spec, *operands)


def _rule(letters: Sequence[str], spec: AttentionSpec) -> str:
    # Heads of a group and key heads are factors of their own: tied as (k g) they would be split into parts of a mesh
    # axis where the key heads do not divide it, which no NamedSharding can say and no message could explain.
    return " ".join("k" if letter == "n" and spec.group_size == 1 else letter for letter in letters)


def _first(letter: str, letters: Sequence[Sequence[str]], leaves: Sequence[Any]) -> Any:
    """How the first operand that has the axis sharded has it sharded."""
    for axes, leaf in zip(letters, leaves, strict=True):
        if letter in axes and (found := leaf.sharding.spec[axes.index(letter)]):
            return found
    return None
