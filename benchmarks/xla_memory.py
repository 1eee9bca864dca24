"""Temporary memory and CPU time of the XLA path beside jax.nn.dot_product_attention, as Markdown tables.

    python benchmarks/xla_memory.py [--skip-time] [--runs N]

Memory is what the compiler reserves beyond arguments and results (``compiled.memory_analysis()``); nothing is run. The
times of all candidates are taken in turns in one process, so that other load meets them alike.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell import flash_attention

HEADS, HEAD_DIM = 4, 64
CANDIDATES: dict[str, Callable[..., Any]] = {
    "flash_attention": functools.partial(flash_attention, implementation="xla"),
    "jax.nn": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
}


def compile_pass(attention: Callable[..., Any], length: int, dtype: Any, is_causal: bool, backward: bool):
    """The compiled forward pass, or forward and backward pass, of one sequence of HEADS heads of HEAD_DIM."""

    def forward(query, key, value):
        return attention(query, key, value, is_causal=is_causal)

    def gradients(query, key, value, cotangent):
        return jax.vjp(forward, query, key, value)[1](cotangent)

    array = jax.ShapeDtypeStruct((1, length, HEADS, HEAD_DIM), dtype)
    return jax.jit(gradients if backward else forward).lower(*[array] * (4 if backward else 3)).compile()


def memory_table(lengths: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[str]:
    """Rows of the table of temporary memory, causal, in MiB."""
    rows = [
        f"Temporary memory in MiB, causal, {jnp.dtype(dtype).name}, 1 sequence, {HEADS} heads of {HEAD_DIM}:",
        "",
        "| pass | implementation | " + " | ".join(f"T = {length // 1024}k" for length in lengths) + " |",
        "|---|---|" + "--:|" * len(lengths),
    ]
    for backward in (False, True):
        for name, attention in CANDIDATES.items():
            cells = []
            for length in lengths:
                analysis: Any = compile_pass(attention, length, dtype, True, backward).memory_analysis()
                cells.append(f"{analysis.temp_size_in_bytes / 2**20:,.1f}")
            rows.append(f"| {'forward and backward' if backward else 'forward'} | {name} | {' | '.join(cells)} |")
    return rows


def time_table(lengths: tuple[int, ...], runs: int) -> list[str]:
    """Rows of the table of times: the median of each candidate's runs, taken in turns."""
    names = list(CANDIDATES)
    rows = [
        f"Milliseconds on this machine's CPU, median of {runs} runs taken in turns, {HEADS} heads of {HEAD_DIM}:",
        "",
        "| T | dtype | mask | pass | " + " | ".join(names) + " | ratio |",
        "|--:|---|---|---|" + "--:|" * (len(names) + 1),
    ]
    for length in lengths:
        for dtype in (jnp.float32, jnp.bfloat16):
            rng = np.random.default_rng(0)
            shape = (1, length, HEADS, HEAD_DIM)
            arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(4)]
            for is_causal in (False, True):
                for backward in (False, True):
                    given = arrays if backward else arrays[:3]
                    compiled = [compile_pass(CANDIDATES[name], length, dtype, is_causal, backward) for name in names]
                    times = _times_in_turns(compiled, given, runs)
                    label = "forward and backward" if backward else "forward"
                    cells = " | ".join(f"{1e3 * t:,.0f}" for t in times)
                    mask = "causal" if is_causal else "none"
                    row = f"| {length // 1024}k | {jnp.dtype(dtype).name} | {mask} | {label} | {cells} |"
                    rows.append(f"{row} {times[0] / times[1]:.2f} |")
                    print(rows[-1], flush=True)
    return rows


def _times_in_turns(functions: list[Any], arrays: list[jax.Array], runs: int) -> list[float]:
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        jax.block_until_ready(function(*arrays))
    for _ in range(runs):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*arrays))
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-time", action="store_true", help="only the memory table")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each candidate")
    options = parser.parse_args()
    print("\n".join(memory_table((4 << 10, 16 << 10, 64 << 10))), flush=True)
    if not options.skip_time:
        print()
        rows = time_table((2 << 10, 8 << 10), options.runs)
        print("\n" + "\n".join(rows))


if __name__ == "__main__":
    main()
