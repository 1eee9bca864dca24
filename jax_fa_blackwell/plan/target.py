"""What each supported architecture has: the budgets that plans are made from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """One GPU architecture. Rates are per SM and clock.

    Sources: CUDA programming guide (memory sizes, registers), PTX ISA (Tensor Memory), and for the rates the
    microbenchmarks and vendor figures that docs/kernels.md lists.
    """

    arch: str
    """The compiler's target, e.g. ``sm_100a``."""
    compute_capability: tuple[int, int]
    sm_count: int
    """SMs of the usual part (H200, B200, B300); a persistent grid is this wide and stays right on any other."""
    shared_bytes: int
    """Dynamic shared memory that one block may ask for, in bytes."""
    tensor_memory_columns: int
    """Columns of 128 lanes x 32 bits; 0 where there is no Tensor Memory."""
    registers: int
    """32-bit registers of one SM."""
    mma_flops: int
    """Dense bf16 FLOP."""
    exp2_results: int
    """ex2.approx results."""
    dense_tflops: int
    """Dense bf16 TFLOP/s of the usual part, by its data sheet; what ``mma_flops`` makes at its clock."""
    shared_memory_bytes: int = 128
    """Bytes read or written in shared memory."""


TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        Target("sm_90a", (9, 0), 132, 227 * 1024, 0, 65536, 4096, 16, 989),
        Target("sm_100a", (10, 0), 148, 227 * 1024, 512, 65536, 8192, 16, 2250),
        Target("sm_103a", (10, 3), 148, 227 * 1024, 512, 65536, 8192, 32, 2250),
    )
}


def get_target(arch: str) -> Target:
    """Returns the target named ``arch``; ValueError lists the known ones."""
    if arch not in TARGETS:
        raise ValueError(f"arch must be one of {', '.join(TARGETS)}; got {arch!r}")
    return TARGETS[arch]


def arch_of_compute_capability(major: int, minor: int) -> str | None:
    """The architecture whose cubins run on a device of this compute capability, or None."""
    for target in TARGETS.values():
        if target.compute_capability == (major, minor):
            return target.arch
    return None
