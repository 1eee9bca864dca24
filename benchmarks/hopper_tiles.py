"""Times tiles of the Hopper kernels beside those that the plans choose: ``plan/hopper.py``'s tables come from it.

    python benchmarks/hopper_tiles.py compile FOLDER     # where the kernel DSL is; no GPU
    python benchmarks/hopper_tiles.py time FOLDER [--json FILE]   # on a Hopper GPU; no DSL

Each head dim has one causal and one full self attention of 16,384 tokens in bfloat16. A tile's output is compared with
that of the first tile of its head dim and pass before it is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell import cubins, custom_call, export
from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.kernels.registry import KernelVariant
from jax_fa_blackwell.plan import hopper, hopper_backward, hopper_forward
from jax_fa_blackwell.plan.hopper import BackwardTile, ForwardTile
from jax_fa_blackwell.plan.launch import LaunchPlan
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import get_target

Tile = ForwardTile | BackwardTile
LENGTH, BATCH, CALLS, ROUNDS = 8192, 2, 5, 5
HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)
FORWARD_COLUMNS = {2: (64, 80, 96, 112, 128, 144, 160, 176, 192), 3: (64, 80, 96, 112, 128, 144)}
BACKWARD_COLUMNS = {2: (48, 64, 80, 96, 112, 128), 3: (48, 64, 80, 96)}


def tiles(head_dim: int) -> Iterator[Tile]:
    """The legal tiles that may be worth it: of a class's many numbers of columns those that use the registers."""

    def legal(make: Callable[[], Tile]) -> Iterator[Tile]:
        try:
            tile = make()
        except ValueError:
            return
        if tile.registers >= 0.75 * tile.consumer_registers:
            yield tile

    for warpgroups, choices in FORWARD_COLUMNS.items():
        for columns in choices:
            for takes_turns in (True, False):
                yield from legal(
                    lambda c=columns, w=warpgroups, t=takes_turns: ForwardTile(head_dim, head_dim, c, w, t)
                )
    for transposed, has_c1, has_c2 in (
        (False, False, True),
        (True, True, True),
        (True, False, True),
        (True, True, False),
    ):
        if has_c1 != has_c2 and transposed and head_dim <= 128:
            continue
        for warpgroups, choices in BACKWARD_COLUMNS.items():
            for columns in choices:
                flags = transposed, has_c1, has_c2, warpgroups
                yield from legal(lambda c=columns, f=flags: BackwardTile(head_dim, head_dim, c, *f))


def variant_of(tile: Tile) -> KernelVariant:
    """The tile's kernel for bfloat16, under a name of its own."""
    options = tuple(sorted({**dataclasses.asdict(tile), "dtype": "bfloat16"}.items()))
    if isinstance(tile, ForwardTile):
        name, kernel = registry.hopper_forward_name("bfloat16", tile), "forward_sm90"
        name += "_turns" if tile.takes_turns else "_free"
    else:
        name, kernel = registry.hopper_backward_name("bfloat16", tile), "backward_sm90"
    return KernelVariant(f"{name}_{tile.columns}c_{tile.warpgroups}w", kernel, options, (hopper.ARCH,))


def compile_all(folder: pathlib.Path, head_dims: list[int]) -> None:
    """Compiles every tile into a store; those that spill are named and left out."""
    store = cubins.Store(folder)

    def make(tile: Tile) -> str:
        variant = variant_of(tile)
        if export.up_to_date(store, variant, hopper.ARCH):
            return f"{variant.name} is up to date"
        try:
            store.add(export.compile_variant(variant, hopper.ARCH))
        except export.CompileError as error:
            return str(error).splitlines()[-1]
        return f"{variant.name} compiled"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for line in pool.map(make, (tile for head_dim in head_dims for tile in tiles(head_dim))):
            print(line, flush=True)


def launch_plan(spec: AttentionSpec, tile: Tile, found: tuple[str, str, str]) -> LaunchPlan:
    """The forward, or one pass of the backward, by a tile."""
    target = get_target(hopper.ARCH)
    if isinstance(tile, ForwardTile):
        return hopper_forward.launch_forward(hopper_forward.ForwardPlan(spec, target, tile), *found)
    return hopper_backward.launch_backward((hopper_backward.Pass(spec, target, tile),), lambda _: found)


def seconds(call: Callable[[], Any]) -> float:
    """Median of the mean time of calls queued back to back."""
    jax.block_until_ready(call())
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        last = [call() for _ in range(CALLS)]
        jax.block_until_ready(last)
        rounds.append((time.perf_counter() - began) / CALLS)
    return statistics.median(rounds)


def time_all(folder: pathlib.Path, head_dims: list[int]) -> Iterator[dict[str, Any]]:
    """A row for each tile: microseconds and TFLOP/s of the products that it computes."""
    store = cubins.Store(folder)
    custom_call.add_cubin_directory(folder)
    for head_dim in head_dims:
        heads = 2048 // head_dim
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (BATCH, LENGTH, heads, head_dim)
        query, key, value, grad = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
        for causal in (False, True):
            form = ("affine", -LENGTH, 1) if causal else ("none", 0, 0)
            spec = AttentionSpec(
                BATCH, LENGTH, LENGTH, heads, heads, head_dim, head_dim, "bfloat16", head_dim**-0.5, *form
            )
            first: dict[str, list[np.ndarray]] = {}
            lse = delta = None
            for tile in tiles(head_dim):
                variant = variant_of(tile)
                try:
                    cubin = store.get(variant, hopper.ARCH)
                except LookupError:
                    continue
                plan = launch_plan(spec, tile, (variant.name, cubin.sha256, cubin.symbol))
                if isinstance(tile, ForwardTile):
                    arrays = [query, key, value]
                    results = [jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct(shape[:3], jnp.float32)]
                    kind, written, products = "forward", (0, 1), 2
                else:
                    arrays = [query, key, value, grad, lse, delta]
                    results = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
                    kind = ("dk" if tile.has_c2 else "") + ("dv" if tile.has_c1 else "") if tile.transposed else "dq"
                    written = {"dq": (0,), "dkdv": (1, 2), "dk": (1,), "dv": (2,)}[kind]
                    products = {"dq": 3, "dkdv": 4, "dk": 3, "dv": 2}[kind]
                call = jax.jit(lambda *arrays, plan=plan, results=results: custom_call.call(plan, arrays, results))
                outputs = call(*arrays)
                got = [np.asarray(outputs[i], np.float32)[:1, -300:, :2] for i in written]
                if kind == "forward" and lse is None:
                    lse = outputs[1].swapaxes(1, 2)
                    delta = (outputs[0].astype(jnp.float32) * grad.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
                wanted = first.setdefault(kind, got)
                error = max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
                took = seconds(lambda call=call, arrays=arrays: call(*arrays))
                flop = 2 * products * BATCH * heads * LENGTH**2 * head_dim * (0.5 if causal else 1)
                yield {
                    "head_dim": head_dim,
                    "causal": causal,
                    "pass": kind,
                    "tile": variant.name,
                    "microseconds": round(took * 1e6, 1),
                    "tflops": round(flop / took / 1e12, 1),
                    "difference": error,
                }


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Times tiles of the Hopper kernels.")
    parser.add_argument("what", choices=["compile", "time"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows to this file")
    args = parser.parse_args()
    if args.what == "compile":
        compile_all(args.folder, args.head_dims)
        return 0
    rows = []
    for row in time_all(args.folder, args.head_dims):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
