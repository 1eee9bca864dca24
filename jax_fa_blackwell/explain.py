"""What flash_attention would run for a call, and why, without running it.

    python -m jax_fa_blackwell.explain --query 2,4096,16,192 --dtype bfloat16 --causal --arch sm_100a

From Python, with the arguments of the call itself or with ``jax.ShapeDtypeStruct`` in the place of arrays::

    print(explain(query, key, value, is_causal=True, arch="sm_100a"))
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_fa_blackwell.arguments import check_arguments
from jax_fa_blackwell.attention import device_arch, make_spec
from jax_fa_blackwell.masks import kv_intervals
from jax_fa_blackwell.plan.report import format_attention, format_plan
from jax_fa_blackwell.plan.spec import IMPLEMENTATIONS, AttentionSpec, choose_implementation
from jax_fa_blackwell.plan.target import TARGETS, get_target

__all__ = ["Explanation", "explain", "format_plan", "main"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What one call of ``flash_attention`` runs.

    Attributes:
      spec: the call as static data.
      arch: the GPU architecture it was asked for, or None where there is no supported GPU.
      implementation: "cuda", "xla" or "reference".
      reason: why this one, in words.
    """

    spec: AttentionSpec
    arch: str | None
    implementation: str
    reason: str

    def __str__(self) -> str:
        rows = (
            ("call", self.spec.describe()),
            ("architecture", self.arch or "no supported GPU"),
            ("implementation", self.implementation),
            ("reason", self.reason),
        )
        lines = [f"{name:<15} {text}" for name, text in rows]
        if self.implementation == "cuda" and self.arch is not None and not self.spec.is_empty:
            lines.append(format_attention(self.spec, get_target(self.arch)))
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    arch: str | None = None,
) -> Explanation:
    """Says what ``flash_attention`` runs for these arguments. Nothing is computed, on any device.

    The arguments are those of ``flash_attention``; each array may be a ``jax.ShapeDtypeStruct`` instead. One more,
    ``arch``, is an architecture such as "sm_100a" and needs no GPU; None asks JAX for the default device's.

    Raises:
      ValueError: a malformed argument, with ``flash_attention``'s own message, or an unknown ``arch``.
      NotImplementedError: implementation="cuda" and no kernel takes the call.
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "query_segment_ids": query_segment_ids,
        "key_value_segment_ids": key_value_segment_ids,
        "sinks": sinks,
    }
    specs = []

    def trace(arrays):
        arguments = check_arguments(
            **arrays,
            scale=scale,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
        )
        specs.append(make_spec(arguments, kv_intervals(arguments.masks), deterministic))

    jax.eval_shape(trace, arrays)  # abstract arrays: shapes and dtypes decide, and nothing is computed
    arch = device_arch() if arch is None else get_target(arch).arch
    choice = choose_implementation(specs[0], implementation, arch)
    return Explanation(specs[0], arch, choice.name, choice.reason)


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be extents such as 2,4096,16,192; got {text!r}") from None


def _window(text: str) -> int | tuple[int | None, int | None]:
    try:
        sides = [None if side == "none" else int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) == 1 and sides[0] is not None:
        return sides[0]
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"must be an int or left,right, each an int or none; got {text!r}")
    return sides[0], sides[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_fa_blackwell.explain",
        description="Says what flash_attention would run for a call, and why. Needs no GPU when --arch is given.",
    )
    shape: dict[str, Any] = {"type": _shape, "metavar": "SHAPE"}
    flag: dict[str, Any] = {"action": "store_true"}
    parser.add_argument("--query", required=True, help="B,T,N,H or T,N,H", **shape)
    parser.add_argument("--key", help="B,S,K,H; default: query's shape with --kv-heads", **shape)
    parser.add_argument("--value", help="B,S,K,Hv; default: key's shape", **shape)
    parser.add_argument("--kv-heads", type=int, metavar="K", help="heads of the default key; default: query's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bias", help="a shape that broadcasts to B,N,T,S; float32", **shape)
    parser.add_argument("--mask", help="a shape that broadcasts to B,N,T,S; bool", **shape)
    parser.add_argument("--scale", type=float)
    parser.add_argument("--causal", dest="is_causal", **flag)
    parser.add_argument("--causal-alignment", choices=["top_left", "bottom_right"], default="top_left")
    parser.add_argument("--window", dest="local_window_size", type=_window, metavar="W", help="W, or LEFT,RIGHT")
    parser.add_argument("--query-seq-lengths", help="as if the lengths of the queries were given", **flag)
    parser.add_argument("--key-value-seq-lengths", help="as if the lengths of the keys were given", **flag)
    parser.add_argument("--segment-ids", help="as if the segment ids of both sides were given", **flag)
    parser.add_argument("--soft-cap", dest="logits_soft_cap", type=float, metavar="C")
    parser.add_argument("--sinks", **flag)
    parser.add_argument("--deterministic", **flag)
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="default: the best available")
    parser.add_argument("--arch", choices=list(TARGETS), help="default: that of this machine's GPU")
    return parser


def _explain_arguments(args: argparse.Namespace) -> Explanation:
    options = vars(args)
    query, dtype, kv_heads = args.query, options.pop("dtype"), options.pop("kv_heads")
    if len(query) not in (3, 4):
        raise ValueError(f"--query must have 3 or 4 extents; got {query}")
    key = args.key or (*query[:-2], kv_heads or query[-2], query[-1])
    if kv_heads is not None and key[-2:-1] != (kv_heads,):
        raise ValueError(f"--kv-heads {kv_heads} contradicts --key {key}")
    batch = query[:-3]

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    lengths, segment_ids = options.pop("query_seq_lengths"), options.pop("segment_ids")
    key_lengths = options.pop("key_value_seq_lengths")
    arrays = {
        "query": struct(query, dtype),
        "key": struct(key, dtype),
        "value": struct(args.value or key, dtype),
        "bias": args.bias and struct(args.bias, "float32"),
        "mask": args.mask and struct(args.mask, "bool"),
        "query_seq_lengths": struct(batch, "int32") if lengths else None,
        "key_value_seq_lengths": struct(batch, "int32") if key_lengths else None,
        "query_segment_ids": struct((*batch, query[-3]), "int32") if segment_ids else None,
        "key_value_segment_ids": struct((*batch, key[-3]), "int32") if segment_ids else None,
        "sinks": struct((query[-2],), "float32") if args.sinks else None,
    }
    return explain(**options | arrays)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; malformed arguments end with status 2, an impossible ``--implementation cuda`` with 1."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        explanation = _explain_arguments(args)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    except NotImplementedError as error:
        parser.exit(1, f"not implemented: {error}\n")
    else:
        print(explanation)


if __name__ == "__main__":
    main()
