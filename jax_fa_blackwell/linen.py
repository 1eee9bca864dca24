"""Attention for Flax Linen: an ``attention_fn`` for Flax's own layers, and a multi-head layer with every mask option.

With Flax's layer::

    nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)
    nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=AttentionFn(is_causal=True, local_window_size=1024))
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import linen as nn

from jax_fa_blackwell.flax_attention import (
    AttentionFn,
    AttentionOptions,
    HeadShapes,
    Rotary,
    attend_projected,
    attention_fn,
)

__all__ = ["AttentionFn", "MultiHeadAttention", "attention_fn"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention with grouped heads, any head dims and every mask option of ``flash_attention``.

    Parameters have the names and shapes of ``nn.MultiHeadDotProductAttention`` (``query``, ``key``, ``value``: kernel
    [features, heads, head_dim], bias [heads, head_dim]; ``out``: kernel [heads, head_dim, features], bias [features]),
    so weights can be copied from one to the other. For logical partitioning wrap the initialisers in
    ``nn.with_logical_partitioning``.

    Attributes:
      num_heads: N, heads of the query.
      num_kv_heads: K, heads of key and value, a divisor of N; None is N.
      qkv_features: N * H as in Flax's layer; None is the features of ``inputs_q``.
      head_dim: H, in the place of ``qkv_features``.
      value_head_dim: Hv; None is H.
      out_features: features of the result; None is those of ``inputs_q``.
      dtype: of the computation; None takes it from inputs and parameters.
      param_dtype: of the parameters.
      precision: of the four projections; attention has one precision.
      use_bias: whether the projections have a bias.
      kernel_init, bias_init: initialisers of the projections.
      out_kernel_init, out_bias_init: those of the output projection; None is the same as the others.
    """

    num_heads: int
    num_kv_heads: int | None = None
    qkv_features: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    out_features: int | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    out_kernel_init: nn.initializers.Initializer | None = None
    out_bias_init: nn.initializers.Initializer | None = None

    @nn.compact
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
          inputs_q: [batch..., T, features].
          inputs_k: [batch..., S, features]; None is ``inputs_q``.
          inputs_v: [batch..., S, features]; None is ``inputs_k``.
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
        heads = HeadShapes.of(
            inputs_q.shape[-1],
            self.num_heads,
            self.num_kv_heads,
            self.qkv_features,
            self.head_dim,
            self.value_head_dim,
        )
        dense = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        project = functools.partial(dense, kernel_init=self.kernel_init, bias_init=self.bias_init)
        projections = (
            project(heads.query, name="query"),
            project(heads.key, name="key"),
            project(heads.value, name="value"),
        )
        attended = attend_projected((inputs_q, inputs_k, inputs_v), projections, rotary, options)
        return dense(
            inputs_q.shape[-1] if self.out_features is None else self.out_features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(attended)
