"""flash_attention on an emulated B200, through a host callback, and the training of a small model on it."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from emulator import attention_kernels
from jax_fa_blackwell import attention, cuda, linen
from jax_fa_blackwell.plan import attention as attention_plan
from jax_fa_blackwell.plan.target import get_target

STEPS = 20


def install(setattr_: Callable[[object, str, object], None]) -> list[str]:
    """Makes this process's GPU an emulated B200; returns the list that launched plans' names will stand in.

    Args:
      setattr_: how to set an attribute of a module, e.g. a monkeypatch's, which also sets it back.
    """
    attention_kernels.prepare()
    launched: list[str] = []

    def execute(make_plan, spec, arrays, results, fallback, fallback_arguments):
        del fallback, fallback_arguments
        given = attention_plan.arguments(spec, get_target("sm_100a"), "grad_out" in arrays)

        def call(*arrays):
            launched.append(make_plan.__name__)
            flat, _ = attention_kernels.run(make_plan, spec, [np.asarray(array) for array in arrays])
            return tuple(
                array.view(result.dtype).reshape(result.shape) for array, result in zip(flat, results, strict=True)
            )

        return jax.pure_callback(call, tuple(results), *cuda.make_arguments(given, arrays))

    setattr_(cuda, "execute", execute)
    setattr_(attention, "device_arch", lambda: "sm_100a")
    return launched


class Model(nn.Module):
    """Two layers of attention with a residual each."""

    head_dim: int
    implementation: str

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 64, dtype=jnp.bfloat16)(tokens)
        for _ in range(2):
            attend = linen.MultiHeadAttention(
                num_heads=2,
                num_kv_heads=1,
                head_dim=self.head_dim,
                dtype=jnp.bfloat16,
            )
            x = x + attend(nn.LayerNorm(dtype=jnp.bfloat16)(x), is_causal=True, implementation=self.implementation)
        return nn.Dense(32, dtype=jnp.float32)(x)


def train(head_dim: int, implementation: str) -> np.ndarray:
    """The loss in nats a token at each step of training the model on 48 random tokens, with Adam."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 1, 49)))
    model, optimizer = Model(head_dim, implementation), optax.adam(3e-4)
    params = model.init(jax.random.key(0), tokens[0, :, :-1])

    def loss_of(params, tokens):
        logits = jnp.asarray(model.apply(params, tokens[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    state, history = optimizer.init(params), []
    for batch in tokens.repeat(STEPS, 0):
        params, state, loss = step(params, state, batch)
        history.append(float(loss))
    return np.array(history)
