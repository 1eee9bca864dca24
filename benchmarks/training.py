"""Training with our attention and with cuDNN's: the same loss curve, and tokens a second.

    python benchmarks/training.py [--models NAME ...] [--steps N] [--json FILE]

Trains the language model of examples/train_lm.py with each attention from the same parameters on the same batches. Two
right implementations round differently, and training magnifies that; so the bound for our curve's distance from
cuDNN's is twice the distance of our XLA path's from cuDNN's, in the same run: the greatest and the mean of the
differences at each step, in bits a byte. Tokens a second are the median over groups of ten steps, without the first.

Where rows are packed, cuDNN gets the segments as a mask of all pairs: jax.nn.dot_product_attention has no other form.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from flax import linen as nn

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
import train_lm  # pyright: ignore[reportMissingImports]

from jax_fa_blackwell.linen import MultiHeadAttention

SIZE = "--layers 8 --width 1024 --heads 8 --kv-heads 4 --batch 4 --length 8192 --dtype bfloat16"
MODELS = {
    "d128": f"{SIZE} --head-dim 128",
    "d192": f"{SIZE} --head-dim 192",
    "d128 packed": f"{SIZE} --head-dim 128 --packed",
    "tiny": "--layers 1 --width 32 --heads 4 --kv-heads 2 --head-dim 16 --batch 2 --length 64 --dtype bfloat16",
}
GROUP = 10  # steps between two looks at the clock


class JaxAttention(nn.Module):
    """MultiHeadAttention's parameters with jax.nn.dot_product_attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    use_bias: bool
    dtype: Any

    @nn.compact
    def __call__(
        self, x, rotary, is_causal=True, local_window_size=None, implementation=None, query_segment_ids=None, **_
    ):
        dense = functools.partial(nn.DenseGeneral, use_bias=self.use_bias, dtype=self.dtype)
        query = dense((self.num_heads, self.head_dim), name="query")(x)
        key, value = (dense((self.num_kv_heads, self.head_dim), name=name)(x) for name in ("key", "value"))
        query, key = (array.astype(value.dtype) for array in rotary(query, key))
        ids = query_segment_ids
        mask = None if ids is None else ids[:, None, :, None] == ids[:, None, None, :]
        options = {"is_causal": is_causal, "local_window_size": local_window_size, "implementation": implementation}
        out = jax.nn.dot_product_attention(query, key, value, mask=mask, **options)
        return dense(x.shape[-1], axis=(-2, -1), name="out")(out)


ATTENTIONS = {
    "ours": (MultiHeadAttention, "cuda"),
    "cuDNN": (JaxAttention, "cudnn"),
    "XLA": (MultiHeadAttention, "xla"),
}


def train(args: argparse.Namespace, attention: type[nn.Module], text) -> dict[str, Any]:
    """The losses of all steps in bits a byte, tokens a second, and seconds to compile."""
    began = time.perf_counter()
    _, _, step, state = train_lm.make_training(args, attention)
    compiled = time.perf_counter() - began
    losses, times = [], []
    began = time.perf_counter()
    for i, batch in zip(range(args.steps), train_lm.random_batches(text, args), strict=False):
        *state, loss = step(*state, batch)
        losses.append(loss)
        if (i + 1) % GROUP == 0:
            jax.block_until_ready(loss)
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
    seconds = statistics.median(times[1:] or times) / GROUP
    return {
        "losses": [float(loss) for loss in losses],
        "tokens/s": args.batch * args.length / seconds,
        "milliseconds a step": 1e3 * seconds,
        "seconds to compile": round(compiled, 1),
    }


def distance(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The greatest and the mean difference of two loss curves."""
    differences = np.abs(np.subtract(one["losses"], other["losses"]))
    return {"greatest": float(differences.max()), "mean": float(differences.mean())}


def compare(model: str, steps: int, attentions: list[str], text) -> dict[str, Any]:
    """Trains a model with each attention; the record has what ``train`` says of each, and the curves' distances."""
    record: dict[str, Any] = {"model": model, "arguments": f"{MODELS[model]} --steps {steps}"}
    for name in attentions:
        module, implementation = ATTENTIONS[name]
        args = train_lm.parse_arguments(record["arguments"].split())
        args.implementation = implementation
        try:
            record[name] = train(args, module, text)
        except Exception as error:  # cuDNN refuses some head dims
            record[name] = {"refused": f"{type(error).__name__}: {str(error).strip()[:200]}"}
        jax.clear_caches()
    trained = {name: record[name] for name in attentions if "losses" in record[name]}
    if "cuDNN" in trained:
        others = [name for name in trained if name != "cuDNN"]
        record |= {f"{name} from cuDNN": distance(trained[name], trained["cuDNN"]) for name in others}
    if {"ours", "cuDNN", "XLA"} <= trained.keys():
        ours, bound = record["ours from cuDNN"], record["XLA from cuDNN"]
        record["same curve"] = all(ours[which] <= 2 * bound[which] for which in ours)
    return record


def summary(record: dict[str, Any]) -> str:
    """A record without the curves, which are given at five steps."""
    shown = dict(record)
    for name in ATTENTIONS:
        if "losses" in shown.get(name, {}):
            losses = shown[name]["losses"]
            at = [len(losses) * i // 5 - 1 for i in range(1, 6)]
            shown[name] = {**shown[name], "losses": {i + 1: round(losses[i], 4) for i in at}}
    return json.dumps(shown)


def main() -> int:
    """Prints a JSON line for each model; returns 1 if a curve is not the same."""
    parser = argparse.ArgumentParser(description="Training with our attention, cuDNN's and XLA's.")
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), default=[name for name in MODELS if name != "tiny"]
    )
    parser.add_argument("--attentions", nargs="+", choices=list(ATTENTIONS), default=list(ATTENTIONS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures and the curves to this file")
    args = parser.parse_args()
    if args.steps < GROUP:
        parser.error(f"--steps must be at least {GROUP}; got {args.steps}")
    text, _ = train_lm.read_library()
    records = []
    for model in args.models:
        records.append(compare(model, args.steps, args.attentions, text))
        print(summary(records[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(records))
    return 0 if all(record.get("same curve", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
