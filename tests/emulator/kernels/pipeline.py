"""A persistent, warp-specialised GEMM: C[M, N] = A[M, K]·B[N, K]ᵀ, bf16 to fp32, every size known at run time only.

Tiles are 128 × 64. Warp 0 loads by TMA, warp 1 multiplies, warps 4-7 store; warps 0-3 give registers to warps 4-7. Two
accumulators in TMEM, so that the next tile is multiplied while the last is stored. Parameters: map a, sizes, map b,
sizes, pointer c, m, n, k (int32).
"""

from dataclasses import dataclass

TILE = (128, 64, 64)
STAGES = 3
THREADS = 256


@dataclass(frozen=True)
class Config:
    """Registers of the first and of the second warpgroup; 0 leaves the registers alone."""

    few_registers: int = 48
    many_registers: int = 208
