"""Small kernels for the tests of the machine itself: a body of PTX with parameters already in registers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import emulator

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
# Registers of every body: predicates p0.., 16-bit h0.., 32-bit r0.., 64-bit d0.., 128-bit q0..; %t is %tid.x, %lane its
# lane, %warp its warp, %me the linear thread index in the grid.
PROLOGUE = """
.reg .pred p<16>; .reg .b16 h<16>; .reg .b32 r<64>; .reg .b64 d<32>; .reg .b128 q<4>;
.reg .b32 %t, %lane, %warp, %me;
mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5;
mov.u32 %me, %ctaid.x; { .reg .b32 n; mov.u32 n, %ntid.x; mad.lo.s32 %me, %me, n, %t; }
"""


def module(
    body: str, params: Sequence[str] = ("out",), *, before: str = "", directives: str = "", declare: str = ""
) -> str:
    """A module with the kernel `kernel`; each parameter is a 64-bit pointer in the register %name, or "name:u32"."""
    declared, loads = [], []
    for param in params:
        name, _, kind = param.partition(":")
        kind = kind or "u64"
        bits = kind[1:]
        declared.append(f".param .{kind} {name}_param")
        loads.append(f".reg .b{bits} %{name}; ld.param.b{bits} %{name}, [{name}_param];")
    text = "\n".join(loads)
    return (
        f"{HEADER}{before}\n.visible .entry kernel({', '.join(declared)})\n{directives}\n{{\n{declare}\n{text}\n"
        f"{PROLOGUE}\n{body}\nret;\n}}\n"
    )


def run(
    body: str,
    *values: Any,
    params: Sequence[str] = ("out",),
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared_bytes: int = 0,
    schedule: emulator.Schedule | None = None,
    check: emulator.Checks | None = None,
    trace: str | None = None,
    **parts: str,
) -> emulator.Report:
    """Runs a body with `values` for its parameters."""
    return emulator.load(module(body, params, **parts)).launch(
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        shared_bytes=shared_bytes,
        params=values,
        schedule=schedule,
        check=check,
        trace=trace,
    )


def outputs(
    body: str, *, threads: int = 32, grid: int = 1, per_thread: int = 1, dtype: type = np.uint32, **options: Any
):
    """Runs a body that leaves results in r0, r1, ... (d0, d1, ... for 64 bits); returns [thread, result]."""
    size = np.dtype(dtype).itemsize
    out = np.zeros((threads * grid, per_thread), dtype)
    kind = "b32" if size == 4 else "b64"
    register = "r" if size == 4 else "d"
    stores = [f"st.global.{kind} [%place+{k * size}], {register}{k};" for k in range(per_thread)]
    tail = f".reg .b64 %place; mad.wide.u32 %place, %me, {per_thread * size}, %out;\n" + "\n".join(stores)
    run(body + "\n" + tail, out, threads=threads, grid=grid, **options)
    return out


SCHEDULES = (
    emulator.Schedule(seed=0, async_="eager"),
    emulator.Schedule(seed=1, async_="lazy"),
    emulator.Schedule(seed=2, async_="random", spurious_wait=0.3),
)


class expect_fault:  # noqa: N801 - reads as a statement
    """Asserts a Verdict of this fault whose message holds `text`, at a PTX line that holds `at`."""

    def __init__(self, fault: str, text: str = "", at: str = ""):
        self.fault, self.text, self.at = fault, text, at

    def __enter__(self):
        return self

    def __exit__(self, kind, verdict, trace):
        assert isinstance(verdict, emulator.Verdict), f"expected the verdict {self.fault}; got {verdict!r}"
        assert verdict.fault == self.fault, str(verdict)
        assert self.text in verdict.message, str(verdict)
        assert self.at in verdict.text, str(verdict)
        self.verdict = verdict
        return True
