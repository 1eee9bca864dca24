"""The delta kernel as compiled, run by its own launch plan in the emulator, under every kind of schedule."""

import dataclasses
import pathlib

import ml_dtypes
import numpy as np
import pytest

import emulator
from jax_fa_blackwell import cubins, export
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import delta as plan
from jax_fa_blackwell.plan.launch import Int32, Launch

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

COMPILED = [("bfloat16", "sm_90a"), ("float16", "sm_100a"), ("bfloat16", "sm_103a")]
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPES = [(1, 1, 1, 8), (2, 5, 3, 72), (1, 37, 5, 24), (1, 33, 2, 512), (2, 20, 6, 64), (1, 300, 2, 16), (2, 9, 7, 488)]
SCHEDULES = [
    emulator.Schedule(seed=0, async_="eager"),
    emulator.Schedule(seed=1, async_="lazy", spurious_wait=0.3),
    emulator.Schedule(seed=2, async_="random"),
]
SMALL = plan.DeltaConfig(tile_bytes=2048, ring_bytes=8192, blocks_per_sm=2)  # many tiles from few rows


@pytest.fixture(scope="module")
def compiled():
    """PTX and cubin, both of one compilation."""
    return {key: export.compile_variant(registry.get_variant(f"delta_{key[0]}"), key[1]) for key in COMPILED}


def make_plan(compiled, spec, config, blocks=2, **changes):
    """The plan on few blocks, so that the ring wraps; ``changes`` replace integer parameters."""
    cubin = cubins.Cubin(
        variant=compiled.variant,
        arch=compiled.arch,
        sha256=compiled.sha256,
        symbol=compiled.symbol,
        params=compiled.params,
        block=compiled.resources.block,
        registers=compiled.resources.registers,
        shared_bytes=compiled.resources.shared_bytes,
        toolchain=compiled.toolchain,
        folder=pathlib.Path(),
    )
    made = plan.make_plan(spec, [cubin], config)
    (program,) = made.programs
    (launch,) = program.steps
    assert isinstance(launch, Launch)
    names = [parameter.name for parameter in compiled.variant.parameters]
    params = tuple(
        Int32(changes[name]) if name in changes else param for name, param in zip(names, launch.params, strict=True)
    )
    launch = dataclasses.replace(launch, grid=(min(blocks, launch.grid[0]), 1, 1), params=params)
    return dataclasses.replace(made, programs=(dataclasses.replace(program, steps=(launch,)),))


def inputs(shape, dtype):
    rng = np.random.default_rng(0)
    out, grad_out = (rng.standard_normal(shape).astype(NUMPY[dtype]) for _ in range(2))
    return out, grad_out, rng.standard_normal(shape[:3]).astype(np.float32)


def run(compiled, made, arguments, schedule=SCHEDULES[0], ptx=None):
    text = {compiled.sha256: ptx or compiled.ptx}
    (result,), report = emulator.run_plan(made, arguments, ptx=text, arch=compiled.arch, schedule=schedule)
    return result.view(np.float32), report


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("key", COMPILED, ids="-".join)
@pytest.mark.parametrize("with_lse", [False, True])
def test_right_under_every_schedule(compiled, key, shape, with_lse):
    batch, tokens, heads, head_dim = shape
    out, grad_out, grad_lse = inputs(shape, key[0])
    spec = plan.DeltaSpec(batch, tokens, heads, head_dim, key[0], with_lse)
    expected = np.einsum("btnh,btnh->bnt", out.astype(np.float64), grad_out.astype(np.float64))
    magnitude = np.einsum("btnh,btnh->bnt", abs(out.astype(np.float64)), abs(grad_out.astype(np.float64)))
    if with_lse:
        expected = expected - grad_lse.swapaxes(1, 2)
        magnitude = magnitude + abs(grad_lse.swapaxes(1, 2))
    made = make_plan(compiled[key], spec, SMALL)
    results = []
    for schedule in SCHEDULES:
        result, _ = run(compiled[key], made, [out, grad_out, grad_lse][: 3 if with_lse else 2], schedule)
        results.append(result)
        error = abs(result.reshape(expected.shape) - expected)
        assert (error <= (head_dim + 1) * 2.0**-24 * magnitude).all()
    assert all(np.array_equal(results[0], result) for result in results)


@pytest.mark.parametrize("config", [plan.DEFAULT_CONFIG, plan.DeltaConfig(8192, 49152, 4)], ids=str)
def test_whole_grid_of_the_default_configuration(compiled, config):
    key = COMPILED[0]
    shape = (2, 70, 16, 64)
    out, grad_out, grad_lse = inputs(shape, key[0])
    made = make_plan(compiled[key], plan.DeltaSpec(2, 70, 16, 64, key[0], True), config, blocks=1 << 30)
    result, report = run(compiled[key], made, [out, grad_out, grad_lse])
    expected = np.einsum("btnh,btnh->bnt", out.astype(np.float64), grad_out.astype(np.float64))
    np.testing.assert_allclose(result.reshape(2, 16, 70), expected - grad_lse.swapaxes(1, 2), atol=1e-4)
    assert not any("local" in opcode for opcode in report.by_opcode)


def test_nan_stays_in_its_row(compiled):
    key = COMPILED[0]
    out, grad_out, grad_lse = inputs((2, 37, 5, 24), key[0])
    made = make_plan(compiled[key], plan.DeltaSpec(2, 37, 5, 24, key[0], True), SMALL)
    clean, _ = run(compiled[key], made, [out, grad_out, grad_lse])
    bad = np.random.default_rng(1).random((2, 37, 5)) < 0.3
    out[bad] = np.nan
    poisoned, _ = run(compiled[key], made, [out, grad_out, grad_lse])
    bad = bad.swapaxes(1, 2).reshape(-1)
    assert np.array_equal(np.isnan(poisoned), bad)
    assert np.array_equal(poisoned[~bad], clean[~bad])


def without(text, instruction, nth=0):
    """The PTX less its nth line with this instruction."""
    lines = text.splitlines(keepends=True)
    found = [i for i, line in enumerate(lines) if instruction in line]
    assert len(found) > nth, f"no {instruction}"
    return "".join(lines[: found[nth]] + lines[found[nth] + 1 :])


MUTANTS = {
    "no release of a stage": lambda text: without(text, "mbarrier.arrive.shared"),
    "no barrier between writing and reading the turned tile": lambda text: without(text, "bar.sync \t1"),
    "dO not loaded": lambda text: without(text, "cp.async.bulk.tensor.4d", 1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_emulator_sees_what_a_broken_kernel_does(compiled, mutant):
    """So that the tests above can fail."""
    key = COMPILED[0]
    arguments = inputs((2, 20, 6, 64), key[0])
    made = make_plan(compiled[key], plan.DeltaSpec(2, 20, 6, 64, key[0], True), SMALL)
    clean, _ = run(compiled[key], made, arguments)
    broken = MUTANTS[mutant](compiled[key].ptx)
    for schedule in SCHEDULES:
        try:
            result, _ = run(compiled[key], made, arguments, schedule, broken)
        except emulator.Verdict:
            return
        if not np.array_equal(result, clean):
            return
    pytest.fail("the mutant went unnoticed")


@pytest.mark.parametrize("change", [{"box_bytes": 2048 - 16}, {"stage_bytes": 4096 - 256}, {"tiles": 19}])
def test_wrong_parameters_are_noticed(compiled, change):
    key = COMPILED[0]
    out, grad_out, grad_lse = inputs((2, 20, 6, 64), key[0])
    spec = plan.DeltaSpec(2, 20, 6, 64, key[0], True)
    clean, _ = run(compiled[key], make_plan(compiled[key], spec, SMALL), [out, grad_out, grad_lse])
    try:
        result, _ = run(compiled[key], make_plan(compiled[key], spec, SMALL, **change), [out, grad_out, grad_lse])
    except emulator.Verdict:
        return
    assert not np.array_equal(result, clean)
