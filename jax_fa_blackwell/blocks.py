"""Which blocks of keys each group of query rows sees: what a kernel walks when the mask is per-row intervals."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa_blackwell.plan.slices import ROWS


def blocks_of_groups(low: jax.Array, high: jax.Array, rows: int) -> jax.Array:
    """int32 [B, groups, 2]: for each group of rows, the first block of 128 columns it sees and one past the last."""
    batch, length = low.shape
    padding = ((0, 0), (0, -length % rows))
    least = jnp.pad(low, padding, constant_values=jnp.iinfo(jnp.int32).max).reshape(batch, -1, rows).min(2)
    greatest = jnp.pad(high, padding, constant_values=0).reshape(batch, -1, rows).max(2)
    return jnp.stack([least // ROWS, -(-greatest // ROWS)], axis=-1)
