"""Programs with our kernels that were exported, or that are spread over GPUs, on whatever GPUs there are."""

import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attention_cases
from attention_cases import Case, Shape
from gpu_machine import why_not
from jax_fa_blackwell import aot, custom_call, flash_attention, lowering

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "a GPU is there")]

CASE = Case("program", Shape(4, 300, 300, 8, 4, 128, 128))


def arrays() -> list[jax.Array]:
    """Query, key and value."""
    inputs = attention_cases.make_inputs(CASE, 0, ml_dtypes.bfloat16)
    return [jnp.asarray(inputs[name]) for name in ("query", "key", "value")]


def loss(query, key, value):
    # deterministic: other ways to run the same call must give the same bits.
    out = flash_attention(query, key, value, is_causal=True, implementation="cuda", deterministic=True)
    return (out.astype(jnp.float32) * jnp.cos(jnp.arange(out.shape[-1], dtype=jnp.float32))).sum()


gradient = jax.grad(loss, (0, 1, 2))


def same(got, wanted):
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))


LOADING = """
    import pathlib, sys
    sys.modules["cutlass"] = None  # importing the kernel DSL raises ImportError
    import jax, numpy as np
    from jax_fa_blackwell import aot, cubins, custom_call
    folder = pathlib.Path(sys.argv[1])
    cubins.PACKAGED = folder / "none"  # so that the kernels are those of the artefact
    exported = aot.deserialize((folder / "artefact").read_bytes())
    arrays = [np.load(folder / f"{i}.npy").view(aval.dtype) for i, aval in enumerate(exported.in_avals)]
    results = jax.jit(exported.call)(*arrays)
    assert all(result.devices() == {jax.local_devices(backend="cuda")[0]} for result in results)
    assert custom_call.execution_count() == 3, custom_call.execution_count()  # forward, delta, backward
    np.savez(folder / "results.npz", *(np.asarray(result, np.float32) for result in results))
"""


def test_exported_program_runs_in_another_process(tmp_path):
    operands = arrays()
    artefact = aot.serialize(jax.jit(gradient), *operands, arches=lowering.arches(), embed_cubins=True)
    (tmp_path / "artefact").write_bytes(artefact)
    for i, array in enumerate(operands):
        np.save(tmp_path / f"{i}.npy", np.asarray(array).view(np.uint16))
    cache = tmp_path / "cache"
    environment = os.environ | {"JAX_FA_BLACKWELL_CACHE": str(cache), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert list(cache.glob("*.cubin"))
    results = np.load(tmp_path / "results.npz")
    same([results[name] for name in sorted(results.files)], jax.jit(gradient)(*operands))


def mesh() -> jax.sharding.Mesh:
    """All GPUs along the batch; two axes of which one may have one device."""
    count = len(jax.local_devices(backend="cuda"))
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((min(count, CASE.shape.B), 1), ("data", "model"), axis_types=kinds)


def test_shard_map():
    spec = P("data", None, "model")
    spread = jax.shard_map(gradient, mesh=mesh(), in_specs=(spec,) * 3, out_specs=spec)
    same(jax.jit(spread)(*arrays()), jax.jit(gradient)(*arrays()))


def test_sharded_arrays_are_not_gathered():
    sharding = NamedSharding(mesh(), P("data", None, "model"))
    placed = [jax.device_put(array, sharding) for array in arrays()]
    compiled = jax.jit(gradient).lower(*placed).compile()
    text = compiled.as_text() or ""
    assert text.count(f'custom_call_target="{custom_call.TARGET}"') == 3
    assert "all-gather" not in text
    results = compiled(*placed)
    assert all(result.sharding.is_equivalent_to(sharding, result.ndim) for result in results)
    same(results, jax.jit(gradient)(*arrays()))


@pytest.mark.parametrize("donate", [False, True])
def test_training_loop_in_one_program(donate):
    """A scan of steps of a rematerialised, batched layer has the bits of the steps one by one."""

    def step(operands, _):
        gradients = jax.grad(jax.checkpoint(lambda *each: jax.vmap(loss)(*each).sum()), (0, 1, 2))(*operands)
        return tuple((x - 0.5 * y).astype(x.dtype) for x, y in zip(operands, gradients, strict=True)), None

    batched = tuple(jnp.stack([array, -array]) for array in arrays())
    wanted = batched
    for _ in range(3):
        wanted, _ = jax.jit(step)(wanted, None)
    copies = tuple(array + 0 for array in batched)
    loop = functools.partial(jax.lax.scan, step, xs=None, length=3)
    results, _ = jax.jit(loop, donate_argnums=(0,) if donate else ())(copies)
    same(results, wanted)
    assert all(array.is_deleted() == donate for array in copies)
