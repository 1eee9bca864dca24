"""Programs that travel: ``jax.export`` of functions with attention in them, for CUDA and CPU in one artefact.

``serialize`` needs no GPU. The launch plans in the program have a part for each GPU architecture, and the device that
runs it chooses; on another platform the same program runs the XLA path. ``deserialize`` needs neither the kernel DSL
nor the code of the model.

An artefact is a zip archive: ``about.json``, ``program`` (what ``jax.export`` serialises) and, if they are embedded,
``<sha256>.cubin`` files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export as jax_export

from jax_fa_blackwell import cubins, custom_call, lowering
from jax_fa_blackwell.plan import launch

ARCHES = ("sm_100a", "sm_103a", "sm_90a")
"""The architectures that ``serialize`` lowers for; the first decides which implementation runs a call."""

FORMAT = 1
_ABOUT, _PROGRAM = "about.json", "program"

DISABLED_CHECKS = (jax_export.DisabledSafetyCheck.custom_call(custom_call.TARGET),)
"""What ``jax.export.export`` must be told: JAX does not know that our custom call's format is versioned."""


class VersionSkewError(RuntimeError):
    """An artefact of another version of this package, or with launch plans of another version."""


def package_version() -> str:
    """The installed version of this package."""
    return importlib.metadata.version("jax_fa_blackwell")


def serialize(
    function: Callable[..., Any],
    *arguments: Any,
    platforms: Sequence[str] = ("cuda", "cpu"),
    arches: Sequence[str] = ARCHES,
    embed_cubins: bool = False,
    disabled_checks: Sequence[jax_export.DisabledSafetyCheck] = (),
    vjp_order: int = 0,
    **keywords: Any,
) -> bytes:
    """Traces, lowers and serialises a function; no GPU is needed.

    A kernel that does not run on one of the architectures is left out for it: a device of that architecture refuses
    the program with an error that names what it has. Which implementation runs a call with ``implementation=None`` is
    decided for the first architecture.

    Args:
      function: jitted or not; it is traced afresh, and JAX's caches are emptied before and after.
      *arguments: arrays or ``jax.ShapeDtypeStruct``; shapes are fixed by them.
      platforms: any of "cuda", "cpu", "tpu", "rocm".
      arches: GPU architectures, of "sm_90a", "sm_100a", "sm_103a"; not used without "cuda".
      embed_cubins: whether the artefact has the compiled kernels in it. Without them the process that loads it needs
        the same cubins, in the package or in its cache.
      disabled_checks: more of ``jax.export``'s checks to leave out.
      vjp_order: how often the loaded function can be differentiated.
      **keywords: as ``arguments``.

    Returns:
      The artefact, for ``deserialize``.

    Raises:
      NotImplementedError: a symbolic shape, or implementation="cuda" where no kernel takes a call.
      jax_fa_blackwell.cubins.CubinNotFoundError: a kernel is not compiled and cannot be here.
      ImportError: ``flatbuffers`` is not installed, which ``jax.export`` needs (``jax_fa_blackwell[aot]`` has it).
    """
    _require_flatbuffers()

    def fresh(*arguments, **keywords):
        return function(*arguments, **keywords)

    checks = (*DISABLED_CHECKS, *disabled_checks)
    with lowering.lowering_for(arches), custom_call.recorded_plans() as plans:
        exported = jax_export.export(jax.jit(fresh), platforms=platforms, disabled_checks=checks)(
            *arguments, **keywords
        )
        program = exported.serialize(vjp_order=vjp_order)
    needed = {
        (step.sha256, program.arch, step.kernel)
        for plan in plans
        for program in plan.programs
        for step in program.steps
        if isinstance(step, launch.Launch)
    }
    about = {
        "format": FORMAT,
        "package_version": package_version(),
        "plan_version": launch.VERSION,
        "cubins": [{"sha256": sha256, "arch": arch, "kernel": kernel} for sha256, arch, kernel in sorted(needed)],
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_ABOUT, json.dumps(about, indent=1))
        archive.writestr(_PROGRAM, bytes(program))
        if embed_cubins:
            for sha256 in sorted({sha256 for sha256, _, _ in needed}):
                data = cubins.read(sha256)
                if data is None:
                    raise cubins.CubinNotFoundError(f"cubin {sha256} has gone from {_folders()} since it was found")
                archive.writestr(f"{sha256}.cubin", data)
    return out.getvalue()


def deserialize(data: bytes) -> jax_export.Exported:
    """Makes an artefact ready to run in this process: ``jax.jit(deserialize(data).call)(...)``.

    The FFI target is registered, embedded cubins are written into the user's cache, and those that this process's
    CUDA devices need are looked for. Only open an artefact that you trust: its kernels run as they are.

    Args:
      data: from ``serialize``.

    Raises:
      ValueError: data is not an artefact, or damaged.
      VersionSkewError: it was made by another version; the message names both.
      jax_fa_blackwell.cubins.CubinNotFoundError: a cubin that a device here needs is neither embedded nor in the
        package or the cache.
      ImportError: ``flatbuffers`` is not installed.
    """
    _require_flatbuffers()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        about = json.loads(files[_ABOUT])
        program = files[_PROGRAM]
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(
            f"data must be an artefact that aot.serialize made, whole; got {len(data)} bytes: {error}"
        ) from error
    _check_versions(about)
    needed = about["cubins"]
    if needed:
        custom_call.register()
        for folder in cubins.folders():
            custom_call.add_cubin_directory(folder)
    for sha256 in {cubin["sha256"] for cubin in needed}:
        if (embedded := files.get(f"{sha256}.cubin")) is not None:
            custom_call.add_cubin_directory(cubins.add(sha256, embedded))
    here = lowering.device_arches()
    for cubin in needed:
        if cubin["arch"] in here and cubins.read(cubin["sha256"]) is None:
            raise cubins.CubinNotFoundError(
                f"the program needs kernel {cubin['kernel']} for {cubin['arch']}, cubin {cubin['sha256']}, which is "
                f"neither in the artefact nor in {_folders()}: serialize it with embed_cubins=True, or copy the "
                "cache of the machine that made it"
            )
    return jax_export.deserialize(bytearray(program))


def _require_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError("jax.export writes and reads programs with flatbuffers: pip install 'jax_fa_blackwell[aot]'")


def _folders() -> str:
    return " or ".join(map(str, cubins.folders()))


def _check_versions(about: dict[str, Any]) -> None:
    written = about.get("package_version"), about.get("plan_version"), about.get("format")
    here = package_version(), launch.VERSION, FORMAT
    if written != here:
        have, want = (
            f"jax_fa_blackwell {package} (launch plans of version {plan}, artefact format {form})"
            for package, plan, form in (written, here)
        )
        raise VersionSkewError(
            f"the artefact was made by {have}; this is {want}: serialize it again with this version or install that one"
        )
