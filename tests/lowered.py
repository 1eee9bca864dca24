"""Programs lowered for CUDA on a machine without a GPU: which custom calls they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jax_fa_blackwell import cuda, custom_call, delta, lowering
from jax_fa_blackwell.plan.launch import LaunchPlan

BLACKWELL = "sm_100a,sm_103a"


@contextmanager
def named_cubins(arches: str = BLACKWELL) -> Iterator[None]:
    """Lowering for ``arches`` with cubins that are only named, and without delta's kernel, which is not counted."""

    def find(name: str, arch: str) -> tuple[str, str, str]:
        return name, "0" * 64, f"{name}_0"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lowering.ARCH_VARIABLE, arches)
        patch.setattr(cuda, "_find", find)
        patch.setattr(cuda.make_forward_plan, "__defaults__", (find,))
        patch.setattr(cuda.make_backward_plan, "__defaults__", (find,))
        patch.setattr(delta, "_launch", lambda spec, *arrays: delta._expression(*arrays))
        jax.clear_caches()  # what was traced or lowered before knows other cubins
        yield
    jax.clear_caches()


def lower_for_cuda(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The program as StableHLO text."""
    jitted = jax.jit(function, **options)
    return jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def launches(text: str) -> list[LaunchPlan]:
    """The plans that one run of the program's ``main`` enqueues, in order; a loop's body counts once."""
    bodies = {
        match[1] or match[2]: match[3]
        for match in re.finditer(r'func\.func \w+ @(?:"([^"]+)"|([\w.]+))\(([\s\S]*?)(?=\n  func\.func |\Z)', text)
    }
    called, plan = r'\bcall @(?:"([^"]+)"|([\w.]+))\(', r'plan = "((?:[^"\\]|\\.)*)"'

    def run(name: str) -> Iterator[LaunchPlan]:
        for match in re.finditer(rf"{called}|custom_call @{custom_call.TARGET}\(.*?{plan}", bodies[name]):
            if match[3] is None:
                yield from run(match[1] or match[2])
            else:
                # MLIR writes a backslash twice, and other than printable bytes as \XX.
                byte = lambda m: m[1] if m[1] == b"\\" else bytes.fromhex(m[1].decode())  # noqa: E731
                written = re.sub(rb"\\(\\|[0-9A-F]{2})", byte, match[3].encode())
                yield LaunchPlan.decode(written)

    return list(run("main"))
