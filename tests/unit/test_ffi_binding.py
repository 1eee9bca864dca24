"""custom_call: the library in the package, what is emitted, and XLA's own runtime calling the handlers on a CPU."""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa_blackwell import custom_call
from jax_fa_blackwell.plan import launch

F32 = jnp.dtype("float32")
ARGUMENT = jax.ShapeDtypeStruct((16,), F32)
RESULTS = [jax.ShapeDtypeStruct((2, 4), F32), jax.ShapeDtypeStruct((3,), jnp.dtype("int32"))]


def make_plan(name: str = "demo", argument_bytes: int = 64) -> launch.LaunchPlan:
    step = launch.Launch("k", "ab" * 32, "s", (1, 1, 1), (32, 1, 1), (launch.Pointer(0), launch.Pointer(1)))
    program = launch.Program("sm_90a", (launch.Fill(2, 3), step))
    return launch.LaunchPlan(name, (argument_bytes,), (32, 12), (program,))


def run(x, plan: launch.LaunchPlan | None = None):
    return custom_call.call(plan or make_plan(), [x], RESULTS)


def lower(function, *avals) -> str:
    return jax.jit(function).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_for_cuda_without_a_gpu():
    text = lower(run, ARGUMENT)
    assert text.count(f"stablehlo.custom_call @{custom_call.TARGET}") == 1
    assert "(tensor<16xf32>) -> (tensor<2x4xf32>, tensor<3xi32>)" in text
    assert "callback" not in text
    assert "has_side_effect = true" not in text
    # The whole plan stands in the program, so that it can be exported: MLIR writes other than printable bytes as \XX.
    (written,) = re.findall(r'plan = "((?:[^"\\]|\\.)*)"', text)
    data = re.sub(rb"\\([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), written.encode())
    assert launch.LaunchPlan.decode(data) == make_plan()


def test_unused_calls_are_dropped():
    text = jax.jit(lambda x: (run(x), x + 1)[1]).trace(ARGUMENT).lower(lowering_platforms=("cuda",)).as_text()
    assert custom_call.TARGET not in text


def test_lowers_in_scan_remat_and_shard_map():
    scanned = lower(lambda x: jax.lax.scan(lambda c, _: (c + run(c)[0].sum(), None), x, None, length=3)[0], ARGUMENT)
    assert custom_call.TARGET in scanned
    assert custom_call.TARGET in lower(jax.checkpoint(run), ARGUMENT)
    mesh = jax.make_mesh((1,), ("x",))
    sharded = jax.ShapeDtypeStruct((16,), F32, sharding=NamedSharding(mesh, P("x")))
    for check_vma in (True, False):
        mapped = jax.shard_map(lambda x: run(x)[0], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
        assert custom_call.TARGET in lower(mapped, sharded)


def test_bare_vmap_is_refused():
    with pytest.raises(NotImplementedError, match=r"vmap over the custom call of plan 'demo'.*custom_vmap rule"):
        jax.vmap(run)(jnp.zeros((2, 16)))


def test_differentiation_is_refused():
    with pytest.raises(ValueError, match=custom_call.TARGET):
        jax.grad(lambda x: run(x)[0].sum())(jnp.zeros(16))


def test_sizes_are_checked():
    with pytest.raises(ValueError, match=r"argument 0 of plan 'demo' must have 64 bytes; got float32\[17\], .* 68"):
        run(jnp.zeros(17))
    with pytest.raises(ValueError, match=r"argument 0 of plan 'demo' must have 64 bytes; got bfloat16\[16\]"):
        run(jnp.zeros(16, jnp.bfloat16))
    with pytest.raises(ValueError, match="plan 'demo' has 1 arguments; got 2"):
        custom_call.call(make_plan(), [jnp.zeros(16)] * 2, RESULTS)
    with pytest.raises(ValueError, match="plan 'demo' has 2 results; got 1"):
        custom_call.call(make_plan(), [jnp.zeros(16)], RESULTS[:1])
    with pytest.raises(ValueError, match=r"result 1 of plan 'demo' must have 12 bytes; got int32\[4\]"):
        custom_call.call(make_plan(), [jnp.zeros(16)], [RESULTS[0], jax.ShapeDtypeStruct((4,), jnp.dtype("int32"))])


def test_symbolic_shapes_are_refused():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(NotImplementedError, match="shapes known at trace time"):
        jax.export.export(jax.jit(run), platforms=["cuda"])(jax.ShapeDtypeStruct((n,), F32))


def test_exports_with_its_check_disabled():
    check = jax.export.DisabledSafetyCheck.custom_call(custom_call.TARGET)
    exported = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[check])(ARGUMENT)
    assert custom_call.TARGET in exported.mlir_module()


def test_library_stands_alone():
    """No Python, no CUDA and no C++ runtime behind it: one binary serves every Python and every jaxlib."""
    path = pathlib.Path(custom_call.library()._name)
    assert path.name == "libjax_fa_blackwell_ffi.so"
    needed = subprocess.run(["ldd", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert not re.search("python|cuda|stdc", needed), needed


def test_plan_version_is_the_librarys():
    assert custom_call.library().jfa_plan_version() == launch.VERSION


def test_missing_library_says_what_to_do(monkeypatch):
    def refuse(path):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(RuntimeError, match=r"libjax_fa_blackwell_ffi.so; reinstall jax_fa_blackwell.*no such file"):
        custom_call.library.__wrapped__()


def test_library_is_loaded_at_first_use():
    code = "import jax_fa_blackwell.custom_call as c; assert c.library.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


# The stages that touch no device run in XLA's CPU runtime as they do in its CUDA runtime.
@pytest.fixture
def on_cpu():
    custom_call.register("cpu")
    custom_call.register("cpu")  # twice is as good as once


def test_runtime_refuses_plan_of_another_version(on_cpu):
    data = make_plan().encode()
    other = data[:4] + b"\x09" + data[5:]
    emit = jax.ffi.ffi_call(custom_call.TARGET, RESULTS)
    x = np.zeros(16, np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it has version 9; this library reads version 1"):
        jax.jit(lambda x: emit(x, plan=other))(x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="launch plan: ends early"):
        jax.jit(lambda x: emit(x, plan=data[:-1]))(x)
    # The next good plan is instantiated; it fails only where it asks for a stream.
    jax.jit(run).lower(x).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="platform stream"):
        jax.jit(run)(x)
