"""Ring and Ulysses attention on 8 simulated devices: the results of one device, order of communication, memory."""

import collections
import functools
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_blackwell import context_parallel, cuda, custom_call, flash_attention, lowering, masks, xla
from jax_fa_blackwell.context_parallel import (
    from_zigzag,
    ring_attention,
    to_zigzag,
    ulysses_attention,
    zigzag_permutation,
)
from lowered import launches, lower_for_cuda, named_cubins

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
DEVICES = 8
B, T, N, K, H, HV = 2, 96, 8, 2, 16, 8


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Several blocks along both axes of a step, the last ones overlapping."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", 8)
    monkeypatch.setattr(xla, "KV_BLOCK", 5)


def make_inputs(S=T, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, HV))
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes)


def segments(length, *lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return jnp.asarray(np.pad(ids, (0, length - len(ids)), constant_values=-1)[None].repeat(B, 0), jnp.int32)


SINKS = jnp.asarray(np.random.default_rng(1).standard_normal(N, np.float32))

CASES = {
    "no mask": {},
    "causal": {"is_causal": True},
    "bottom right, more keys": {"S": 160, "is_causal": True, "causal_alignment": "bottom_right"},
    "bottom right, rows without keys": {"S": 48, "is_causal": True, "causal_alignment": "bottom_right"},
    "window, cap and sinks": {"local_window_size": (20, 3), "logits_soft_cap": 2.0, "sinks": SINKS},
    "lengths and sinks": {
        "query_seq_lengths": jnp.array([96, 50]),
        "key_value_seq_lengths": jnp.array([61, 0]),
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "sinks": SINKS,
    },
    "segments": {
        "query_segment_ids": segments(T, 30, 41, 7),
        "key_value_segment_ids": segments(T, 25, 49, 3),
        "is_causal": True,
        "causal_alignment": "bottom_right",
        "local_window_size": (17, 0),
    },
}
SHARDED_ALONG_LENGTH = ("query_segment_ids", "key_value_segment_ids")


def make_mesh():
    return jax.make_mesh((DEVICES,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(function, mesh, options, *, order="contiguous"):
    """``function(query, key, value, sinks)`` on whole arrays, by ``function`` on the parts of the devices."""
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array) and name != "sinks"}
    static = {name: value for name, value in options.items() if not isinstance(value, jax.Array)}
    sequence = P(None, "context")

    def local(query, key, value, sinks, arrays):
        return function(query, key, value, sinks=sinks, axis_name="context", return_lse=True, **arrays, **static)

    specs = {name: sequence if name in SHARDED_ALONG_LENGTH else P() for name in arrays}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*[sequence] * 3, P(), specs), out_specs=(sequence, sequence))

    def whole(query, key, value, sinks):
        if order == "contiguous":
            return mapped(query, key, value, sinks, arrays)
        enter = functools.partial(to_zigzag, devices=DEVICES)
        ids = {name: enter(value) if name in SHARDED_ALONG_LENGTH else value for name, value in arrays.items()}
        results = mapped(enter(query), enter(key), enter(value), sinks, ids)
        return tuple(from_zigzag(result, DEVICES) for result in results)

    return whole


def one_device(options, implementation="xla"):
    rest = {name: value for name, value in options.items() if name != "sinks"}

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, sinks=sinks, return_lse=True, implementation=implementation, **rest)

    return attend


def with_gradients(attend):
    """Output, LSE and the gradients of a loss in both."""

    def loss(*arrays):
        out, lse = attend(*arrays)
        weights = jnp.cos(jnp.arange(out.size).reshape(out.shape))
        total = jnp.sum(weights * out.astype(jnp.float32))
        return total + jnp.sum(jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0.0))), (out, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))


def assert_close(results, expected, tolerance):
    for got, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(wanted))
        finite = np.isfinite(wanted)
        greatest = max(np.max(np.abs(wanted[finite]), initial=0), 1e-30)
        np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=tolerance * greatest)


def check(function, case, order="contiguous", dtype=jnp.float32, tolerance=2e-6, **fixed):
    options = dict(CASES[case])
    arrays = make_inputs(options.pop("S", T), dtype)
    sinks = options.get("sinks")
    if function is ring_attention:
        fixed["order"] = order
    attend = sharded(functools.partial(function, **fixed), make_mesh(), options, order=order)
    expected = with_gradients(one_device(options))(*arrays, sinks)
    assert_close(with_gradients(attend)(*arrays, sinks), expected, tolerance)


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("case", "order"),
    [(case, "zigzag") for case in CASES] + [(case, "contiguous") for case in ("bottom right, more keys", "segments")],
)
def test_ring(case, order):
    check(ring_attention, case, order, implementation="xla")


@pytest.mark.eight_devices
def test_rounding_in_bfloat16(monkeypatch):
    """Root mean square errors of output and gradients beside those of one device.

    Steps of "xla" are merged in float32. Steps of kernels are rounded once more each, which their fallback does too: as
    the weights of a merge add up to 1, that does not grow with the ring.
    """
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_100a")

    def results(attend, dtype=jnp.bfloat16):
        gradients, (out, _) = with_gradients(attend)(*make_inputs(dtype=dtype), None)
        return [np.asarray(array, np.float64) for array in (out, *gradients[:3])]

    options = {"is_causal": True}
    exact = results(one_device(options, "reference"), jnp.float32)
    one = results(one_device(options))
    for implementation, most in (("xla", 1.01), ("cuda", 1.5)):
        ring = functools.partial(ring_attention, order="zigzag", implementation=implementation)
        several = results(sharded(ring, make_mesh(), options, order="zigzag"))
        for got, alone, wanted in zip(several, one, exact, strict=True):
            assert 0 < np.linalg.norm(got - wanted) < most * np.linalg.norm(alone - wanted), implementation


@pytest.mark.eight_devices
@pytest.mark.parametrize("case", ["lengths and sinks", "segments"])
def test_ring_of_kernels(case, monkeypatch):
    """The steps as kernels get them, with intervals of keys and of rows; on a CPU they run their fallback."""
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_100a")
    seen = []
    execute = cuda.execute

    def watch(make_plan, spec, arrays, results, fallback, arguments):
        seen.append(arguments[0])
        return execute(make_plan, spec, arrays, results, fallback, arguments)

    monkeypatch.setattr(cuda, "execute", watch)
    jax.clear_caches()  # an equal call of an earlier test would lend its trace
    check(ring_attention, case, "zigzag", jnp.bfloat16, tolerance=1e-2, implementation="cuda")
    assert seen
    assert all(operands.key_lo.shape == (B, T // DEVICES) for operands in seen)


@pytest.mark.eight_devices
def test_lowered_for_cuda():
    """Kernels are called on local parts; with output and LSE kept by name the backward runs no forward step again."""
    mesh = make_mesh()
    arrays = [
        jax.ShapeDtypeStruct(array.shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "context")))
        for array in make_inputs()
    ]
    saved = jax.checkpoint_policies.save_only_these_names("context")

    def kinds(function, policy=None):
        """The names of the launches and the extents of their queries and keys."""
        attend = sharded(functools.partial(function, implementation="cuda"), mesh, {"is_causal": True})

        def total(query, key, value):
            return attend(query, key, value, None)[0].astype(jnp.float32).sum()

        total = jax.checkpoint(total, policy=policy) if policy else total
        text = lower_for_cuda(jax.value_and_grad(total, (0, 1, 2)), *arrays)
        calls = re.findall(rf"@{custom_call.TARGET}\(.* : \(tensor<(\w+)>, tensor<(\w+)>", text)
        return collections.Counter(plan.name.split("_")[0] for plan in launches(text)), set(calls)

    with named_cubins():
        # The loop's body counts once: the ring's forward is it and the last step, its backward has a first one too.
        ring = {(f"{B}x{T // DEVICES}x{N}x{H}xbf16", f"{B}x{T // DEVICES}x{K}x{H}xbf16")}
        assert kinds(ring_attention) == ({"forward": 2, "backward": 3}, ring)
        assert kinds(ring_attention, saved) == ({"forward": 2, "backward": 3}, ring)
        assert kinds(ring_attention, jax.checkpoint_policies.nothing_saveable)[0] == {"forward": 4, "backward": 3}
        ulysses = {(f"{B}x{T}x1x{H}xbf16", f"{B}x{T}x1x{H}xbf16")}
        assert kinds(ulysses_attention, saved) == ({"forward": 1, "backward": 1}, ulysses)


@pytest.mark.eight_devices
@pytest.mark.parametrize("case", ["window, cap and sinks", "segments"])
def test_ulysses(case):
    check(ulysses_attention, case, implementation="xla")


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    ("function", "case", "mode"),
    [
        (ring_attention, "lengths and sinks", "forward"),
        (ring_attention, "lengths and sinks", "forward over reverse"),
        (ulysses_attention, "window, cap and sinks", "forward over reverse"),
    ],
)
def test_other_modes(function, case, mode):
    """Forward mode and products with the Hessian, by "xla"."""
    options = CASES[case]
    arrays = (*make_inputs(), options["sinks"])

    def derivatives(attend):
        if mode == "forward":
            along = lambda *x: attend(*x)[0]  # noqa: E731
        else:
            along = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x)[0])), (0, 1, 2, 3))
        return jax.jit(lambda *x: jax.jvp(along, x, tuple(map(jnp.cos, x))))(*arrays)

    attend = sharded(functools.partial(function, implementation="xla"), make_mesh(), options)
    assert_close(derivatives(attend), derivatives(one_device(options)), 4e-6)


@pytest.mark.eight_devices
def test_other_modes_of_kernels_are_refused(monkeypatch):
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_100a")
    arrays = make_inputs(dtype=jnp.bfloat16)
    ring = sharded(functools.partial(ring_attention, implementation="cuda"), make_mesh(), {})

    def total(query, key, value):
        return ring(query, key, value, None)[0].astype(jnp.float32).sum()

    message = "of implementation='cuda': kernels have first derivatives by reverse mode only; use implementation='xla'"
    with pytest.raises(NotImplementedError, match="forward-mode differentiation .* " + message):
        jax.jit(lambda *x: jax.jvp(total, x, x))(*arrays)
    with pytest.raises(NotImplementedError, match="second derivative " + message):
        jax.jit(jax.grad(lambda *x: jax.grad(total)(*x).astype(jnp.float32).sum()))(*arrays)


@pytest.mark.eight_devices
def test_ring_beside_an_axis_of_the_compiler(monkeypatch):
    """Only the axis of the sequence is manual; the batch is the compiler's, which "xla" follows and kernels refuse."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data", "context"))) for x in make_inputs()]
    sequence = P(None, "context")

    def attend(implementation):
        local = functools.partial(ring_attention, axis_name="context", is_causal=True, implementation=implementation)
        return jax.shard_map(local, mesh=mesh, in_specs=sequence, out_specs=sequence, axis_names={"context"})

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2)))

    compiled = gradients(attend("xla")).lower(*arrays).compile()
    assert "all-gather" not in (compiled.as_text() or "")
    one = functools.partial(flash_attention, is_causal=True, implementation="xla")
    assert_close(compiled(*arrays), gradients(one)(*make_inputs()), 2e-6)
    monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_100a")
    with pytest.raises(
        NotImplementedError, match=r"leaves \('data',\) to the compiler; give all of them to axis_names"
    ):
        jax.jit(attend("cuda"))(*(x.astype(jnp.bfloat16) for x in arrays))


@pytest.mark.eight_devices
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_intervals_of_a_step(order):
    """Rows seen by each key are the transpose of keys seen by each row, in every step's local positions."""
    ids = segments(T, 30, 41, 7)
    ring = context_parallel._Ring("context", DEVICES, order)
    arguments = masks.MaskArguments(B, T, T, left=9, right=0, query_segment_ids=ids, key_value_segment_ids=ids)
    rows = masks.kv_intervals(arguments).rows(B)
    columns = masks.query_intervals(arguments).rows(B)
    position = np.arange(T)
    whole = (position >= np.asarray(rows[0])[..., None]) & (position < np.asarray(rows[1])[..., None])
    local = T // DEVICES
    for here in range(DEVICES):
        for source in range(DEVICES):
            mine, theirs = np.asarray(ring.positions(here, local)), np.asarray(ring.positions(source, local))
            lo, hi = context_parallel._local_bounds(ring, [bound[:, mine] for bound in rows], source, local)
            key_lo, key_hi = context_parallel._local_bounds(ring, [bound[:, theirs] for bound in columns], here, local)
            seen = whole[:, mine][:, :, theirs]
            index = np.arange(local)
            np.testing.assert_array_equal((index >= lo[..., None]) & (index < hi[..., None]), seen)
            transposed = (index >= key_lo[..., None]) & (index < key_hi[..., None])
            np.testing.assert_array_equal(transposed, seen.swapaxes(1, 2))


def test_zigzag():
    assert zigzag_permutation(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    array = jnp.arange(48).reshape(2, 24)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(array, 4), 4), array)
    with pytest.raises(ValueError, match="length must be a multiple of 2 \\* devices = 8; got 12"):
        zigzag_permutation(12, 4)


@pytest.mark.eight_devices
@pytest.mark.parametrize("backward", [False, True])
def test_what_comes_next_is_sent_before_the_step(backward):
    """In the compiled program, in the order in which it runs, a step sends first and then computes."""
    attend = sharded(functools.partial(ring_attention, implementation="xla"), make_mesh(), {})
    arrays = (*make_inputs(), None)

    def backward_pass(*arrays):
        results, pull = jax.vjp(attend, *arrays)
        return pull(results)

    function = jax.jit(backward_pass if backward else attend)
    compiled = function.lower(*arrays).compile().as_text() or ""
    assert "is_scheduled=true" in compiled
    send = re.compile(r" collective-permute(-start)?\(")
    computations = compiled.split("\n\n")
    steps = [part.splitlines() for part in computations if send.search(part) and not part.startswith("ENTRY")]
    # Keys and values; in the backward's loop their gradients too.
    counts = sorted(sum(bool(send.search(line)) for line in step) for step in steps)
    assert counts == ([2, 4] if backward else [2])
    compute = re.compile(r" (dot|while)\(")  # blocks of a step are a loop
    for step in steps:
        sends = [at for at, line in enumerate(step) if send.search(line)]
        work = [at for at, line in enumerate(step) if compute.search(line)]
        assert work
        assert max(sends) < min(work), "\n".join(step)


def memory(devices, length):
    """Temporary bytes of a device, forward and backward."""
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("context",), axis_types=axis_types, devices=jax.devices()[:devices])
    array = jax.ShapeDtypeStruct((1, length, 4, 64), jnp.bfloat16)
    options = {"axis_name": "context", "is_causal": True, "order": "zigzag", "implementation": "xla"}

    def local(query, key, value):
        return jax.vjp(functools.partial(ring_attention, **options), query, key, value)[1](query)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))
    analysis = jax.jit(mapped).lower(array, array, array).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.eight_devices
def test_memory_of_a_device_is_that_of_its_part(monkeypatch):
    monkeypatch.setattr(xla, "QUERY_BLOCK", 256)
    monkeypatch.setattr(xla, "KV_BLOCK", 256)
    four, eight, longer = memory(4, 32 << 10), memory(8, 32 << 10), memory(8, 64 << 10)
    assert eight > 0
    assert eight < 0.6 * four  # half the rows, and blocks, whose size does not depend on the length
    assert longer < 1.01 * four  # equal parts: the length of the whole sequence does not matter


@pytest.mark.eight_devices
def test_refused():
    mesh = make_mesh()
    query, key, value = make_inputs()

    def attempt(function, *arrays, **options):
        local = functools.partial(function, axis_name="context", **options)
        return jax.shard_map(local, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))(*arrays)

    with pytest.raises(ValueError, match="order must be one of"):
        attempt(ring_attention, query, key, value, order="striped")
    with pytest.raises(ValueError, match="implementation must be 'cuda', 'xla' or None; got 'reference'"):
        attempt(ring_attention, query, key, value, implementation="reference")
    with pytest.raises(ValueError, match="query must have an even local length for order='zigzag'; got 11"):
        attempt(ring_attention, query[:, :88], key, value, order="zigzag")
    with pytest.raises(ValueError, match=r"key_value_seq_lengths must have shape \[2\]; got \[1\]"):
        attempt(ring_attention, query, key, value, key_value_seq_lengths=jnp.array([3]))
    with pytest.raises(ValueError, match="query must have a multiple of the 8 devices of mesh axis 'context' as heads"):
        attempt(ulysses_attention, query[:, :, :4], key, value)


@pytest.mark.eight_devices
def test_example(monkeypatch, capsys):
    """Training is the same, whatever the mesh and the way of attention."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(xla, "QUERY_BLOCK", 256)
    monkeypatch.setattr(xla, "KV_BLOCK", 256)
    example = importlib.import_module("train_long_context")
    sizes = "--batch 8 --length 64 --layers 1 --width 32 --heads 4 --head-dim 16"
    common = [*sizes.split(), "--learning-rate", "0.02", "--packed"]
    losses = example.main([*common, "--steps", "12", "--context", "4"])
    assert "mesh {'data': 2, 'context': 4}; a device holds 16 bytes of a row" in capsys.readouterr().out
    assert losses[-1] < 0.8 * losses[0]
    for other in ("--context 1", "--context 4 --attention ulysses"):
        np.testing.assert_allclose(example.main([*common, "--steps", "4", *other.split()]), losses[:4], rtol=1e-4)
