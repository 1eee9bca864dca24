"""The plans of a call by architecture: the one place that knows which kernels serve which."""

from __future__ import annotations

from collections.abc import Callable

from jax_fa_blackwell.plan import forward, hopper, hopper_forward
from jax_fa_blackwell.plan.launch import LaunchPlan
from jax_fa_blackwell.plan.slices import ROWS
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target

FindCubin = Callable[[str], tuple[str, str, str]]
"""From a variant's name to (kernel name, sha256, symbol) of its cubin."""


def launch_forward(spec: AttentionSpec, target: Target, find: FindCubin) -> LaunchPlan:
    """The forward's launch plan."""
    module = hopper_forward if target.arch == hopper.ARCH else forward
    plan = module.plan_forward(spec, target)
    return module.launch_forward(plan, *find(plan.kernel))


def forward_work(spec: AttentionSpec, target: Target) -> tuple[int, int]:
    """Query rows of a work item and keys of a block, by which row intervals are listed (``blocks.py``)."""
    if target.arch == hopper.ARCH:
        plan = hopper_forward.plan_forward(spec, target)
        return plan.group_rows, plan.block_keys
    return forward.plan_forward(spec, target).group_rows, ROWS
