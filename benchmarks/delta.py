"""Bandwidth of the delta kernel beside a device-to-device copy and XLA's jax.numpy expression, in one run.

    python benchmarks/delta.py [--gigabytes 1] [--head-dims 64 72 128 256] [--sweep] [--json FILE]

Bytes are those that must move: O, dO and dLSE read, delta written; for the copy, read and written. Every figure is the
median over rounds of the mean time of calls queued back to back. ``--sweep`` times other tiles and rings as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory for the copy's own buffers

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell import cubins, custom_call, lowering
from jax_fa_blackwell.plan import delta as plan
from jax_fa_blackwell.plan.delta import DeltaConfig, DeltaSpec

BATCH, HEADS = 8, 16
CALLS, ROUNDS = 20, 9
KIB = 1024
SWEEP = tuple(
    DeltaConfig(tile * KIB, ring * KIB, blocks)
    for tile, ring, blocks in ((8, 48, 4), (8, 64, 3), (8, 96, 2), (16, 64, 3), (16, 96, 2), (16, 192, 1), (32, 192, 1))
)


def median_seconds(queue, wait) -> float:
    """Median time of one call; ``queue()`` starts one, ``wait()`` returns when all that were started are done."""
    for _ in range(3):
        queue()
    wait()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            queue()
        wait()
        rounds.append((time.perf_counter() - began) / CALLS)
    return statistics.median(rounds)


def seconds_of(function, *arguments) -> float:
    """Median time of a compiled JAX function."""
    last = []

    def queue():
        last[:] = [function(*arguments)]

    return median_seconds(queue, lambda: jax.block_until_ready(last))


def copy_bandwidth(size: int) -> float:
    """Bytes read and written a second by the driver's device-to-device copy of ``size`` bytes."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments):
        status = getattr(cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: CUDA error {status}")

    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    buffers = [ctypes.c_uint64(), ctypes.c_uint64()]
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    for buffer in buffers:
        call("cuMemAlloc_v2", ctypes.byref(buffer), ctypes.c_size_t(size))
    source, target = buffers
    seconds = median_seconds(
        lambda: call("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(size), stream),
        lambda: call("cuStreamSynchronize", stream),
    )
    for buffer in buffers:
        call("cuMemFree_v2", buffer)
    return 2 * size / seconds


def expression(out, grad_out, grad_lse):
    """What a user would write."""
    sums = jnp.sum(grad_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - grad_lse
    return sums.swapaxes(1, 2)


def measure(head_dim: int, gigabytes: float, arch: str, configs) -> list[dict]:
    """Times the expression and the kernel in each configuration; raises if a kernel's result is wrong."""
    tokens = round(gigabytes * 1e9 / (2 * 2 * BATCH * HEADS * head_dim))
    shape = (BATCH, tokens, HEADS, head_dim)
    keys = jax.random.split(jax.random.key(head_dim), 3)
    out, grad_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    grad_lse = jax.random.normal(keys[2], shape[:3], jnp.float32)
    arguments = (out, grad_out, grad_lse)
    moved = sum(array.nbytes for array in arguments) + grad_lse.nbytes
    plain = jax.jit(expression)
    expected = np.asarray(plain(*arguments))
    rows = [{"head_dim": head_dim, "what": "jax.numpy", "bytes_a_second": moved / seconds_of(plain, *arguments)}]
    spec = DeltaSpec(*shape, "bfloat16", True)
    cubin = cubins.find(spec.variant, arch)
    custom_call.add_cubin_directory(cubin.folder)
    result = jax.ShapeDtypeStruct((BATCH, HEADS, tokens), jnp.float32)
    for config in configs:
        try:
            made = plan.make_plan(spec, [cubin], config)
        except ValueError as error:
            print(f"H={head_dim} {config}: {error}", file=sys.stderr)
            continue
        kernel = jax.jit(lambda *arrays, made=made: custom_call.call(made, arrays, [result])[0])
        np.testing.assert_allclose(np.asarray(kernel(*arguments)), expected, rtol=1e-4, atol=1e-3)
        name = f"kernel {config.tile_bytes // KIB}K/{config.ring_bytes // KIB}K x{config.blocks_per_sm}"
        rows.append({"head_dim": head_dim, "what": name, "bytes_a_second": moved / seconds_of(kernel, *arguments)})
    return rows


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Bandwidth of the delta kernel.")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="bytes of O and dO together")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 72, 128, 256])
    parser.add_argument("--sweep", action="store_true", help="time other configurations as well")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        print("delta: no CUDA device here, nothing measured")
        return 0
    arches = lowering.arches()
    if not arches:
        print(f"delta: no kernel for {device.device_kind}, nothing measured")
        return 0
    configs = (plan.DEFAULT_CONFIG, *(SWEEP if args.sweep else ()))
    size = int(args.gigabytes * 1e9 / 2) // 256 * 256  # so that reading and writing move as much as the kernel
    copies = [copy_bandwidth(size)]
    rows = [row for head_dim in args.head_dims for row in measure(head_dim, args.gigabytes, arches[0], configs)]
    copies.append(copy_bandwidth(size))
    copy = statistics.mean(copies)
    print(f"{device.device_kind}, jax {jax.__version__}, {args.gigabytes} GB of O and dO, B={BATCH} N={HEADS}, bf16")
    print(f"device-to-device copy: {copies[0] / 1e9:.0f} GB/s before, {copies[1] / 1e9:.0f} GB/s after")
    print(f"{'H':>4}  {'what':<22} {'GB/s':>7}  of the copy")
    for row in rows:
        bandwidth = row["bytes_a_second"]
        print(f"{row['head_dim']:>4}  {row['what']:<22} {bandwidth / 1e9:>7.0f}  {bandwidth / copy:>10.1%}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device.device_kind, "copy_bytes_a_second": copies, "rows": rows}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
