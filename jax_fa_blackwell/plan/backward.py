"""The backward's plan on Blackwell: which passes of the gradient kernel, their maps, and the launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
    streamed_dims,
)
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target

HEADER_BYTES = 3072 + SLICE_BYTES  # barriers and column statistics, then the staging slice
OUTPUT_SLICES = {128: 4, 64: 6}  # of 64 head dims that fit in Tensor Memory beside S and dP, by columns
FORMS = ((False, 1, 128), (False, 2, 128), (True, 1, 128), (True, 2, 128), (True, 2, 64))
"""(transposed, group, columns) of the kernel's variants."""
THREADS = 384
LEAST_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class Pass:
    """One launch of the gradient kernel.

    Attributes:
      transposed: rows are keys (dK, dV) or queries (dQ).
      group: blocks that work as a pair (tcgen05 cta_group::2), 128 rows each, on the same columns; else 1.
      columns: columns of a block of scores: 128, or 64, so that Tensor Memory has room for larger outputs.
      value_part, score_part: slices of the value head dim (dV) and of the head dim (dQ or dK) that one item
        accumulates; 0 where that gradient is not computed in this pass.
      parts: items that share the same rows, each with its scores rebuilt.
      slots: slots in the shared-memory ring, each 64 head dims of a block of columns (in a pair half of 128).
    """

    spec: AttentionSpec
    target: Target
    transposed: bool
    group: int
    value_part: int
    score_part: int
    columns: int = 128

    def __post_init__(self):
        """The legality rule: what the kernel needs within the target's memories."""
        if (self.transposed, self.group, self.columns) not in FORMS:
            raise ValueError(f"no kernel for a backward pass of {self.columns} columns in a group of {self.group}")
        columns = max(end for _, _, end in self.tensor_memory_map())
        if columns > self.target.tensor_memory_columns:
            raise ValueError(f"backward pass needs {columns} Tensor Memory columns")
        if self.slots < self.least_slots:
            raise ValueError(f"backward pass has {self.slots} ring slots and needs {self.least_slots}")
        if self.value_part and not self.transposed:
            raise ValueError("only a transposed backward pass computes dV")

    @property
    def least_slots(self) -> int:
        """With fewer the ring would deadlock: what is multiplied together, or else two."""
        return self.group + 1 if self.streams_gradient else LEAST_SLOTS

    @property
    def rows(self) -> int:
        """Queries, or keys in a transposed pass."""
        return self.spec.key_value_length if self.transposed else self.spec.query_length

    @property
    def group_rows(self) -> int:
        """Rows of an item."""
        return ROWS * self.group

    @property
    def row_groups(self) -> int:
        """Items along the rows."""
        return -(-self.rows // self.group_rows)

    @property
    def streams_gradient(self) -> bool:
        """Whether dO or V of the rows does not fit beside Q or K, so that it goes through the ring."""
        scores, values = slices_of(self.spec.head_dim), slices_of(self.spec.value_head_dim)
        return self.score_part > 0 and (scores + values + LEAST_SLOTS) * SLICE_BYTES > self._budget

    @property
    def resident_slices(self) -> int:
        """Slices that stay in shared memory: Q or K; dO or V where dS is computed, unless they stream."""
        scores, values = slices_of(self.spec.head_dim), slices_of(self.spec.value_head_dim)
        return scores + (values if self.score_part and not self.streams_gradient else 0)

    @property
    def _budget(self) -> int:
        return self.target.shared_bytes - HEADER_BYTES

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.columns * SLICE * 2

    @property
    def slots(self) -> int:
        """Slots in the shared-memory ring."""
        return min((self._budget - self.resident_slices * SLICE_BYTES) // self.slot_bytes, MAX_SLOTS)

    @property
    def parts(self) -> int:
        """Items that share the same rows."""
        values = -(-slices_of(self.spec.value_head_dim) // self.value_part) if self.value_part else 0
        scores = -(-slices_of(self.spec.head_dim) // self.score_part) if self.score_part else 0
        return max(values, scores)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return HEADER_BYTES + self.resident_slices * SLICE_BYTES + self.slots * self.slot_bytes

    @property
    def gemms(self) -> float:
        """Matrix products of T x S x head dim for each part of it: rebuilt scores count each time."""
        H, Hv = self.spec.head_dim, self.spec.value_head_dim
        rebuilt = self.parts * (H + (Hv if self.score_part else 0))
        return (rebuilt + (Hv if self.value_part else 0) + (H if self.score_part else 0)) / ((H + Hv) / 2)

    def account(self) -> Account:
        """Cycles of 128 rows and 128 columns, all parts."""
        H, Hv = round_up(self.spec.head_dim, 16), round_up(self.spec.value_head_dim, 16)
        rebuilt = self.parts * (H + (Hv if self.score_part else 0))
        outputs = (self._columns(Hv) if self.value_part else 0) + (self._columns(H) if self.score_part else 0)
        # Of the five products dQ's pass owns dQ's alone: the others are those of dK and dV.
        ideal = self.spec.head_dim
        if self.transposed:
            ideal = (2 * self.spec.head_dim + self.spec.value_head_dim if self.score_part else 0) + (
                self.spec.value_head_dim if self.value_part else 0
            )
        # The rows' operands are read once a block of columns, those of the columns by halves in a pair.
        read = rebuilt * ROWS / self.columns + (rebuilt + outputs) / self.group
        (key_scores, key_rows), (value_scores, value_rows) = (streamed_dims(dim, self.group) for dim in (H, Hv))
        written = self.parts * (key_scores + (value_scores if self.score_part else 0))
        written += (value_rows if self.value_part else 0) + (key_rows if self.score_part else 0)
        if self.streams_gradient:
            written += self.parts * slices_of(Hv) * SLICE
        return Account(self.target, ideal, rebuilt + outputs, self.parts, read, written)

    def _columns(self, dim: int) -> int:
        """Head dims of an output that are computed: as many as an MMA's N can be."""
        return round_up(dim, 16 * self.group)

    def cost(self) -> float:
        """Cycles by which ways to run the same pass are compared; the same on every Blackwell target.

        The exponentials, whose rate differs between them, are as many either way.
        """
        cycles = self.account().cycles
        return max(cycles["MMA"], cycles["shared memory"]) * self.row_groups * self.group

    @property
    def kernel(self) -> str:
        """Name of the kernel's variant."""
        has_cap = self.spec.logits_soft_cap is not None
        return registry.backward_name(self.spec.dtype, self.transposed, self.group, self.columns, has_cap)

    def tensor_memory_map(self) -> list[tuple[str, int, int]]:
        """(name, first column, end column); P and dS lie in their score tiles."""
        outputs = 2 * self.columns
        first = outputs + self.value_part * SLICE
        out = [("S/P", 0, self.columns), ("dP/dS", self.columns, outputs)]
        out += [("dV", outputs, first)] if self.value_part else []
        name = "dK" if self.transposed else "dQ"
        return out + ([(name, first, first + self.score_part * SLICE)] if self.score_part else [])


def supports(spec: AttentionSpec, target: Target) -> str | None:
    """None if the kernel runs the call's backward, else the limit."""
    return forward.supports(spec, target)


def plan_backward(spec: AttentionSpec, target: Target) -> tuple[Pass, ...]:
    """The passes with the fewest cycles: dQ, then dK and dV together or apart, by pairs of blocks where that pays."""
    limit = supports(spec, target)
    if limit is not None:
        raise ValueError(f"no backward plan: {limit}")
    H, Hv = slices_of(spec.head_dim), slices_of(spec.value_head_dim)

    def cheapest(transposed: bool, value_part: int, score_part: int) -> Pass:
        alone = Pass(spec, target, transposed, 1, value_part, score_part)
        if alone.rows <= ROWS:
            return alone
        return min(alone, dataclasses.replace(alone, group=2), key=Pass.cost)

    most = OUTPUT_SLICES[ROWS]
    choices: list[tuple[Pass, ...]] = []
    if H + Hv <= most:
        choices.append((cheapest(True, Hv, H),))
    elif H + Hv <= OUTPUT_SLICES[64] and spec.key_value_length > ROWS:
        choices.append((Pass(spec, target, True, 2, Hv, H, columns=64),))
    choices.append((cheapest(True, min(Hv, most), 0), cheapest(True, 0, min(H, most))))
    dq = cheapest(False, 0, min(H, most))
    return (dq, *min(choices, key=lambda passes: sum(one.cost() for one in passes)))


def work_lists(passes: tuple[Pass, ...], transposed: bool) -> list[int]:
    """What lists of work (``blocks.py``) the passes of one direction need: the rows of a group, ascending."""
    return sorted({one.group_rows for one in passes if one.transposed == transposed})


def launch_backward(passes: tuple[Pass, ...], find: Callable[[str], tuple[str, str, str]]) -> launch.LaunchPlan:
    """The custom call: the passes one after the other.

    Arguments: query, key, value, dO, fp32 LSE [B, N, T], fp32 delta [B, N, T], then for row intervals of the
    queries and of the keys: low, high, and the ``work_lists``. Results: dQ, dK, dV.

    Args:
      passes: from ``plan_backward``.
      find: from ``Pass.kernel`` to (kernel name, sha256, symbol) of its cubin.
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
            for group_rows in work_lists(passes, side == "key"):
                add(f"{side}_blocks_{group_rows}", WORK_ENTRY_BYTES * B * (-(-rows // group_rows)))
    arguments = len(sizes)
    for name in ("grad_query", "grad_key", "grad_value"):
        add(name)

    def tensor_map(name: str, box_rows: int) -> launch.TensorMap:
        rows, heads, dim = shapes[name]
        strides = (heads * dim * 2, dim * 2, rows * heads * dim * 2)
        box = (SLICE, box_rows, 1, 1)
        return launch.TensorMap(operands[name], spec.dtype, (dim, rows, heads, B), strides, box, swizzle="128B")

    steps = tuple(_launch(one, *find(one.kernel), tensor_map, operands) for one in passes)
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
    common = (1 << 4) | (number << 7) | (number << 10) | ((one.group_rows >> 4) << 24)
    negate = int(spec.scale < 0) << 13
    scale, cap = abs(spec.scale), 1.0
    if spec.logits_soft_cap is not None:
        scale, cap = spec.logits_soft_cap, scale / spec.logits_soft_cap
    items = one.row_groups * one.parts * row_heads * spec.batch
    H, Hv = spec.head_dim, spec.value_head_dim
    streamed_rows = one.columns // one.group
    box_rows = (ROWS, ROWS, streamed_rows, streamed_rows, ROWS, ROWS)

    def pointer(name: str) -> launch.Pointer:
        return launch.Pointer(operands.get(name, operands["lse"]))

    scalars = {
        "rows": rows,
        "columns": columns,
        "row_heads": row_heads,
        "column_heads": column_heads,
        "group": spec.group_size,
        "a1_steps": round_up(H, 16) // 16,
        "a1_columns": round_up(H, 16 * one.group),
        "a2_steps": round_up(Hv, 16) // 16,
        "a2_columns": round_up(Hv, 16 * one.group),
        "a2_resident": one.resident_slices - slices_of(H),
        "c1_part": one.value_part * SLICE,
        "c2_part": one.score_part * SLICE,
        "parts": one.parts,
        "slots": one.slots,
        **mask_scalars(spec, one.transposed),
        "items": items,
        "row_groups": one.row_groups,
        "heavy_last": int(not one.transposed),
        "score_instruction": common | negate | ((one.columns >> 3) << 17),
        "gradient_instruction": common | ((one.columns >> 3) << 17),
        "row_instruction": common | (1 << 16),
    }
    values = {
        **{
            f"{name}_map": tensor_map(of, box)
            for name, of, box in zip(("a1", "a2", "b1", "b2", "c1", "c2"), maps, box_rows, strict=True)
        },
        "lse": pointer("lse"),
        "delta": pointer("delta"),
        "low": pointer(f"{side}_low"),
        "high": pointer(f"{side}_high"),
        "blocks": pointer(f"{side}_blocks_{one.group_rows}"),
        "column_low": pointer(f"{other}_low"),
        "column_high": pointer(f"{other}_high"),
        "scale": launch.Float32(scale * LOG2_E),
        "cap": launch.Float32(cap),
        "out_scale": launch.Float32(spec.scale),
        **{name: launch.Int32(value) for name, value in scalars.items()},
    }
    params = abi.bind(registry.KERNELS["backward_sm100"].parameters, values)
    return launch.Launch(
        kernel,
        sha256,
        symbol,
        (one.group * min(items, one.target.sm_count // one.group), 1, 1),
        (THREADS, 1, 1),
        params,
        cluster=(one.group, 1, 1),
        shared_bytes=one.shared_bytes,
    )
