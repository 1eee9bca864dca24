"""The derivative of attention as one linear operation: what reverse mode transposes and forward mode evaluates.

``jax.custom_vjp`` refuses forward mode, and a rule of ``jax.custom_jvp`` alone would make reverse mode keep the weights
of every block. So attention has a ``custom_jvp`` whose rule is this primitive: linear in the tangents, with the
backward pass as its transpose. Forward mode evaluates the tangent of the blockwise forward pass in ``xla``, in memory
linear in T and S; kernels have no such pass, and say so.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_fa_blackwell import mapped_queries
from jax_fa_blackwell.operands import Operands

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")

Results = tuple[jax.Array, jax.Array]


class Passes(NamedTuple):
    """An implementation as this module needs it; its functions are of module level, so that equal calls are equal.

    Attributes:
      name: of the implementation, for messages.
      forward: (spec, operands) -> (out, lse).
      backward: (spec, operands, out, lse, cotangent of out, cotangent of lse) -> gradients, by the operands' names.
      has_forward_mode: whether forward is a JAX function that forward mode can differentiate; kernels are none.
    """

    name: str
    forward: Callable[..., Results]
    backward: Callable[..., Any]
    has_forward_mode: bool


class _Call(NamedTuple):
    """The static part: what the flat arguments of the primitive are.

    Attributes:
      passes, spec: the call.
      names: the operands that have a tangent, in the order of the tangents.
      tree: the structure of (operands, out, lse).
      batched: for each vmap around the call, outermost last, which of the flat arguments have its axis; an argument's
        axes stand before its own, outermost first.
    """

    passes: Passes
    spec: Any
    names: tuple[str, ...]
    tree: Any
    batched: tuple[tuple[bool, ...], ...] = ()

    @property
    def residuals(self) -> int:
        return self.tree.num_leaves


def no_derivative(passes: Passes, what: str) -> NotImplementedError:
    """The error of a derivative that kernels do not have."""
    return NotImplementedError(
        f"{what} of implementation={passes.name!r}: kernels have first derivatives by reverse mode only; "
        "use implementation='xla'"
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def attend(passes: Passes, spec: Any, name: str, operands: Any) -> Results:
    """Output and LSE, with every derivative that an implementation has.

    Args:
      passes: the implementation.
      spec: the call, hashable; what the passes take.
      name: of output and LSE for ``jax.checkpoint`` policies.
      operands: the call's arrays, a named tuple, each varying over the same mesh axes.

    Returns:
      (out, lse).
    """
    del name
    return passes.forward(spec, operands)


@functools.partial(attend.defjvp, symbolic_zeros=True)
def _attend_jvp(passes: Passes, spec: Any, name: str, primals, tangents):
    (operands,), (moving,) = primals, tangents
    # Through attend again, so that a second derivative uses this rule instead of going through the forward scan.
    out, lse = attend(passes, spec, name, operands)
    out, lse = ad_checkpoint.checkpoint_name(out, name), ad_checkpoint.checkpoint_name(lse, name)
    given = {field: getattr(moving, field, None) for field in DIFFERENTIABLE}
    given = {field: t for field, t in given.items() if t is not None and not isinstance(t, SymbolicZero)}
    leaves, tree = jax.tree.flatten((operands, out, lse))
    d_out, d_lse = _tangent_p.bind(*leaves, *given.values(), call=_Call(passes, spec, tuple(given), tree))
    return (out, lse), (d_out, d_lse)


_tangent_p = Primitive("jax_fa_blackwell_tangent")
_tangent_p.multiple_results = True


@_tangent_p.def_abstract_eval
def _abstract(*avals, call: _Call):
    _, out, lse = jax.tree.unflatten(call.tree, avals[: call.residuals])
    return [out, lse]


def _evaluate(*arrays, call: _Call) -> list[jax.Array]:
    """Forward mode: the tangent of the forward pass, its own primal results dropped."""
    if not call.passes.has_forward_mode:
        raise no_derivative(call.passes, "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian)")
    forward = functools.partial(call.passes.forward, call.spec)

    def one(*arrays):
        operands, _, _ = jax.tree.unflatten(call.tree, arrays[: call.residuals])
        tangents = dict(zip(call.names, arrays[call.residuals :], strict=True))

        def along(differentiated):
            return forward(operands._replace(**differentiated))

        return list(jax.jvp(along, ({name: getattr(operands, name) for name in tangents},), (tangents,))[1])

    for flags in call.batched:
        one = jax.vmap(one, [0 if flag else None for flag in flags])
    return one(*arrays)


@_tangent_p.def_impl
def _run(*arrays, call: _Call):
    return jax.jit(functools.partial(_tangent_p.bind, call=call))(*arrays)


mlir.register_lowering(_tangent_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(primals, tangents, *, call: _Call):
    """Linear in the last arguments, so that their derivative can be transposed; the rest by JAX."""
    results = _tangent_p.bind(*primals, call=call)
    count = call.residuals
    parts = []
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        instantiated = map(ad.instantiate_zeros, tangents[count:])
        parts.append(_tangent_p.bind(*primals[:count], *instantiated, call=call))
    moving = [index for index, t in enumerate(tangents[:count]) if type(t) is not ad.Zero]
    if moving:

        def of_residuals(*some):
            arrays = list(primals)
            for index, array in zip(moving, some, strict=True):
                arrays[index] = array
            return _evaluate(*arrays, call=call)

        parts.append(jax.jvp(of_residuals, [primals[i] for i in moving], [tangents[i] for i in moving])[1])
    return results, list(functools.reduce(lambda a, b: map(operator.add, a, b), parts))


ad.primitive_jvps[_tangent_p] = _jvp


def _transpose(cotangents, *arguments, call: _Call):
    """Reverse mode: the backward pass."""
    residuals, linear = arguments[: call.residuals], arguments[call.residuals :]
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]

    def one(*arrays):
        operands, out, lse = jax.tree.unflatten(call.tree, arrays[: call.residuals])
        gradients = call.passes.backward(call.spec, operands, out, lse, *arrays[call.residuals :])
        return [getattr(gradients, name) for name in call.names]

    grouped = tuple(itertools.takewhile(functools.partial(_is_of_queries_alone, call), call.batched))
    if grouped:
        one = _grouped_transpose(call, grouped)
    for flags in call.batched[len(grouped) :]:
        one = _mapped_transpose(one, flags, call.residuals)
    gradients = one(*residuals, *cotangents)
    wanted = [g if ad.is_undefined_primal(x) else None for g, x in zip(gradients, linear, strict=True)]
    return [None] * call.residuals + wanted


ad.primitive_transposes[_tangent_p] = _transpose


def _mapped_transpose(transpose: Callable, flags: tuple[bool, ...], residuals: int) -> Callable:
    """The transpose of a vmap: an argument that the vmap did not map gets the sum of its cotangents."""
    in_axes = [0 if flag else None for flag in flags[:residuals]] + [0, 0]

    def run(*arrays):
        gradients = jax.vmap(transpose, in_axes)(*arrays)
        return [g if flag else jnp.sum(g, 0) for g, flag in zip(gradients, flags[residuals:], strict=True)]

    return run


def _is_of_queries_alone(call: _Call, flags: tuple[bool, ...]) -> bool:
    """Whether a vmap maps queries over keys and values that it does not, and whose cotangents it therefore sums."""
    operands, _, _ = jax.tree.unflatten(call.tree, flags[: call.residuals])
    if not isinstance(operands, Operands) or not operands.query:
        return False
    if operands.bias is not None or operands.mask is not None:
        return False
    shared = operands._replace(query=False, sinks=False)
    linear = dict(zip(call.names, flags[call.residuals :], strict=True))
    return not (any(jax.tree.leaves(shared)) or linear.get("key") or linear.get("value"))


def _grouped_transpose(call: _Call, levels: tuple[tuple[bool, ...], ...]) -> Callable:
    """The transpose of nested vmaps, innermost first, with mapped queries as more heads of a group: no copied keys."""
    sinks_have = [jax.tree.unflatten(call.tree, flags[: call.residuals])[0].sinks for flags in levels]
    backward = call.passes.backward
    for _ in levels:
        backward = functools.partial(mapped_queries.backward, backward)

    def run(*arrays):
        operands, out, lse = jax.tree.unflatten(call.tree, arrays[: call.residuals])
        extents = out.shape[: len(levels)]
        if operands.sinks is not None:
            heads = operands.sinks.shape[-1]
            there = [extent if has else 1 for extent, has in zip(extents, reversed(sinks_have), strict=True)]
            sinks = jnp.broadcast_to(operands.sinks.reshape(*there, heads), (*extents, heads))
            operands = operands._replace(sinks=sinks)
        gradients = backward(call.spec, operands, out, lse, *arrays[call.residuals :])
        results = []
        for index, name in enumerate(call.names, call.residuals):
            gradient = getattr(gradients, name)
            if name not in ("key", "value"):
                # Axes stand outermost first. An argument that a vmap did not map gets the sum of its cotangents.
                axes = [axis for axis, flags in enumerate(reversed(levels)) if not flags[index]]
                gradient = jnp.sum(gradient, axes) if axes else gradient
            results.append(gradient)
        return results

    return run


def _batch(arrays, axes, *, call: _Call):
    """A vmap around the call; its results, and so the primal results among its arguments, have the new axis.

    Vmaps commute: those over queries alone are kept innermost, where ``_transpose`` needs no copies for them.
    """
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    out_and_lse = (call.residuals - 2, call.residuals - 1)
    flags = tuple(axis is not None or index in out_and_lse for index, axis in enumerate(axes))
    outer: tuple[tuple[bool, ...], ...] = ()
    if _is_of_queries_alone(call, flags):
        outer = tuple(level for level in call.batched if not _is_of_queries_alone(call, level))
    moved = []
    for index, (array, axis) in enumerate(zip(arrays, axes, strict=True)):
        if axis is None and flags[index]:
            array, axis = jnp.broadcast_to(array, (size, *array.shape)), 0
        moved.append(array if axis is None else jnp.moveaxis(array, axis, sum(level[index] for level in outer)))
    inner = call.batched[: len(call.batched) - len(outer)]
    results = _tangent_p.bind(*moved, call=call._replace(batched=(*inner, flags, *outer)))
    return results, [len(outer)] * len(results)


batching.primitive_batchers[_tangent_p] = _batch
