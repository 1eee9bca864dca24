"""Speed of flash_attention beside the attention of other JAX packages, on this machine's GPU, in one process.

    python benchmarks/attention.py [--cells NAME ...] [--peers NAME ...] [--json FILE] [--plot FILE.png]
    python benchmarks/attention.py --load FILE --plot FILE.png

Peers are cuDNN and XLA through jax.nn.dot_product_attention, and tokamax, flash-attn3-jax and dew-flash-attn where they
can be imported. Inputs are random bfloat16 in the layout [batch, tokens, heads, head dim]. Before a peer is timed in a
cell, its outputs and gradients at a small shape of the same head dim are compared with float32; one that is wrong is
not timed. All peers of a cell are timed in turn, in several rounds, and the figure is the median over the rounds; so
ratios come from the same minutes. FLOP are 4 B N T S d forward, halved where causal, and 2.5 times that backward,
whatever a peer computes; packed batches count what their segments see.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa_blackwell import flash_attention

OURS = "ours"
PASSES = ("forward", "backward", "forward and backward")
FACTORS = {"forward": 1.0, "backward": 2.5, "forward and backward": 3.5}
CHECKED_TOKENS = 320
SECONDS_A_ROUND = 0.03


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is timed: a self attention, its tokens packed into equal segments if ``segments`` is above 1."""

    head_dim: int
    tokens: int
    causal: bool
    batch: int
    heads: int
    kv_heads: int
    queries: int = 0  # 0: as many as tokens
    segments: int = 1

    @property
    def name(self) -> str:
        """For the command line and the table."""
        parts = [f"d{self.head_dim}", f"{self.batch}x{self.tokens}"]
        parts += ["causal"] if self.causal else []
        parts += [f"gqa{self.heads // self.kv_heads}"] if self.heads != self.kv_heads else []
        parts += [f"packed{self.segments}"] if self.segments > 1 else []
        parts += [f"queries{self.queries}"] if self.queries else []
        return "-".join(parts)

    @property
    def flop(self) -> float:
        """Of the forward."""
        seen = (self.queries or self.tokens) * self.tokens / self.segments
        return 4 * self.batch * self.heads * self.head_dim * seen * (0.5 if self.causal else 1.0)


def _cell(head_dim: int, tokens: int, causal: bool, **fields) -> Cell:
    """16,384 tokens a batch and 2,048 head dims in all."""
    heads = 2048 // head_dim
    return Cell(head_dim, tokens, causal, **{"batch": 16384 // tokens, "heads": heads, "kv_heads": heads} | fields)


CELLS = (
    _cell(128, 4096, False),
    _cell(128, 16384, False),
    _cell(128, 16384, True),
    _cell(64, 4096, True),
    _cell(256, 8192, True),
    _cell(192, 8192, True),
    _cell(160, 8192, True),
    _cell(96, 8192, True),
    _cell(80, 8192, True),
    _cell(72, 8192, True),
    _cell(128, 8192, True, kv_heads=4),
    _cell(128, 16384, True, segments=8),
    _cell(128, 128, True),
    _cell(128, 512, True),
    _cell(64, 1024, False),
    _cell(128, 8192, False, batch=16, heads=32, kv_heads=8, queries=1),
)
Attention = Callable[..., jax.Array]


def find_peers() -> dict[str, Attention]:
    """Functions of (cell, query, key, value) by name; those whose package cannot be imported are named on stderr."""

    def ours(cell, *operands):
        ids = segment_ids(cell)
        packed = {} if ids is None else {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return flash_attention(*operands, is_causal=cell.causal, implementation="cuda", **packed)

    def plain(attention, cell, *operands, **options):
        if cell.segments > 1:
            raise NotImplementedError("no packed batches")
        return attention(*operands, is_causal=cell.causal, **options)

    peers: dict[str, Attention] = {OURS: ours}
    for name in ("cudnn", "xla"):
        peers[name] = functools.partial(plain, jax.nn.dot_product_attention, implementation=name)
    for name, package, function, options in (
        ("tokamax", "tokamax", "dot_product_attention", {"implementation": "mosaic"}),
        ("flash-attn3-jax", "flash_attn3_jax", "flash_mha", {}),
        ("dew-flash-attn", "dew_flash_attn", "flash_mha", {}),
    ):
        try:
            if package == "tokamax":
                _stand_in_for_xprof()
            peers[name] = functools.partial(plain, getattr(importlib.import_module(package), function), **options)
        except Exception as error:  # whatever a foreign package raises when imported
            print(f"{name}: not here ({type(error).__name__}: {first_line(error)})", file=sys.stderr)
    return peers


def _stand_in_for_xprof():
    """tokamax imports a profiler when it is imported, and needs none of it here."""
    name = "xprof"
    for part in ("", ".cli", ".tools", ".get_kernel_stats_tool"):
        name += part
        if name not in sys.modules:
            module = sys.modules[name] = types.ModuleType(name)
            if "." in name:
                parent, child = name.rsplit(".", 1)
                setattr(sys.modules[parent], child, module)


def first_line(error: Exception) -> str:
    """An error in a few words."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def segment_ids(cell: Cell) -> jax.Array | None:
    """int32 [B, T], or None where the cell is not packed."""
    if cell.segments == 1:
        return None
    ids = jnp.arange(cell.tokens, dtype=jnp.int32) * cell.segments // cell.tokens
    return jnp.broadcast_to(ids, (cell.batch, cell.tokens))


def inputs(cell: Cell, dtype: Any = jnp.bfloat16) -> tuple[list[jax.Array], jax.Array]:
    """Random query, key and value, and the output's cotangent."""
    keys = jax.random.split(jax.random.key(cell.head_dim), 4)
    of_queries = (cell.batch, cell.queries or cell.tokens, cell.heads, cell.head_dim)
    of_keys = (cell.batch, cell.tokens, cell.kv_heads, cell.head_dim)
    shapes = (of_queries, of_keys, of_keys, of_queries)
    made = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    made = [array.astype(dtype) for array in made]
    return made[:3], made[3]


def results(attention: Callable[..., jax.Array], operands, cotangent):
    """Output and gradients."""

    def run(operands, cotangent):
        out, pullback = jax.vjp(attention, *operands)
        return out, *pullback(cotangent.astype(out.dtype))

    return [np.asarray(array, np.float64) for array in jax.jit(run)(operands, cotangent)]


def check(cell: Cell, attention: Attention) -> None:
    """Raises unless the greatest error at a small shape is at most four times that of jax.nn's attention by XLA."""
    groups = cell.heads // cell.kv_heads
    small = dataclasses.replace(
        cell, tokens=CHECKED_TOKENS, batch=1, heads=2 * groups, kv_heads=2, segments=min(cell.segments, 4)
    )
    ids = segment_ids(small)
    mask = None if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
    xla = functools.partial(jax.nn.dot_product_attention, mask=mask, is_causal=small.causal, implementation="xla")
    with jax.default_matmul_precision("highest"):
        exact = results(xla, *inputs(small, jnp.float32))
    plain, got = results(xla, *inputs(small)), results(functools.partial(attention, small), *inputs(small))
    for name, mine, theirs, wanted in zip(("output", "dQ", "dK", "dV"), got, plain, exact, strict=True):
        error, bound = np.abs(mine - wanted).max(), 4 * np.abs(theirs - wanted).max() + 1e-3
        if not error <= bound:
            raise ValueError(f"wrong {name}: error {error:.3g} above {bound:.3g}")


def functions(cell: Cell, attention: Attention, operands, cotangent) -> dict[str, Callable[[], Any]]:
    """What each pass runs, compiled; calling one queues it and returns its results."""
    attend = functools.partial(attention, cell)
    forward = jax.jit(attend)
    pullback = jax.jit(lambda *operands: jax.vjp(attend, *operands)[1])(*operands)
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    both = jax.jit(lambda operands, cotangent: jax.vjp(attend, *operands)[1](cotangent))
    calls = (
        lambda: forward(*operands),
        lambda: backward(pullback, cotangent),
        lambda: both(operands, cotangent),
    )
    return dict(zip(PASSES, calls, strict=True))


def seconds(call: Callable[[], Any], count: int) -> float:
    """Mean time of calls queued back to back."""
    began = time.perf_counter()
    last = None
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - began) / count


def measure(cell: Cell, peers: dict[str, Attention], rounds: int) -> list[dict[str, Any]]:
    """A row for each peer: TFLOP/s by pass with their spread, or why it has none."""
    operands, cotangent = inputs(cell)
    ready: dict[str, dict[str, Callable[[], Any]]] = {}
    counts: dict[str, dict[str, int]] = {}
    rows: dict[str, dict[str, Any]] = {name: {"cell": cell.name, "peer": name} for name in peers}
    for name, attention in peers.items():
        if name == "xla" and cell.batch * cell.heads * cell.tokens * (cell.queries or cell.tokens) > 2**32:
            rows[name]["refused"] = "scores would not fit in memory"
            continue
        try:
            check(cell, attention)
            calls = functions(cell, attention, operands, cotangent)
            for call in calls.values():
                seconds(call, 2)
            counts[name] = {p: max(2, round(SECONDS_A_ROUND / seconds(call, 3))) for p, call in calls.items()}
            ready[name] = calls
        except Exception as error:  # whatever a foreign package raises
            rows[name]["refused"] = f"{type(error).__name__}: {first_line(error)}"
    times = {name: {p: [] for p in PASSES} for name in ready}
    for _ in range(rounds):
        for p in PASSES:
            for name, calls in ready.items():
                times[name][p].append(seconds(calls[p], counts[name][p]))
    for name, of_passes in times.items():
        for p, each in of_passes.items():
            flop = FACTORS[p] * cell.flop
            rows[name][p] = flop / statistics.median(each) / 1e12
            rows[name][f"{p}, spread"] = (flop / max(each) / 1e12, flop / min(each) / 1e12)
            rows[name][f"{p}, microseconds"] = statistics.median(each) * 1e6
    return list(rows.values())


def matmul_tflops() -> float:
    """Of an 8192 x 8192 x 8192 product, the practical ceiling."""
    a = jax.random.normal(jax.random.key(1), (8192, 8192), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    seconds(lambda: product(a), 3)
    return 2 * 8192**3 / statistics.median(seconds(lambda: product(a), 10) for _ in range(3)) / 1e12


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: TFLOP/s, the best peer of each cell and pass, and ours over it."""
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = [
        "| cell | pass | " + " | ".join(names) + " | ours / best peer | ours, µs |",
        "|---|---|" + "--:|" * (len(names) + 2),
    ]
    for cell in dict.fromkeys(row["cell"] for row in rows):
        of_cell = {row["peer"]: row for row in rows if row["cell"] == cell}
        for p in PASSES:
            figures = [of_cell[name].get(p) if name in of_cell else None for name in names]
            best = max((f for n, f in zip(names, figures, strict=True) if f and n != OURS), default=None)
            mine = of_cell.get(OURS, {}).get(p)
            ratio = f"{mine / best:.2f}" if mine and best else "–"
            shown = [f"{figure:.1f}" if figure else "–" for figure in figures]
            own = of_cell.get(OURS, {}).get(f"{p}, microseconds")
            lines.append(f"| {cell} | {p} | {' | '.join(shown)} | {ratio} | {f'{own:.0f}' if own else '–'} |")
    refusals = [f"- {row['cell']}, {row['peer']}: {row['refused']}" for row in rows if "refused" in row]
    return "\n".join(lines + ([""] if refusals else []) + refusals)


def plot(record: dict[str, Any], file: pathlib.Path) -> None:
    """Bars of TFLOP/s by cell and peer, forward above backward."""
    import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

    rows = record["rows"]
    cells, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("cell", "peer"))
    figure, axes = plt.subplots(2, 1, figsize=(max(8, 1.1 * len(cells)), 8), sharex=True, layout="constrained")
    width = 0.8 / len(names)
    for ax, p in zip(axes, PASSES, strict=False):
        for index, name in enumerate(names):
            heights = [next((r.get(p, 0) for r in rows if (r["cell"], r["peer"]) == (c, name)), 0) for c in cells]
            ax.bar([i + (index + 0.5) * width - 0.4 for i in range(len(cells))], heights, width, label=name)
        ax.axhline(record["matmul"], color="grey", linewidth=0.8, linestyle="--")
        ax.set_ylabel(f"{p}, TFLOP/s")
        ax.grid(axis="y", linewidth=0.3)
    axes[0].legend(ncols=len(names), fontsize="small")
    axes[0].set_title(f"{record['device']}, bf16; dashed: an 8192³ product")
    axes[1].set_xticks(range(len(cells)), cells, rotation=45, ha="right")
    figure.savefig(file, dpi=150)


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description="Speed of attention beside other JAX packages.")
    parser.add_argument("--cells", nargs="+", choices=[cell.name for cell in CELLS], help="default: all")
    parser.add_argument("--peers", nargs="+", help="default: all that can be imported")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--load", type=pathlib.Path, help="figures of an earlier run instead of timing")
    parser.add_argument("--plot", type=pathlib.Path, help="also draw the figures to this file (needs matplotlib)")
    args = parser.parse_args()
    if args.load:
        record = json.loads(args.load.read_text())
    else:
        try:
            device = jax.local_devices(backend="cuda")[0]
        except RuntimeError:
            print("attention: no CUDA device here, nothing measured")
            return 0
        peers = find_peers()
        if unknown := set(args.peers or ()) - set(peers):
            parser.error(f"--peers must be of {', '.join(peers)}; got {', '.join(sorted(unknown))}")
        peers = {name: peer for name, peer in peers.items() if name in (args.peers or peers)}
        record = {"device": device.device_kind, "jax": jax.__version__, "matmul": matmul_tflops(), "rows": []}
        for cell in CELLS:
            if args.cells is None or cell.name in args.cells:
                rows = measure(cell, peers, args.rounds)
                record["rows"] += rows
                for row in rows:
                    print(json.dumps(row), file=sys.stderr, flush=True)
                if args.json:  # after every cell: a run that is cut short keeps what it has
                    args.json.write_text(json.dumps(record, indent=1))
    print(f"{record['device']}, jax {record['jax']}, bf16, TFLOP/s; an 8192³ product: {record['matmul']:.0f}\n")
    print(table(record["rows"]))
    if args.plot:
        plot(record, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
