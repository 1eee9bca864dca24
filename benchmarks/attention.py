"""Speed of flash_attention beside the attention of other JAX packages, on this machine's GPU, in one process.

    python benchmarks/attention.py [--cells NAME ...] [--peers NAME ...] [--seconds S] [--json FILE] [--plot FILE.png]
    python benchmarks/attention.py --load FILE --plot FILE.png

Peers are cuDNN and XLA through jax.nn.dot_product_attention, and tokamax, flash-attn3-jax and dew-flash-attn where they
can be imported. Inputs are random bfloat16 in the layout [batch, tokens, heads, head dim]. Before a peer is timed in a
cell, its outputs and gradients at a small shape of the same head dim are compared with float64; one that is wrong is
not timed. All peers of a cell are timed in turn, in several rounds, and the figure is the median over the rounds; so
ratios come from the same minutes. FLOP are 4 B N T S d forward, halved where causal, and 2.5 times that backward,
whatever a peer computes; packed batches count what their segments see.

Small cells have several calls in one program, as the layers of a model are, each with its own queries; otherwise the
time to start a program would be all that is seen. Packed batches reach each peer in the form that it wants, as
arguments of the program: segment ids for ours, cumulative lengths for the others' functions for packed sequences. JAX's
public function has none for cuDNN, so that the one beneath it is used.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_fa_blackwell import flash_attention

OURS = "ours"
PASSES = ("forward", "backward", "forward and backward")
FACTORS = {"forward": 1.0, "backward": 2.5, "forward and backward": 3.5}
CHECKED_TOKENS = 320
SECONDS_A_ROUND = 0.03
FLOP_A_PROGRAM = 1.5e11  # half a millisecond at 300 TFLOP/s
MOST_CALLS = 8
MOST_SCORES = 2**31  # beyond it XLA's attention takes minutes of a run, and is never the best


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is timed: a self attention, of rows packed with segments of lengths as 1 : 2 : ... : ``segments``."""

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
    def offsets(self) -> list[int]:
        """Where the segments of a row begin, and its end."""
        parts = self.segments * (self.segments + 1)
        return [self.tokens * i * (i + 1) // parts for i in range(self.segments + 1)]

    @property
    def passes(self) -> tuple[str, ...]:
        """What is timed; decoding has no backward."""
        return PASSES[:1] if self.queries else PASSES

    @property
    def flop(self) -> float:
        """Of the forward."""
        lengths = np.diff(self.offsets).astype(float)
        seen = float((lengths**2).sum()) if self.segments > 1 else (self.queries or self.tokens) * self.tokens
        return 4 * self.batch * self.heads * self.head_dim * seen * (0.5 if self.causal else 1.0)

    @property
    def calls(self) -> int:
        """Calls in one program."""
        return min(math.ceil(FLOP_A_PROGRAM / self.flop), MOST_CALLS)


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
    _cell(64, 8192, True, kv_heads=4),
    _cell(128, 16384, True, segments=8),
    _cell(128, 16384, True, segments=8, kv_heads=4),
    _cell(64, 4096, False, segments=8),
    _cell(128, 128, True),
    _cell(128, 256, False),
    _cell(128, 512, True),
    _cell(128, 1024, True),
    _cell(64, 128, False),
    _cell(64, 512, True),
    _cell(64, 1024, False),
    _cell(192, 512, True),
    _cell(128, 8192, False, batch=16, heads=32, kv_heads=8, queries=1),
    _cell(128, 1024, False, batch=64, heads=32, kv_heads=8, queries=1),
)
Attention = Callable[..., jax.Array]


def find_peers() -> dict[str, Attention]:
    """Functions of (cell, packing, query, key, value) by name; packages that cannot be imported are named on stderr."""

    def ours(cell, packing, *operands):
        ids = packing.get("ids")
        packed = {} if ids is None else {"query_segment_ids": ids, "key_value_segment_ids": ids}
        return flash_attention(*operands, is_causal=cell.causal, implementation="cuda", **packed)

    def xla(cell, packing, *operands):
        return jax.nn.dot_product_attention(
            *operands, mask=same_segment(packing), is_causal=cell.causal, implementation="xla"
        )

    peers: dict[str, Attention] = {OURS: ours, "cudnn": cudnn, "xla": xla}
    _stand_in_for_xprof()
    for name, package, function in (
        ("tokamax", "tokamax", _tokamax),
        ("flash-attn3-jax", "flash_attn3_jax", _flash_attn3_jax),
        ("flash-attn3-jax, cache", "flash_attn3_jax", _flash_attn3_jax_cache),
        ("dew-flash-attn", "dew_flash_attn", _dew_flash_attn),
    ):
        try:
            peers[name] = functools.partial(function, importlib.import_module(package))
        except Exception as error:  # whatever a foreign package raises when imported
            print(f"{name}: not here ({type(error).__name__}: {first_line(error)})", file=sys.stderr)
    return peers


def cudnn(cell: Cell, packing: dict[str, jax.Array], query, key, value) -> jax.Array:
    """cuDNN through jax.nn, packed through the function that jax.nn calls."""
    if not packing:
        return jax.nn.dot_product_attention(query, key, value, is_causal=cell.causal, implementation="cudnn")
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if cell.heads != cell.kv_heads:
        raise NotImplementedError(
            "JAX gives cuDNN the queries' offsets for the keys too, wrong where heads are grouped"
        )
    offsets, lengths = packing["offsets"], jnp.diff(packing["offsets"])
    return fused.dot_product_attention(  # pyright: ignore[reportReturnType]
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=cell.head_dim**-0.5,
        mask_type=fused.MaskType.PADDING_CAUSAL if cell.causal else fused.MaskType.PADDING,
    )


def _tokamax(package, cell, packing, *operands):
    if packing:
        raise NotImplementedError("packed batches only by a mask of all pairs")
    return package.dot_product_attention(*operands, is_causal=cell.causal, implementation="mosaic")


def _flash_attn3_jax(package, cell, packing, *operands):
    if not packing:
        return package.flash_mha(*operands, is_causal=cell.causal)
    longest = int(max(np.diff(cell.offsets)))
    options = {"max_seqlen_q": longest, "max_seqlen_k": longest, "is_causal": cell.causal}
    out = package.flash_mha_varlen(*map(flat, operands), packing["cumulative"], **options)
    return out.reshape(operands[0].shape)


def _flash_attn3_jax_cache(package, cell, packing, *operands):
    if "backward" in cell.passes:
        raise NotImplementedError("for decoding only")
    return package.flash_mha_with_kvcache(*operands)


def _dew_flash_attn(package, cell, packing, *operands):
    if not packing:
        return package.flash_mha(*operands, is_causal=cell.causal)
    longest = int(max(np.diff(cell.offsets)))
    options = {"max_seqlen": longest, "is_causal": cell.causal}
    out = package.flash_mha_varlen(*map(flat, operands), packing["cumulative"], **options)
    return out.reshape(operands[0].shape)


def flat(array: jax.Array) -> jax.Array:
    """Without the batch axis, the rows one after the other."""
    return array.reshape(-1, *array.shape[2:])


def make_packing(cell: Cell) -> dict[str, jax.Array]:
    """What a packed batch's rows hold, in each peer's form, int32; empty where nothing is packed.

    ids [B, T], offsets [B, segments + 1] from each row's start, cumulative [B * segments + 1] from the first row's.
    """
    if cell.segments == 1:
        return {}
    offsets = np.array(cell.offsets)
    starts = np.arange(cell.batch)[:, None] * cell.tokens + offsets[:-1]
    made = {
        "ids": np.tile(np.repeat(np.arange(cell.segments), np.diff(offsets)), (cell.batch, 1)),
        "offsets": np.tile(offsets, (cell.batch, 1)),
        "cumulative": np.append(starts, cell.batch * cell.tokens),
    }
    return {name: jnp.asarray(array, jnp.int32) for name, array in made.items()}


def same_segment(packing: dict[str, Any]) -> Any:
    """bool [B, 1, T, S], or None where nothing is packed."""
    if not packing:
        return None
    ids = packing["ids"]
    return ids[:, None, :, None] == ids[:, None, None, :]


def _stand_in_for_xprof():
    """tokamax imports a profiler, and needs none of it here."""
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


def inputs(cell: Cell, calls: int = 1) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
    """Random queries of each call, key, value, and the output's cotangent, bfloat16."""
    keys = iter(jax.random.split(jax.random.key(cell.head_dim), calls + 3))
    of_queries = (cell.batch, cell.queries or cell.tokens, cell.heads, cell.head_dim)
    of_keys = (cell.batch, cell.tokens, cell.kv_heads, cell.head_dim)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    queries = [draw(next(keys), of_queries, jnp.bfloat16) for _ in range(calls)]
    key, value = (draw(next(keys), of_keys, jnp.bfloat16) for _ in range(2))
    return queries, key, value, draw(next(keys), of_queries, jnp.bfloat16)


def definition(
    cell: Cell, query: np.ndarray, key: np.ndarray, value: np.ndarray, cotangent: np.ndarray, rounded: Callable
) -> list[np.ndarray]:
    """Output, dQ, dK and dV by their definition; ``rounded`` is applied to what enters a product, and to results."""
    groups = cell.heads // cell.kv_heads
    key, value = (np.repeat(array, groups, axis=2) for array in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) * cell.head_dim**-0.5
    visible = np.tri(*scores.shape[2:], dtype=bool) if cell.causal else True
    if (mask := same_segment(jax.tree.map(np.asarray, make_packing(cell)))) is not None:
        visible = visible & mask
    weights = np.exp(np.where(visible, scores - scores.max(axis=-1, keepdims=True), -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = rounded(np.einsum("bnts,bsnh->btnh", rounded(weights), value))
    d_weights = np.einsum("btnh,bsnh->bnts", cotangent, value)
    delta = np.einsum("btnh,btnh->bnt", out, cotangent)[..., None]
    d_scores = rounded(weights * (d_weights - delta)) * cell.head_dim**-0.5
    d_query = np.einsum("bnts,bsnh->btnh", d_scores, key)
    d_key = np.einsum("bnts,btnh->bsnh", d_scores, query)
    d_value = np.einsum("bnts,btnh->bsnh", rounded(weights), cotangent)
    by_head = [array.reshape(*array.shape[:2], cell.kv_heads, groups, -1).sum(axis=3) for array in (d_key, d_value)]
    return [out, *map(rounded, (d_query, *by_head))]


@functools.cache
def wanted(small: Cell) -> tuple[list[np.ndarray], list[float]]:
    """Output and gradients in float64, and the greatest error of each where bfloat16 enters the products."""
    arrays = [np.asarray(array, np.float64) for array in jax.tree.leaves(inputs(small))]
    exact = definition(small, *arrays, rounded=lambda array: array)
    plain = definition(small, *arrays, rounded=lambda array: array.astype(ml_dtypes.bfloat16).astype(np.float64))
    return exact, [np.abs(mine - theirs).max() for mine, theirs in zip(plain, exact, strict=True)]


@functools.cache
def check(small: Cell, attention: Attention) -> None:
    """Raises unless the greatest error is at most four times that of rounding to bfloat16 alone."""
    (query,), key, value, cotangent = inputs(small)

    def run(packing, operands, cotangent):
        attend = functools.partial(attention, small, packing)
        if "backward" not in small.passes:
            return (attend(*operands),)
        out, pullback = jax.vjp(attend, *operands)
        return out, *pullback(cotangent.astype(out.dtype))

    got = jax.jit(run)(make_packing(small), (query, key, value), cotangent)
    for name, mine, exact, error in zip(("output", "dQ", "dK", "dV"), got, *wanted(small), strict=False):
        worst, bound = np.abs(np.asarray(mine, np.float64) - exact).max(), 4 * error + 1e-3
        if not worst <= bound:
            raise ValueError(f"wrong {name}: error {worst:.3g} above {bound:.3g}")


def smaller(cell: Cell) -> Cell:
    """What is checked for a cell; many cells share one."""
    groups = cell.heads // cell.kv_heads
    return dataclasses.replace(
        cell, tokens=CHECKED_TOKENS, batch=2, heads=2 * groups, kv_heads=2, segments=min(cell.segments, 4)
    )


def functions(cell: Cell, attention: Attention, queries, key, value, cotangent) -> dict[str, Callable[[], Any]]:
    """What each pass runs, compiled; calling one queues it and returns its results."""
    packing = make_packing(cell)

    def attend(packing, query, key, value):
        return attention(cell, packing, query, key, value)

    def pull(packing, query, key, value):
        return jax.vjp(functools.partial(attend, packing), query, key, value)[1]

    forward = jax.jit(lambda packing, queries, *rest: [attend(packing, query, *rest) for query in queries])
    pulls = jax.jit(lambda packing, queries, *rest: [pull(packing, query, *rest) for query in queries])
    backward = jax.jit(lambda pullbacks, cotangent: [pullback(cotangent) for pullback in pullbacks])
    both = jax.jit(
        lambda packing, queries, key, value, cotangent: [
            pull(packing, query, key, value)(cotangent) for query in queries
        ]
    )
    calls: dict[str, Callable[[], Any]] = {"forward": lambda: forward(packing, queries, key, value)}
    if "backward" in cell.passes:
        pullbacks = pulls(packing, queries, key, value)
        calls["backward"] = lambda: backward(pullbacks, cotangent)
        calls["forward and backward"] = lambda: both(packing, queries, key, value, cotangent)
    return calls


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
    arrays = inputs(cell, cell.calls)
    ready: dict[str, dict[str, Callable[[], Any]]] = {}
    counts: dict[str, dict[str, int]] = {}
    rows: dict[str, dict[str, Any]] = {name: {"cell": cell.name, "peer": name} for name in peers}
    for name, attention in peers.items():
        if name == "xla" and cell.batch * cell.heads * cell.tokens * (cell.queries or cell.tokens) > MOST_SCORES:
            rows[name]["refused"] = "too many scores"
            continue
        began = time.perf_counter()
        try:
            check(smaller(cell), attention)
            rows[name]["seconds to check"] = round(time.perf_counter() - began, 2)
            calls = functions(cell, attention, *arrays)
            for call in calls.values():
                seconds(call, 2)
            counts[name] = {p: max(2, round(SECONDS_A_ROUND / seconds(call, 3))) for p, call in calls.items()}
            ready[name] = calls
        except Exception as error:  # whatever a foreign package raises
            rows[name]["refused"] = f"{type(error).__name__}: {first_line(error)}"
        rows[name]["seconds to prepare"] = round(time.perf_counter() - began, 2)
    times = {name: {p: [] for p in cell.passes} for name in ready}
    for _ in range(rounds):
        for p in cell.passes:
            for name, calls in ready.items():
                times[name][p].append(seconds(calls[p], counts[name][p]) / cell.calls)
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
            if not any(figures):
                continue
            best = max((f for n, f in zip(names, figures, strict=True) if f and n != OURS), default=None)
            mine = of_cell.get(OURS, {}).get(p)
            ratio = f"{mine / best:.2f}" if mine and best else "–"
            shown = [f"{figure:.1f}" if figure else "–" for figure in figures]
            own = of_cell.get(OURS, {}).get(f"{p}, microseconds")
            lines.append(f"| {cell} | {p} | {' | '.join(shown)} | {ratio} | {f'{own:.0f}' if own else '–'} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "refused" in row:
            reasons.setdefault((row["peer"], row["refused"]), []).append(row["cell"])
    refusals = [f"- {peer}: {reason} ({', '.join(cells)})" for (peer, reason), cells in reasons.items()]
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
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so long")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--load", type=pathlib.Path, help="figures of an earlier run instead of timing")
    parser.add_argument("--plot", type=pathlib.Path, help="also draw the figures to this file (needs matplotlib)")
    args = parser.parse_args()
    began = time.perf_counter()
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
            if args.cells is not None and cell.name not in args.cells:
                continue
            if time.perf_counter() - began > args.seconds:
                print(f"{cell.name}: no time left", file=sys.stderr)
            else:
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
