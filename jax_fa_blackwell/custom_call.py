"""The XLA FFI target that runs a LaunchPlan on a CUDA device, and how JAX calls it.

The library ``ffi/`` is loaded and its target registered at the first call. Neither needs a GPU or a driver: a program
that calls the target can be lowered for CUDA on any machine.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib.resources
import math
import os
import threading
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jax_fa_blackwell.plan import launch

TARGET = "jax_fa_blackwell_launch"
"""Name of the custom call, as it stands in the lowered program."""

PLATFORM = "CUDA"
_STATE_TYPE = "jax_fa_blackwell_call_site"
_LIBRARY = "libjax_fa_blackwell_ffi.so"
_lock = threading.Lock()
_recorded: contextvars.ContextVar[list[launch.LaunchPlan] | None] = contextvars.ContextVar("recorded", default=None)


@functools.cache
def library() -> ctypes.CDLL:
    """The FFI library; RuntimeError if it is missing or belongs to another version of the package."""
    path = importlib.resources.files("jax_fa_blackwell") / _LIBRARY
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"cannot load {path}; reinstall jax_fa_blackwell to build it: {error}") from error
    lib.jfa_plan_version.restype = ctypes.c_uint32
    lib.jfa_execution_count.restype = ctypes.c_uint64
    lib.jfa_call_site_type_id.restype = ctypes.c_void_p
    lib.jfa_call_site_type_info.restype = ctypes.c_void_p
    lib.jfa_add_cubin_directory.argtypes = [ctypes.c_char_p]
    lib.jfa_add_cubin_directory.restype = None
    version = lib.jfa_plan_version()
    if version != launch.VERSION:
        raise RuntimeError(
            f"{path} reads launch plans of version {version}; this package writes version {launch.VERSION}"
        )
    return lib


def add_cubin_directory(directory: str | os.PathLike[str]) -> None:
    """Adds a directory that the executor searches for cubins, after those added before.

    A cubin lies in it as ``<sha256 of its bytes>.cubin``. The file is read, and its bytes checked against its name,
    when a plan first needs it on a device; it may be written after the directory was added. Adding a directory twice
    does nothing.

    Args:
      directory: path of the directory; it need not exist yet.
    """
    library().jfa_add_cubin_directory(os.fsencode(os.path.abspath(directory)))


def execution_count() -> int:
    """How often the executor has enqueued a plan in this process, on any device.

    A captured CUDA graph replays without it: where the number grows by less than the calls made, XLA replayed a graph.
    """
    return library().jfa_execution_count()


def register(platform: str = PLATFORM) -> None:
    """Registers the target with JAX, if that has not happened. ``call`` does so by itself.

    A process that runs a ``jax.export`` program, and so never traces a call, needs it and the cubins' directories too:
    ``aot.deserialize`` sees to both.

    Args:
      platform: XLA's name of the platform. The executor runs on CUDA only; tests register it elsewhere to see how it
        fails.
    """
    with _lock:
        _register(platform)


@functools.cache
def _register(platform: str) -> None:
    lib = library()
    # The type comes first: registering the target asks its handlers for the identifier that XLA gives to the type.
    type_id = jax.ffi.pycapsule(lib.jfa_call_site_type_id())
    type_info = jax.ffi.pycapsule(lib.jfa_call_site_type_info())
    jax.ffi.register_ffi_type(_STATE_TYPE, {"type_id": type_id, "type_info": type_info}, platform=platform)
    stages = {
        "instantiate": jax.ffi.pycapsule(lib.jfa_instantiate),
        "initialize": jax.ffi.pycapsule(lib.jfa_initialize),
        "execute": jax.ffi.pycapsule(lib.jfa_execute),
    }
    jax.ffi.register_ffi_target(TARGET, stages, platform=platform)


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[launch.LaunchPlan]]:
    """A list that gets the plan of every call made within, in this thread."""
    plans: list[launch.LaunchPlan] = []
    token = _recorded.set(plans)
    try:
        yield plans
    finally:
        _recorded.reset(token)


def _nbytes(what: str, shape: tuple, dtype: np.dtype) -> int:
    if not all(isinstance(extent, int | np.integer) for extent in shape):
        raise NotImplementedError(f"{what} has shape {shape}; a launch plan needs shapes known at trace time")
    return math.prod(shape) * dtype.itemsize


def _check_sizes(plan: launch.LaunchPlan, kind: str, arrays: Sequence, sizes: tuple[int, ...]) -> None:
    if len(arrays) != len(sizes):
        raise ValueError(f"plan {plan.name!r} has {len(sizes)} {kind}s; got {len(arrays)}")
    for index, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        what = f"{kind} {index} of plan {plan.name!r}"
        have = _nbytes(what, array.shape, np.dtype(array.dtype))
        if have != size:
            raise ValueError(f"{what} must have {size} bytes; got {array.dtype}{list(array.shape)}, which has {have}")


def call(
    plan: launch.LaunchPlan,
    arguments: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """Emits the custom call that runs a plan.

    The call has no side effect, so XLA drops it if no result is used. Arrays are row-major. It has no rule for vmap or
    differentiation: its callers bring one (``jax.custom_batching.custom_vmap``, ``jax.custom_vjp``), and a bare vmap
    raises NotImplementedError.

    Args:
      plan: what to run; its operands are the arguments followed by the results.
      arguments: arrays of the plan's ``argument_bytes``.
      results: shape and dtype of each result, of the plan's ``result_bytes``. Workspaces are results too.

    Returns:
      The results, in order.

    Raises:
      ValueError: number or sizes of arguments or results are not the plan's.
      NotImplementedError: a shape is symbolic, or the call is mapped by vmap.
      RuntimeError: the FFI library cannot be loaded.
    """
    _check_sizes(plan, "argument", arguments, plan.argument_bytes)
    _check_sizes(plan, "result", results, plan.result_bytes)
    register()
    if (recorded := _recorded.get()) is not None:
        recorded.append(plan)

    @jax.custom_batching.custom_vmap
    def emit(*arrays):
        return jax.ffi.ffi_call(TARGET, list(results), has_side_effect=False)(*arrays, plan=plan.encode())

    @emit.def_vmap
    def _refuse(*_):
        raise NotImplementedError(
            f"vmap over the custom call of plan {plan.name!r}: fold the mapped axis into the plan's shapes in a"
            " custom_vmap rule around custom_call.call"
        )

    return list(emit(*arguments))
