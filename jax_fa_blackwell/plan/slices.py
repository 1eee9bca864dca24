"""Sizes that the Blackwell kernels and their plans share."""

from __future__ import annotations

import math

ROWS = 128
"""Query rows or keys of a tile: the lanes of Tensor Memory."""
SLICE = 64
"""Head dims of a slice: one row of the 128-byte swizzle in 16-bit elements."""
SLICE_BYTES = ROWS * SLICE * 2
MAX_SLOTS = 12
"""Most slots that the ring's barriers have room for."""
UNBOUNDED = 1 << 30
"""A distance from the diagonal that no sequence reaches."""
LOG2_E = math.log2(math.e)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def slices_of(dim: int) -> int:
    """Slices that hold a head dim."""
    return -(-dim // SLICE)


def tail_of(dim: int) -> int:
    """Head dims in the last slice."""
    return dim - (slices_of(dim) - 1) * SLICE
