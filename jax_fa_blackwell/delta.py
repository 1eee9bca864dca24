"""delta = rowsum(dO * O) - dLSE: what attention's backward subtracts from dP in every row.

With P = softmax(S) and O = P V, dS = P * (dP - rowsum(dO * O)) (Dao et al., FlashAttention, 2022, appendix B); the
gradient of a returned log-sum-exp enters the same bracket with the opposite sign.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_fa_blackwell import cubins, custom_call, lowering
from jax_fa_blackwell.plan import delta as plan
from jax_fa_blackwell.plan.delta import DeltaSpec


def delta(out: jax.Array, grad_out: jax.Array, grad_lse: jax.Array | None = None) -> jax.Array:
    """Row sums of ``grad_out * out``, less ``grad_lse``.

    On GPUs of compute capability 9.0, 10.0 and 10.3 a kernel runs for bfloat16 and float16, any H that is a multiple
    of 8 up to 512, and up to 2**31 - 1 rows. Everything else (``plan.delta.DeltaSpec.limit`` is the rule) and every
    other platform gets the same sum as a jax.numpy expression.

    Args:
      out: attention's output O, floating point [B, T, N, H].
      grad_out: its cotangent dO, of the same shape and dtype.
      grad_lse: cotangent dLSE of the log-sum-exp, [B, T, N] in the dtype of the result; None is zero.

    Returns:
      [B, N, T]; float32, but float64 for float64 inputs. Differentiable in every argument.

    Raises:
      ValueError: shapes or dtypes are not those above.
    """
    if out.ndim != 4 or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(f"out must be floating point [B, T, N, H]; got {out.dtype}{list(out.shape)}")
    if grad_out.shape != out.shape or grad_out.dtype != out.dtype:
        expected, got = f"{out.dtype}{list(out.shape)}", f"{grad_out.dtype}{list(grad_out.shape)}"
        raise ValueError(f"grad_out must be like out, {expected}; got {got}")
    sums = _sum_dtype(out)
    if grad_lse is not None and (grad_lse.shape != out.shape[:3] or grad_lse.dtype != sums):
        expected, got = f"{sums}{list(out.shape[:3])}", f"{grad_lse.dtype}{list(grad_lse.shape)}"
        raise ValueError(f"grad_lse must be {expected}; got {got}")
    return _delta(out, grad_out, grad_lse)


def _sum_dtype(out: jax.Array) -> jnp.dtype:
    return jnp.promote_types(out.dtype, jnp.float32)


@jax.custom_vjp
def _delta(out, grad_out, grad_lse):
    return _batched(out, grad_out) if grad_lse is None else _batched(out, grad_out, grad_lse)


def _forward(out, grad_out, grad_lse):
    return _delta(out, grad_out, grad_lse), (out, grad_out, grad_lse)


def _backward(residuals, cotangent):
    out, grad_out, grad_lse = residuals
    cotangent = cotangent.swapaxes(1, 2)
    scaled = [(cotangent[..., None] * other.astype(cotangent.dtype)).astype(out.dtype) for other in (grad_out, out)]
    return *scaled, None if grad_lse is None else -cotangent


_delta.defvjp(_forward, _backward)


@jax.custom_batching.custom_vmap
def _batched(out, grad_out, *grad_lse):
    return _unbatched(out, grad_out, *grad_lse)


@_batched.def_vmap
def _fold_into_batch(axis_size, in_batched, *arrays):
    """A mapped axis becomes part of B, so that one launch runs it; nested vmaps come here once each."""
    mapped = [
        array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))
        for array, batched in zip(arrays, in_batched, strict=True)
    ]
    folded = _batched(*(array.reshape(-1, *array.shape[2:]) for array in mapped))
    return folded.reshape(axis_size, -1, *folded.shape[1:]), True


def _unbatched(out, grad_out, *grad_lse):
    batch, tokens, heads, head_dim = out.shape
    spec = DeltaSpec(batch, tokens, heads, head_dim, out.dtype.name, bool(grad_lse))
    if spec.limit():
        return _expression(out, grad_out, *grad_lse)

    def kernel(*arrays):
        return lowering.deferred(_launch, spec, arrays, _expression)

    return jax.lax.platform_dependent(out, grad_out, *grad_lse, cuda=kernel, default=_expression)


def _expression(out, grad_out, *grad_lse):
    dtype = _sum_dtype(out)
    sums = jnp.sum(grad_out.astype(dtype) * out.astype(dtype), axis=-1)
    for subtrahend in grad_lse:
        sums -= subtrahend
    return sums.swapaxes(1, 2)


def _launch(spec: DeltaSpec, *arrays):
    """Traced when lowering for CUDA: the kernel, or the expression where no device has an architecture we know."""
    arches = lowering.arches()
    if not arches:
        return _expression(*arrays)
    found = [cubins.find(spec.variant, arch) for arch in arches]
    for cubin in found:
        custom_call.add_cubin_directory(cubin.folder)
    result = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.tokens), jnp.float32)
    return custom_call.call(plan.make_plan(spec, found), arrays, [result])[0]
