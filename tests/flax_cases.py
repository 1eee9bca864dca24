"""Inputs and comparisons of the tests of both Flax modules."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np

# float32 differs by the order of sums; bfloat16 keeps 8 bits, and three roundings lie between input and output.
TOLERANCE = {"float32": {"rtol": 2e-5, "atol": 2e-5}, "bfloat16": {"rtol": 3 * 2**-8, "atol": 3 * 2**-8}}
DTYPES = ["float32", "bfloat16"]


def inputs(batch=(2,), T=12, S=16, features=24, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.standard_normal((*batch, T, features)), dtype)
    return query, jnp.asarray(rng.standard_normal((*batch, S, features)), dtype)


def random_mask(shape, seed=1):
    """A random mask in which every row sees its first key: on rows that see nothing, Flax differs by definition."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 0] = True
    return jnp.asarray(mask)


def check_same(ours, flax, dtype="float32"):
    assert ours.dtype == flax.dtype == jnp.dtype(dtype)
    chex.assert_trees_all_close(ours.astype("float32"), flax.astype("float32"), **TOLERANCE[dtype])
