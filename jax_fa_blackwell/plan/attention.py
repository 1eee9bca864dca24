"""The plans of a call by architecture: the one place that knows which kernels serve which, and what they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax_fa_blackwell.plan import backward, forward, hopper, hopper_backward, hopper_forward, launch
from jax_fa_blackwell.plan.launch import LaunchPlan
from jax_fa_blackwell.plan.slices import ROWS
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target

FindCubin = Callable[[str], tuple[str, str, str]]
"""From a variant's name to (kernel name, sha256, symbol) of its cubin."""


@dataclasses.dataclass(frozen=True)
class WorkList:
    """An argument of a plan: which blocks of ``columns`` each group of ``rows`` sees, as ``blocks.py`` lists them.

    Rows are queries, or keys where ``of_keys``.
    """

    of_keys: bool
    rows: int
    columns: int


Argument = str | WorkList
"""An operand's name ("query", "key", "value", "grad_out", "lse", "delta", "sinks", and "query_low", "query_high",
"key_low", "key_high", the intervals of queries and keys), or a list made from the intervals."""


def supports(spec: AttentionSpec, target: Target) -> str | None:
    """None if kernels run the call on the target, forward and backward, else the limit."""
    return (hopper_forward if target.arch == hopper.ARCH else forward).supports(spec, target)


def launch_forward(spec: AttentionSpec, target: Target, find: FindCubin) -> LaunchPlan:
    """The forward's launch plan; its arguments are ``arguments``, its results output and LSE [B, T, N]."""
    if target.arch == hopper.ARCH:
        plan = hopper_forward.plan_forward(spec, target)
        return hopper_forward.launch_forward(plan, *find(plan.kernel))
    plan = forward.plan_forward(spec, target)
    return forward.launch_forward(plan, *find(plan.kernel))


def launch_backward(spec: AttentionSpec, target: Target, find: FindCubin) -> LaunchPlan:
    """The backward's launch plan; its arguments are ``arguments``, its results dQ, dK and dV."""
    if target.arch == hopper.ARCH:
        return hopper_backward.launch_backward(hopper_backward.plan_backward(spec, target), find)
    return backward.launch_backward(backward.plan_backward(spec, target), find)


def arguments(spec: AttentionSpec, target: Target, is_backward: bool) -> tuple[Argument, ...]:
    """What the launch plan of the forward or backward is given, in order."""
    is_hopper = target.arch == hopper.ARCH
    out: list[Argument] = ["query", "key", "value"]
    if is_backward:
        out += ["grad_out", "lse", "delta"]
    if spec.mask_form == "rows":
        queries, keys = ["query_low", "query_high"], ["key_low", "key_high"]
        if is_backward and is_hopper:
            tiles = [one.tile for one in hopper_backward.plan_backward(spec, target)]
            out += [*queries, *keys, *(WorkList(tile.transposed, tile.rows, tile.columns) for tile in tiles)]
        elif is_backward:
            passes = backward.plan_backward(spec, target)
            for transposed, intervals in ((False, queries), (True, keys)):
                out += intervals
                out += [WorkList(transposed, rows, ROWS) for rows in backward.work_lists(passes, transposed)]
        elif is_hopper:
            tile = hopper_forward.plan_forward(spec, target).tile
            out += [*queries, WorkList(False, tile.rows, tile.columns), *keys]
        else:
            out += [*queries, WorkList(False, forward.plan_forward(spec, target).group_rows, ROWS), *keys]
    if spec.has_sinks and not is_backward:
        out.append("sinks")
    return tuple(out)


def merge(plans: Sequence[tuple[LaunchPlan, tuple[Argument, ...]]]) -> tuple[LaunchPlan, tuple[Argument, ...]]:
    """One plan for several architectures and its arguments: each that any of them is given, once.

    A plan may have workspaces behind the results that all have.
    """
    sizes: dict[Argument, int] = {}
    for plan, given in plans:
        for argument, size in zip(given, plan.argument_bytes, strict=True):
            if sizes.setdefault(argument, size) != size:
                raise ValueError(f"plans disagree about the bytes of argument {argument}: {sizes[argument]} and {size}")
    names = tuple(sizes)
    results = max((plan.result_bytes for plan, _ in plans), key=len)
    for plan, _ in plans:
        if plan.result_bytes != results[: len(plan.result_bytes)]:
            raise ValueError(f"plans disagree about the bytes of results: {plan.result_bytes} and {results}")
    programs = []
    for plan, given in plans:
        to = [names.index(argument) for argument in given]
        to += range(len(names), len(names) + len(plan.result_bytes))
        programs += [_with_operands(program, to) for program in plan.programs]
    first = plans[0][0]
    return LaunchPlan(first.name, tuple(sizes.values()), results, tuple(programs)), names


def _with_operands(program: launch.Program, to: Sequence[int]) -> launch.Program:
    """The program with each operand's number replaced by ``to[number]``."""

    def moved(param):
        if isinstance(param, launch.TensorMap | launch.Pointer | launch.Fill):
            return dataclasses.replace(param, operand=to[param.operand])
        return param

    steps = [
        dataclasses.replace(step, params=tuple(map(moved, step.params)))
        if isinstance(step, launch.Launch)
        else moved(step)
        for step in program.steps
    ]
    return dataclasses.replace(program, steps=tuple(steps))
