"""Micro kernels that a Hopper GPU executed: what they are (`all_cases`) and what came out (h200.npz, by record.py)."""

from . import arithmetic, barriers, clusters, conversions, mma, tma, warps, wgmma
from .micro import Micro


def all_cases() -> list[Micro]:
    """Every micro kernel; names are unique."""
    modules = (conversions, arithmetic, warps, barriers, tma, clusters, mma, wgmma)
    found = [case for module in modules for case in module.cases()]
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate names: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return found
