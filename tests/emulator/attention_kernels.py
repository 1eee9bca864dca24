"""The attention kernels in the emulator: their PTX, and calls through their launch plans."""

from __future__ import annotations

import concurrent.futures
import fcntl
import functools
import hashlib
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

import emulator
from attention_cases import Arrays, Case, visibility
from attention_grid import tensor_core_einsum
from jax_fa_blackwell import cuda, export
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.masks import MaskArguments, kv_intervals
from jax_fa_blackwell.plan import attention as attention_plan
from jax_fa_blackwell.plan.launch import LaunchPlan
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

CACHE = pathlib.Path(__file__).resolve().parents[2] / "build" / "emulator-kernels"
SETS = ("forward", "backward", "hopper")

__all__ = ["backward", "evaluate", "forward", "kernel_text", "make_spec", "prepare", "run", "tensor_core_einsum"]


@functools.cache
def kernel_text(name: str, arch: str) -> str:
    """The PTX of a variant, kept under build/; of processes that want the same at once, one compiles it."""
    variant = registry.get_variant(name)
    tools = hashlib.sha256(repr(export.toolchain()).encode()).hexdigest()[:16]
    path = CACHE / f"{name}-{arch}-{variant.source_hash(arch)[:24]}-{tools}.ptx"
    CACHE.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compiled = export.compile_variant(variant, arch)
            path.with_suffix(".tmp").write_text(compiled.ptx)
            path.with_suffix(".tmp").replace(path)
    return path.read_text()


def prepare(arch: str = "sm_100a") -> None:
    """Compiles all variants, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        names = [name for kernels in SETS for name in registry.SETS[kernels]]
        names = [name for name in names if arch in registry.get_variant(name).arches]
        list(pool.map(lambda name: kernel_text(name, arch), names))


def _find(name: str, arch: str) -> tuple[str, str, str]:
    """What a plan needs of a cubin; the PTX stands for it, found by the variant's name."""
    return name, hashlib.sha256(kernel_text(name, arch).encode()).hexdigest(), f"{name}_0"


def run(make_plan: cuda.MakePlan, spec: AttentionSpec, arrays, arch: str = "sm_100a", **options):
    """The results of a call as flat bytes, and the emulator's report."""
    plan = make_plan(spec, arch, _find)  # pyright: ignore[reportCallIssue]
    return run_launch_plan(plan, arrays, arch, **options)


def run_launch_plan(plan: LaunchPlan, arrays, arch: str = "sm_100a", **options):
    """As ``run`` with the plan given."""
    return emulator.run_plan(plan, arrays, ptx=lambda launch: kernel_text(launch.kernel, arch), arch=arch, **options)


def make_spec(case: Case, dtype: Any) -> AttentionSpec:
    """The call as static data, as flash_attention makes it."""
    x = case.shape
    window = case.option("local_window_size")
    left, right = window if isinstance(window, tuple) else (window, window)
    if case.option("is_causal"):
        right = 0 if right is None else min(right, 0)
    bottom_right = case.option("causal_alignment") == "bottom_right"
    intervals = kv_intervals(MaskArguments(x.B, x.T, x.S, left, right, bottom_right))
    form = "rows" if case.lengths or case.segments else intervals.form
    affine = form == "affine"
    return AttentionSpec(
        x.B,
        x.T,
        x.S,
        x.N,
        x.K,
        x.H,
        x.Hv,
        np.dtype(dtype).name,
        case.option("scale") or x.H**-0.5,
        form,
        intervals.lower if affine else 0,
        intervals.upper if affine else 0,
        logits_soft_cap=case.option("logits_soft_cap"),
        has_sinks=case.sinks,
        deterministic=bool(case.option("deterministic")),
    )


def _intervals(visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First column seen and one past the last, int32 [B, rows], from bool [B, rows, columns]; (columns, 0) if none."""
    columns = visible.shape[2]
    seen = visible.any(2)
    low = np.where(seen, visible.argmax(2), columns)
    high = np.where(seen, columns - visible[:, :, ::-1].argmax(2), 0)
    return low.astype(np.int32), high.astype(np.int32)


def _arguments(spec: AttentionSpec, arch: str, case: Case, inputs: Arrays, **others: np.ndarray) -> list[np.ndarray]:
    """What a plan is given, from a case's inputs; with "grad_out" among the others it is the backward's."""
    arrays = {name: inputs[name] for name in ("query", "key", "value")} | others
    if spec.mask_form == "rows":
        visible = visibility(case, inputs)[:, 0]
        for side, seen in (("query", visible), ("key", visible.swapaxes(1, 2))):
            arrays[f"{side}_low"], arrays[f"{side}_high"] = _intervals(seen)
    given = attention_plan.arguments(spec, get_target(arch), "grad_out" in others)
    return [np.asarray(array) for array in cuda.make_arguments(given, {k: jnp.asarray(v) for k, v in arrays.items()})]


def forward(
    case: Case, inputs: Arrays, arch: str = "sm_100a", **options
) -> tuple[np.ndarray, np.ndarray, emulator.Report]:
    """Output, LSE [B, T, N] and the report."""
    x, dtype = case.shape, inputs["query"].dtype
    spec = make_spec(case, dtype)
    sinks = {"sinks": np.broadcast_to(inputs["sinks"].astype(np.float32), (x.B, x.N))} if case.sinks else {}
    arrays = _arguments(spec, arch, case, inputs, **sinks)
    (out, lse), report = run(cuda.make_forward_plan, spec, arrays, arch, **options)
    return out.view(dtype).reshape(x.B, x.T, x.N, x.Hv), lse.view(np.float32).reshape(x.B, x.T, x.N), report


def backward(
    case: Case, inputs: Arrays, out, lse, cotangents, arch: str = "sm_100a", **options
) -> tuple[Arrays, emulator.Report]:
    """Gradients of query, key, value and sinks, and the report."""
    dtype = inputs["query"].dtype
    spec = make_spec(case, dtype)
    products = cotangents[0].astype(np.float32) * out.astype(np.float32)
    delta = (products.sum(-1) - cotangents[1].astype(np.float32)).swapaxes(1, 2)
    lse = np.ascontiguousarray(lse.swapaxes(1, 2))
    arrays = _arguments(spec, arch, case, inputs, grad_out=cotangents[0], lse=lse, delta=delta)
    results, report = run(cuda.make_backward_plan, spec, arrays, arch, **options)
    names = ("query", "key", "value")
    gradients = {  # a workspace may follow them
        f"d_{name}": array.view(dtype).reshape(inputs[name].shape) for name, array in zip(names, results, strict=False)
    }
    if case.sinks:
        sinks = inputs["sinks"].astype(np.float32)[:, None]
        delta = np.where(lse <= sinks, -cotangents[1].swapaxes(1, 2), delta)
        gradients["d_sinks"] = np.asarray(-np.sum(np.exp(sinks - lse) * delta, axis=(0, 2), dtype=np.float32))
    return gradients, report


def evaluate(case: Case, inputs: Arrays, cotangents, **options) -> dict[str, np.ndarray]:
    """All results of a case, forward and backward, as attention_cases.check_results takes them."""
    out, lse, _ = forward(case, inputs, **options)
    gradients, _ = backward(case, inputs, out, lse, cotangents, **options)
    return {"out": out, "lse": lse, **gradients}
