"""The forward kernel's plan on Blackwell: tiles, ring, Tensor Memory and shared memory maps, and the launch."""

from __future__ import annotations

import dataclasses

from jax_fa_blackwell.kernels import abi, registry
from jax_fa_blackwell.plan import launch
from jax_fa_blackwell.plan.account import Account
from jax_fa_blackwell.plan.limits import common_limit
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
from jax_fa_blackwell.plan.spec import KERNELS, AttentionSpec
from jax_fa_blackwell.plan.target import Target

HEADER_BYTES = 3072
MAX_DIM = 512
OUTPUT_COLUMN = 256
CHUNK_SLICES = 4
THREADS = 512


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How one call runs.

    Attributes:
      query_tiles: tiles of 128 query rows in flight in a block: 2 in ping-pong, or 1 with two score buffers.
      group: blocks that work as a pair (tcgen05 cta_group::2), a tile each, on the same keys and values; else 1.
      pair_heads: whether the two tiles are two heads of a group on the same rows (else two runs of rows of one head).
      value_chunks: parts of the value head dim, each computed with its scores rebuilt.
      slots: slots of 16 KiB in the shared-memory ring of keys and values.
    """

    spec: AttentionSpec
    target: Target
    query_tiles: int
    group: int
    pair_heads: bool
    value_chunks: int
    slots: int

    def __post_init__(self):
        """The legality rule: what the kernel needs to run without deadlock and within the target's memories."""
        if self.slots < self.least_slots:
            raise ValueError(f"forward plan has {self.slots} ring slots and needs {self.least_slots}")
        columns = max(end for _, _, end in self.tensor_memory_map())
        if columns > self.target.tensor_memory_columns:
            raise ValueError(
                f"forward plan needs {columns} Tensor Memory columns of {self.target.tensor_memory_columns}"
            )
        if self.shared_bytes > self.target.shared_bytes:
            raise ValueError(f"forward plan needs {self.shared_bytes} bytes of shared memory")

    @property
    def item_tiles(self) -> int:
        """Query tiles of a work item."""
        return self.query_tiles * self.group

    @property
    def k_slices(self) -> int:
        """Slices of 64 head dims of queries and keys."""
        return slices_of(self.spec.head_dim)

    @property
    def v_slices(self) -> int:
        """Slices of 64 head dims of values."""
        return slices_of(self.spec.value_head_dim)

    @property
    def chunk_slices(self) -> int:
        """Value slices of a chunk; the last chunk may have fewer."""
        return -(-self.v_slices // self.value_chunks)

    @property
    def v_columns(self) -> int:
        """Value head dims that are computed: as many as an MMA's N can be."""
        return round_up(self.spec.value_head_dim, 16 * self.group)

    @property
    def query_slices(self) -> int:
        """Slices of a query tile's shared memory, which the output is staged in later."""
        return max(self.k_slices, self.chunk_slices)

    @property
    def least_slots(self) -> int:
        """With two tiles a V block and the next K block are held together; with one, slots stream."""
        return self.k_slices + self.chunk_slices if self.query_tiles == 2 else 2

    @property
    def group_rows(self) -> int:
        """Query rows of a work item."""
        return ROWS * (1 if self.pair_heads else self.item_tiles)

    @property
    def row_groups(self) -> int:
        """Work items along the query axis."""
        return -(-self.spec.query_length // self.group_rows)

    @property
    def head_groups(self) -> int:
        """Work items along the head axis."""
        return self.spec.query_heads // (2 if self.pair_heads else 1)

    @property
    def items(self) -> int:
        """Work items in all."""
        return self.row_groups * self.head_groups * self.spec.batch * self.value_chunks

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return HEADER_BYTES + (self.query_tiles * self.query_slices + self.slots) * SLICE_BYTES

    def account(self) -> Account:
        """Cycles of one query tile and one KV block, all value chunks."""
        H, Hv = self.spec.head_dim, self.spec.value_head_dim
        scores, values = self.value_chunks * round_up(H, 16), self.v_columns
        by_hardware = 1 - (1 / self.polynomial_every if self.polynomial_every else 0)
        for_scores, _ = streamed_dims(H, self.group)
        _, for_rows = streamed_dims(Hv, self.group)
        written = (self.value_chunks * for_scores + for_rows) / self.query_tiles  # a block's tiles share K and V
        read = scores + (scores + values) / self.group  # Q, and a block's half of K and V
        return Account(self.target, H + Hv, scores + values, self.value_chunks * by_hardware, read, written)

    @property
    def polynomial_every(self) -> int:
        """Of so many pairs of exponentials one is a polynomial: more where they, not MMAs, would bound the time."""
        if self.query_tiles == 1 or self.target.exp2_results > 16:
            return 0
        dims = round_up(self.spec.head_dim, 16) + round_up(self.spec.value_head_dim, 16)
        is_bound_by_exp2 = 2 * dims / self.target.mma_flops < 1 / self.target.exp2_results
        return 4 if is_bound_by_exp2 else 8

    @property
    def kernel(self) -> str:
        """Name of the kernel's variant."""
        has_cap = self.spec.logits_soft_cap is not None
        return registry.forward_name(self.spec.dtype, self.query_tiles, self.group, has_cap, self.polynomial_every)

    def tensor_memory_map(self) -> list[tuple[str, int, int]]:
        """(name, first column, end column) of each accumulator; P lies in the first half of its score tile."""
        out = [("S/P 0", 0, ROWS), ("S/P 1", ROWS, 2 * ROWS)]
        width = min(self.chunk_slices * SLICE, round_up(self.v_columns, 32))
        for tile in range(self.query_tiles):
            out.append((f"O {tile}", OUTPUT_COLUMN + 128 * tile, OUTPUT_COLUMN + 128 * tile + width))
        return out


def supports(spec: AttentionSpec, target: Target) -> str | None:
    """None if the kernel runs the call's forward, else the limit."""
    if target.tensor_memory_columns == 0:
        return f"{target.arch} has no Tensor Memory"
    return common_limit(spec, MAX_DIM)


KERNELS["sm100"] = supports  # the backward takes what the forward takes


def plan_forward(spec: AttentionSpec, target: Target) -> ForwardPlan:
    """Chooses tiles, chunks and the ring; ValueError where ``supports`` names a limit."""
    limit = supports(spec, target)
    if limit is not None:
        raise ValueError(f"no forward plan: {limit}")
    k_slices, v_slices = slices_of(spec.head_dim), slices_of(spec.value_head_dim)
    value_chunks = -(-v_slices // CHUNK_SLICES)
    budget = (target.shared_bytes - HEADER_BYTES) // SLICE_BYTES

    def attempt(query_tiles: int, group: int) -> ForwardPlan:
        query_slices = max(k_slices, -(-v_slices // value_chunks))
        slots = min(budget - query_tiles * query_slices, MAX_SLOTS)
        pair_heads = query_tiles * group == 2 and spec.group_size % 2 == 0
        return ForwardPlan(spec, target, query_tiles, group, pair_heads, value_chunks, slots)

    if spec.query_length * (2 if spec.group_size % 2 == 0 else 1) <= ROWS:
        return attempt(1, 1)
    # Either has the same items of two tiles, so that work lists (``blocks.py``) do not depend on the target.
    choices = [attempt(1, 2)]
    if v_slices <= 2 and budget - 2 * max(k_slices, v_slices) >= k_slices + v_slices:
        choices.insert(0, attempt(2, 1))  # where equal, one block's two tiles hide each other's softmax
    return min(choices, key=lambda plan: plan.account().bound[1])


def launch_forward(plan: ForwardPlan, kernel: str, sha256: str, symbol: str) -> launch.LaunchPlan:
    """The custom call of a plan; ``kernel`` is ``plan.kernel``, with its cubin's digest and symbol.

    Arguments: query, key, value, then (low, high, blocks, key_low, key_high) for row intervals, then fp32
    sinks [B, N] if any.
    Results: output, fp32 LSE [B, T, N].
    """
    spec = plan.spec
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.query_heads, spec.key_value_heads
    H, Hv = spec.head_dim, spec.value_head_dim
    sizes = [2 * B * T * N * H, 2 * B * S * K * H, 2 * B * S * K * Hv]
    operand = {"query": 0, "key": 1, "value": 2}

    def argument(name: str, size: int):
        operand[name] = len(sizes)
        sizes.append(size)

    if spec.mask_form == "rows":
        argument("low", 4 * B * T)
        argument("high", 4 * B * T)
        argument("blocks", WORK_ENTRY_BYTES * B * plan.row_groups)
        argument("key_low", 4 * B * S)
        argument("key_high", 4 * B * S)
    if spec.has_sinks:
        argument("sinks", 4 * B * N)
    arguments = len(sizes)
    argument("out", 2 * B * T * N * Hv)
    argument("lse", 4 * B * T * N)

    def tensor_map(name: str, rows: int, heads: int, dim: int, box_rows: int = ROWS) -> launch.TensorMap:
        strides = (heads * dim * 2, dim * 2, rows * heads * dim * 2)
        box = (SLICE, box_rows, 1, 1)
        return launch.TensorMap(operand[name], spec.dtype, (dim, rows, heads, B), strides, box, swizzle="128B")

    def pointer(name: str) -> launch.Pointer:
        return launch.Pointer(operand.get(name, operand["lse"]))

    number = {"bfloat16": 1, "float16": 0}[spec.dtype]
    common = (1 << 4) | (number << 7) | (number << 10) | ((plan.group * ROWS >> 4) << 24)
    negate = int(spec.scale < 0) << 13  # so that the greatest score is the greatest logit
    scale, cap = abs(spec.scale), 1.0
    if spec.logits_soft_cap is not None:
        scale, cap = spec.logits_soft_cap, scale / spec.logits_soft_cap
    scalars = {
        "query_length": T,
        "key_value_length": S,
        "heads": N,
        "group": spec.group_size,
        "k_steps": round_up(H, 16) // 16,
        "v_columns": plan.v_columns,
        "v_chunks": plan.value_chunks,
        "chunk_columns": plan.chunk_slices * SLICE,
        "query_slices": plan.query_slices,
        "slots": plan.slots,
        **mask_scalars(spec, transposed=False),
        "items": plan.items,
        "row_groups": plan.row_groups,
        "head_groups": plan.head_groups,
        "group_rows": plan.group_rows,
        "row_step": 0 if plan.pair_heads else ROWS,
        "head_step": int(plan.pair_heads),
        "has_sinks": int(spec.has_sinks),
        "score_instruction": common | negate | ((ROWS >> 3) << 17),
        "value_instruction": common | (1 << 16),
    }
    values = {
        "query_map": tensor_map("query", T, N, H),
        "key_map": tensor_map("key", S, K, H, ROWS // plan.group),
        "value_map": tensor_map("value", S, K, Hv, ROWS // plan.group),
        "out_map": tensor_map("out", T, N, Hv),
        **{name: pointer(name) for name in ("lse", "low", "high", "blocks", "key_low", "key_high", "sinks")},
        "scale": launch.Float32(scale * LOG2_E),
        "cap": launch.Float32(cap),
        **{name: launch.Int32(value) for name, value in scalars.items()},
    }
    params = abi.bind(registry.KERNELS["forward_sm100"].parameters, values)
    step = launch.Launch(
        kernel,
        sha256,
        symbol,
        (plan.group * min(plan.items, plan.target.sm_count // plan.group), 1, 1),
        (THREADS, 1, 1),
        params,
        cluster=(plan.group, 1, 1),
        shared_bytes=plan.shared_bytes,
    )
    program = launch.Program(plan.target.arch, (step,))
    return launch.LaunchPlan("forward", tuple(sizes[:arguments]), tuple(sizes[arguments:]), (program,))
