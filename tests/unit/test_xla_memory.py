"""The XLA path's temporary memory grows with the length, not its square; compiled only, at the default block sizes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_fa_blackwell import flash_attention

LENGTHS = (4 << 10, 16 << 10, 64 << 10)


def temporary_bytes(length, *, backward, segments):
    def forward(query, key, value, ids):
        packed = {"query_segment_ids": ids, "key_value_segment_ids": ids} if segments else {}
        return flash_attention(query, key, value, is_causal=True, implementation="xla", **packed)

    def gradients(query, key, value, ids, cotangent):
        return jax.vjp(lambda q, k, v: forward(q, k, v, ids), query, key, value)[1](cotangent)

    array = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
    arguments = [array] * 3 + [jax.ShapeDtypeStruct((1, length), jnp.int32)] + [array] * backward
    # What the backend does to instructions does not change the buffers.
    options: Any = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(gradients if backward else forward).lower(*arguments).compile(options)
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("segments", [False, True], ids=["causal", "segments"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_temporary_memory_grows_linearly(backward, segments):
    sizes = [temporary_bytes(length, backward=backward, segments=segments) for length in LENGTHS]
    assert sizes[0] > 0
    for small, large in itertools.pairwise(sizes):
        assert large <= 4.1 * small
    # Not more than some copies of the operands and float32 accumulators, whatever the blocks cost.
    operand = LENGTHS[-1] * 4 * 64 * 2
    assert sizes[-1] <= (16 if backward else 6) * operand
