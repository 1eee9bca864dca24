"""Trains a byte-level language model on the source of Python's standard library, through jax_fa_blackwell.

    python examples/train_lm.py                            a few minutes on two CPU cores; uses a GPU where there is one
    python examples/train_lm.py --packed --window 128      files do not see each other; a sliding window
    python examples/train_lm.py --head-dim 192 --steps 50  a head dim that most attention kernels refuse

Writes the loss curve to out/train_lm.png and prints a sample, bits per byte on held-out files, and which
implementation of attention ran and why.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from tqdm import tqdm

from jax_fa_blackwell.explain import explain
from jax_fa_blackwell.linen import MultiHeadAttention


def rotary(query, key):
    """Rotary position embedding (arXiv 2104.09864): turns pairs of features by an angle that grows with position."""

    def rotate(x):
        half = x.shape[-1] // 2
        frequencies = 10_000.0 ** (-jnp.arange(half) / half)
        angles = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, H / 2]: the same for every head
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        left, right = x[..., :half], x[..., half : 2 * half]
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, x[..., 2 * half :]], axis=-1)

    return rotate(query), rotate(key)


class Block(nn.Module):
    heads: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    attention: type[nn.Module] = MultiHeadAttention

    @nn.compact
    def __call__(self, x, **attention_options):
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        attention = self.attention(
            self.heads, self.kv_heads, head_dim=self.head_dim, use_bias=False, dtype=self.dtype, name="attention"
        )
        x = x + attention(norm()(x), rotary=rotary, **attention_options)
        hidden = nn.gelu(dense(4 * x.shape[-1])(norm()(x)))
        return x + dense(x.shape[-1])(hidden)


class LanguageModel(nn.Module):
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    attention: type[nn.Module] = MultiHeadAttention

    @nn.compact
    def __call__(self, tokens, **attention_options):
        """Bytes [B, T] → fp32 logits of the next byte [B, T, 256]."""
        x = nn.Embed(256, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            block = Block(self.heads, self.kv_heads, self.head_dim, self.dtype, self.attention)
            x = block(x, **attention_options)
        return nn.Dense(256, use_bias=False)(nn.RMSNorm()(x))


def read_library():
    """The standard library's source, train and held-out: its bytes, and beside them the number of each byte's file."""
    root = Path(os.__file__).parent
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))

    def load(paths):
        texts = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
        return np.concatenate(texts), np.repeat(np.arange(len(texts), dtype=np.int32), [text.size for text in texts])

    return load([path for i, path in enumerate(files) if i % 20]), load(files[::20])


def cut_rows(text, starts, length):
    """One row from each start: its bytes with one more to predict [B, length + 1], and their files [B, length]."""
    content, file_of = text
    index = starts[:, None] + np.arange(length + 1)
    return {"bytes": content[index].astype(np.int32), "files": file_of[index[:, :-1]]}


def attention_options(args, files=None):
    """What the command line asks of flash_attention; ``files`` are the segments of a packed row."""
    options = {"is_causal": True, "local_window_size": args.window, "implementation": args.implementation}
    if args.packed and files is not None:
        options |= {"query_segment_ids": files, "key_value_segment_ids": files}
    return options


def generate(model, parameters, prompt, length, key, options):
    """Continues the prompt to ``length`` bytes, one forward pass a byte."""

    def add_byte(i, carry):
        row, key = carry
        key, sample_key = jax.random.split(key)
        logits = model.apply(parameters, row[None], **options)[0, i - 1]
        return row.at[i].set(jax.random.categorical(sample_key, logits / 0.8)), key

    row = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.array(list(prompt)))
    row, _ = jax.lax.fori_loop(len(prompt), length, add_byte, (row, key))
    return bytes(np.asarray(row, np.uint8)).decode(errors="replace")


def plot(losses, held_out, path):
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits/byte", title="Source of Python's standard library")
    axes.plot(losses, alpha=0.3, color="C0", label="training batches")
    window = max(1, len(losses) // 20)
    mean = np.convolve(losses, np.ones(window) / window, mode="valid")
    axes.plot(np.arange(window - 1, len(losses)), mean, color="C0", label=f"mean of {window} steps")
    axes.axhline(held_out, color="C1", linestyle="--", label=f"held-out files: {held_out:.2f}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments(argv):
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000 if on_gpu else 450)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 4, help="rows a step")
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 256, help="bytes a row")
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 4)
    parser.add_argument("--width", type=int, default=768 if on_gpu else 128, help="features of the residual stream")
    parser.add_argument("--heads", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=2, help="grouped heads: a divisor of --heads")
    parser.add_argument("--head-dim", type=int, default=96 if on_gpu else 32)
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", help="of all but the parameters")
    parser.add_argument("--learning-rate", type=float, default=1e-3 if on_gpu else 3e-3)
    parser.add_argument("--window", type=int, help="see at most this many bytes back")
    parser.add_argument("--packed", action="store_true", help="bytes of one file do not see those of another")
    parser.add_argument("--implementation", choices=["cuda", "xla", "reference"], help="default: the best available")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    return parser.parse_args(argv)


def make_training(args, attention=MultiHeadAttention):
    """The model; its loss; the training step, compiled; and what the step begins with and returns, changed."""
    dtype = jnp.dtype(args.dtype)
    model = LanguageModel(args.layers, args.width, args.heads, args.kv_heads, args.head_dim, dtype, attention)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    def bits_per_byte(parameters, batch):
        inputs, targets = batch["bytes"][:, :-1], batch["bytes"][:, 1:]
        logits = jnp.asarray(model.apply(parameters, inputs, **attention_options(args, batch["files"])))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean() / math.log(2)

    def train_step(parameters, optimizer_state, batch):
        loss, gradients = jax.value_and_grad(bits_per_byte)(parameters, batch)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
        return optax.apply_updates(parameters, updates), optimizer_state, loss

    parameters = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, args.length), jnp.int32))
    state = parameters, optimizer.init(parameters)
    batch = {
        "bytes": jax.ShapeDtypeStruct((args.batch, args.length + 1), jnp.int32),
        "files": jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32),
    }
    step = jax.jit(train_step, donate_argnums=(0, 1)).lower(*state, batch).compile()
    return model, bits_per_byte, step, state


def random_batches(text, args):
    """Batches without end; the same for the same seed."""
    rng = np.random.default_rng(args.seed)
    while True:
        yield cut_rows(text, rng.integers(text[0].size - args.length, size=args.batch), args.length)


def main(argv=None):
    args = parse_arguments(argv)
    train_text, held_out_text = read_library()
    print(f"{train_text[0].size / 1e6:.1f} MB to train on, {held_out_text[0].size / 1e6:.1f} MB held out")

    begun = time.perf_counter()
    model, bits_per_byte, step, (parameters, optimizer_state) = make_training(args)
    size = sum(x.size for x in jax.tree.leaves(parameters))
    print(f"{size / 1e6:.2f} million parameters; training step compiled in {time.perf_counter() - begun:.1f} s")

    losses = []
    with tqdm(total=args.steps * args.batch * args.length, unit=" tokens", unit_scale=True) as bar:
        for i, batch in zip(range(args.steps), random_batches(train_text, args), strict=False):
            parameters, optimizer_state, loss = step(parameters, optimizer_state, batch)
            losses.append(loss)
            if i % 10 == 0:  # reading the loss waits for the device
                bar.set_postfix_str(f"{loss:.2f} bits/byte", refresh=False)
            bar.update(args.batch * args.length)

    evaluate = jax.jit(bits_per_byte)
    starts = np.linspace(0, held_out_text[0].size - args.length - 1, 32 * args.batch).astype(int)
    held_out = np.mean(
        [evaluate(parameters, cut_rows(held_out_text, part, args.length)) for part in np.split(starts, 32)]
    )
    plot(np.array(losses), held_out, args.out / "train_lm.png")

    print("\nA sample:\n")
    print(
        generate(model, parameters, b"def ", min(args.length, 400), jax.random.key(args.seed), attention_options(args))
    )

    query = jax.ShapeDtypeStruct((args.batch, args.length, args.heads, args.head_dim), args.dtype)
    key = jax.ShapeDtypeStruct((args.batch, args.length, args.kv_heads, args.head_dim), args.dtype)
    files = jax.ShapeDtypeStruct((args.batch, args.length), jnp.int32)
    attention = explain(query, key, key, **attention_options(args, files))
    print(f"\nHeld-out files: {held_out:.3f} bits/byte; loss curve in {args.out / 'train_lm.png'}")
    print(f"Attention ran as {attention.implementation!r}: {attention.reason}")


if __name__ == "__main__":
    main()
