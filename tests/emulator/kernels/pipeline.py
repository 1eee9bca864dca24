"""A persistent, warp-specialised GEMM: C[M, N] = A[M, K]·B[N, K]ᵀ, bf16 to fp32, every size known at run time only.

Tiles are 128 × 64. Warp 0 loads by TMA, warp 1 multiplies, warps 4-7 store; the others give them registers. Two
accumulators in TMEM, so that the next tile is multiplied while the last is stored. Parameters: map a, sizes, map b,
sizes, pointer c, m, n, k (int32).
"""

from dataclasses import dataclass

TILE = (128, 64, 64)
STAGES = 3
THREADS = 384


@dataclass(frozen=True)
class Config:
    """Registers of a thread of the outer and of the middle warpgroup, which at launch have 168 each."""

    few_registers: int = 48
    many_registers: int = 208
