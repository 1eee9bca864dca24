"""Attention of arrays sharded over batch and heads: no gather, and the results of one device."""

import collections
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_blackwell import attention, cuda, custom_call, flash_attention
from lowered import named_cubins

pytestmark = pytest.mark.eight_devices

B, T, S, N, K, H = 4, 48, 40, 8, 4, 16
SHAPES = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (N,), (B,))
SPECS = (P("data", None, "model"), P("data", None, "model"), P("data", None, "model"), P("model"), P("data"))
IMPLEMENTATIONS = ("xla", "cuda")


@pytest.fixture(scope="module", autouse=True)
def _blackwell():
    """implementation="cuda" is lowered for sm_100a with cubins that are only named; on a CPU it runs its fallback."""
    with named_cubins("sm_100a"):
        yield


def make_mesh(kind, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def make_arrays(implementation):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if implementation == "cuda" else jnp.float32
    floats = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in SHAPES[:3]]
    return [*floats, jnp.asarray(rng.standard_normal(N, np.float32)), jnp.array([40, 13, 0, 29])]


def attend(implementation, query, key, value, sinks, lengths):
    return flash_attention(
        query,
        key,
        value,
        sinks=sinks,
        key_value_seq_lengths=lengths,
        is_causal=True,
        causal_alignment="bottom_right",
        return_lse=True,
        implementation=implementation,
    )


def affine(implementation, query, key, value, sinks, lengths):
    del sinks, lengths
    return flash_attention(query, key, value, is_causal=True, return_lse=True, implementation=implementation)


def loss(function, *arrays):
    out, lse = function(*arrays)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))


def gradients(function):
    return jax.grad(functools.partial(loss, function), (0, 1, 2, 3))


def place(mesh, arrays, specs=SPECS):
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]


def collectives(compiled):
    names = r"\b(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
    return collections.Counter(re.findall(names, compiled.as_text()))


def assert_close(results, expected):
    for got, wanted in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        # The same operations on the same numbers, up to the order and the rounding of sums over devices.
        tolerance = 1e-5 if wanted.dtype == jnp.float32 else 1e-2
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
        greatest = np.max(np.abs(wanted), where=np.isfinite(wanted), initial=0)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * greatest)


def in_shard_map(function, mesh):
    out = SPECS[0]
    return jax.shard_map(function, mesh=mesh, in_specs=SPECS, out_specs=(out, out))


WAYS = {
    "auto": (AxisType.Auto, lambda function, mesh: function),
    "explicit": (AxisType.Explicit, lambda function, mesh: function),
    "shard_map": (AxisType.Auto, in_shard_map),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_forward_has_no_collective(way, implementation):
    kind, wrap = WAYS[way]
    mesh = make_mesh(kind)
    arrays = place(mesh, make_arrays(implementation))
    compiled = jax.jit(wrap(functools.partial(affine, implementation), mesh)).lower(*arrays).compile()
    assert not collectives(compiled)
    out, lse = compiled(*arrays)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[0]), 4)
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[0]), 3)
    assert_close((out, lse), jax.jit(functools.partial(affine, "xla"))(*make_arrays(implementation)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way, implementation):
    """With lengths and sinks, whose gradient is a sum over devices and the only collective that moves floats."""
    kind, wrap = WAYS[way]
    mesh = make_mesh(kind)
    arrays = place(mesh, make_arrays(implementation))
    function = gradients(wrap(functools.partial(attend, implementation), mesh))
    compiled = jax.jit(function).lower(*arrays).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    reduced = re.findall(r"= \(?(f32|bf16|s32)\[([\d,]*)\]\S* all-reduce", compiled.as_text() or "")
    assert reduced
    for dtype, extents in reduced:
        assert extents in (("1", "") if dtype == "s32" else ("2",)), reduced  # the span of a block; two heads' sinks
    expected = jax.jit(gradients(functools.partial(attend, "xla")))(*make_arrays(implementation))
    assert_close(compiled(*arrays), expected)


@pytest.mark.parametrize(
    ("way", "implementation"), [("auto", "xla"), ("explicit", "xla"), ("shard_map", "xla"), ("shard_map", "cuda")]
)
def test_replicated_operands_get_the_sum(way, implementation):
    """One key head and sinks for all, keys of one batch entry for all: replicated over the axes of the queries."""
    kind, _ = WAYS[way]
    mesh = make_mesh(kind, (8, 1))
    query, _, _, sinks, _ = make_arrays(implementation)
    query = jnp.concatenate([query, query * 0.5])
    key, value = (array[:1] for array in make_arrays(implementation)[1:3])

    def total(attend, query, key, value, sinks):
        out, lse = attend(query, key, value, sinks)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

    def local(implementation, query, key, value, sinks):
        key, value = (jnp.repeat(array, len(query) // len(array), 0) for array in (key, value))
        return affine_with_sinks(implementation, query, key, value, sinks)

    def affine_with_sinks(implementation, query, key, value, sinks):
        return flash_attention(
            query, key, value, sinks=sinks, is_causal=True, return_lse=True, implementation=implementation
        )

    function = functools.partial(local, implementation)
    specs = (P("data"), P(), P(), P())
    if way == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data")))
    arrays = place(mesh, (query, key, value, sinks), specs)
    results = jax.jit(jax.grad(functools.partial(total, function), (0, 1, 2, 3)))(*arrays)
    expected = jax.grad(functools.partial(total, functools.partial(local, "xla")), (0, 1, 2, 3))
    assert_close(results, jax.jit(expected)(query, key, value, sinks))


@pytest.mark.parametrize("way", WAYS)
def test_forward_mode(way):
    kind, wrap = WAYS[way]
    mesh = make_mesh(kind)

    def along(function, *arrays):
        *moving, lengths = arrays
        return jax.jvp(lambda *moving: function(*moving, lengths)[0], moving, [jnp.sin(array) for array in moving])

    function = functools.partial(attend, "xla")
    results = jax.jit(functools.partial(along, wrap(function, mesh)))(*place(mesh, make_arrays("xla")))
    assert_close(results, jax.jit(functools.partial(along, function))(*make_arrays("xla")))


def manual_over(axis, function, mesh):
    """In a ``jax.shard_map`` over one mesh axis; what the arrays are sharded over beside it is not in its specs."""
    specs = tuple(P(*(entry if entry == axis else None for entry in spec)) for spec in SPECS)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=(specs[0], specs[0]), axis_names={axis})


@pytest.mark.parametrize(
    ("kind", "axis", "implementation"),
    [
        (AxisType.Auto, "model", "xla"),
        (AxisType.Explicit, "data", "xla"),
        (AxisType.Explicit, "model", "cuda"),
    ],
)
def test_shard_map_over_one_of_two_axes(kind, axis, implementation):
    """The other axis is the compiler's, or explicit: then a ``jax.shard_map`` over it stands within the first."""
    mesh = make_mesh(kind)
    function = gradients(manual_over(axis, functools.partial(attend, implementation), mesh))
    results = jax.jit(function)(*place(mesh, make_arrays(implementation)))
    expected = jax.jit(gradients(functools.partial(attend, "xla")))(*make_arrays(implementation))
    assert_close(results, expected)


@pytest.mark.parametrize("axis", ["data", "model"])
def test_kernels_within_two_shard_maps(axis):
    """On local parts, the forward once."""
    mesh = make_mesh(AxisType.Explicit)
    calls = custom_calls(lowered_for_cuda(gradients(manual_over(axis, functools.partial(attend, "cuda"), mesh)), mesh))
    assert [call[:3] for call in calls] == [["2x48x2x16xbf16", "2x40x1x16xbf16", "2x40x1x16xbf16"]] * 2


def test_kernels_beside_an_axis_of_the_compiler(caplog):
    """The compiler's partition of a part that is manual already is not to be had: refused, or "xla" with the reason."""
    mesh = make_mesh(AxisType.Auto)
    arrays = place(mesh, make_arrays("cuda"))
    reason = r"mesh axes \('data',\) manual and leaves \('model',\) to the compiler; give all of them to axis_names"
    with pytest.raises(NotImplementedError, match=r"implementation='cuda': kernels are not partitioned .*" + reason):
        jax.jit(manual_over("data", functools.partial(affine, "cuda"), mesh))(*arrays)
    attention._log_once.cache_clear()
    with caplog.at_level(logging.INFO, "jax_fa_blackwell"):
        results = jax.jit(manual_over("data", functools.partial(affine, None), mesh))(*arrays)
    assert re.search(r"runs as implementation 'xla': kernels are not partitioned .*" + reason, caplog.text)
    assert_close(results, jax.jit(functools.partial(affine, "xla"))(*make_arrays("cuda")))


def test_sharded_lengths_are_logged(caplog):
    """Outside of jit shardings are known; the compiler gathers for "xla", and that is said once."""
    mesh = make_mesh(AxisType.Auto, (1, 8))
    query, key, value, _, _ = make_arrays("xla")
    arrays = place(mesh, (query, key, value), (P(None, "model"), P(), P()))
    attention._warn_once.cache_clear()
    results = [flash_attention(*arrays, is_causal=True, implementation="xla") for _ in range(2)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(
        r"query has its query length sharded over mesh axes 'model', which the compiler gathers; .*"
        r"ring_attention or ulysses_attention of jax_fa_blackwell.context_parallel",
        record.getMessage(),
    )
    assert_close(results[0], flash_attention(query, key, value, is_causal=True, implementation="xla"))
    caplog.clear()
    flash_attention(*place(make_mesh(AxisType.Auto), (query, key, value), SPECS[:3]), implementation="xla")
    assert not caplog.records


def test_what_the_compiler_does_with_sharded_lengths():
    """Within jit nothing can be said: the results are right, and something is gathered."""
    mesh = make_mesh(AxisType.Auto, (1, 8))
    arrays = make_arrays("xla")
    placed = place(mesh, arrays, (*[P(None, "model")] * 3, P(), P()))
    compiled = jax.jit(functools.partial(affine, "xla")).lower(*placed).compile()
    assert "all-gather" in collectives(compiled)
    assert_close(compiled(*placed), affine("xla", *arrays))


@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_vmap(way):
    mesh = make_mesh(WAYS[way][0])
    query, key, value, _, _ = make_arrays("cuda")
    queries = jnp.stack([query, query * 2])
    specs = (P(None, *SPECS[0]), *SPECS[1:3])
    arrays = place(mesh, (queries, key, value), specs)

    def mapped(implementation, query, key, value):
        attend = functools.partial(flash_attention, is_causal=True, implementation=implementation)
        return jnp.sum(jnp.sin(jax.vmap(attend, (0, None, None))(query, key, value).astype(jnp.float32)))

    compiled = jax.jit(jax.grad(functools.partial(mapped, "cuda"), (0, 1, 2))).lower(*arrays).compile()
    assert not collectives(compiled)
    expected = jax.jit(jax.grad(functools.partial(mapped, "xla"), (0, 1, 2)))(queries, key, value)
    assert_close(compiled(*arrays), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_jit(kind):
    mesh = make_mesh(kind)
    query, key, value, _, _ = place(mesh, make_arrays("cuda"))
    out, lse = affine("cuda", query, key, value, None, None)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[0]), 4)
    assert_close((out, lse), affine("xla", *make_arrays("cuda")))


def test_without_batch_axis():
    mesh = make_mesh(AxisType.Explicit)
    query, key, value, sinks, _ = make_arrays("xla")
    specs = (P(None, "model"), P(None, "model"), P(None, "model"), P())
    arrays = place(mesh, (query[0], key[0], value[0], sinks), specs)

    def attend(query, key, value, sinks):
        return flash_attention(query, key, value, sinks=sinks, key_value_seq_lengths=13, implementation="xla")

    compiled = jax.jit(attend).lower(*arrays).compile()
    assert not collectives(compiled)
    assert_close(compiled(*arrays), attend(query[0], key[0], value[0], sinks))


def test_bias_and_mask_on_an_explicit_mesh():
    """Axes of extent 1 are replicated, and so are arrays that the caller has not sharded."""
    mesh = make_mesh(AxisType.Explicit)
    query, key, value, _, _ = make_arrays("xla")
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.standard_normal((1, N, T, S), np.float32))
    mask = jnp.asarray(rng.random((B, 1, 1, S)) < 0.8)
    arrays = place(mesh, (query, key, value, bias, mask), (*SPECS[:3], P(None, "model"), P()))

    def total(*arrays):
        return jnp.sum(flash_attention(*arrays, implementation="xla") ** 2)

    results = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*arrays)
    assert_close(results, jax.jit(jax.grad(total, (0, 1, 2, 3)))(query, key, value, bias, mask))


@pytest.mark.parametrize(("way", "error"), [("auto", jax.errors.JaxRuntimeError), ("explicit", ValueError)])
def test_refused(way, error):
    mesh = make_mesh(WAYS[way][0], (1, 8))
    arrays = make_arrays("cuda")[:3]
    attend = jax.jit(functools.partial(flash_attention, implementation="cuda"))
    with pytest.raises(error, match=r"8 query heads are sharded 8 ways .* do not divide the 4 key and value"):
        attend(*place(mesh, arrays, (P(None, None, "model"), P(), P())))
    with pytest.raises(error, match=r"query has its query length sharded over mesh axes 'model'.*ring_att"):
        attend(*place(mesh, arrays, (P(None, "model"), P(), P())))
    with pytest.raises(error, match="key has its head dim sharded over mesh axes 'model'"):
        attend(*place(mesh, arrays, (P(), P(None, None, None, "model"), P())))


def test_arrays_that_disagree_are_refused():
    mesh = make_mesh(AxisType.Explicit, (2, 4))
    arrays = place(mesh, make_arrays("xla")[:3], (P("data"), P("model"), P()))
    with pytest.raises(ValueError, match="key has its batch sharded over 'model', but query over 'data'"):
        flash_attention(*arrays)


def lowered_for_cuda(function, mesh, specs=SPECS):
    dtypes = [jnp.bfloat16] * 3 + [jnp.float32, jnp.int32]
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(SHAPES, dtypes, specs, strict=True)
    ]
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text):
    """The first operand's and the first result's type of each custom call."""
    lines = [line for line in text.splitlines() if f"@{custom_call.TARGET}(" in line]
    return [re.findall(r"tensor<(\w+)>", line.rsplit(" : ", 1)[1]) for line in lines]


@pytest.mark.parametrize("way", ["explicit", "shard_map"])
def test_kernels_are_called_on_local_parts(way):
    kind, wrap = WAYS[way]
    mesh = make_mesh(kind)
    text = lowered_for_cuda(gradients(wrap(functools.partial(attend, "cuda"), mesh)), mesh)
    calls = custom_calls(text)
    assert len(calls) == 2
    for call in calls:
        assert call[:3] == ["2x48x2x16xbf16", "2x40x1x16xbf16", "2x40x1x16xbf16"]


def test_kernels_have_a_sharding_rule(monkeypatch):
    """The compiler partitions the call: forward and backward with the rule, and kernels on what it hands out."""
    mesh = make_mesh(AxisType.Auto)
    text = lowered_for_cuda(gradients(functools.partial(attend, "cuda")), mesh)
    assert text.count("custom_call @CustomSPMDPartitioning(") == 2
    assert text.count("sdy.sharding_rule") == 2
    assert not custom_calls(text)
    assert "all_gather" not in text

    inner = []
    run = cuda._forward

    def forward(spec, operands):
        inner.append((spec.batch, spec.query_heads, spec.key_value_heads, operands.query.shape, operands.sinks.shape))
        return run(spec, operands)

    monkeypatch.setattr(cuda, "_forward", forward)
    jax.jit(functools.partial(attend, "cuda")).lower(*place(mesh, make_arrays("cuda"))).compile()
    assert inner[-1] == (2, 2, 1, (2, 48, 2, 16), (2, 2))


def test_export_on_one_device_has_no_callback():
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES[:3]]
    attend = jax.jit(functools.partial(flash_attention, implementation="cuda"))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(custom_call.TARGET)]
    exported = jax.export.export(attend, platforms=["cuda"], disabled_checks=allowed)(*arrays)
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    assert exported.nr_devices == 1
