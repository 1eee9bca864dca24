"""The executor on a real GPU: what a plan can say, every way to fail, command buffers, threads, several devices.

The kernels are small ones in PTX, so that this file needs neither the kernel DSL nor a cubin of ours.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pathlib
import struct
import threading

import jax
import jax.numpy as jnp
import numpy as np
import ptx_kernels
import pytest

from jax_fa_blackwell import custom_call
from jax_fa_blackwell.plan import launch
from jax_fa_blackwell.plan.launch import Bytes, Fill, Float32, Int32, Launch, LaunchPlan, Pointer, Program, TensorMap


def gpus() -> list:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="no CUDA device")]

N = 1000
X = np.arange(N, dtype=np.float32) - 300


class Kernels:
    """The folder that the executor searches, and the plans that run what lies in it."""

    def __init__(self, folder: pathlib.Path):
        device = gpus()[0]
        jax.block_until_ready(jnp.zeros(1, device=device))  # makes the device's context
        self.folder = folder
        self.capability = int(str(device.compute_capability).replace(".", ""))
        self.arch = f"sm_{self.capability}a"
        self.image = ptx_kernels.assemble(ptx_kernels.source(self.arch), self.capability)
        self.sha256 = self.add(self.image)
        custom_call.add_cubin_directory(folder)
        self._serial = itertools.count(1)

    def add(self, image: bytes, sha256: str | None = None) -> str:
        sha256 = sha256 or hashlib.sha256(image).hexdigest()
        (self.folder / f"{sha256}.cubin").write_bytes(image)
        return sha256

    def fresh_image(self) -> bytes:
        """The same cubin with other bytes behind it, so that it counts as one that was never loaded."""
        return self.image + struct.pack("<q", next(self._serial))

    def launch(self, symbol: str, *params: launch.Param, **changes) -> Launch:
        fields = {"kernel": f"{symbol} kernel", "sha256": self.sha256, "symbol": symbol, "grid": (1, 1, 1)}
        return Launch(**{**fields, "block": (128, 1, 1), "params": params, **changes})

    def plan(self, *steps: launch.Step, argument=4 * N, results=(4 * N,), arch: str | None = None) -> LaunchPlan:
        return LaunchPlan("test plan", (argument,), results, (Program(arch or self.arch, steps),))

    def scale(self, factor: float = 2.0, **changes) -> LaunchPlan:
        params = (Pointer(0), Pointer(1), Int32(N), Float32(factor))
        return self.plan(self.launch("scale", *params, **{"grid": (math.ceil(N / 128), 1, 1), **changes}))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("cubins"))


def run(plan: LaunchPlan, x, shape=(N,), dtype="float32"):
    return custom_call.call(plan, [x], [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))])[0]


def once(plan: LaunchPlan, x=X, shape=(N,), dtype="float32") -> np.ndarray:
    """Compiled and run anew, on device 0."""
    return np.asarray(jax.jit(lambda x: run(plan, x, shape, dtype))(jax.device_put(x, gpus()[0])))


def assert_good_call(kernels: Kernels) -> None:
    np.testing.assert_array_equal(once(kernels.scale(3.0)), 3 * X)


# What a plan can say.


def test_pointers_and_scalars(kernels):
    np.testing.assert_array_equal(once(kernels.scale(-1.5)), np.float32(-1.5) * X)


def test_offsets(kernels):
    step = kernels.launch("scale", Pointer(0, 400), Pointer(1, 200), Int32(100), Float32(1.0))
    got = once(kernels.plan(Fill(1, N, 0), step))
    want = np.zeros(N, np.float32)
    want[50:150] = X[100:200]
    np.testing.assert_array_equal(got, want)


def test_fill(kernels):
    word = struct.unpack("<I", struct.pack("<f", 7.0))[0]
    got = once(kernels.plan(Fill(1, N, 0), Fill(1, 10, word, 40)))
    want = np.zeros(N, np.float32)
    want[10:20] = 7
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fill", launch.FILLS)
@pytest.mark.parametrize("place", [(0, 0), (32, 11), (88, 45), (-4, -3)])
def test_tensor_map(kernels, fill, place):
    x = np.random.default_rng(0).standard_normal((50, 100), np.float32)
    tile = TensorMap(0, "float32", (100, 50), (400,), (32, 8), fill=fill)
    step = kernels.launch("tile", tile, Pointer(1), Bytes(struct.pack("<ii", *place)), block=(256, 1, 1))
    got = once(kernels.plan(step, argument=x.nbytes, results=(1024,)), x, (8, 32))
    padded = np.pad(x, 40, constant_values=np.nan if fill == "nan" else 0)
    row, column = place[1] + 40, place[0] + 40
    np.testing.assert_array_equal(got, padded[row : row + 8, column : column + 32])


@pytest.mark.parametrize("cluster", [1, 2, 8, 16])
def test_clusters(kernels, cluster):
    step = kernels.launch("ranks", Pointer(1), grid=(32, 1, 1), cluster=(cluster, 1, 1))
    got = once(kernels.plan(Fill(1, 1), step, results=(4,)), shape=(), dtype="int32")
    assert got == 32 // cluster * sum(range(cluster))


def test_large_shared_memory(kernels):
    np.testing.assert_array_equal(once(kernels.scale(shared_bytes=200 * 1024)), 2 * X)
    np.testing.assert_array_equal(once(kernels.scale(shared_bytes=60 * 1024)), 2 * X)


def chain_of_launches(kernels: Kernels, programmatic: bool) -> LaunchPlan:
    """Result 0 is 2**6 times the argument, by way of result 1 and back."""
    steps, source = [], 0
    for i in range(6):
        target = 2 - i % 2
        params = (Pointer(source), Pointer(target), Int32(N), Float32(2.0))
        steps.append(kernels.launch("scale", *params, grid=(math.ceil(N / 128), 1, 1), programmatic=programmatic))
        source = target
    return kernels.plan(*steps, results=(4 * N, 4 * N))


def run_chain(plan: LaunchPlan, x):
    result = jax.ShapeDtypeStruct((N,), jnp.dtype("float32"))
    return custom_call.call(plan, [x], [result, result])[0]


@pytest.mark.parametrize("programmatic", [False, True])
def test_launches_run_in_order(kernels, programmatic):
    plan = chain_of_launches(kernels, programmatic)
    x = jax.device_put(X, gpus()[0])
    for _ in range(20):
        np.testing.assert_array_equal(jax.jit(lambda x: run_chain(plan, x))(x), 64 * X)


def test_scan(kernels):
    plan = kernels.scale(2.0)
    got = jax.jit(lambda x: jax.lax.scan(lambda c, _: (run(plan, c), None), x, None, length=10)[0])(X)
    np.testing.assert_array_equal(got, 1024 * X)


# Ways to fail. Each names the kernel, the architecture and what the driver says, and the next good call works.


def expect_error(kernels: Kernels, plan: LaunchPlan, *texts: str, x=X) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        once(plan, x)
    message = str(caught.value)
    for text in ("test plan", *texts):
        assert text in message
    assert_good_call(kernels)


def test_unknown_cubin(kernels):
    where = f"kernel 'scale kernel' ({kernels.arch})"
    expect_error(kernels, kernels.scale(sha256="0" * 64), where, f"no cubin {'0' * 64}.cubin in", str(kernels.folder))


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "empty"])
def test_damaged_cubin(kernels, damage):
    image = kernels.fresh_image()
    half = len(image) // 2
    corrupt = image[:half] + bytes([image[half] ^ 1]) + image[half + 1 :]
    damaged = {"truncated": image[:half], "corrupt": corrupt, "empty": b""}[damage]
    sha256 = kernels.add(damaged, hashlib.sha256(image).hexdigest())
    expect_error(kernels, kernels.scale(sha256=sha256), "scale kernel", kernels.arch, "is damaged: its")
    kernels.add(image)
    np.testing.assert_array_equal(once(kernels.scale(sha256=sha256)), 2 * X)


def test_not_a_cubin(kernels):
    sha256 = kernels.add(b"not a cubin, but its name is right")
    expect_error(kernels, kernels.scale(sha256=sha256), "scale kernel", "is not a whole cubin")


def test_cubin_of_another_architecture(kernels):
    ptx = ".version 8.0\n.target sm_80\n.address_size 64\n" + ptx_kernels.SMALL
    sha256 = kernels.add(ptx_kernels.assemble(ptx, 80))
    failed = "cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU"
    expect_error(kernels, kernels.scale(sha256=sha256), "scale kernel", kernels.arch, sha256, failed)


def test_no_program_for_the_device(kernels):
    plan = kernels.plan(arch="sm_35a")
    expect_error(kernels, plan, f"no program for {kernels.arch} (", "the plan has sm_35a")


def test_missing_symbol(kernels):
    plan = kernels.plan(kernels.launch("absent"))
    expect_error(kernels, plan, "absent kernel", kernels.arch, "entry point 'absent'", "CUDA_ERROR_NOT_FOUND")


def test_too_much_shared_memory(kernels):
    tile = TensorMap(0, "float32", (N,), (), (32,))
    plan = kernels.plan(kernels.launch("tile", tile, Pointer(1), Bytes(bytes(8)), shared_bytes=227 * 1024))
    wanted, allowed = "a block needs 232448 bytes of dynamic and", "the device allows 232448"
    expect_error(kernels, plan, "tile kernel", kernels.arch, wanted, allowed, "CUDA_ERROR_INVALID_VALUE")


def test_launch_failure(kernels):
    plan = kernels.plan(kernels.launch("small", Pointer(0), block=(128, 1, 1)))
    expect_error(kernels, plan, "small kernel", kernels.arch, "cuLaunchKernelEx failed: CUDA_ERROR_")


def test_parameter_mismatch(kernels):
    plan = kernels.plan(kernels.launch("scale", Pointer(0), Pointer(1), Int32(N)))
    expect_error(
        kernels, plan, "scale kernel", kernels.arch, "the plan gives 3 parameters; entry point 'scale' takes 4"
    )
    plan = kernels.plan(kernels.launch("scale", Pointer(0), Pointer(1), Int32(N), Bytes(bytes(8))))
    expect_error(kernels, plan, "the plan gives parameter 3 8 bytes; entry point 'scale' takes 4")


def emit(data: bytes, *arguments):
    """The custom call without the checks of ``custom_call.call``."""
    custom_call.register()
    result = jax.ShapeDtypeStruct((N,), jnp.dtype("float32"))
    return jax.ffi.ffi_call(custom_call.TARGET, result)(*arguments, plan=data)


def test_buffers_that_are_not_the_plans(kernels):
    data = kernels.scale().encode()
    x = jax.device_put(X, gpus()[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"test plan: argument 0 has 3996 bytes; .* made for 4000"):
        jax.block_until_ready(jax.jit(lambda x: emit(data, x[1:]))(x))
    assert_good_call(kernels)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="test plan: the call has 2 arguments; the plan was made for 1"
    ):
        jax.block_until_ready(jax.jit(lambda x: emit(data, x, x))(x))
    assert_good_call(kernels)


def test_plan_of_another_version(kernels):
    data = kernels.scale().encode()
    other = data[:4] + struct.pack("<I", 77) + data[8:]
    with pytest.raises(jax.errors.JaxRuntimeError, match="it has version 77; this library reads version 1"):
        jax.jit(lambda x: emit(other, x))(X)
    assert_good_call(kernels)
    with pytest.raises(jax.errors.JaxRuntimeError, match="launch plan: ends early"):
        jax.jit(lambda x: emit(data[:-2], x))(X)
    assert_good_call(kernels)


# Command buffers: XLA captures a run of calls into a CUDA graph and replays it.


def captured(function):
    """``function`` compiled so that even a few calls become a command buffer."""
    return jax.jit(function, compiler_options={"xla_gpu_graph_min_graph_size": 1})


def six_calls(kernels: Kernels):
    plan = kernels.scale(2.0)

    def function(x):
        for _ in range(6):
            x = run(plan, x)
        return x

    return function


def test_command_buffer_replays(kernels):
    function = captured(six_calls(kernels))
    x = jax.device_put(X, gpus()[0])
    before = custom_call.execution_count()
    rounds = 30
    for _ in range(rounds):
        result = function(x)
        np.testing.assert_array_equal(result, 64 * X)
        del result
    assert custom_call.execution_count() - before < 6 * rounds, "no graph was replayed"


def test_command_buffer_with_moving_buffers(kernels):
    function = captured(six_calls(kernels))
    kept = []
    for round_ in range(12):
        x = jax.device_put(X + round_, gpus()[0])
        kept.append((x, function(x)))  # alive, so that each call gets other addresses
    for round_, (_, result) in enumerate(kept):
        np.testing.assert_array_equal(result, 64 * (X + round_))


@pytest.mark.parametrize("programmatic", [False, True])
def test_command_buffer_with_fills_and_chains(kernels, programmatic):
    plan = chain_of_launches(kernels, programmatic)
    count = kernels.plan(
        Fill(1, 1), kernels.launch("ranks", Pointer(1), grid=(32, 1, 1), cluster=(4, 1, 1)), results=(4,)
    )
    function = captured(lambda x: (run_chain(plan, run_chain(plan, x)), run(count, x, (), "int32")))
    x = jax.device_put(X, gpus()[0])
    for _ in range(20):
        scaled, ranks = function(x)
        np.testing.assert_array_equal(scaled, 4096 * X)
        assert ranks == 48


def test_failure_while_capturing(kernels):
    good = six_calls(kernels)
    bad = kernels.plan(kernels.launch("small", Pointer(0), block=(128, 1, 1)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="test plan: kernel 'small kernel'"):
        jax.block_until_ready(captured(lambda x: run(bad, good(x)))(X))
    np.testing.assert_array_equal(captured(good)(X), 64 * X)


# Threads and devices.


def in_threads(bodies) -> None:
    errors = []

    def guarded(body):
        try:
            body()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_threads_share_a_cubin(kernels):
    sha256 = kernels.add(kernels.fresh_image())
    devices = gpus()

    def body(index: int):
        plan = kernels.scale(float(index), sha256=sha256, shared_bytes=1024 * (50 + index))
        function = jax.jit(lambda x: run(plan, x))
        x = jax.device_put(X, devices[index % len(devices)])
        for _ in range(50):
            np.testing.assert_array_equal(function(x), np.float32(index) * X)

    in_threads([lambda index=index: body(index) for index in range(8)])


def test_good_and_bad_calls_at_once(kernels):
    def good():
        for _ in range(10):
            assert_good_call(kernels)

    def bad():
        for _ in range(10):
            with pytest.raises(jax.errors.JaxRuntimeError, match="entry point 'absent'"):
                once(kernels.plan(kernels.launch("absent")))

    in_threads([good, bad, good, bad])


@pytest.mark.skipif(len(gpus()) < 2, reason="one CUDA device")
def test_one_program_on_two_devices(kernels):
    plan = kernels.scale(5.0, sha256=kernels.add(kernels.fresh_image()))
    function = jax.jit(lambda x: run(plan, x))
    for device in gpus():
        result = function(jax.device_put(X, device))
        assert result.devices() == {device}
        np.testing.assert_array_equal(result, 5 * X)
    mesh = jax.make_mesh((len(gpus()),), ("d",), devices=gpus())
    spec = jax.sharding.PartitionSpec("d")
    many = np.concatenate([X + i for i in range(len(gpus()))])
    mapped = jax.shard_map(lambda x: run(plan, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    placed = jax.device_put(many, jax.sharding.NamedSharding(mesh, spec))
    np.testing.assert_array_equal(jax.jit(mapped)(placed), 5 * many)
