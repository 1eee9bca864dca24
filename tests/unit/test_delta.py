"""delta on a CPU: values, gradients, vmap; what is lowered for CUDA; whether launch plans are legal and complete."""

import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa_blackwell import cubins, custom_call, elf, export, lowering
from jax_fa_blackwell.delta import delta
from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import delta as plan
from jax_fa_blackwell.plan.launch import Int32, Launch, LaunchPlan, TensorMap
from jax_fa_blackwell.plan.target import TARGETS, get_target


def inputs(shape, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    out, grad_out = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    return out, grad_out, jnp.asarray(rng.standard_normal(shape[:-1]), jnp.promote_types(dtype, jnp.float32))


def expected(out, grad_out, grad_lse=None):
    sums = np.einsum("btnh,btnh->bnt", np.asarray(out, np.float64), np.asarray(grad_out, np.float64))
    return sums if grad_lse is None else sums - np.swapaxes(np.asarray(grad_lse, np.float64), 1, 2)


@pytest.fixture(autouse=True)
def compiled(monkeypatch, tmp_path):
    """Cubins that are found but are none, so that programs can be lowered anywhere; returns what was asked for."""
    asked = []

    def find(variant, arch):
        asked.append((variant.name, arch))
        return fake_cubin(variant, arch, tmp_path)

    monkeypatch.setattr(cubins, "find", find)
    monkeypatch.delenv(lowering.ARCH_VARIABLE, raising=False)
    return asked


def fake_cubin(variant, arch, folder=pathlib.Path()):
    base = 528 if arch == "sm_90a" else 896
    return cubins.Cubin(
        variant, arch, "ab" * 32, "entry", abi.table(variant.parameters, base), (288, 1, 1), 40, 0, "tools", folder
    )


def lowered_plans(function, *arguments, platforms=("cuda",)):
    """The launch plans in the program lowered for CUDA, and its text."""
    found = []
    original = LaunchPlan.encode

    def encode(self):
        found.append(self)
        return original(self)

    jax.clear_caches()  # a program lowered before would not be lowered again
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchPlan, "encode", encode)
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=platforms).as_text()
    return found, text


class TestValues:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
    @pytest.mark.parametrize("with_lse", [False, True])
    @pytest.mark.parametrize("jit", [False, True])
    def test_matches_float64(self, dtype, with_lse, jit):
        arguments = inputs((2, 5, 3, 72), dtype)[: 3 if with_lse else 2]
        result = (jax.jit(delta) if jit else delta)(*arguments)
        assert result.dtype == jnp.float32
        chex.assert_trees_all_close(np.asarray(result, np.float64), expected(*arguments), rtol=1e-5, atol=1e-5)

    def test_float64(self):
        with jax.enable_x64(True):
            arguments = inputs((1, 3, 2, 12), jnp.float64)
            result = delta(*arguments)
            assert result.dtype == jnp.float64
            chex.assert_trees_all_close(np.asarray(result), expected(*arguments), rtol=1e-14)

    @pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16), (2, 4, 0, 16)])
    def test_empty(self, shape, compiled):
        arguments = inputs(shape)
        assert delta(*arguments).shape == (shape[0], shape[2], shape[1])
        plans, text = lowered_plans(delta, *arguments)
        assert not plans
        assert custom_call.TARGET not in text
        assert not compiled

    def test_nan_stays_in_its_row(self):
        out, grad_out, grad_lse = inputs((2, 6, 3, 16))
        single = jax.jit(delta)
        poisoned = single(out.at[1, 2, 0].set(jnp.nan), grad_out, grad_lse)
        clean = single(out, grad_out, grad_lse)
        bad = np.zeros(clean.shape, bool)
        bad[1, 0, 2] = True
        assert np.array_equal(np.isnan(poisoned), bad)
        assert np.array_equal(np.asarray(poisoned)[~bad], np.asarray(clean)[~bad])


class TestTransformations:
    @pytest.mark.parametrize("with_lse", [False, True])
    def test_gradients_match_the_expression(self, with_lse):
        arguments = inputs((2, 4, 3, 16), jnp.float32)[: 3 if with_lse else 2]
        weights = jnp.asarray(np.random.default_rng(9).standard_normal((2, 3, 4)), jnp.float32)

        def plain(out, grad_out, grad_lse=None):
            sums = jnp.einsum("btnh,btnh->bnt", out, grad_out)
            return sums if grad_lse is None else sums - jnp.swapaxes(grad_lse, 1, 2)

        def gradients(function):
            loss = lambda *args: (weights * jnp.sin(function(*args))).sum()  # noqa: E731
            return jax.jit(jax.grad(loss, argnums=tuple(range(len(arguments)))))(*arguments)

        chex.assert_trees_all_close(gradients(delta), gradients(plain), rtol=1e-5, atol=1e-6)

    def test_second_derivative(self):
        out, grad_out, grad_lse = inputs((1, 2, 2, 8), jnp.float32)
        loss = lambda scale: delta(out * scale, grad_out * scale, grad_lse).sum()  # noqa: E731
        chex.assert_trees_all_close(jax.jit(jax.grad(jax.grad(loss)))(1.5), 2 * (out * grad_out).sum(), rtol=1e-5)

    @pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (None, 1, None), (None, None, 0)])
    def test_vmap(self, in_axes):
        stacked = inputs((3, 2, 3, 3, 16), seed=1)
        arguments = [array if axis is not None else array[0] for array, axis in zip(stacked, in_axes, strict=True)]
        if in_axes[1] == 1:
            arguments[1] = jnp.moveaxis(arguments[1], 0, 1)
        result = jax.jit(jax.vmap(delta, in_axes))(*arguments)
        one = [stacked[i] if in_axes[i] is not None else stacked[i][:1].repeat(3, 0) for i in range(3)]
        single = jax.jit(delta)
        chex.assert_trees_all_close(
            result, jnp.stack([single(*(array[i] for array in one)) for i in range(3)]), rtol=1e-6
        )

    def test_nested_vmap_and_grad_fold_into_one_call(self):
        out, grad_out, grad_lse = inputs((2, 3, 2, 4, 2, 16), seed=2)
        nested = jax.vmap(jax.vmap(delta, (0, 0, None)), (0, 0, 0))
        result = np.asarray(jax.jit(nested)(out, grad_out, grad_lse[:, 0]))
        assert result.shape == (2, 3, 2, 2, 4)
        chex.assert_trees_all_close(
            result[1, 2], expected(out[1, 2], grad_out[1, 2], grad_lse[1, 0]), rtol=1e-5, atol=1e-5
        )
        plans, _ = lowered_plans(nested, out, grad_out, grad_lse[:, 0])
        assert [p.result_bytes for p in plans] == [(2 * 3 * 2 * 2 * 4 * 4,)]
        loss = lambda *args: (nested(*args) ** 2).sum()  # noqa: E731
        plans, _ = lowered_plans(jax.grad(loss, (0, 1, 2)), out, grad_out, grad_lse[:, 0])
        assert len(plans) == 1

    def test_scan(self):
        out, grad_out, grad_lse = inputs((4, 2, 3, 2, 16), seed=3)
        scanned = lambda xs: jax.lax.scan(lambda carry, x: (carry, delta(*x)), 0, xs)[1]  # noqa: E731
        result = jax.jit(scanned)((out, grad_out, grad_lse))
        one_by_one = np.stack([expected(*x) for x in zip(out, grad_out, grad_lse, strict=True)])
        chex.assert_trees_all_close(np.asarray(result, np.float64), one_by_one, rtol=1e-5, atol=1e-5)
        plans, _ = lowered_plans(scanned, (out, grad_out, grad_lse))
        assert len(plans) == 1


class TestShardMap:
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_in_shard_map(self, check_vma):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("data")
        mapped = jax.shard_map(delta, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        arguments = inputs((2, 5, 3, 72))
        result = jax.jit(mapped)(*arguments)
        chex.assert_trees_all_close(np.asarray(result), expected(*arguments), rtol=1e-5, atol=1e-5)
        gradient = jax.jit(jax.grad(lambda *args: (mapped(*args) ** 2).sum()))
        assert gradient(*arguments).shape == (2, 5, 3, 72)
        plans, text = lowered_plans(mapped, *arguments)
        assert len(plans) == 1
        assert custom_call.TARGET in text


class TestLowering:
    @pytest.mark.parametrize("with_lse", [False, True])
    def test_cuda_program_has_the_custom_call_and_no_callback(self, with_lse, compiled):
        arguments = inputs((2, 5, 3, 72))[: 3 if with_lse else 2]
        plans, text = lowered_plans(delta, *arguments)
        assert text.count(f"stablehlo.custom_call @{custom_call.TARGET}") == 1
        assert "callback" not in text
        (made,) = plans
        assert [program.arch for program in made.programs] == list(TARGETS)
        assert compiled == [("delta_bfloat16", arch) for arch in TARGETS]

    def test_cpu_program_needs_no_cubin(self, compiled):
        jax.jit(delta)(*inputs((2, 5, 3, 72)))
        delta(*inputs((2, 5, 3, 72)))
        assert not compiled

    def test_program_for_both_platforms(self):
        _, text = lowered_plans(delta, *inputs((2, 5, 3, 72)), platforms=("cuda", "cpu"))
        assert text.count(f"stablehlo.custom_call @{custom_call.TARGET}") == 1

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [((1, 2, 2, 12), jnp.bfloat16), ((1, 2, 2, 520), jnp.bfloat16), ((1, 2, 2, 64), jnp.float32)],
    )
    def test_what_the_kernel_does_not_take_is_the_expression(self, shape, dtype):
        arguments = inputs(shape, dtype)
        batch, tokens, heads, head_dim = shape
        assert plan.DeltaSpec(batch, tokens, heads, head_dim, np.dtype(dtype).name, True).limit()
        plans, text = lowered_plans(delta, *arguments)
        assert not plans
        assert custom_call.TARGET not in text

    def test_arch_variable(self, monkeypatch, compiled):
        monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_103a, sm_90a")
        lowered_plans(delta, *inputs((1, 2, 2, 64), jnp.float16))
        assert compiled == [("delta_float16", "sm_103a"), ("delta_float16", "sm_90a")]
        monkeypatch.setenv(lowering.ARCH_VARIABLE, "sm_80")
        with pytest.raises(ValueError, match=r"JAX_FA_BLACKWELL_ARCH='sm_80': arch must be one of .*; got 'sm_80'"):
            lowering.arches()

    @pytest.mark.parametrize(
        ("capabilities", "arches"),
        [(["9.0", "9.0"], ("sm_90a",)), (["10.3", "8.0"], ("sm_103a",)), (["8.0"], ()), (["12.0"], ())],
    )
    def test_local_devices_decide(self, monkeypatch, capabilities, arches):
        class Device:
            def __init__(self, compute_capability):
                self.compute_capability = compute_capability

        monkeypatch.setattr(jax, "local_devices", lambda backend: [Device(c) for c in capabilities])
        assert lowering.arches() == arches
        plans, text = lowered_plans(delta, *inputs((1, 2, 2, 64)))
        assert [program.arch for made in plans for program in made.programs] == list(arches)
        assert (custom_call.TARGET in text) == bool(arches)


class TestArguments:
    def test_errors_name_the_argument(self):
        out, grad_out, grad_lse = inputs((2, 4, 3, 16))
        with pytest.raises(ValueError, match=r"out must be floating point \[B, T, N, H\]; got bfloat16\[4, 3, 16\]"):
            delta(out[0], grad_out[0])
        with pytest.raises(ValueError, match=r"out must be floating point .*; got int32\[2, 4, 3, 16\]"):
            delta(out.astype(jnp.int32), grad_out)
        with pytest.raises(ValueError, match=r"grad_out must be like out, bfloat16\[2, 4, 3, 16\]; got float32"):
            delta(out, grad_out.astype(jnp.float32))
        with pytest.raises(ValueError, match=r"grad_lse must be float32\[2, 4, 3\]; got float32\[2, 3, 4\]"):
            delta(out, grad_out, grad_lse.swapaxes(1, 2))
        with pytest.raises(ValueError, match=r"grad_lse must be float32\[2, 4, 3\]; got bfloat16"):
            delta(out, grad_out, grad_lse.astype(jnp.bfloat16))


HEAD_DIMS = range(8, 513, 8)
SHAPES = [(1, 1, 1), (2, 5, 3), (1, 4096, 16), (3, 130, 7), (1, 1000, 1), (64, 1, 128), (1, 8, 1000), (2, 17, 12)]


def spec_of(shape, head_dim, with_lse=False):
    batch, tokens, heads = shape
    return plan.DeltaSpec(batch, tokens, heads, head_dim, "bfloat16", with_lse)


def launch_of(spec, arch="sm_90a", config=plan.DEFAULT_CONFIG) -> tuple[Launch, dict[str, Any]]:
    """The launch and its parameters by name, integers as such."""
    (program,) = plan.make_plan(spec, [fake_cubin(spec.variant, arch)], config).programs
    (launch,) = program.steps
    assert isinstance(launch, Launch)
    names = [parameter.name for parameter in spec.variant.parameters]
    values = dict(zip(names, launch.params, strict=True))
    return launch, {name: value.value if isinstance(value, Int32) else value for name, value in values.items()}


class TestPlan:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_legal_for_every_head_dim(self, shape):
        for head_dim in HEAD_DIMS:
            spec = spec_of(shape, head_dim)
            tile = plan.choose_tile(spec, plan.DEFAULT_CONFIG)
            assert tile.rows <= 512  # what the consumers can store
            assert tile.box_bytes <= max(plan.DEFAULT_CONFIG.tile_bytes, 2 * head_dim)
            assert tile.group_words * 4 * tile.groups == tile.heads * head_dim * 2
            assert tile.heads <= spec.heads
            for arch in TARGETS:
                launch, values = launch_of(spec, arch)
                memory = plan.shared_map(tile, plan.DEFAULT_CONFIG, get_target(arch))
                blocks = plan.DEFAULT_CONFIG.blocks_per_sm
                assert blocks * (launch.shared_bytes + 1024) <= get_target(arch).shared_bytes + 1024
                assert launch.shared_bytes == memory.total
                assert 1 <= launch.grid[0] <= values["tiles"]
                assert isinstance(values["out_map"], TensorMap)
                assert values["out_map"].box_bytes == values["box_bytes"] <= values["stage_bytes"] // 2
                # every part begins where the last one ends, aligned for its use
                assert values["stage_bytes"] % 256 == 0
                assert values["stages"] >= 3
                assert values["turned_offset"] == values["stages"] * values["stage_bytes"]
                assert values["barrier_offset"] >= values["turned_offset"] + 8 * tile.rows
                assert values["barrier_offset"] % 8 == 0
                assert memory.total == values["barrier_offset"] + 16 * values["stages"]

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_shared_loads_have_no_bank_conflict(self, head_dim):
        bits, chunks = plan.lane_bits(head_dim), head_dim // 8
        assert chunks % (1 << bits) == 0
        for step in range(chunks >> bits):
            for phase in range(4):  # a 16-byte load takes a warp eight lanes at a time
                lanes = range(8 * phase, 8 * phase + 8)
                banks = {((lane >> bits) * chunks + lane % (1 << bits) + (step << bits)) % 8 for lane in lanes}
                assert len(banks) == 8

    @pytest.mark.parametrize("head_dim", [8, 24, 72, 128, 200, 512])
    @pytest.mark.parametrize("shape", [(2, 5, 3), (1, 40, 16), (3, 130, 7), (5, 1, 33)], ids=str)
    def test_tiles_and_boxes_cover_every_row_once(self, shape, head_dim):
        """Walks the tiles as the kernel does, over what the tensor map would fetch."""
        spec = spec_of(shape, head_dim)
        _, values = launch_of(spec)
        batch, tokens, heads = shape
        box = values["out_map"]
        words = np.arange(spec.rows * head_dim // 2, dtype=np.int64)
        view = np.lib.stride_tricks.as_strided(
            words, box.dims[::-1], tuple(2 * s for s in (*box.strides_bytes[::-1], 4)), writeable=False
        )
        hits = np.zeros((batch, tokens, heads), int)
        tile_tokens, tile_heads = 1 << values["token_bits"], values["tile_heads"]
        for tile in range(values["tiles"]):
            rest, head_tile = divmod(tile, values["head_tiles"])
            b, token_tile = divmod(rest, values["token_tiles"])
            token, head, group = token_tile * tile_tokens, head_tile * tile_heads, head_tile * values["tile_groups"]
            loaded = np.full((tile_tokens, box.box[1], box.box[0]), -1, np.int64)
            part = view[b, token : token + tile_tokens, group : group + box.box[1]]
            loaded[: part.shape[0], : part.shape[1]] = part
            rows = loaded.reshape(tile_tokens, tile_heads, head_dim // 2)
            for t in range(min(tile_tokens, tokens - token)):
                for n in range(min(tile_heads, heads - head)):
                    first = ((b * tokens + token + t) * heads + head + n) * head_dim // 2
                    assert np.array_equal(rows[t, n], np.arange(first, first + head_dim // 2))
                    hits[b, token + t, head + n] += 1
        assert (hits == 1).all()

    def test_operands(self):
        for with_lse in (False, True):
            spec = spec_of((2, 5, 3), 16, with_lse)
            made = plan.make_plan(spec, [fake_cubin(spec.variant, "sm_90a")])
            assert made.argument_bytes == (960, 960) + (120,) * with_lse
            assert made.result_bytes == (120,)
            _, values = launch_of(spec)
            assert values["out_map"].operand == 0
            assert values["grad_out_map"].operand == 1
            assert values["delta"].operand == 2 + with_lse
            assert values["grad_lse"].operand == 2
            assert values["has_grad_lse"] == with_lse

    def test_limits_and_configurations_are_checked(self):
        with pytest.raises(ValueError, match="head dim must be a multiple of 8 from 8 to 512; got 520"):
            launch_of(spec_of((1, 1, 1), 520))
        with pytest.raises(ValueError, match="batch, tokens and heads must be at least 1"):
            launch_of(spec_of((1, 0, 1), 64))
        with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
            launch_of(spec_of((1 << 20, 1 << 10, 2), 64))
        with pytest.raises(ValueError, match=r"needs .* bytes of shared memory a block; sm_90a has"):
            launch_of(spec_of((1, 64, 16), 64), config=plan.DeltaConfig(ring_bytes=160 * 1024))
        with pytest.raises(ValueError, match="no room for two stages of 32768 bytes"):
            launch_of(spec_of((1, 64, 16), 64), config=plan.DeltaConfig(tile_bytes=16 * 1024, ring_bytes=48 * 1024))
        with pytest.raises(ValueError, match="ring_bytes must be at least 1; got 0"):
            plan.DeltaConfig(ring_bytes=0)


def test_real_cubin_takes_the_plan(monkeypatch):
    """The block and the parameters of the compiled kernel are those that the plan brings."""
    if export.toolchain() is None:
        pytest.skip("the kernel DSL is not installed")
    variant = registry.get_variant("delta_float16")
    compiled = export.compile_variant(variant, "sm_103a")
    (kernel,) = elf.read(compiled.cubin).kernels
    options = dict(variant.options)
    assert kernel.block == (32 * (int(options["consumer_warps"]) + 1), 1, 1)
    launch, _ = launch_of(plan.DeltaSpec(1, 8, 2, 64, "float16", True), "sm_103a")
    assert [param.size for param in launch.params] == [size for _, size in kernel.parameters]
