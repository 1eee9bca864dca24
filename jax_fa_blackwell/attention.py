"""flash_attention: the public function, the choice of implementation, and the gradient rule."""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa_blackwell import reference, sharding, xla
from jax_fa_blackwell.arguments import Arguments, check_arguments
from jax_fa_blackwell.differentiation import Passes, attend, no_derivative
from jax_fa_blackwell.masks import KvIntervals, MaskArguments, kv_intervals
from jax_fa_blackwell.operands import Operands
from jax_fa_blackwell.plan import attention as _kernels  # noqa: F401 - each kernel adds its rule to those to choose from
from jax_fa_blackwell.plan.spec import AttentionSpec, Choice, choose_implementation
from jax_fa_blackwell.plan.target import arch_of_compute_capability

_logger = logging.getLogger("jax_fa_blackwell")

CHECKPOINT_NAME = "context"
"""The default name of the output and the LSE for ``jax.checkpoint`` policies such as ``save_only_these_names``."""


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    checkpoint_name: str = CHECKPOINT_NAME,
) -> Any:
    """Exact attention: ``softmax(scale * query @ key^T + bias) @ value`` for each head, with every usual mask.

    Shapes: B batch, T query length, S key and value length, N query heads, K key and value heads (N is a multiple of
    K; query head n uses key head ``n // (N / K)``), H head dim, Hv value head dim. Names and defaults follow
    ``jax.nn.dot_product_attention``.

    The scores are ``s = scale * q . k + bias``, then ``s = c * tanh(s / c)`` with a soft cap c, then the masks. Softmax
    is computed in float32 (float64 for float64 inputs). Masks refer to row i's diagonal: key i for
    causal_alignment="top_left", key ``i + S - T`` for "bottom_right". With sequence lengths T and S are the lengths of
    the batch entry; with segment ids, positions and lengths count within the two segments of equal id.

    A row that sees no key has output 0, an LSE of -inf (or its sink) and no part in any gradient of query, key, value
    or bias. Nothing that is in a masked position reaches a result or a gradient, not even NaN: a key or value that no
    row sees, a row that sees no key, a bias where the mask is False. Any of B, T, S may be 0.

    Args:
      query: [B, T, N, H] or [T, N, H]; bfloat16, float16, float32 or float64 (on GPU kernels the first two).
      key: [B, S, K, H] or [S, K, H], query's dtype.
      value: [B, S, K, Hv] or [S, K, Hv], query's dtype.
      bias: floating; broadcasts to [B, N, T, S].
      mask: bool, True attends; broadcasts to [B, N, T, S].
      scale: static number; None is ``1 / sqrt(H)``.
      is_causal: whether row i sees no key after its diagonal.
      causal_alignment: "top_left" or "bottom_right".
      local_window_size: an int w, meaning (w, w), or (left, right): row i sees the keys from ``diagonal - left`` to
        ``diagonal + right``; None for a side is unbounded. With or without is_causal.
      query_seq_lengths: integers [B], clipped to 0 and T; rows at and beyond the length see nothing.
      key_value_seq_lengths: integers [B], clipped to 0 and S; keys at and beyond the length are not seen.
      query_segment_ids: int32 [B, T]; equal ids attend, negative ids are padding. Each id must stand in one contiguous
        run, in any order; this cannot be checked under jit. Sequence lengths, if also given, make what is beyond them
        padding.
      key_value_segment_ids: int32 [B, S], given exactly if query_segment_ids is.
      logits_soft_cap: static positive number, or None.
      sinks: floating [N]; each head's softmax denominator gets ``exp(sink)`` more.
      return_lse: whether to return the log-sum-exp too.
      deterministic: whether gradients must be the same, bit for bit, in every run ("xla", "reference" and the kernels
        for Blackwell always are; those for Hopper are slower so, up to head dim 128).
      implementation: "cuda" (kernels), "xla" (pure JAX, memory linear in T and S), "reference" (the definition,
        quadratic memory), or None for the best available, which logs why once where it is not "cuda".
      checkpoint_name: what the output and the LSE are called for ``jax.checkpoint``: with the policy
        ``jax.checkpoint_policies.save_only_these_names("context")`` they are kept and the backward pass runs no forward
        pass again. "reference" has no names: what it would keep is quadratic.

    Without a batch axis in query, the other arrays have none either: lengths are scalars, segment ids [T] and [S].

    Returns:
      The output [B, T, N, Hv] in query's dtype; with return_lse a pair of it and the LSE [B, T, N], natural log of
      each row's softmax denominator, float32 (float64 for float64 inputs). Both are differentiable: with "xla" and
      "reference" in every mode and any number of times, with "cuda" once and by reverse mode.

    Raises:
      ValueError: an argument is malformed; the message names it, what it was and what was expected.
      NotImplementedError: implementation="cuda" and no kernel takes the call; the message names the limit. Or a
        derivative that kernels do not have (forward mode, second order); a symbolic shape (``jax.export``).
    """
    for name, flag in (("return_lse", return_lse), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be a Python bool, known when JAX traces; got {flag!r}")
    if not isinstance(checkpoint_name, str) or not checkpoint_name:
        raise ValueError(f"checkpoint_name must be a string that is not empty; got {checkpoint_name!r}")
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
        "sinks": sinks,
    }
    _refuse_symbolic_shapes(arrays)
    arguments = check_arguments(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
    )
    # Lists and numbers are taken too, and by here they are known to be arrays.
    arrays = {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}
    mapped = sharding.map_explicit(
        functools.partial(
            flash_attention,
            scale=scale,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            return_lse=return_lse,
            deterministic=deterministic,
            implementation=implementation,
            checkpoint_name=checkpoint_name,
        ),
        arrays,
        has_lse=return_lse,
        checkpoint_name=checkpoint_name,
    )
    if mapped is not None:
        return mapped
    intervals = _intervals(arguments.masks)
    spec = make_spec(arguments, intervals, deterministic)
    choice = choose(spec, implementation)
    if choice.name != "cuda" and (warning := sharding.gather_warning(arrays)):
        _warn_once(warning)
    if choice.name == "reference":
        out, lse = reference.attention(
            arguments.query,
            arguments.key,
            arguments.value,
            arguments.bias,
            arguments.mask,
            arguments.sinks,
            arguments.masks,
            scale=arguments.scale,
            logits_soft_cap=arguments.logits_soft_cap,
        )
    else:
        operands = Operands(
            arguments.query,
            arguments.key,
            arguments.value,
            arguments.bias,
            arguments.mask,
            arguments.sinks,
            intervals.lo,
            intervals.hi,
        )
        if choice.name == "cuda" and spec.mask_form == "rows":
            transposed = _intervals(arguments.masks.transpose())
            operands = operands._replace(key_lo=transposed.lo, key_hi=transposed.hi)
        out, lse = attend(passes(choice.name), spec, checkpoint_name, sharding.vary_alike(operands))
    if not arguments.has_batch:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def _refuse_symbolic_shapes(arrays: dict[str, Any]) -> None:
    """Blocks, tiles and launch plans are made from the extents when JAX traces."""
    for name, array in arrays.items():
        shape = getattr(array, "shape", ())
        if not all(isinstance(extent, numbers.Integral) for extent in shape):
            extents = ", ".join(map(str, shape))
            raise NotImplementedError(
                f"{name} must have a shape of integers, known when JAX traces; got the symbolic shape [{extents}]: "
                "export one program for each shape, or pad and give sequence lengths"
            )


def _intervals(masks: MaskArguments) -> KvIntervals:
    """``kv_intervals``, computed under jit where it needs arrays, for the reason that ``_xla_forward`` is."""
    arrays = {name: getattr(masks, name) for name in _MASK_ARRAYS}
    if all(array is None for array in arrays.values()):
        return kv_intervals(masks)
    lo, hi = _interval_arrays(dataclasses.replace(masks, **dict.fromkeys(_MASK_ARRAYS)), arrays)
    return KvIntervals(masks.query_length, masks.key_value_length, lo=lo, hi=hi)


_MASK_ARRAYS = ("query_seq_lengths", "key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids")


@functools.partial(jax.jit, static_argnums=0)
def _interval_arrays(static: MaskArguments, arrays: dict[str, Any]) -> tuple[Any, Any]:
    intervals = kv_intervals(dataclasses.replace(static, **arrays))
    return intervals.lo, intervals.hi


def make_spec(arguments: Arguments, intervals: KvIntervals, deterministic: bool) -> AttentionSpec:
    """The call as static data."""
    B, T, N, H = arguments.query.shape
    _, S, K, Hv = arguments.value.shape
    is_affine = intervals.form == "affine"
    return AttentionSpec(
        batch=B,
        query_length=T,
        key_value_length=S,
        query_heads=N,
        key_value_heads=K,
        head_dim=H,
        value_head_dim=Hv,
        dtype=arguments.query.dtype.name,
        scale=arguments.scale,
        mask_form=intervals.form,
        lower=intervals.lower if is_affine else 0,
        upper=intervals.upper if is_affine else 0,
        bias_shape=None if arguments.bias is None else arguments.bias.shape,
        mask_shape=None if arguments.mask is None else arguments.mask.shape,
        logits_soft_cap=arguments.logits_soft_cap,
        has_sinks=arguments.sinks is not None,
        deterministic=deterministic,
    )


def device_arch() -> str | None:
    """The architecture that kernels are chosen for: the default GPU's if kernels exist for it, else None.

    What ``lowering.named_arches`` says comes first, so that a program can be lowered for a GPU on a machine that has
    none.
    """
    from jax_fa_blackwell import lowering  # here, because it takes a good part of the package's import time

    if named := lowering.named_arches():
        return named[0]
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", "")
    major, _, minor = str(capability).partition(".")
    return arch_of_compute_capability(int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def choose(spec: AttentionSpec, implementation: str | None) -> Choice:
    """``choose_implementation`` for the GPUs here and the mesh around; it logs, once, why a call falls back to "xla".

    Raises:
      ValueError: there is no such implementation.
      NotImplementedError: "cuda" is asked for and no kernel takes the call here; the message names the limit.
    """
    on_request = implementation in ("xla", "reference")
    choice = choose_implementation(spec, implementation, None if on_request else device_arch())
    if choice.name == "cuda" and (limit := sharding.kernel_limit()):
        if implementation == "cuda":
            raise NotImplementedError(f"implementation='cuda': {limit}")
        choice = Choice("xla", limit)
    if choice.name == "xla" and not on_request:
        _log_once(choice.reason)
    return choice


@functools.cache
def _log_once(reason: str) -> None:
    # On a GPU the fallback costs speed that the user paid for; elsewhere there is nothing else to expect.
    level = logging.WARNING if jax.default_backend() == "gpu" else logging.INFO
    _logger.log(level, "flash_attention runs as implementation 'xla': %s", reason)


@functools.cache
def _warn_once(warning: str) -> None:
    _logger.warning("flash_attention: %s", warning)


# Under jit, so that calls with equal shapes, such as a model's layers, are traced and lowered once.
_xla_forward = jax.jit(xla.forward, static_argnums=0, static_argnames="result_dtype")
_xla_backward = jax.jit(xla.backward, static_argnums=0, static_argnames="result_dtype")


def passes(implementation: str) -> Passes:
    """Forward and backward pass of "xla" or "cuda", on operands that vary alike over mesh axes."""
    if implementation == "xla":
        return Passes("xla", _xla_forward, _xla_backward, has_forward_mode=True)
    return Passes("cuda", _kernel_forward, _kernel_backward, has_forward_mode=False)


def _cuda() -> Any:
    from jax_fa_blackwell import cuda  # here, because only programs with kernels need to find cubins

    return cuda


def _kernel_forward(spec: AttentionSpec, operands: Operands):
    return _cuda().forward(spec, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _kernel_backward(spec: AttentionSpec, *arguments):
    return _cuda().backward(spec, *arguments)


@_kernel_backward.defjvp
def _refuse_second_derivative(*_):
    raise no_derivative(passes("cuda"), "second derivative")
