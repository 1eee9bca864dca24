"""What the test kernels share. Imports the kernel DSL: only for use in the compiling child process (see build.py)."""
# pyright: reportMissingImports=false

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import make_ptr

DTYPES = {
    "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
    "tf32": cutlass.TFloat32,
    "f32": cutlass.Float32,
    "e4m3": cutlass.Float8E4M3FN,
    "s32": cutlass.Int32,
    "u8": cutlass.Uint8,
}
MAJORS = {"K": tcgen05.OperandMajorMode.K, "MN": tcgen05.OperandMajorMode.MN}


def pointer(dtype: str, align: int = 16):
    """A global-memory pointer to compile for."""
    return make_ptr(DTYPES[dtype], 0x1000, cute.AddressSpace.gmem, assumed_align=align)


def compile_to_ptx(host: Any, *arguments: Any) -> str:
    """Compiles a @cute.jit function whose last parameter is the stream."""
    compiled = cute.compile(host, *arguments, cuda.CUstream(0))
    text = compiled.artifacts.PTX
    if not text:
        raise RuntimeError("the compiler kept no PTX; CUTE_DSL_KEEP=ptx must be set before it is imported")
    return text


def smem_atom_kind(major: str, swizzle: str) -> tcgen05.SmemLayoutAtomKind:
    """The shared-memory layout atom of an operand that is major in K or MN and swizzled by 32, 64 or 128 bytes."""
    return getattr(tcgen05.SmemLayoutAtomKind, f"{major}_{'INTER' if swizzle == 'none' else 'SW' + swizzle[:-1]}")
