"""Kernels that apply one PTX fragment to arrays, element by element: how tests of arithmetic reach an instruction."""

from collections.abc import Sequence

import numpy as np

import emulator

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
# (PTX type of a load or store, register class, prefix) by item size
ACCESS = {1: ("u8", "b16", "h"), 2: ("b16", "b16", "h"), 4: ("b32", "b32", "r"), 8: ("b64", "b64", "d")}
BLOCK = 128


def elementwise_ptx(body: str, inputs: Sequence[np.dtype], output: np.dtype) -> str:
    """PTX of a kernel that loads %a, %b, ... from the input arrays, runs `body`, and stores %z.

    `body` may declare registers of its own in braces.
    """
    names = "abcdefgh"[: len(inputs)]
    lines = [HEADER, ".visible .entry kernel("]
    lines.append(", ".join(f".param .u64 p_{name}" for name in (*names, "z")) + ")\n{")
    lines.append(".reg .b32 %index, %t;\n.reg .b64 %at, %offset;")
    for name, dtype in zip((*names, "z"), (*inputs, output), strict=True):
        lines.append(f".reg .{ACCESS[dtype.itemsize][1]} %{name};")
    lines.append(
        "mov.u32 %t, %ctaid.x;\nmad.lo.s32 %index, %t, 128, 0;\nmov.u32 %t, %tid.x;\nadd.s32 %index, %index, %t;"
    )
    for name, dtype in zip(names, inputs, strict=True):
        lines.append(f"ld.param.b64 %at, [p_{name}];\nmul.wide.u32 %offset, %index, {dtype.itemsize};")
        lines.append(f"add.s64 %at, %at, %offset;\nld.global.{ACCESS[dtype.itemsize][0]} %{name}, [%at];")
    lines.append(body)
    lines.append(f"ld.param.b64 %at, [p_z];\nmul.wide.u32 %offset, %index, {output.itemsize};")
    lines.append(f"add.s64 %at, %at, %offset;\nst.global.{ACCESS[output.itemsize][0]} [%at], %z;\nret;\n}}")
    return "\n".join(lines)


def apply(body: str, *inputs: np.ndarray, output: np.dtype | type) -> np.ndarray:
    """Runs `body` on every element; arrays of unsigned integers of equal length, a multiple of 128."""
    count = len(inputs[0])
    assert count % BLOCK == 0
    result = np.zeros(count, output)
    program = emulator.load(elementwise_ptx(body, [a.dtype for a in inputs], result.dtype))
    program.launch(grid=(count // BLOCK, 1, 1), block=(BLOCK, 1, 1), params=[*inputs, result])
    return result
