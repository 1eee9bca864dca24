"""Work that waits until a program is lowered for CUDA.

``jax.lax.platform_dependent`` chooses by platform when it lowers, but traces every branch. A branch that launches a
kernel needs the kernel's cubin, which a program on a CPU must neither have nor wait for. ``deferred`` puts off tracing
such a branch until it is lowered.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_fa_blackwell.plan.target import TARGETS, arch_of_compute_capability, get_target

ARCH_VARIABLE = "JAX_FA_BLACKWELL_ARCH"

_chosen: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("arches", default=())

_results: dict[tuple, tuple] = {}
_MAX_RESULTS = 1024

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
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
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
        (``jax.shard_map``). They must follow from ``function``, ``static`` and the types of ``arrays``, for which they
        are kept: a model calls attention with the same shapes in every layer.
    """
    key = (function, static, *map(jax.typeof, arrays))
    if (known := _results.get(key)) is None:
        jaxpr, shapes = jax.make_jaxpr(like, return_shape=True)(*arrays)
        known = tuple(jaxpr.out_avals), jax.tree.structure(shapes)
        if len(_results) >= _MAX_RESULTS:
            _results.clear()
        _results[key] = known
    avals, tree = known
    return jax.tree.unflatten(tree, _deferred_p.bind(*arrays, function=function, static=static, results=avals))


@contextlib.contextmanager
def lowering_for(arches: Sequence[str]) -> Iterator[None]:
    """Within it programs are lowered for these architectures, whatever the environment and the devices are.

    Traces are forgotten before and after: they hold choices made for other architectures. The first one decides which
    implementation runs a call that leaves it open.

    Args:
      arches: names such as "sm_100a"; at least one.

    Raises:
      ValueError: arches is empty or has an unknown name.
    """
    if not arches:
        raise ValueError(f"arches must have at least one name, of {', '.join(TARGETS)}; got {arches!r}")
    token = _chosen.set(tuple(dict.fromkeys(get_target(name).arch for name in arches)))
    jax.clear_caches()
    try:
        yield
    finally:
        _chosen.reset(token)
        jax.clear_caches()


def named_arches() -> tuple[str, ...]:
    """The architectures named by ``lowering_for`` or, failing that, by ``JAX_FA_BLACKWELL_ARCH``; else none.

    Raises:
      ValueError: the variable has an unknown name.
    """
    if chosen := _chosen.get():
        return chosen
    names = os.environ.get(ARCH_VARIABLE)
    if not names:
        return ()
    try:
        return tuple(dict.fromkeys(get_target(name.strip()).arch for name in names.split(",")))
    except ValueError as error:
        raise ValueError(f"environment variable {ARCH_VARIABLE}={names!r}: {error}") from error


def arches() -> tuple[str, ...]:
    """The architectures that a program lowered for CUDA now is to run on: the one place that decides it.

    Those of ``lowering_for`` around; else ``JAX_FA_BLACKWELL_ARCH`` (one name or several, comma-separated) if set; else
    those of this process's CUDA devices, which may be none that the kernels know; else, with no CUDA device, all: the
    program is lowered for elsewhere.

    Raises:
      ValueError: the variable has an unknown name.
    """
    if named := named_arches():
        return named
    return device_arches() or (() if _has_cuda() else tuple(TARGETS))


def device_arches() -> tuple[str, ...]:
    """The architectures, of those that the kernels know, that this process's CUDA devices have; perhaps none."""
    if not _has_cuda():
        return ()
    devices = jax.local_devices(backend="cuda")
    found = (arch_of_compute_capability(*map(int, device.compute_capability.split("."))) for device in devices)
    return tuple(dict.fromkeys(arch for arch in found if arch))


def _has_cuda() -> bool:
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:  # no such backend in this process
        return False
