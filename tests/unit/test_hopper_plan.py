"""The plans of the Hopper kernels: every head dim has one, within the GPU's budgets; what is not legal says why."""

import pytest

from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import attention, hopper, hopper_backward, hopper_forward
from jax_fa_blackwell.plan.hopper import BackwardTile, ForwardTile
from jax_fa_blackwell.plan.launch import Fill, Launch, LaunchPlan, Pointer, Program, TensorMap
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

TARGET = get_target(hopper.ARCH)
CUBIN = "0" * 64, "none"


def spec(head_dim=128, value_head_dim=128, mask_form="none", **fields) -> AttentionSpec:
    return AttentionSpec(2, 300, 400, 8, 4, head_dim, value_head_dim, "bfloat16", 0.1, mask_form, **fields)


def find(name: str) -> tuple[str, str, str]:
    return name, *CUBIN


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_plans_of_registered_kernels(head_dim):
    for value_head_dim in range(8, 257, 8):
        one, fixed = (spec(head_dim, value_head_dim, deterministic=flag) for flag in (False, True))
        backward = [pass_ for call in (one, fixed) for pass_ in hopper_backward.plan_backward(call, TARGET)]
        for plan in (hopper_forward.plan_forward(one, TARGET), *backward):
            variant = registry.get_variant(plan.kernel)
            assert dict(variant.options)["head_dim"] == plan.tile.head_dim >= head_dim
            assert dict(variant.options)["value_dim"] == plan.tile.value_dim >= value_head_dim
            assert plan.shared_bytes <= hopper.SHARED_BYTES


def test_dims_that_people_come_for_pay_no_other_class():
    for head_dim in (64, 80, 96, 128, 160, 192, 256):
        assert hopper_forward.plan_forward(spec(head_dim, head_dim), TARGET).tile.head_dim == head_dim
        assert hopper_backward.plan_backward(spec(head_dim, head_dim), TARGET)[0].tile.head_dim == head_dim
    assert hopper_forward.plan_forward(spec(192, 128), TARGET).tile.value_dim == 128
    assert hopper_forward.plan_forward(spec(72, 72), TARGET).tile.head_dim == 80


def test_passes_of_the_backward_compute_each_gradient_once():
    for passes in hopper.BACKWARD_PASSES:
        assert [tile.transposed for tile in passes].count(False) == 1
        assert sum(tile.has_c1 for tile in passes) == 1
        assert sum(tile.has_c2 for tile in passes) == 2  # dQ and dK


def test_products():
    for head_dim, deterministic, products in (
        (64, False, 5),
        (128, False, 5),
        (64, True, 7),
        (128, True, 7),
        (192, False, 8),
        (256, False, 8),
    ):
        passes = hopper_backward.plan_backward(spec(head_dim, head_dim, deterministic=deterministic), TARGET)
        assert sum(one.gemms for one in passes) == products


def test_one_pass_adds_dq_unless_gradients_must_be_the_same_bits_or_scores_are_capped():
    for one, count in ((spec(), 1), (spec(deterministic=True), 2), (spec(logits_soft_cap=5.0), 2), (spec(136), 3)):
        passes = hopper_backward.plan_backward(one, TARGET)
        plan = hopper_backward.launch_backward(passes, find)
        assert len(passes) == count
        assert [pass_.tile.adds_dq for pass_ in passes] == ([True] if count == 1 else [False] * count)
        assert len(plan.result_bytes) == (4 if count == 1 else 3)
        fills = [step for step in plan.programs[0].steps if isinstance(step, Fill)]
        if count == 1:  # the whole workspace: 64 queries at a time, in fp32
            (fill,) = fills
            assert 4 * fill.words == plan.result_bytes[3] == 4 * 2 * 8 * 320 * 128
        else:
            assert not fills


@pytest.mark.parametrize("rows", [1, 127, 300, 4000, 8192])
@pytest.mark.parametrize("mask_form", ["none", "affine", "rows"])
def test_paired_items_are_each_done_once(rows, mask_form):
    """The order of ``kernels/sm90/work.py``, item_of_pairs, by the plan's numbers."""
    one = AttentionSpec(2, 300, rows, 8, 4, 64, 64, "bfloat16", 0.1, mask_form, -300, 1)
    (only,) = hopper_backward.plan_backward(one, TARGET)
    paired, groups = int(only.is_paired), only.row_groups
    assert not paired or groups % 2 == 0
    done = []
    for unit in range(only.items >> paired):
        for second in range(1 + paired):
            head, group = divmod(unit, groups >> paired)
            done.append(head * groups + (groups - 1 - group if second else group))
    assert sorted(done) == list(range(only.items))
    assert groups * only.tile.rows >= rows
    assert paired == (mask_form == "affine" and rows == 8192)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ForwardTile(128, 128, 120, 2), "no wgmma shape"),
        (lambda: ForwardTile(128, 264, 128, 2), "no wgmma shape"),
        (lambda: ForwardTile(128, 128, 128, 4), "warpgroups must be one of 2, 3; got 4"),
        (lambda: ForwardTile(256, 256, 96, 2), r"needs 224 registers|shared memory for 1 stages and needs 2"),
        (lambda: ForwardTile(128, 128, 128, 3), r"needs \d+ registers of 160"),
        (lambda: BackwardTile(128, 128, 64, False, True, True), "a backward pass computes dQ, or transposed"),
        (lambda: BackwardTile(128, 128, 64, True, False, False), "a backward pass computes dQ, or transposed"),
        (lambda: BackwardTile(256, 256, 64, True, True, True), r"needs \d+ registers of 232"),
        (lambda: BackwardTile(256, 256, 80, False, False, True), "registers|slots"),
        (lambda: BackwardTile(72, 72, 64, False, False, True), "no wgmma shape"),
        (lambda: BackwardTile(64, 64, 96, True, True, True, adds_dq=True), "64 or 128 columns; got"),
    ],
)
def test_what_is_not_legal(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (spec(264, 64), "head_dim must be a multiple of 8 from 8 to 256; got 264"),
        (spec(64, 320), "value_head_dim must be a multiple of 8 from 8 to 256; got 320"),
        (spec(bias_shape=(1, 1, 300, 400)), "bias and mask arrays are not taken"),
    ],
)
def test_limits_are_named(one, message):
    assert attention.supports(one, TARGET) == message
    for plan in (hopper_forward.plan_forward, hopper_backward.plan_backward):
        with pytest.raises(ValueError, match=message):
            plan(one, TARGET)
    assert hopper_forward.supports(spec(), get_target("sm_100a")) == "sm_100a has no wgmma"


def plans_of(one: AttentionSpec, arch: str, is_backward: bool) -> tuple[LaunchPlan, tuple[attention.Argument, ...]]:
    make = attention.launch_backward if is_backward else attention.launch_forward
    return make(one, get_target(arch), find), attention.arguments(one, get_target(arch), is_backward)


def launches(program: Program) -> list[Launch]:
    return [step for step in program.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("mask_form", ["none", "rows"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
def test_merged_plans_give_each_program_its_arguments(mask_form, has_sinks, is_backward):
    one = spec(mask_form=mask_form, has_sinks=has_sinks)
    alone = [plans_of(one, arch, is_backward) for arch in ("sm_100a", hopper.ARCH)]
    merged, names = attention.merge(alone)
    assert len(set(names)) == len(names) == len(merged.argument_bytes)
    for (plan, given), program in zip(alone, merged.programs, strict=True):
        everything = [*given, *range(len(plan.result_bytes))]
        everything_merged = [*names, *range(len(plan.result_bytes))]
        for step, moved in zip(launches(plan.programs[0]), launches(program), strict=True):
            for before, after in zip(step.params, moved.params, strict=True):
                if isinstance(before, TensorMap | Pointer):
                    assert isinstance(after, TensorMap | Pointer)
                    assert everything[before.operand] == everything_merged[after.operand]
                else:
                    assert before == after


def test_plans_that_disagree_are_not_merged():
    forward, backward = (plans_of(spec(head_dim, 128), hopper.ARCH, False) for head_dim in (64, 128))
    with pytest.raises(ValueError, match="plans disagree about the bytes of argument query"):
        attention.merge([forward, backward])
