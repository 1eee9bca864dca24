"""Both Flax modules in the idioms of real models: scan over layers, remat, sharding annotations, bf16 parameters."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from jax.sharding import PartitionSpec as P

from jax_fa_blackwell import linen as fa_linen
from jax_fa_blackwell import nnx as fa_nnx
from lowered import launches, lower_for_cuda, named_cubins

LAYERS, FEATURES = 2, 32
SAVED = jax.checkpoint_policies.save_only_these_names("context")
LECUN = nn.initializers.lecun_normal()


def inputs(dtype="float32"):
    """x [2, 12, 32] and segment ids [2, 12] with padding at the end."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, FEATURES)), dtype)
    return x, jnp.asarray([[0] * 5 + [1] * 7, [0] * 3 + [1] * 6 + [-1] * 3], jnp.int32)


def mask_options(ids):
    return {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}


class LinenBlock(nn.Module):
    """Norm, attention and residual; ids come from the model's caller, as one broadcast input of the scan."""

    dtype: jnp.dtype
    implementation: str | None = None

    @nn.compact
    def __call__(self, x, ids):
        attention = fa_linen.MultiHeadAttention(
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            dtype=self.dtype,
            param_dtype=self.dtype,
            kernel_init=nn.with_logical_partitioning(LECUN, ("embed", "heads", "head_dim")),
            out_kernel_init=nn.with_logical_partitioning(LECUN, ("heads", "head_dim", "embed")),
            use_bias=False,
            name="attention",
        )
        normed = nn.RMSNorm(dtype=self.dtype, param_dtype=self.dtype, name="norm")(x)
        return x + attention(normed, **mask_options(ids), implementation=self.implementation), None


def linen_stack(block, dtype, implementation=None):
    scan: Any = nn.scan  # its annotation of in_axes leaves nn.broadcast out
    scanned = scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=LAYERS,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(dtype, implementation)


def linen_params(dtype):
    x, ids = inputs(dtype)
    return linen_stack(LinenBlock, dtype).init(jax.random.key(0), x, ids)["params"]


class NnxBlock(nnx.Module):
    """The same in NNX."""

    def __init__(self, dtype, implementation=None, *, annotate=False, rngs):
        # NNX wants a mesh around where a variable with an annotation is made.
        partition = nnx.with_partitioning if annotate else lambda initializer, _: initializer
        self.norm = nnx.RMSNorm(FEATURES, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.attention = fa_nnx.MultiHeadAttention(
            4,
            FEATURES,
            num_kv_heads=2,
            head_dim=16,
            dtype=dtype,
            param_dtype=dtype,
            kernel_init=partition(LECUN, ("embed", "heads", None)),
            out_kernel_init=partition(LECUN, ("heads", None, "embed")),
            use_bias=False,
            rngs=rngs,
        )
        self.implementation = implementation

    def __call__(self, x, ids):
        return x + self.attention(self.norm(x), **mask_options(ids), implementation=self.implementation)


def nnx_stack(dtype, implementation=None):
    """LAYERS blocks whose parameters have a leading axis of layers."""

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs):
        return NnxBlock(dtype, implementation, rngs=rngs)

    return create(nnx.Rngs(0))


def nnx_apply(blocks, x, ids, remat=None):
    def apply(x, block):
        return block(x, ids)

    if remat is not None:
        apply = nnx.remat(apply, **remat)
    return nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)


def square_sum(x):
    return jnp.sum(x.astype(jnp.float32) ** 2)


def check_same_function(one, other, tree, x):
    """The same results and, in float32, gradients: in bfloat16 each layer rounds anew, here at 2 ** -8."""
    got, expected = jax.jit(one)(tree, x), jax.jit(other)(tree, x)
    assert got.dtype == x.dtype
    tolerance = 1e-5 if x.dtype == jnp.float32 else 2**-6
    chex.assert_trees_all_close(got, expected, rtol=tolerance, atol=tolerance)
    gradients = [jax.jit(jax.grad(lambda *a, f=f: square_sum(f(*a)), (0, 1)))(tree, x) for f in (one, other)]
    chex.assert_trees_all_equal_dtypes((tree, x), *gradients)
    chex.assert_tree_all_finite(gradients)
    if x.dtype == jnp.float32:
        chex.assert_trees_all_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_linen_scan_is_a_loop_over_layers(dtype):
    x, ids = inputs(dtype)
    params = nn.unbox(linen_params(dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}

    def loop(params, x):
        for layer in range(LAYERS):
            one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params)
            x, _ = LinenBlock(dtype).apply({"params": one}, x, ids)
        return x

    def scan(params, x):
        return linen_stack(LinenBlock, dtype).apply({"params": params}, x, ids)[0]

    check_same_function(scan, loop, params, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nnx_scan_is_a_loop_over_layers(dtype):
    x, ids = inputs(dtype)
    graph, state = nnx.split(nnx_stack(dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(dtype)}

    def loop(state, x):
        for layer in range(LAYERS):
            x = nnx.merge(graph, jax.tree.map(lambda leaf, layer=layer: leaf[layer], state))(x, ids)
        return x

    def scan(state, x):
        return nnx_apply(nnx.merge(graph, state), x, ids)

    check_same_function(scan, loop, state, x)


@pytest.mark.parametrize("policy", [None, SAVED])
def test_linen_remat_keeps_values(policy):
    x, ids = inputs()
    params = nn.unbox(linen_params(jnp.float32))

    def gradient(block):
        of = lambda p: square_sum(linen_stack(block, jnp.float32).apply({"params": p}, x, ids)[0])  # noqa: E731
        return jax.jit(jax.grad(of))(params)

    remat = nn.remat(LinenBlock, policy=policy, prevent_cse=False)
    chex.assert_trees_all_close(gradient(remat), gradient(LinenBlock), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [None, SAVED])
def test_nnx_remat_keeps_values(policy):
    x, ids = inputs()
    graph, state = nnx.split(nnx_stack(jnp.float32))

    def gradient(remat):
        return jax.jit(jax.grad(lambda s: square_sum(nnx_apply(nnx.merge(graph, s), x, ids, remat))))(state)

    chex.assert_trees_all_close(gradient({"policy": policy}), gradient(None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("policy", "forwards"), [(SAVED, 1), (None, 2)])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_remat_policy_in_a_scanned_model_runs_no_forward_kernel_again(api, policy, forwards):
    dtype = jnp.bfloat16
    x, ids = inputs(dtype)
    if api == "linen":
        tree = nn.unbox(linen_params(dtype))
        stack = linen_stack(nn.remat(LinenBlock, policy=policy, prevent_cse=False), dtype, "cuda")
        apply = lambda p, x: stack.apply({"params": p}, x, ids)[0]  # noqa: E731
    else:
        graph, tree = nnx.split(nnx_stack(dtype, "cuda"))
        apply = lambda s, x: nnx_apply(nnx.merge(graph, s), x, ids, {"policy": policy})  # noqa: E731
    with named_cubins():
        text = lower_for_cuda(jax.value_and_grad(lambda tree, x: square_sum(apply(tree, x))), tree, x)
    names = [plan.name.split("_")[0] for plan in launches(text)]
    assert names.count("forward") == forwards
    assert names.count("backward") == 1


def test_linen_annotations_in_a_scan():
    """Each logical axis of a kernel stands behind the axis of layers, and rules bring them to a mesh."""
    specs = nn.get_partition_spec(linen_params(jnp.float32))["attention"]
    assert specs["query"]["kernel"] == P("layers", "embed", "heads", "head_dim")
    assert specs["out"]["kernel"] == P("layers", "heads", "head_dim", "embed")
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shardings = spmd.logical_to_mesh_sharding(specs, mesh, [("heads", "model"), ("embed", "data")])
    assert shardings["key"]["kernel"].spec == P(None, "data", "model", None)
    assert shardings["out"]["kernel"].spec == P(None, "model", None, "data")


def test_nnx_annotations_in_a_scan():
    mesh = jax.make_mesh((1, 1), ("embed", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def create(rngs):
            return NnxBlock(jnp.float32, annotate=True, rngs=rngs)

        specs: Any = nnx.get_partition_spec(nnx.state(create(nnx.Rngs(0)), nnx.Param))["attention"]
    assert specs["query"]["kernel"].get_value() == P(None, "embed", "heads", None)
    assert specs["out"]["kernel"].get_value() == P(None, "heads", None, "embed")


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_padding_from_the_model_is_a_row_of_zeros(api):
    """A padding position gets the residual alone; what stands in it, NaN too, reaches no other position."""
    x, ids = inputs()
    padded = ids < 0
    if api == "linen":
        params = nn.unbox(linen_params(jnp.float32))
        apply = jax.jit(lambda x: linen_stack(LinenBlock, jnp.float32).apply({"params": params}, x, ids)[0])
    else:
        graph, state = nnx.split(nnx_stack(jnp.float32))
        apply = functools.partial(jax.jit(lambda state, x: nnx_apply(nnx.merge(graph, state), x, ids)), state)
    clean = apply(x)
    np.testing.assert_array_equal(np.asarray(clean)[padded], np.asarray(x)[padded])
    poisoned = apply(jnp.where(padded[..., None], jnp.nan, x))
    np.testing.assert_array_equal(np.asarray(poisoned)[~padded], np.asarray(clean)[~padded])


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_checkpoint_name_of_the_attention_function(api):
    """Flax's own layers with our function, under a policy that keeps a name of the user's."""
    x = jax.ShapeDtypeStruct((1, 16, FEATURES), jnp.bfloat16)
    module = fa_linen if api == "linen" else fa_nnx
    function = module.AttentionFn(is_causal=True, implementation="cuda", checkpoint_name="attended")
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "attention_fn": function}
    with named_cubins():
        if api == "linen":
            layer = nn.MultiHeadDotProductAttention(num_heads=4, **options)
            tree = jax.eval_shape(layer.init, jax.random.key(0), x)
            apply = layer.apply
        else:
            model = functools.partial(nnx.MultiHeadAttention, 4, FEATURES, decode=False, **options)
            graph, tree = nnx.split(nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0))))
            apply = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
        for name, forwards in (("attended", 1), ("context", 2)):
            policy = jax.checkpoint_policies.save_only_these_names(name)
            of = jax.checkpoint(lambda tree, x: square_sum(apply(tree, x)), policy=policy)
            names = [plan.name for plan in launches(lower_for_cuda(jax.value_and_grad(of, 1), tree, x))]
            assert sum(name.startswith("forward") for name in names) == forwards
