"""Trains a byte-level language model on sequences that are sharded over devices: data and context parallelism.

    python examples/train_long_context.py --simulate 8                  8 simulated CPU devices, a few minutes
    python examples/train_long_context.py --context 8 --length 262144   on GPUs: rows of 256k bytes, 8 devices a row

The mesh has the axes data and context. Every device holds its part of some rows, in zigzag order, so that causal
attention gives all the same work; only attention and the sums of the loss and of the gradients communicate.
docs/long_context.md explains the parts.
"""

from __future__ import annotations

import argparse
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import cut_rows, read_library

from jax_fa_blackwell.context_parallel import ring_attention, ulysses_attention, zigzag_permutation

SEQUENCE = P("data", "context")


def init(key, args):
    """Parameters: those of the layers are stacked along a first axis."""
    width, inner = args.width, args.heads * args.head_dim
    shapes = {
        "query": (width, inner),
        "key_value": (width, 2 * args.kv_heads * args.head_dim),
        "out": (inner, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    layers = {
        name: jax.random.normal(keys[name], (args.layers, *shape)) / math.sqrt(shape[0])
        for name, shape in shapes.items()
    }
    layers |= {"attention_norm": jnp.ones((args.layers, width)), "mlp_norm": jnp.ones((args.layers, width))}
    embedding = jax.random.normal(jax.random.fold_in(key, 1), (256, width)) / math.sqrt(width)
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(width)}


def normalise(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rotate(x, positions):
    """Rotary position embedding (arXiv 2104.09864) at global positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles)], axis=-1
    )


def block(attend, args, x, layer, positions, files):
    """One layer on a device's part of the rows; all but attention is local."""
    dtype = jnp.dtype(args.dtype)
    layer = jax.tree.map(lambda weight: weight.astype(dtype), layer)
    h = normalise(x, layer["attention_norm"]).astype(dtype)
    query = (h @ layer["query"]).reshape(*h.shape[:2], args.heads, args.head_dim)
    key, value = jnp.split((h @ layer["key_value"]).reshape(*h.shape[:2], -1, args.head_dim), 2, axis=2)
    query, key = (rotate(array, positions).astype(dtype) for array in (query, key))
    packed = {"query_segment_ids": files, "key_value_segment_ids": files} if args.packed else {}
    attended = attend(query, key, value, is_causal=True, **packed)
    x = x + attended.reshape(*h.shape[:2], -1) @ layer["out"]
    h = normalise(x, layer["mlp_norm"]).astype(dtype)
    return x + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def bits_per_byte(args, parameters, inputs, targets, positions, files):
    """The mean loss of all devices, from each one's part."""
    kinds = {"ring": functools.partial(ring_attention, order="zigzag"), "ulysses": ulysses_attention}
    attend = functools.partial(kinds[args.attention], axis_name="context")
    # Nothing of a layer is kept for the backward pass but its input and the results of attention.
    policy = jax.checkpoint_policies.save_only_these_names("context")
    layer = jax.checkpoint(functools.partial(block, attend, args), policy=policy)

    def visit(x, weights):
        return layer(x, weights, positions, files), None

    x = parameters["embedding"][inputs] * math.sqrt(args.width)
    x, _ = jax.lax.scan(visit, x.astype(args.dtype), parameters["layers"])
    logits = normalise(x.astype(jnp.float32), parameters["norm"]) @ parameters["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jax.lax.pmean(losses.mean(), ("data", "context")) / math.log(2)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", type=int, help="run on that many simulated CPU devices")
    parser.add_argument("--context", type=int, default=4, help="devices that share a row; the others have other rows")
    parser.add_argument("--attention", choices=["ring", "ulysses"], default="ring")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows a step")
    parser.add_argument("--length", type=int, default=1024, help="bytes a row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2, help="grouped heads: a divisor of --heads")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="of all but the parameters; bfloat16 on GPUs")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--packed", action="store_true", help="bytes of one file do not see those of another")
    return parser.parse_args(argv)


def main(argv=None):
    """Trains, and returns the loss of every step in bits per byte."""
    args = parse_arguments(argv)
    if args.simulate:
        jax.config.update("jax_num_cpu_devices", args.simulate)
    devices = jax.device_count()
    if devices % args.context:
        raise SystemExit(f"--context must divide the {devices} devices; got {args.context}")
    mesh = jax.make_mesh((devices // args.context, args.context), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    print(f"mesh {dict(mesh.shape)}; a device holds {args.length // args.context} bytes of a row")

    # Ulysses keeps the order; both are given as positions, which the model needs anyway.
    order = np.arange(args.length)
    if args.attention == "ring":
        order = zigzag_permutation(args.length, args.context)
    text, _ = read_library()
    rng = np.random.default_rng(0)

    def next_batch():
        rows = cut_rows(text, rng.integers(text[0].size - args.length, size=args.batch), args.length)
        inputs, targets = rows["bytes"][:, :-1], rows["bytes"][:, 1:]
        host = [array[:, order].astype(np.int32) for array in (inputs, targets, rows["files"])]
        inputs, targets, files = (jax.device_put(array, NamedSharding(mesh, SEQUENCE)) for array in host)
        return inputs, targets, positions, files

    positions = jax.device_put(order.astype(np.int32), NamedSharding(mesh, P("context")))
    # Parameters are the same everywhere: JAX gives them the sum of all devices' gradients.
    loss_of = jax.shard_map(
        functools.partial(bits_per_byte, args),
        mesh=mesh,
        in_specs=(P(), SEQUENCE, SEQUENCE, P("context"), SEQUENCE),
        out_specs=P(),
    )
    optimizer = optax.adamw(args.learning_rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(parameters, state, *batch):
        loss, gradients = jax.value_and_grad(loss_of)(parameters, *batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    everywhere = NamedSharding(mesh, P())
    parameters = jax.jit(functools.partial(init, args=args), out_shardings=everywhere)(jax.random.key(0))
    state = jax.jit(optimizer.init, out_shardings=everywhere)(parameters)
    losses = []
    for step in range(args.steps):
        parameters, state, loss = train_step(parameters, state, *next_batch())
        losses.append(float(loss))
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}: {losses[-1]:.3f} bits/byte", flush=True)
    return losses


if __name__ == "__main__":
    main()
