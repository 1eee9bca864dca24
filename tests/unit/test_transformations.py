"""JAX's transformations of flash_attention: forward mode and second order, remat, scan, donation, vmap, shapes."""

import functools
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa_blackwell import flash_attention, xla
from lowered import launches, lower_for_cuda, named_cubins

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window and cap": {"local_window_size": (7, 2), "logits_soft_cap": 2.0},
    "lengths": {"is_causal": True, "key_value_seq_lengths": np.array([11, 0], "int32")},
}


def inputs(dtype="float32", seed=0):
    """Query [2, 20, 4, 8], key [2, 23, 2, 8], value [2, 23, 2, 12], bias [1, 4, 1, 23], sinks [4]."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (2, 20, 4, 8),
        "key": (2, 23, 2, 8),
        "value": (2, 23, 2, 12),
        "bias": (1, 4, 1, 23),
        "sinks": (4,),
    }
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def attend(arrays, implementation, **options):
    """Output and LSE, with weights that make every element count; an LSE of -inf has no derivative to compare."""
    out, lse = flash_attention(**arrays, return_lse=True, implementation=implementation, **options)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def loss(arrays, implementation, **options):
    out, lse = attend(arrays, implementation, **options)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def check_same_as_reference(function):
    """``function(implementation)`` gives with "xla" what JAX's own derivatives of the definition give; float64."""
    got, expected = (jax.jit(functools.partial(function, name))() for name in ("xla", "reference"))
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(expected))
    chex.assert_trees_all_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
class TestXlaDerivatives:
    def test_forward_mode(self, x64, options):
        arrays, along = inputs("float64"), inputs("float64", seed=1)
        check_same_as_reference(lambda name: jax.jvp(lambda x: attend(x, name, **options), (arrays,), (along,)))

    def test_forward_mode_along_some_arguments(self, x64, options):
        arrays, along = inputs("float64"), inputs("float64", seed=1)

        def some(name):
            def of_key(key, sinks):
                return attend(arrays | {"key": key, "sinks": sinks}, name, **options)

            return jax.jvp(of_key, (arrays["key"], arrays["sinks"]), (along["key"], along["sinks"]))

        check_same_as_reference(some)

    @pytest.mark.parametrize("order", ["forward over reverse", "reverse over forward", "reverse over reverse"])
    def test_second_order(self, x64, options, order):
        arrays, along = inputs("float64"), inputs("float64", seed=1)

        def product(name):
            """The Hessian times a vector."""
            of = functools.partial(loss, implementation=name, **options)
            if order == "forward over reverse":
                return jax.jvp(jax.grad(of), (arrays,), (along,))[1]
            if order == "reverse over forward":
                return jax.grad(lambda x: jax.jvp(of, (x,), (along,))[1])(arrays)
            dot = lambda tree: sum(jnp.vdot(along[k], tree[k]) for k in along)  # noqa: E731
            return jax.grad(lambda x: dot(jax.grad(of)(x)))(arrays)

        check_same_as_reference(product)


def test_jacobians_and_hessian(x64):
    rng = np.random.default_rng(3)
    query, key = (jnp.asarray(rng.standard_normal((1, 3, 1, 4))) for _ in range(2))

    def all_of_them(name):
        out = lambda q: flash_attention(q, key, key, is_causal=True, implementation=name)  # noqa: E731
        total = lambda q: jnp.sum(out(q) ** 2)  # noqa: E731
        return jax.jacfwd(out)(query), jax.jacrev(out)(query), jax.hessian(total)(query)

    check_same_as_reference(all_of_them)


def test_linearize_transposes_to_the_gradient(x64):
    arrays = inputs("float64")
    of = functools.partial(loss, implementation="xla")
    value, linear = jax.linearize(of, arrays)
    (gradient,) = jax.linear_transpose(linear, arrays)(jnp.ones(()))
    chex.assert_trees_all_close((value, gradient), jax.value_and_grad(of)(arrays), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mapped", [("query",), ("key", "sinks"), ("query", "key", "value", "bias", "sinks")])
def test_vmap_of_every_mode(x64, mapped):
    """Derivatives of a vmap and vmaps of derivatives, with what is not mapped shared."""
    arrays, along = inputs("float64"), inputs("float64", seed=1)
    stacked = arrays | {name: jnp.stack([arrays[name], 2 * along[name], -arrays[name]]) for name in mapped}
    axes = ({name: 0 if name in mapped else None for name in arrays},)
    tangents = jax.tree.map(jnp.sin, stacked)

    def modes(name):
        of = functools.partial(loss, implementation=name)
        several = jax.vmap(of, axes)
        forward = lambda x, t: jax.jvp(of, (x,), (t,))[1]  # noqa: E731
        return (
            jax.jvp(several, (stacked,), (tangents,)),
            jax.grad(lambda x: several(x).sum())(stacked),
            jax.vmap(forward, axes * 2)(stacked, tangents),
            jax.vmap(jax.grad(of), axes)(stacked),
            jax.jvp(jax.grad(lambda x: several(x).sum()), (stacked,), (tangents,))[1],
        )

    check_same_as_reference(modes)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [(("query",), ("query", "sinks")), (("query", "sinks"), ("query",)), (("query", "key", "value"), ("query",))],
)
def test_nested_vmaps_over_queries(x64, inner, outer):
    """Gradients of what a vmap shares are sums over it: of keys and values over both, or over the outer one alone."""
    arrays, factors = inputs("float64"), jnp.cos(jnp.arange(6.0)).reshape(2, 3)
    del arrays["bias"]
    for level, names in ((factors[0], inner), (factors[:, 0], outer)):
        for name in names:
            arrays[name] = jnp.stack([arrays[name] * factor for factor in level])

    def gradients(name):
        of = functools.partial(loss, implementation=name, is_causal=True)
        for names in (inner, outer):
            of = jax.vmap(of, ({name: 0 if name in names else None for name in arrays},))
        return jax.grad(lambda x: jnp.sum(of(x) * factors))(arrays)

    check_same_as_reference(gradients)


def test_forward_mode_memory_is_linear():
    """The tangent of a call needs no [T, S] array."""

    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        along = jax.jit(lambda q, t: jax.jvp(lambda q: flash_attention(q, q, q, implementation="xla"), (q,), (t,)))
        analysis = along.lower(x, x).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 5 * short
    assert long < 4096 * 4096 * 4


SHAPES = ((2, 256, 4, 96), (2, 200, 2, 96), (2, 200, 2, 64))
CUDA_INPUTS = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]


@pytest.fixture
def blackwell():
    with named_cubins():
        yield


def kernel_loss(*arrays, **options):
    return flash_attention(*arrays, is_causal=True, implementation="cuda", **options).astype(jnp.float32).sum()


def count(function, *arguments, **options) -> tuple[int, int]:
    """Forward and backward launches of one run of the program lowered for CUDA."""
    plans = launches(lower_for_cuda(function, *(arguments or CUDA_INPUTS), **options))
    kinds = [plan.name.split("_")[0] for plan in plans]
    assert set(kinds) <= {"forward", "backward"}
    return kinds.count("forward"), kinds.count("backward")


class TestKernelDerivatives:
    MESSAGE = r"implementation='cuda': kernels have first derivatives by reverse mode only.*implementation='xla'"

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("mode", ["jvp", "jacfwd", "hessian"])
    def test_other_modes_say_what_to_use(self, blackwell, mode, jit):
        x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
        of = lambda q: kernel_loss(q, x, x)  # noqa: E731
        of = jax.jit(of) if jit else of
        transformed = {"jvp": lambda q: jax.jvp(of, (q,), (q,)), "jacfwd": jax.jacfwd(of), "hessian": jax.hessian(of)}
        with pytest.raises(NotImplementedError, match="forward-mode differentiation .*of " + self.MESSAGE):
            transformed[mode](x)

    def test_second_order_says_what_to_use(self, blackwell):
        twice = jax.grad(lambda *x: jax.grad(kernel_loss)(*x).astype(jnp.float32).sum())
        with pytest.raises(NotImplementedError, match="second derivative of " + self.MESSAGE):
            lower_for_cuda(twice, *CUDA_INPUTS)

    def test_gradient_is_one_forward_and_one_backward(self, blackwell):
        assert count(kernel_loss) == (1, 0)
        assert count(jax.grad(kernel_loss, (0, 1, 2))) == (1, 1)


class TestRemat:
    def test_saved_results_spare_the_second_forward(self, blackwell):
        policy = jax.checkpoint_policies.save_only_these_names("context")
        with_policy = jax.checkpoint(kernel_loss, policy=policy)
        assert count(jax.value_and_grad(with_policy, (0, 1, 2))) == (1, 1)
        assert count(jax.value_and_grad(jax.checkpoint(kernel_loss), (0, 1, 2))) == (2, 1)

    def test_name_is_the_callers(self, blackwell):
        named = functools.partial(kernel_loss, checkpoint_name="attention")
        for name, expected in (("attention", (1, 1)), ("context", (2, 1))):
            policy = jax.checkpoint_policies.save_only_these_names(name)
            assert count(jax.value_and_grad(jax.checkpoint(named, policy=policy), (0, 1, 2))) == expected

    def test_in_a_scan_over_layers(self, blackwell):
        """The loop forward has the forward launch, the loop backward only the backward one."""
        layer = jax.ShapeDtypeStruct((3, 96, 96), jnp.bfloat16)

        def model(x, weights, policy):
            def block(x, weight):
                attended = flash_attention(x @ weight, x, x, is_causal=True, implementation="cuda")
                return x + attended, None

            body = jax.checkpoint(block, policy=policy, prevent_cse=False)
            return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

        saved = jax.checkpoint_policies.save_only_these_names("context")
        for policy, expected in ((saved, (1, 1)), (jax.checkpoint_policies.nothing_saveable, (2, 1))):
            gradient = jax.grad(functools.partial(model, policy=policy), (0, 1))
            assert count(gradient, CUDA_INPUTS[0], layer) == expected

    @pytest.mark.parametrize("implementation", ["xla", "reference"])
    def test_values_are_the_same(self, implementation):
        arrays = inputs()
        of = functools.partial(loss, implementation=implementation, is_causal=True)
        policy = jax.checkpoint_policies.save_only_these_names("context")
        expected = jax.jit(jax.grad(of))(arrays)
        for options in ({}, {"policy": policy}):
            chex.assert_trees_all_close(jax.jit(jax.grad(jax.checkpoint(of, **options)))(arrays), expected, rtol=1e-5)

    def test_policy_saves_the_work_of_xla_too(self):
        """The forward pass's two loops, over rows and keys, are not in the program a second time."""
        query, key, value = (jax.ShapeDtypeStruct((1, 512, 1, 32), jnp.float32) for _ in range(3))
        of = lambda *x: flash_attention(*x, implementation="xla").sum()  # noqa: E731

        def loops(**options):
            gradient = jax.jit(jax.value_and_grad(jax.checkpoint(of, **options), (0, 1, 2)))
            return gradient.lower(query, key, value).as_text().count("stablehlo.while")

        assert loops(policy=jax.checkpoint_policies.save_only_these_names("context")) == loops() - 2

    @pytest.mark.parametrize("name", ["", None, 3])
    def test_name_is_checked(self, name):
        x = jnp.zeros((1, 2, 1, 8))
        with pytest.raises(ValueError, match="checkpoint_name must be a string that is not empty; got"):
            flash_attention(x, x, x, checkpoint_name=name)


def test_unused_results_cost_nothing(blackwell):
    def unused(*arrays):
        flash_attention(*arrays, implementation="cuda")
        return arrays[0]

    assert count(unused) == (0, 0)
    # A gradient of which nothing is used.
    assert count(lambda *x: jax.value_and_grad(kernel_loss)(*x)[0]) == (1, 0)


def test_scan_over_layers_is_one_call(blackwell):
    x = CUDA_INPUTS[0]

    def layers(x):
        return jax.lax.scan(lambda x, _: (flash_attention(x, x, x, implementation="cuda"), None), x, None, length=4)[0]

    assert count(layers, x) == (1, 0)


def test_donated_inputs():
    """A donated query's buffer becomes the output's; donation changes no result."""
    arrays = [jnp.asarray(np.random.default_rng(0).standard_normal((1, 64, 2, 16)), "float32") for _ in range(3)]
    function = functools.partial(flash_attention, is_causal=True, implementation="xla")
    expected = jax.jit(function)(*arrays)
    chex.assert_trees_all_equal(jax.jit(function, donate_argnums=0)(*arrays), expected)
    assert arrays[0].is_deleted()


def test_donated_inputs_for_cuda(blackwell):
    square = [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3
    text = lower_for_cuda(functools.partial(flash_attention, implementation="cuda"), *square, donate_argnums=0)
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text


def test_jit_with_static_options():
    """Every option that is not an array may be a static argument of jit, and equal ones share a compilation."""
    names = (
        "scale",
        "is_causal",
        "causal_alignment",
        "local_window_size",
        "logits_soft_cap",
        "return_lse",
        "deterministic",
        "implementation",
        "checkpoint_name",
    )
    traced = []

    def function(*arrays, **options):
        traced.append(options)
        return flash_attention(*arrays, **options)

    jitted = jax.jit(function, static_argnames=names)
    x = jnp.ones((1, 8, 1, 8))
    for _ in range(2):
        for window in ((2, 0), None):
            jitted(x, x, x, local_window_size=window, is_causal=True, implementation="xla", scale=0.5)
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", jnp.bool_(True)),
        ("scale", jnp.float32(1)),
        ("logits_soft_cap", jnp.float32(1)),
        ("return_lse", jnp.bool_(True)),
        ("deterministic", jnp.bool_(True)),
        ("local_window_size", jnp.int32(3)),
    ],
)
def test_traced_options_are_refused(name, value):
    x = jnp.ones((1, 8, 1, 8))
    with pytest.raises(ValueError, match=f"{name} must be "):
        jax.jit(lambda option: flash_attention(x, x, x, **{name: option}))(value)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "key_value_seq_lengths"])
def test_symbolic_shapes_are_refused(name, implementation):
    (b,) = jax.export.symbolic_shape("b")
    shapes = {
        "query": (1, 4, 1, 8),
        "key": (1, 4, 1, 8),
        "value": (1, 4, 1, 8),
        "bias": (1, 1, 4, 4),
        "key_value_seq_lengths": (1,),
    }
    shapes[name] = (b, *shapes[name][1:])
    dtypes = {"key_value_seq_lengths": jnp.int32}
    arrays = {key: jax.ShapeDtypeStruct(shape, dtypes.get(key, jnp.float32)) for key, shape in shapes.items()}
    function = jax.jit(lambda arrays: flash_attention(**arrays, implementation=implementation))
    with pytest.raises(NotImplementedError, match=rf"{name} must have a shape of integers.*symbolic shape \[b"):
        jax.export.export(function)(arrays)


def lowering_cost(implementation: str, platform: str, with_gradient: bool) -> float:
    """CPU seconds to trace and lower one call in a function that is new to JAX, in a process that knows the shapes."""

    def once():
        attend = lambda *arrays: flash_attention(*arrays, is_causal=True, implementation=implementation)  # noqa: E731
        gradient = jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
        jitted = jax.jit(gradient if with_gradient else attend)
        begin = time.process_time()
        jitted.trace(*CUDA_INPUTS).lower(lowering_platforms=(platform,))
        return time.process_time() - begin

    return min(once() for _ in range(9))


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize(("implementation", "platform"), [("cuda", "cuda"), ("xla", "cuda"), ("xla", "cpu")])
def test_tracing_and_lowering_is_cheap(blackwell, implementation, platform, with_gradient):
    """20 ms a pass is the aim; three times that leaves room for a machine that is slow or busy."""
    cost = lowering_cost(implementation, platform, with_gradient)
    print(f"{1000 * cost:.1f} ms")
    assert cost < 3 * 0.020 * (1 + with_gradient)


@pytest.mark.parametrize("implementation", ["cuda", "xla"])
def test_layers_of_equal_shape_are_traced_once(blackwell, monkeypatch, implementation):
    """Eight calls in one program: the pure JAX pass is traced once and stands in the program once."""
    traced = []
    original = xla._online_softmax_step
    monkeypatch.setattr(xla, "_online_softmax_step", lambda *x: (traced.append(1), original(*x))[1])

    def layers(x):
        for _ in range(8):
            x = flash_attention(x, x, x, is_causal=True, implementation=implementation)
        return x

    text = jax.jit(layers).trace(CUDA_INPUTS[0]).lower(lowering_platforms=("cuda",)).as_text()
    # Of the step there are two: JAX traces the body of a scan and the branch of a condition in it once each.
    assert len(traced) <= 2
    assert text.count("stablehlo.while") == (2 if implementation == "xla" else 0)
