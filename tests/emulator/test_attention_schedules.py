"""The attention kernels whatever the order of asynchronous work: the same bits, and no deadlock in the ring."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest

import attention_cases
import emulator
from attention_cases import Case, Shape
from emulator import attention_kernels
from emulator.kernels import build, late_release
from jax_fa_blackwell import cuda, export
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import backward as backward_plan
from jax_fa_blackwell.plan import forward as forward_plan
from jax_fa_blackwell.plan.slices import SLICE_BYTES, slices_of
from jax_fa_blackwell.plan.target import get_target

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

DTYPES = (ml_dtypes.bfloat16, np.float16)
CAUSAL = (("is_causal", True),)
CAP = (("is_causal", True), ("logits_soft_cap", 5.0))
# One case of each variant of the forward; its gradient runs both passes of the backward, by pairs of blocks and by
# single ones.
CASES = {
    "two tiles, many polynomials": Case("many", Shape(1, 300, 300, 2, 1, 64, 64), CAUSAL),
    "two tiles, few polynomials": Case("few", Shape(1, 260, 260, 1, 1, 128, 128), CAUSAL),
    "two tiles, soft cap": Case("two_cap", Shape(1, 260, 140, 1, 1, 96, 96), CAP),
    "two tiles, few, soft cap": Case("few_cap", Shape(1, 140, 140, 2, 1, 128, 128), CAP),
    "one tile": Case("one", Shape(1, 100, 120, 1, 1, 192, 192), CAUSAL),
    "one tile, soft cap": Case("one_cap", Shape(1, 100, 100, 1, 1, 136, 136), CAP),
    "pair": Case("pair", Shape(1, 140, 260, 1, 1, 192, 192), CAUSAL),
    "pair, soft cap": Case("pair_cap", Shape(1, 240, 240, 1, 1, 136, 136), CAP),
    "pair of heads": Case("pair_heads", Shape(1, 100, 240, 2, 1, 256, 256), CAUSAL),
    "packed": Case("packed", Shape(2, 300, 300, 2, 1, 64, 64), CAUSAL, segments=True),
    "pair, dK and dV apart": Case("apart", Shape(1, 140, 260, 1, 1, 256, 192), CAUSAL),
    "pair, apart, soft cap": Case("apart_cap", Shape(1, 140, 260, 1, 1, 256, 192), CAP),
    "packed, pair": Case("packed_pair", Shape(1, 260, 260, 1, 1, 192, 192), CAUSAL, segments=True),
}
SCHEDULES = 6
VARIANTS = set(registry.SETS["forward"] + registry.SETS["backward"])


def test_cases_run_every_variant():
    target = get_target("sm_100a")
    specs = [attention_kernels.make_spec(case, dtype) for case in CASES.values() for dtype in DTYPES]
    used = {forward_plan.plan_forward(spec, target).kernel for spec in specs}
    used |= {one.kernel for spec in specs for one in backward_plan.plan_backward(spec, target)}
    assert used == {name for name in VARIANTS if target.arch in registry.get_variant(name).arches}


@pytest.fixture(scope="module", autouse=True)
def _prepared():
    attention_kernels.prepare()


def bits(case: Case, dtype, schedules):
    """The results of a case under each schedule, as bytes; the backward's from the first forward."""
    inputs = attention_cases.make_inputs(case, 0, dtype)
    cotangents = attention_cases.make_cotangents(case, 0, dtype)
    for schedule in schedules:
        results = attention_kernels.evaluate(case, inputs, cotangents, schedule=schedule)
        yield {name: array.tobytes() for name, array in results.items()}


def make_schedules(count: int):
    modes = ("eager", "lazy", "random")
    return [
        emulator.Schedule(seed=seed, async_=modes[seed % 3], spurious_wait=0.1 * (seed % 2)) for seed in range(count)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_under_every_schedule(name, dtype):
    first, *others = bits(CASES[name], dtype, make_schedules(SCHEDULES))
    assert all(other == first for other in others)


def test_gradients_are_the_same_bits_under_200_schedules():
    case = Case("repeat", Shape(1, 140, 150, 2, 1, 64, 64), CAUSAL, sinks=True)
    first, *others = bits(case, ml_dtypes.bfloat16, make_schedules(200))
    assert all(other == first for other in others)


# --- deadlock -------------------------------------------------------------------------------------------------------


def small_target(spec, slots: int):
    """A B200 with shared memory for so many ring slots beside the operands of the backward that stay resident."""
    target = get_target("sm_100a")
    scores, values = slices_of(spec.head_dim), slices_of(spec.value_head_dim)
    sizes = (backward_plan.HEADER_BYTES + (resident + slots) * SLICE_BYTES for resident in (scores + values, scores))
    return dataclasses.replace(target, shared_bytes=next(size for size in sizes if size <= target.shared_bytes))


def make_small_plan(spec, arch, find, *, slots: int):
    """The backward's plan with a small ring."""
    passes = backward_plan.plan_backward(spec, small_target(spec, slots))
    assert min(one.slots for one in passes) == slots
    return backward_plan.launch_backward(passes, functools.partial(find, arch=arch))


def run_backward(case: Case, make_plan, run):
    """Gradients by a plan, and those of the shipped plan."""
    dtype = ml_dtypes.bfloat16
    inputs = attention_cases.make_inputs(case, 0, dtype)
    out_cotangent, lse_cotangent = attention_cases.make_cotangents(case, 0, dtype)
    out, lse, _ = attention_kernels.forward(case, inputs)
    delta = (out_cotangent.astype(np.float32) * out.astype(np.float32)).sum(-1) - lse_cotangent.astype(np.float32)
    spec = attention_kernels.make_spec(case, dtype)
    rows = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in (lse, delta)]
    arrays = [inputs["query"], inputs["key"], inputs["value"], out_cotangent, *rows]
    return run(make_plan, spec, arrays), attention_kernels.run(cuda.make_backward_plan, spec, arrays)[0]


@pytest.mark.parametrize("blocks", [1, 2, 3, 9])
@pytest.mark.parametrize("dim", [64, 128, 256, 320, 512])
def test_smallest_ring_has_no_deadlock(dim, blocks):
    """320 and 512 compute their gradients in two parts of the head dim, the others in one; 512 streams dO and V too."""
    length = 128 * blocks
    slots = 3 if dim == 512 and blocks > 1 else backward_plan.LEAST_SLOTS  # pairs that stream both operands need three
    for shape in (Shape(1, 40, length, 1, 1, dim, dim), Shape(1, length, 40, 1, 1, dim, dim)):
        make_plan = functools.partial(make_small_plan, slots=slots)

        def run(make_plan, spec, arrays):
            schedule = emulator.Schedule(seed=blocks, async_="lazy")
            return attention_kernels.run(make_plan, spec, arrays, schedule=schedule)[0]

        small, shipped = run_backward(Case("ring", shape), make_plan, run)
        for one, other in zip(small, shipped, strict=True):
            assert one.tobytes() == other.tobytes()


def run_late_release(make_plan, spec, arrays):
    """As attention_kernels.run, by the kernel that gives its slices back too late."""

    def find(name, arch):
        del arch
        return name, "0" * 64, "late_release_0"

    def ptx(launch):
        return build.ptx(late_release.Config("dkdv" in launch.kernel, 2 if "pair" in launch.kernel else 1))

    return emulator.run_plan(make_plan(spec, "sm_100a", find), arrays, ptx=ptx, arch="sm_100a")[0]


# By the slots that hold B1: 64 head dims each, in a pair of blocks 128.
LATE = {
    "single": (Case("late", Shape(1, 100, 120, 1, 1, 256, 256)), 4),
    "pair": (Case("late", Shape(1, 256, 256, 1, 1, 320, 320)), 3),
}


@pytest.mark.parametrize("name", LATE)
def test_wrong_loop_order_deadlocks(name):
    case, slots = LATE[name]
    with pytest.raises(emulator.Verdict, match="deadlock"):
        run_backward(case, functools.partial(make_small_plan, slots=slots - 1), run_late_release)


@pytest.mark.parametrize("name", LATE)
def test_wrong_loop_order_is_right_where_the_ring_is_large(name):
    case, slots = LATE[name]
    late, shipped = run_backward(case, functools.partial(make_small_plan, slots=slots), run_late_release)
    for one, other in zip(late, shipped, strict=True):
        assert one.tobytes() == other.tobytes()
