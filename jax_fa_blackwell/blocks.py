"""The work that per-row intervals make for a kernel: which blocks of columns each group of rows sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa_blackwell.plan.slices import ROWS


def blocks_of_groups(low: jax.Array, high: jax.Array, rows: int, columns: int = ROWS) -> jax.Array:
    """Work entries, those with the most blocks first.

    Args:
      low: int32 [B, length], the first column that each row sees.
      high: int32 [B, length], one past the last.
      rows: rows of a group.
      columns: columns of a block.

    Returns:
      int32 [B * groups, 4]: batch entry, group, first block of columns that the group sees, one past the last.
    """
    batch, length = low.shape
    padding = ((0, 0), (0, -length % rows))
    least = jnp.pad(low, padding, constant_values=jnp.iinfo(jnp.int32).max).reshape(batch, -1, rows).min(2)
    greatest = jnp.pad(high, padding, constant_values=0).reshape(batch, -1, rows).max(2)
    first, end = (least // columns).ravel(), (-(-greatest // columns)).ravel()
    entry, group = jnp.indices(least.shape, jnp.int32)
    order = jnp.argsort(first - end, stable=True)  # groups that see nothing have end < first, and come last
    return jnp.stack([entry.ravel(), group.ravel(), first, end], axis=-1)[order]
