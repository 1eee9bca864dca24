"""The backward's plan on Blackwell: which passes of the gradient kernel, their maps, and the launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import forward, launch
from jax_fa_blackwell.plan.account import Account
from jax_fa_blackwell.plan.slices import (
    LOG2_E,
    MAX_SLOTS,
    ROWS,
    SLICE,
    SLICE_BYTES,
    WORK_ENTRY_BYTES,
    mask_scalars,
    round_up,
    slices_of,
    tail_of,
)
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target

HEADER_BYTES = 3072 + SLICE_BYTES  # barriers and column statistics, then the staging slice
OUTPUT_COLUMN = 256
OUTPUT_SLICES = 4
THREADS = 384
LEAST_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Pass:
    """One launch of the gradient kernel.

    Attributes:
      transposed: rows are keys (dK, dV) or queries (dQ).
      value_part, score_part: slices of the value head dim (dV) and of the head dim (dQ or dK) that one item
        accumulates; 0 where that gradient is not computed in this pass.
      parts: items that share 128 rows, each with its scores rebuilt.
      slots: slices in the shared-memory ring.
    """

    spec: AttentionSpec
    target: Target
    transposed: bool
    value_part: int
    score_part: int

    def __post_init__(self):
        """The legality rule: what the kernel needs within the target's memories."""
        columns = max(end for _, _, end in self.tensor_memory_map())
        if columns > self.target.tensor_memory_columns:
            raise ValueError(f"backward pass needs {columns} Tensor Memory columns")
        if self.slots < LEAST_SLOTS:
            raise ValueError(f"backward pass has {self.slots} ring slots and needs {LEAST_SLOTS}")
        if self.value_part and not self.transposed:
            raise ValueError("only a transposed backward pass computes dV")

    @property
    def resident_slices(self) -> int:
        """Slices that stay in shared memory: Q or K; dO or V where dS is computed and they fit, else they stream."""
        scores, values = slices_of(self.spec.head_dim), slices_of(self.spec.value_head_dim)
        fits = scores + values <= self._budget - LEAST_SLOTS
        return scores + (values if self.score_part and fits else 0)

    @property
    def _budget(self) -> int:
        return (self.target.shared_bytes - HEADER_BYTES) // SLICE_BYTES

    @property
    def slots(self) -> int:
        """Slices in the shared-memory ring."""
        return min(self._budget - self.resident_slices, MAX_SLOTS)

    @property
    def parts(self) -> int:
        """Items that share 128 rows."""
        values = -(-slices_of(self.spec.value_head_dim) // self.value_part) if self.value_part else 0
        scores = -(-slices_of(self.spec.head_dim) // self.score_part) if self.score_part else 0
        return max(values, scores)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return HEADER_BYTES + (self.resident_slices + self.slots) * SLICE_BYTES

    @property
    def gemms(self) -> float:
        """Matrix products of T x S x head dim for each part of it: rebuilt scores count each time."""
        H, Hv = self.spec.head_dim, self.spec.value_head_dim
        rebuilt = self.parts * (H + (Hv if self.score_part else 0))
        return (rebuilt + (Hv if self.value_part else 0) + (H if self.score_part else 0)) / ((H + Hv) / 2)

    def account(self) -> Account:
        """Cycles of 128 rows and one block of columns, all parts."""
        H, Hv = round_up(self.spec.head_dim, 16), round_up(self.spec.value_head_dim, 16)
        rebuilt = self.parts * (H + (Hv if self.score_part else 0))
        outputs = (Hv if self.value_part else 0) + (H if self.score_part else 0)
        # Of the five products dQ's pass owns dQ's alone: the others are those of dK and dV.
        ideal = self.spec.head_dim
        if self.transposed:
            ideal = (2 * self.spec.head_dim + self.spec.value_head_dim if self.score_part else 0) + (
                self.spec.value_head_dim if self.value_part else 0
            )
        streamed = 0 if self.resident_slices > slices_of(self.spec.head_dim) or not self.score_part else self.parts * Hv
        return Account(
            self.target, ideal, rebuilt + outputs, self.parts, 2 * rebuilt + outputs, rebuilt + outputs + streamed
        )

    def tensor_memory_map(self) -> list[tuple[str, int, int]]:
        """(name, first column, end column); P and dS lie in their score tiles."""
        first = OUTPUT_COLUMN + self.value_part * SLICE
        out = [("S/P", 0, ROWS), ("dP/dS", ROWS, 2 * ROWS)]
        out += [("dV", OUTPUT_COLUMN, first)] if self.value_part else []
        name = "dK" if self.transposed else "dQ"
        return out + ([(name, first, first + self.score_part * SLICE)] if self.score_part else [])


def supports(spec: AttentionSpec, target: Target) -> str | None:
    """None if the kernel runs the call's backward, else the limit."""
    return forward.supports(spec, target)


def plan_backward(spec: AttentionSpec, target: Target) -> tuple[Pass, ...]:
    """The passes with the fewest products: dQ, then dK and dV together or apart."""
    limit = supports(spec, target)
    if limit is not None:
        raise ValueError(f"no backward plan: {limit}")
    H, Hv = slices_of(spec.head_dim), slices_of(spec.value_head_dim)
    dq = Pass(spec, target, False, 0, min(H, OUTPUT_SLICES))
    apart = (
        Pass(spec, target, True, min(Hv, OUTPUT_SLICES), 0),
        Pass(spec, target, True, 0, min(H, OUTPUT_SLICES)),
    )
    choices: list[tuple[Pass, ...]] = [apart]
    if H + Hv <= OUTPUT_SLICES:
        choices.append((Pass(spec, target, True, Hv, H),))
    return (dq, *min(choices, key=lambda passes: sum(one.gemms for one in passes)))


def launch_backward(passes: tuple[Pass, ...], cubins: Mapping[bool, tuple[str, str, str]]) -> launch.LaunchPlan:
    """The custom call: the passes one after the other.

    Arguments: query, key, value, dO, fp32 LSE [B, N, T], fp32 delta [B, N, T], then for row intervals (low, high,
    blocks) of the queries and of the keys. Results: dQ, dK, dV.

    Args:
      passes: from ``plan_backward``.
      cubins: (kernel name, sha256, symbol) by ``transposed``.
    """
    spec, target = passes[0].spec, passes[0].target
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.query_heads, spec.key_value_heads
    H, Hv = spec.head_dim, spec.value_head_dim
    shapes = {
        "query": (T, N, H),
        "key": (S, K, H),
        "value": (S, K, Hv),
        "grad_out": (T, N, Hv),
        "grad_query": (T, N, H),
        "grad_key": (S, K, H),
        "grad_value": (S, K, Hv),
    }
    operands: dict[str, int] = {}
    sizes: list[int] = []

    def add(name: str, size: int | None = None):
        operands[name] = len(sizes)
        rows, heads, dim = shapes.get(name, (0, 0, 0))
        sizes.append(2 * B * rows * heads * dim if size is None else size)

    for name in ("query", "key", "value", "grad_out"):
        add(name)
    add("lse", 4 * B * N * T)
    add("delta", 4 * B * N * T)
    if spec.mask_form == "rows":
        for side, rows in (("query", T), ("key", S)):
            add(f"{side}_low", 4 * B * rows)
            add(f"{side}_high", 4 * B * rows)
            add(f"{side}_blocks", WORK_ENTRY_BYTES * B * (-(-rows // ROWS)))
    arguments = len(sizes)
    for name in ("grad_query", "grad_key", "grad_value"):
        add(name)

    def tensor_map(name: str) -> launch.TensorMap:
        rows, heads, dim = shapes[name]
        strides = (heads * dim * 2, dim * 2, rows * heads * dim * 2)
        box = (SLICE, ROWS, 1, 1)
        return launch.TensorMap(operands[name], spec.dtype, (dim, rows, heads, B), strides, box, swizzle="128B")

    steps = tuple(_launch(one, *cubins[one.transposed], tensor_map, operands) for one in passes)
    program = launch.Program(target.arch, steps)
    return launch.LaunchPlan("backward", tuple(sizes[:arguments]), tuple(sizes[arguments:]), (program,))


def _launch(one: Pass, kernel: str, sha256: str, symbol: str, tensor_map, operands: dict[str, int]) -> launch.Launch:
    spec = one.spec
    if one.transposed:
        side, other, maps = "key", "query", ("key", "value", "query", "grad_out", "grad_value", "grad_key")
        rows, columns, row_heads, column_heads = (
            spec.key_value_length,
            spec.query_length,
            spec.key_value_heads,
            spec.group_size,
        )
    else:
        side, other, maps = "query", "key", ("query", "grad_out", "key", "value", "grad_query", "grad_query")
        rows, columns, row_heads, column_heads = spec.query_length, spec.key_value_length, spec.query_heads, 1

    number = {"bfloat16": 1, "float16": 0}[spec.dtype]
    common = (1 << 4) | (number << 7) | (number << 10) | ((ROWS >> 4) << 24)
    negate = int(spec.scale < 0) << 13
    scale, cap = abs(spec.scale), 1.0
    if spec.logits_soft_cap is not None:
        scale, cap = spec.logits_soft_cap, scale / spec.logits_soft_cap
    row_groups = -(-rows // ROWS)
    items = row_groups * one.parts * row_heads * spec.batch

    def pointer(name: str) -> launch.Pointer:
        return launch.Pointer(operands.get(name, operands["lse"]))

    scalars = {
        "rows": rows,
        "columns": columns,
        "row_heads": row_heads,
        "column_heads": column_heads,
        "group": spec.group_size,
        "a1_slices": slices_of(spec.head_dim),
        "a1_tail_columns": round_up(tail_of(spec.head_dim), 16),
        "a2_slices": slices_of(spec.value_head_dim),
        "a2_tail_columns": round_up(tail_of(spec.value_head_dim), 16),
        "a2_resident": one.resident_slices - slices_of(spec.head_dim),
        "c1_part": one.value_part,
        "c2_part": one.score_part,
        "parts": one.parts,
        "slots": one.slots,
        **mask_scalars(spec, one.transposed),
        "items": items,
        "row_groups": row_groups,
        "heavy_last": int(not one.transposed),
        "score_instruction": common | negate | ((ROWS >> 3) << 17),
        "gradient_instruction": common | ((ROWS >> 3) << 17),
        "row_instruction": common | (1 << 16),
    }
    values = {
        **{f"{name}_map": tensor_map(of) for name, of in zip(("a1", "a2", "b1", "b2", "c1", "c2"), maps, strict=True)},
        "lse": pointer("lse"),
        "delta": pointer("delta"),
        "low": pointer(f"{side}_low"),
        "high": pointer(f"{side}_high"),
        "blocks": pointer(f"{side}_blocks"),
        "column_low": pointer(f"{other}_low"),
        "column_high": pointer(f"{other}_high"),
        "scale": launch.Float32(scale * LOG2_E),
        "cap": launch.Float32(cap),
        "out_scale": launch.Float32(spec.scale),
        **{name: launch.Int32(value) for name, value in scalars.items()},
    }
    params = abi.bind(registry.KERNELS["backward_sm100"].parameters, values)
    grid = (min(items, one.target.sm_count), 1, 1)
    return launch.Launch(kernel, sha256, symbol, grid, (THREADS, 1, 1), params, shared_bytes=one.shared_bytes)
