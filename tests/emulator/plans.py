"""Executing a LaunchPlan: the emulator as the second executor beside the XLA FFI handler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from emulator.launch import Checks, Pointer, Program, Schedule, TensorMap, aligned_empty, load
from emulator.report import Report

if TYPE_CHECKING:  # the package brings JAX along, which other uses of the emulator do without
    from jax_fa_blackwell.plan import launch as plans

POISON = 0x7FFF7FFF  # a NaN in float32, bfloat16 and float16
Resolver = Callable[["plans.Launch"], str]


@functools.lru_cache(maxsize=64)
def _load(text: str) -> Program:
    return load(text)


def _resolver(ptx: Mapping[str, str] | Resolver) -> Resolver:
    if callable(ptx):
        return ptx

    def find(launch: plans.Launch) -> str:
        for key in (launch.sha256, launch.kernel):
            if key in ptx:
                return ptx[key]
        raise KeyError(f"no PTX for kernel {launch.kernel!r} ({launch.sha256}); there is: {', '.join(ptx)}")

    return find


def run_plan(
    plan: plans.LaunchPlan,
    operands: Sequence[np.ndarray],
    *,
    ptx: Mapping[str, str] | Resolver,
    arch: str = "sm_100a",
    schedule: Schedule | None = None,
    check: Checks | None = None,
) -> tuple[list[np.ndarray], Report]:
    """Runs the steps of a plan's program in order.

    Args:
      plan: made by jax_fa_blackwell.plan.
      operands: the arguments, of plan.argument_bytes bytes each; kernels may not write to them.
      ptx: PTX text by Launch.sha256 or Launch.kernel, or a function of the Launch.
      arch: which of the plan's programs.
      schedule, check: as Program.launch.

    Returns:
      The results as flat uint8 arrays (bytes never written hold the NaN pattern 0x7fff7fff), and the sums of all
      launches.

    Raises:
      ValueError: operands do not match the plan.
      Verdict: as Program.launch.
    """
    from jax_fa_blackwell.plan import launch as plans

    find = _resolver(ptx)
    if len(operands) != len(plan.argument_bytes):
        raise ValueError(f"plan {plan.name!r} takes {len(plan.argument_bytes)} operands; got {len(operands)}")
    buffers: list[np.ndarray] = []
    for i, (operand, size) in enumerate(zip(operands, plan.argument_bytes, strict=True)):
        if operand.nbytes != size:
            raise ValueError(f"operand {i} of plan {plan.name!r} must have {size} bytes; got {operand.nbytes}")
        copy = aligned_empty(size)
        copy[:] = np.ascontiguousarray(operand).reshape(-1).view(np.uint8)
        copy.flags.writeable = False
        buffers.append(copy)
    results = [aligned_empty(size, POISON) for size in plan.result_bytes]
    buffers += results
    reports = []
    for step in plan.program(arch).steps:
        if isinstance(step, plans.Fill):
            words = buffers[step.operand][step.offset_bytes : step.end_bytes].view(np.uint32)
            words[:] = step.word
            continue
        report = _load(find(step)).launch(
            step.symbol,
            grid=step.grid,
            block=step.block,
            cluster=step.cluster,
            shared_bytes=step.shared_bytes,
            params=[_param(param, buffers) for param in step.params],
            schedule=schedule,
            check=check,
        )
        reports.append(report)
    return results, Report.merge(reports)


def _param(param: plans.Param, buffers: Sequence[np.ndarray]):
    from jax_fa_blackwell.plan import launch as plans

    match param:
        case plans.TensorMap():
            return TensorMap(
                buffers[param.operand],
                dtype=param.dtype,
                dims=param.dims,
                strides_bytes=param.strides_bytes,
                box=param.box,
                element_strides=param.element_strides,
                swizzle=param.swizzle,
                fill=param.fill,
                offset_bytes=param.offset_bytes,
            )
        case plans.Pointer():
            return Pointer(buffers[param.operand], param.offset_bytes)
        case plans.Int32():
            return np.int32(param.value)
        case plans.Float32():
            return np.float32(param.value)
        case plans.Bytes():
            return param.data
