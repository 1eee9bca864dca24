"""Programs lowered for CUDA on a machine without a GPU: which custom calls they run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jax_fa_blackwell import cuda, custom_call, delta, lowering

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


def launches(text: str) -> list[str]:
    """The names of the plans that one run of the program's ``main`` enqueues; a loop's body counts once."""
    bodies = {
        next(filter(None, match.groups()[:2])): match[3]
        for match in re.finditer(r'func\.func \w+ @(?:"([^"]+)"|([\w.]+))\(([\s\S]*?)(?=\n  func\.func |\Z)', text)
    }

    def run(name: str) -> Iterator[str]:
        pattern = (
            rf'\bcall @(?:"([^"]+)"|([\w.]+))\(|custom_call @{custom_call.TARGET}\(.*?plan = "JFAP((?:[^"\\]|\\.)*)"'
        )
        for match in re.finditer(pattern, bodies[name]):
            callee = match[1] or match[2]
            if callee is not None:
                yield from run(callee)
            else:
                # The plan's version and the length of its name, four bytes each, stand before the name.
                written = re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), match[3])
                yield written[8 : 8 + ord(written[4])]

    return list(run("main"))
