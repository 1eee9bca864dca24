"""Sizes that the Blackwell kernels and their plans share."""

from __future__ import annotations

import math

from jax_fa_blackwell.plan.spec import AttentionSpec

ROWS = 128
"""Query rows or keys of a tile: the lanes of Tensor Memory."""
SLICE = 64
"""Head dims of a slice: one row of the 128-byte swizzle in 16-bit elements."""
SLICE_BYTES = ROWS * SLICE * 2
MAX_SLOTS = 12
"""Most slots that the ring's barriers have room for."""
WORK_ENTRY_BYTES = 16
"""Of an entry of the work list for row intervals: batch entry, group of rows, first block, end block."""
UNBOUNDED = 1 << 30
"""A distance from the diagonal that no sequence reaches."""
LOG2_E = math.log2(math.e)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


def slices_of(dim: int) -> int:
    """Slices that hold a head dim."""
    return -(-dim // SLICE)


def streamed_dims(dim: int, group: int) -> tuple[float, int]:
    """Head dims of 128 rows that a block of a group loads of a streamed operand: for scores, and for rows.

    In a pair a slot has half of the rows of 128 head dims, or all rows of 64 (``kernels/sm100/slices.py``).
    """
    return slices_of(dim) * SLICE / group, round_up(dim, SLICE * group) // group


def mask_scalars(spec: AttentionSpec, transposed: bool) -> dict[str, int]:
    """The kernels' numbers of the mask, for query rows or, transposed, for key rows.

    Row i sees the columns i + mask_low <= j < i + mask_high; those that some row sees are seen_low <= j < seen_high.
    """
    low, high = (spec.lower, spec.upper) if spec.mask_form == "affine" else (-UNBOUNDED, UNBOUNDED)
    low, high = max(low, -UNBOUNDED), min(high, UNBOUNDED)
    rows, columns = spec.query_length, spec.key_value_length
    if transposed:
        # Key j is seen by the queries j - upper < i <= j - lower.
        low, high, rows, columns = 1 - high, 1 - low, columns, rows
    seen = max(0, low), min(columns, rows - 1 + high)
    return {
        "rows_form": int(spec.mask_form == "rows"),
        "mask_low": low,
        "mask_high": high,
        "cleaned": int(spec.mask_form == "rows" or seen != (0, columns)),
        "seen_low": seen[0],
        "seen_high": seen[1],
    }
