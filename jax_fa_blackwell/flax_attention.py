"""What the two Flax APIs share: the attention function for Flax's own layers, and the layers' head shapes.

Flax itself is not imported here. ``linen.py`` and ``nnx.py`` give these names to their users.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp

from jax_fa_blackwell.attention import CHECKPOINT_NAME, flash_attention

Rotary = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""Maps the projected query [..., T, N, H] and key [..., S, K, H] to arrays of the same shapes."""


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments that a layer hands to ``flash_attention``, which documents them."""

    bias: jax.Array | None
    mask: jax.Array | None
    scale: float | None
    is_causal: bool
    causal_alignment: str
    local_window_size: int | tuple[int | None, int | None] | None
    query_seq_lengths: jax.Array | None
    key_value_seq_lengths: jax.Array | None
    query_segment_ids: jax.Array | None
    key_value_segment_ids: jax.Array | None
    logits_soft_cap: float | None
    sinks: jax.Array | None
    deterministic: bool
    implementation: str | None
    checkpoint_name: str


# Trailing dimensions of each option after those of the batch. bias and mask may have 1 where the others may not.
_LOGITS_OPTIONS = ("bias", "mask")
_BATCH_OPTIONS = {
    "query_seq_lengths": 0,
    "key_value_seq_lengths": 0,
    "query_segment_ids": 1,
    "key_value_segment_ids": 1,
}


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **options: Unpack[AttentionOptions]) -> jax.Array:
    """``flash_attention`` with Flax's conventions: any number of batch dimensions, and masks of any dtype.

    Args:
      query: [batch..., T, N, H].
      key: [batch..., S, K, H].
      value: [batch..., S, K, Hv].
      **options: as for ``flash_attention``, with ``batch...`` in the place of B. A mask may be a number array as
        Flax's ``make_causal_mask`` returns it; what is not zero attends.

    Returns:
      [batch..., T, N, Hv] in query's dtype.

    Raises:
      ValueError: query, key and value have different batch dimensions, or an option has the wrong shape.
    """
    if unknown := sorted(set(options) - set(AttentionOptions.__annotations__)):
        raise TypeError(f"unknown attention options {unknown}; known are {sorted(AttentionOptions.__annotations__)}")
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3 or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have shape [batch..., length, heads, head_dim] with query's batch dimensions; "
                f"got {name} {array.shape}, query {query.shape}"
            )
    mask = options.get("mask")
    if mask is not None:
        options["mask"] = jnp.asarray(mask) != 0
    batch = query.shape[:-3]
    if len(batch) <= 1:
        return flash_attention(query, key, value, **options)

    merged: dict[str, Any] = dict(options)
    for name in _LOGITS_OPTIONS:
        if merged.get(name) is not None:
            merged[name] = _merge_logits_batch(name, merged[name], batch)
    for name, trailing in _BATCH_OPTIONS.items():
        if merged.get(name) is not None:
            merged[name] = _merge_batch(name, merged[name], batch, trailing)
    operands = [_merge_batch(name, x, batch, 3) for name, x in (("query", query), ("key", key), ("value", value))]
    out = flash_attention(*operands, **merged)
    return out.reshape(*batch, *out.shape[1:])


def _merge_batch(name: str, x: jax.Array, batch: tuple[int, ...], trailing: int) -> jax.Array:
    """[batch..., trailing...] → [prod(batch), trailing...]."""
    if x.ndim != len(batch) + trailing or x.shape[: len(batch)] != batch:
        raise ValueError(f"{name} must begin with the batch dimensions {batch} and have {trailing} more; got {x.shape}")
    return x.reshape(math.prod(batch), *x.shape[len(batch) :])


def _merge_logits_batch(name: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """The same for an array that broadcasts to [batch..., N, T, S]; one that has no batch stays small."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    lead, trailing = x.shape[:-3], x.shape[-3:]
    if math.prod(lead) == 1 and len(lead) <= len(batch):
        return x.reshape(1, *trailing)
    try:
        full = jnp.broadcast_to(x, (*batch, *trailing))
    except ValueError:
        raise ValueError(f"{name} must broadcast to the batch dimensions {batch}; got {x.shape}") from None
    return full.reshape(math.prod(batch), *trailing)


@dataclasses.dataclass(frozen=True)
class AttentionFn:
    """Exact attention as the ``attention_fn`` of Flax's own layers, Linen or NNX.

    The fields are options that hold for every call: ``AttentionFn(local_window_size=1024, is_causal=True)``. Arrays
    may be bound to a call with ``functools.partial(attention_fn, query_segment_ids=ids, key_value_segment_ids=ids)``.
    Do not bind ``mask`` or ``is_causal`` so: Flax's layers pass their own, which replaces what a partial holds.

    A row whose keys are all masked gives 0 here and the mean of the values in Flax's own function.

    Attributes:
      scale: factor of the logits; None is 1/sqrt(H).
      is_causal: causal whatever the layer asks for.
      causal_alignment, local_window_size, logits_soft_cap, implementation: as for ``flash_attention``.
      checkpoint_name: what output and LSE are called for ``jax.checkpoint`` policies, as for ``flash_attention``.
      deterministic_gradient: ``deterministic`` of ``flash_attention``; Flax's argument of that name is about dropout.
    """

    scale: float | None = None
    is_causal: bool = False
    causal_alignment: str = "top_left"
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    deterministic_gradient: bool = False
    implementation: str | None = None
    checkpoint_name: str = CHECKPOINT_NAME

    # Linen passes only what it finds in this signature, so every argument it may pass is named here: with **kwargs in
    # their place it would drop the mask without a word.
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., jax.Array] | None = None,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
        is_causal: bool = False,
        *,
        query_seq_lengths: jax.Array | None = None,
        key_value_seq_lengths: jax.Array | None = None,
        query_segment_ids: jax.Array | None = None,
        key_value_segment_ids: jax.Array | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention as Flax's ``dot_product_attention`` defines it, without a [T, S] array in memory.

        Args:
          query: [batch..., T, N, H].
          key: [batch..., S, K, H], N a multiple of K.
          value: [batch..., S, K, Hv].
          bias: broadcasts to [batch..., N, T, S].
          mask: broadcasts to [batch..., N, T, S]; what is not zero attends.
          broadcast_dropout: not used, since there is no dropout.
          dropout_rng: not used, since there is no dropout.
          dropout_rate: must be 0 unless ``deterministic``.
          deterministic: Flax's word for "no dropout".
          dtype: query, key and value are cast to it; None is their common dtype.
          precision: must be None or the default one.
          module: must be None; attention weights are never in memory, so they cannot be sown.
          force_fp32_for_softmax: not used; the softmax is always in fp32.
          einsum_dot_general: must be None.
          qk_attn_weights_einsum: must be None.
          attn_weights_value_einsum: must be None.
          is_causal: query i sees the keys up to its diagonal.
          query_seq_lengths: [batch...], as for ``flash_attention``.
          key_value_seq_lengths: [batch...].
          query_segment_ids: [batch..., T].
          key_value_segment_ids: [batch..., S].
          sinks: [N] fp32.

        Returns:
          [batch..., T, N, Hv].

        Raises:
          NotImplementedError: dropout, sown weights, a precision or an einsum that the kernels cannot honour.
          ValueError: malformed arguments.
        """
        if dropout_rate > 0.0 and not deterministic:
            raise NotImplementedError(f"attention dropout is not supported; got dropout_rate {dropout_rate}")
        if module is not None:
            raise NotImplementedError("sow_weights is not supported: the attention weights are never in memory")
        precisions = precision if isinstance(precision, tuple) else (precision,)
        if any(p not in (None, "default", jax.lax.Precision.DEFAULT) for p in precisions):
            raise NotImplementedError(f"precision must be None or default; got {precision!r}")
        for name, einsum in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise NotImplementedError(f"{name} is not supported: attention is one fused operation")
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        return attend(
            query.astype(dtype),
            key.astype(dtype),
            value.astype(dtype),
            bias=bias,
            mask=mask,
            scale=self.scale,
            is_causal=self.is_causal or is_causal,
            causal_alignment=self.causal_alignment,
            local_window_size=self.local_window_size,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            logits_soft_cap=self.logits_soft_cap,
            sinks=sinks,
            deterministic=self.deterministic_gradient,
            implementation=self.implementation,
            checkpoint_name=self.checkpoint_name,
        )


attention_fn = AttentionFn()
"""``AttentionFn`` with its defaults."""


@dataclasses.dataclass(frozen=True)
class HeadShapes:
    """The projections' output shapes: query [N, H], key [K, H], value [K, Hv]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    def __post_init__(self):
        for name, extent in dataclasses.asdict(self).items():
            if extent < 1:
                raise ValueError(f"{name} must be positive; got {extent}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")

    @staticmethod
    def of(
        features: int,
        num_heads: int,
        num_kv_heads: int | None,
        qkv_features: int | None,
        head_dim: int | None,
        value_head_dim: int | None,
    ) -> HeadShapes:
        """Fills in the defaults: N key heads, H = (qkv_features or features) / N, Hv = H."""
        if head_dim is None:
            total = features if qkv_features is None else qkv_features
            if num_heads < 1 or total % num_heads:
                raise ValueError(f"qkv_features {total} must be a multiple of num_heads {num_heads}; or give head_dim")
            head_dim = total // num_heads
        elif qkv_features is not None:
            raise ValueError(f"give qkv_features or head_dim, not both; got {qkv_features} and {head_dim}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        return HeadShapes(num_heads, kv_heads, head_dim, head_dim if value_head_dim is None else value_head_dim)

    @property
    def query(self) -> tuple[int, int]:
        """Heads and head dim of the query projection."""
        return self.num_heads, self.head_dim

    @property
    def key(self) -> tuple[int, int]:
        """Heads and head dim of the key projection."""
        return self.num_kv_heads, self.head_dim

    @property
    def value(self) -> tuple[int, int]:
        """Heads and head dim of the value projection."""
        return self.num_kv_heads, self.value_head_dim

    @property
    def out(self) -> tuple[int, int]:
        """Heads and head dim that attention returns."""
        return self.num_heads, self.value_head_dim


def attend_projected(
    inputs: tuple[jax.Array, jax.Array | None, jax.Array | None],
    projections: tuple[Callable[[jax.Array], jax.Array], ...],
    rotary: Rotary | None,
    options: AttentionOptions,
) -> jax.Array:
    """The body of both layers: inputs → query, key, value → ``rotary`` → attention. The output projection follows.

    Args:
      inputs: inputs_q [batch..., T, features], inputs_k and inputs_v [batch..., S, features]; a None key is the query
        (self attention), a None value is the key.
      projections: of query, key and value.
      rotary: changes query and key before attention, or None.
      options: keyword arguments of ``attend``.
    """
    inputs_q, inputs_k, inputs_v = inputs
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v was given without inputs_k; pass one array for both as inputs_k")
        inputs_k = inputs_q
    if inputs_v is None:
        inputs_v = inputs_k
    query, key, value = (project(x) for project, x in zip(projections, (inputs_q, inputs_k, inputs_v), strict=True))
    if rotary is not None:
        shapes = query.shape, key.shape
        query, key = rotary(query, key)
        if (query.shape, key.shape) != shapes:
            raise ValueError(f"rotary must keep the shapes of query and key {shapes}; got {query.shape}, {key.shape}")
        # Angles are best computed in fp32, which promotes what they rotate.
        query, key = query.astype(value.dtype), key.astype(value.dtype)
    return attend(query, key, value, **options)
