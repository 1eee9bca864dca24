"""Work that waits until a program is lowered for CUDA.

``jax.lax.platform_dependent`` chooses by platform when it lowers, but traces every branch. A branch that launches a
kernel needs the kernel's cubin, which a program on a CPU must neither have nor wait for. ``deferred`` puts off tracing
such a branch until it is lowered.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fa_blackwell.plan.target import TARGETS, arch_of_compute_capability, get_target

ARCH_VARIABLE = "JAX_FA_BLACKWELL_ARCH"

_deferred_p = Primitive("jax_fa_blackwell_deferred")
_deferred_p.multiple_results = True


@_deferred_p.def_abstract_eval
def _abstract(*_, function, static, results):
    del function, static
    return list(results)


def _body(*arrays, function, static, results):
    del results
    return jax.tree.leaves(function(static, *arrays))


def _lower(ctx, *values, **params):
    # How arrays vary over a mesh (jax.shard_map) says nothing about what is computed on one device; and while a program
    # is lowered JAX no longer lets an array that varies meet a constant that does not.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    return mlir.lower_fun(_body, multiple_results=True)(ctx.replace(avals_in=avals), *values, **params)


mlir.register_lowering(_deferred_p, _lower)


@_deferred_p.def_impl
def _run(*arrays, **params):
    return jax.jit(functools.partial(_deferred_p.bind, **params))(*arrays)


def deferred(
    function: Callable[..., Any],
    static: Hashable,
    arrays: Sequence[jax.Array],
    like: Callable[..., Any],
) -> Any:
    """``function(static, *arrays)``, traced when the program around it is lowered.

    It has no rule for vmap or differentiation; callers bring one around it.

    Args:
      function: of module level, so that equal calls share a compilation.
      static: its first argument, hashable.
      arrays: the others.
      like: takes ``arrays`` and returns what ``function`` will, an array or a tree of arrays, by a way that can be
        traced now. Only the types are used: shape, dtype, and how it varies over the axes of a mesh
        (``jax.shard_map``).
    """
    jaxpr, shapes = jax.make_jaxpr(like, return_shape=True)(*arrays)
    results = _deferred_p.bind(*arrays, function=function, static=static, results=tuple(jaxpr.out_avals))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def arches() -> tuple[str, ...]:
    """The architectures that a program lowered for CUDA now is to run on: the one place that decides it.

    ``JAX_FA_BLACKWELL_ARCH`` (one name or several, comma-separated) if set; else those of this process's CUDA devices,
    which may be none that the kernels know; else, with no CUDA device, all: the program is lowered for elsewhere.

    Raises:
      ValueError: the variable has an unknown name.
    """
    if names := os.environ.get(ARCH_VARIABLE):
        try:
            return tuple(dict.fromkeys(get_target(name.strip()).arch for name in names.split(",")))
        except ValueError as error:
            raise ValueError(f"environment variable {ARCH_VARIABLE}={names!r}: {error}") from error
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no such backend in this process
        return tuple(TARGETS)
    found = (arch_of_compute_capability(*map(int, device.compute_capability.split("."))) for device in devices)
    return tuple(dict.fromkeys(arch for arch in found if arch))
