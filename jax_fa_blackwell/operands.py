"""The arrays of one attention call in the form that every implementation takes, beside its AttentionSpec."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """The arrays of a call.

    Attributes:
      query: [B, T, N, H]; key: [B, S, K, H]; value: [B, S, K, Hv].
      bias, mask: 4-D, broadcast to [B, N, T, S]; floating and bool; or None.
      sinks: [N], or None.
      lo, hi: int32 [B, T], the interval of keys that each row sees; None unless the spec's mask form is "rows".
      key_lo, key_hi: int32 [B, S], the interval of rows that see each key; given to kernels only.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    sinks: jax.Array | None = None
    lo: jax.Array | None = None
    hi: jax.Array | None = None
    key_lo: jax.Array | None = None
    key_hi: jax.Array | None = None


class Gradients(NamedTuple):
    """Cotangents of the floating operands, in their shapes and dtypes; None where there is no such operand."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
