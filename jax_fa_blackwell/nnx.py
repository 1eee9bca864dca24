"""Attention for Flax NNX: an ``attention_fn`` for Flax's own layer, and a multi-head layer with every mask option.

With Flax's layer::

    nnx.MultiHeadAttention(num_heads=8, in_features=512, attention_fn=attention_fn, rngs=rngs)
    nnx.MultiHeadAttention(num_heads=8, in_features=512, attention_fn=AttentionFn(local_window_size=1024), rngs=rngs)
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from jax_fa_blackwell.flax_attention import (
    AttentionFn,
    AttentionOptions,
    HeadShapes,
    Rotary,
    attend_projected,
    attention_fn,
)

__all__ = ["AttentionFn", "MultiHeadAttention", "attention_fn"]

DEFAULT_KERNEL_INIT = nnx.initializers.lecun_normal()


class MultiHeadAttention(nnx.Module):
    """Multi-head attention with grouped heads, any head dims and every mask option of ``flash_attention``.

    Parameters have the names and shapes of ``nnx.MultiHeadAttention`` (``query``, ``key``, ``value``: kernel
    [features, heads, head_dim], bias [heads, head_dim]; ``out``: kernel [heads, head_dim, features], bias [features]),
    so weights can be copied from one to the other. For partitioning wrap the initialisers in
    ``nnx.with_partitioning``.
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        use_bias: bool = True,
        kernel_init: nnx.Initializer = DEFAULT_KERNEL_INIT,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        out_kernel_init: nnx.Initializer | None = None,
        out_bias_init: nnx.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the four projections.

        Args:
          num_heads: N, heads of the query.
          in_features: features of ``inputs_q``.
          qkv_features: N * H as in Flax's layer; None is ``in_features``.
          out_features: features of the result; None is ``in_features``.
          num_kv_heads: K, heads of key and value, a divisor of N; None is N.
          in_kv_features: features of ``inputs_k`` and ``inputs_v``; None is ``in_features``.
          head_dim: H, in the place of ``qkv_features``.
          value_head_dim: Hv; None is H.
          dtype: of the computation; None takes it from inputs and parameters.
          param_dtype: of the parameters.
          precision: of the four projections; attention has one precision.
          use_bias: whether the projections have a bias.
          kernel_init: initialiser of the kernels.
          bias_init: initialiser of the biases.
          out_kernel_init: that of the output projection; None is ``kernel_init``.
          out_bias_init: that of the output projection; None is ``bias_init``.
          rngs: keys for the initialisers.
        """
        heads = HeadShapes.of(in_features, num_heads, num_kv_heads, qkv_features, head_dim, value_head_dim)
        kv_features = in_features if in_kv_features is None else in_kv_features
        linear = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        project = functools.partial(linear, kernel_init=kernel_init, bias_init=bias_init)
        self.query = project(in_features, heads.query)
        self.key = project(kv_features, heads.key)
        self.value = project(kv_features, heads.value)
        self.out = linear(
            heads.out,
            in_features if out_features is None else out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        rotary: Rotary | None = None,
        **options: Unpack[AttentionOptions],
    ) -> jax.Array:
        """Projects the inputs to heads, attends, and projects the result.

        Args:
          inputs_q: [batch..., T, in_features].
          inputs_k: [batch..., S, in_kv_features]; None is ``inputs_q``.
          inputs_v: [batch..., S, in_kv_features]; None is ``inputs_k``.
          rotary: called with the projected query and key, returns them with their positions put in.
          **options: any of ``bias``, ``mask``, ``scale``, ``is_causal``, ``causal_alignment``, ``local_window_size``,
            ``query_seq_lengths``, ``key_value_seq_lengths``, ``query_segment_ids``, ``key_value_segment_ids``,
            ``logits_soft_cap``, ``sinks``, ``deterministic``, ``implementation``, ``checkpoint_name``, as for
            ``flash_attention``.

        Returns:
          [batch..., T, out_features].

        Raises:
          ValueError: malformed arguments.
        """
        projections = (self.query, self.key, self.value)
        return self.out(attend_projected((inputs_q, inputs_k, inputs_v), projections, rotary, options))
