"""flash_attention lowered for CUDA on a machine without a GPU: which custom calls the program has."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jax_fa_blackwell import custom_call, flash_attention, lowering
from jax_fa_blackwell.plan.launch import Launch, Pointer, Program, TensorMap
from lowered import launches, lower_for_cuda, named_cubins

SHAPES = ((2, 256, 4, 96), (2, 200, 2, 96), (2, 200, 2, 64))


@pytest.fixture
def blackwell():
    with named_cubins():
        yield


def lowered(function) -> str:
    return lower_for_cuda(function, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES))


def attend(*arrays, implementation="cuda", **options):
    return flash_attention(*arrays, is_causal=True, implementation=implementation, **options)


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


def largest_keys(text: str) -> int:
    """Elements of the greatest array that has an axis as long as the keys and one as wide as they are."""
    shapes = [tuple(map(int, extents.split("x")[:-1])) for extents in re.findall(r"tensor<((?:\d+x)+)\w+>", text)]
    return max(math.prod(shape) for shape in shapes if {200, 96} <= set(shape))


@pytest.mark.parametrize("implementation", ["cuda", "xla"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_vmap_over_queries_alone_copies_no_keys(blackwell, axes, implementation):
    """Mapped queries become more heads of each group, whose gradient is the sum that the keys get."""
    shape = (3, 5, 2)[:axes]
    size = math.prod(shape)

    def mapped(query, key, value):
        attend_all = functools.partial(attend, implementation=implementation)
        for _ in shape:
            attend_all = jax.vmap(attend_all, (0, None, None))
        return attend_all(jnp.broadcast_to(query, (*shape, *query.shape)) * 2, key, value)

    forward = lowered(mapped)
    gradient = lowered(jax.grad(lambda *arrays: mapped(*arrays).astype(jnp.float32).sum(), (0, 1, 2)))
    for text in (forward, gradient):
        assert largest_keys(text) == math.prod(SHAPES[1])
    operands = [f"2x256x{4 * size}x96xbf16", "2x200x2x96xbf16", "2x200x2x64xbf16"]
    for text, count in ((forward, 1), (gradient, 2)) if implementation == "cuda" else ():
        assert [types[:3] for types in operand_types(text)] == [operands] * count


@pytest.mark.parametrize("order", ["queries inside", "queries outside"])
def test_vmaps_over_queries_alone_and_over_all(blackwell, order):
    """Neither pass repeats keys, whichever vmap is inside."""
    alone, everything = (0, None, None), (0, 0, 0)
    query, key, value = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES)
    size = {alone: 5, everything: 3}
    stacked = lambda array, *sizes: jax.ShapeDtypeStruct((*sizes, *array.shape), array.dtype)  # noqa: E731
    inner, outer = (alone, everything) if order == "queries inside" else (everything, alone)
    arrays = (stacked(query, size[outer], size[inner]), stacked(key, 3), stacked(value, 3))

    def total(*arrays, implementation):
        attend_all = jax.vmap(jax.vmap(functools.partial(attend, implementation=implementation), inner), outer)
        return attend_all(*arrays).astype(jnp.float32).sum()

    def gradient(implementation):
        return lower_for_cuda(jax.grad(functools.partial(total, implementation=implementation), (0, 1, 2)), *arrays)

    for implementation in ("xla", "cuda"):
        assert largest_keys(gradient(implementation)) == 3 * math.prod(SHAPES[1])
    operands = ["6x256x20x96xbf16", "6x200x2x96xbf16", "6x200x2x64xbf16"]
    assert [types[:3] for types in operand_types(gradient("cuda"))] == [operands] * 2


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


def test_what_an_architecture_does_not_take_is_named(monkeypatch):
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_90a")
    with pytest.raises(NotImplementedError, match="head_dim must be a multiple of 8 from 8 to 256; got 288"):
        lowered(lambda *arrays: attend(*(jnp.tile(array, 3) for array in arrays)))


def operands(program: Program) -> set[int]:
    """Numbers of the operands that a program's launches are given."""
    params = [param for step in program.steps if isinstance(step, Launch) for param in step.params]
    return {param.operand for param in params if isinstance(param, TensorMap | Pointer)}


def test_row_intervals_are_listed_for_each_architecture():
    """One call for Blackwell and Hopper: the operands of both, each once, and each program's numbers into them."""

    def masked(query, key, value):
        lengths = jnp.array([200, 17], jnp.int32)
        return flash_attention(query, key, value, key_value_seq_lengths=lengths, implementation="cuda")

    with named_cubins("sm_100a,sm_90a"):
        gradient = jax.grad(lambda *arrays: masked(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
        plans = launches(lowered(gradient))
    for plan in plans:
        assert [program.arch for program in plan.programs] == ["sm_100a", "sm_90a"]
        first, second = map(operands, plan.programs)
        everything = set(range(len(plan.argument_bytes) + len(plan.result_bytes)))
        assert first | second == everything
        assert first - second  # a list for Blackwell's tiles
        assert second - first  # and one for Hopper's
        results = everything - set(range(len(plan.argument_bytes)))
        workspaces = {len(plan.argument_bytes) + 3} & results  # dQ's sums, which only Hopper's backward has
        assert results - workspaces <= first & second
        assert workspaces <= second - first
