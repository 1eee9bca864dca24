"""flash_attention lowered for CUDA on a machine without a GPU: which custom calls the program has."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_fa_blackwell import cuda, custom_call, delta, flash_attention, lowering

SHAPES = ((2, 256, 4, 96), (2, 200, 2, 96), (2, 200, 2, 64))


@pytest.fixture
def blackwell(monkeypatch):
    """Lowering for sm_100a and sm_103a with cubins that are only named."""
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_100a,sm_103a")
    monkeypatch.setattr(cuda, "_find", lambda name, arch: (name, "0" * 64, f"{name}_0"))
    monkeypatch.setattr(cuda.make_forward_plan, "__defaults__", (cuda._find,))
    monkeypatch.setattr(cuda.make_backward_plan, "__defaults__", (cuda._find,))
    # delta's own kernel is tested in test_delta.py; here its expression stands for it.
    monkeypatch.setattr(delta, "_launch", lambda spec, *arrays: delta._expression(*arrays))


def lowered(function) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def attend(*arrays, **options):
    return flash_attention(*arrays, is_causal=True, implementation="cuda", **options)


def loss(*arrays):
    return attend(*arrays).astype(jnp.float32).sum()


def calls(text: str) -> int:
    assert "callback" not in text
    return text.count(f"stablehlo.custom_call @{custom_call.TARGET}")


def test_forward_is_one_call(blackwell):
    assert calls(lowered(attend)) == 1


def test_gradient_is_forward_and_backward(blackwell):
    assert calls(lowered(jax.grad(loss, (0, 1, 2)))) == 2


def test_default_choice_is_the_kernel(blackwell):
    assert calls(lowered(lambda *arrays: flash_attention(*arrays, is_causal=True))) == 1


def test_vmap_is_one_call(blackwell):
    assert calls(lowered(lambda q, k, v: jax.vmap(attend, (0, None, None))(jnp.stack([q, q]), k, v))) == 1


def operand_types(text: str) -> list[list[str]]:
    """The types of each custom call's operands."""
    lines = [line for line in text.splitlines() if f"@{custom_call.TARGET}(" in line]
    return [re.findall(r"tensor<(\w+)>", line.rsplit(" : (", 1)[1].split(") -> ")[0]) for line in lines]


def broadcasts(text: str, *types: str) -> list[str]:
    """Operations that make an array of one of the types by repeating another."""
    made = "|".join(types)
    return [line for line in text.splitlines() if re.search(rf"broadcast_in_dim.*-> tensor<({made})>", line)]


@pytest.mark.parametrize("axes", [1, 2])
def test_vmap_over_queries_alone_copies_no_keys(blackwell, axes):
    """Mapped queries become more heads of each group, whose gradient is the sum that the keys get."""
    shape = (3, 5)[:axes]
    size = math.prod(shape)

    def mapped(query, key, value):
        attend_all = attend
        for _ in shape:
            attend_all = jax.vmap(attend_all, (0, None, None))
        return attend_all(jnp.broadcast_to(query, (*shape, *query.shape)) * 2, key, value)

    forward = lowered(mapped)
    assert operand_types(forward) == [[f"2x256x{4 * size}x96xbf16", "2x200x2x96xbf16", "2x200x2x64xbf16"]]
    prefix = "x".join(map(str, shape))
    keys = [f"{prefix}x2x200x2x{dim}xbf16" for dim in (96, 64)]
    assert not broadcasts(forward, *keys)

    gradient = lowered(jax.grad(lambda *arrays: mapped(*arrays).astype(jnp.float32).sum(), (0, 1, 2)))
    first, second = operand_types(gradient)
    assert first == operand_types(forward)[0]
    if axes == 1:
        assert second[:3] == first
        assert not broadcasts(gradient, *keys)


def test_vmap_of_a_gradient_has_one_for_each_query(blackwell):
    """Gradients of the keys for each query are as many as copies of the keys, so the keys are repeated."""

    def each(query, key, value):
        return jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, None))(jnp.stack([query, query * 2]), key, value)

    _, second = operand_types(lowered(each))
    assert second[:3] == ["4x256x4x96xbf16", "4x200x2x96xbf16", "4x200x2x64xbf16"]


def test_vmap_over_keys_folds_into_the_batch(blackwell):
    text = lowered(lambda q, k, v: jax.vmap(attend, (None, 0, None))(q, jnp.stack([k, k + 1, k]), v))
    assert operand_types(text) == [["6x256x4x96xbf16", "6x200x2x96xbf16", "6x200x2x64xbf16"]]


def test_lengths_and_sinks_stay_on_the_device(blackwell):
    def masked(query, key, value):
        lengths = jnp.array([200, 17], jnp.int32)
        return flash_attention(query, key, value, key_value_seq_lengths=lengths, sinks=jnp.ones(4))

    assert calls(lowered(masked)) == 1


def test_remat_that_saves_the_results_runs_no_forward_again(blackwell):
    policy = jax.checkpoint_policies.save_only_these_names("context")
    assert calls(lowered(jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1, 2)))) == 2
    assert calls(lowered(jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)))) == 3


def test_hopper_has_no_kernel_yet(monkeypatch):
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_90a")
    with pytest.raises(NotImplementedError, match="sm_90a has no Tensor Memory"):
        lowered(lambda *arrays: attend(*arrays))  # a new function: JAX has traced attend before
