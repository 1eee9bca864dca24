"""What attention kernels of every architecture ask of a call."""

from __future__ import annotations

import math

from jax_fa_blackwell.plan.spec import AttentionSpec


def common_limit(spec: AttentionSpec, most_dims: int) -> str | None:
    """None if a kernel for head dims up to ``most_dims`` takes the call, else the limit."""
    if spec.dtype not in ("bfloat16", "float16"):
        return f"dtype must be bfloat16 or float16; got {spec.dtype}"
    for name in ("head_dim", "value_head_dim"):
        dim = getattr(spec, name)
        if dim % 8 or not 8 <= dim <= most_dims:
            return f"{name} must be a multiple of 8 from 8 to {most_dims}; got {dim}"
    if spec.batch * spec.query_length * spec.query_heads >= 2**31:
        return "batch * query_length * query_heads must be below 2**31"
    if spec.bias_shape is not None or spec.mask_shape is not None:
        return "bias and mask arrays are not taken"
    if spec.scale == 0 or not math.isfinite(spec.scale):
        return f"scale must be finite and not zero; got {spec.scale}"
    return None
