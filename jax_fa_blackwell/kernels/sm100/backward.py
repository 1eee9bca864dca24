"""Gradients of attention for sm_100a and sm_103a: dQ, or dK and dV; no atomics, the same bits on every run.

One kernel serves both directions. Its rows are the queries (for dQ) or, transposed, the keys (for dK and dV); its
columns are the other of the two. A work item keeps the operands of 128 rows resident and streams those of the columns:

    S  = A1 B1^T     A1, B1 = Q, K     transposed: K, Q
    dP = A2 B2^T     A2, B2 = dO, V    transposed: V, dO
    P  = exp(scale S - LSE),  dS = P o (dP - delta)
    C1 += P B2       dV                transposed only
    C2 += dS B1      dQ                transposed: dK

so P and dS are never turned round: they are the left operands, in Tensor Memory, of the products that follow. LSE and
delta belong to queries: one number a row, or transposed one a column, read from shared memory. Heads of a group that
share keys are columns of one item, so dK and dV are summed over the group in fp32. Output head dims may be computed in
parts (``plan/backward.py``), each with its scores rebuilt. Algorithm: FlashAttention-2, backward, split in two kernels.
With ``group`` 2 two blocks work as a pair on an item of 256 rows, 128 each, and share its columns (``slices.py``).

A block has 128 columns, or 64 where dK and dV of larger head dims then fit in Tensor Memory together.

Roles: compute warps 0-7, one thread a row and half of the columns; MMA 8; load 9; clean 10, where columns that no row
sees may hold NaN (``slices.clean``); 11 idle.

Barriers, k the number of times the role has waited on it (parity k mod 2 unless stated). In a pair each block has them
all; the MMA warp is the leader's, its commits arrive at both blocks, and what it waits on counts the arrivals (+) and
bytes of both:

    barrier      count  arrives                                 waits      phase
    a_full       1+tx   load, expecting A1 and A2               MMA        an item with columns
    a_empty      1      tcgen05.commit after the item           load       such an item; parity (k+1) mod 2
    s_full       1      tcgen05.commit after S                  compute    a block
    p_full       8+     each compute warp: S read, P stored     MMA        a block
    dp_full      1      tcgen05.commit after dP                 compute    a block
    ds_full      8+     each compute warp: dP read, dS stored   MMA        a block
    c_full       1      tcgen05.commit after the item           compute    an item with columns
    c_empty      8+     each compute warp: C1 and C2 read       MMA        such an item; parity (k+1) mod 2
    ring_full    1+tx   load, expecting one slot                MMA/clean  a use of the slot
    cleaned      1+     clean, unseen rows zeroed               MMA        a use of the slot, where cleaned
    ring_empty   1      tcgen05.commit after its only reader    load       a use of the slot; parity (k+1) mod 2
    bar 1        256    compute warps: column statistics        same       a block (transposed)
                        written; output staged; store read                 twice a slice of output

Order of ring slots, the same for load and MMA: B1 (for S of block 0), B2 (for dP of block 0), then for each block:
B2 for C1, B1 for the next S, B1 for C2, B2 for the next dP. Where A2 does not fit in shared memory its slices go
through the ring too, before the slot of B2 that they are multiplied with. Every slot is used once and released at
once, so that the ring cannot deadlock with two slots or more; with three in a pair where A2 streams, as two slices of
A2 are multiplied with one slot of B2.
"""

# The DSL is found through a .pth file and rewrites what it decorates: neither is visible to a type checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda.tensor_map import TensorMap

from jax_fa_blackwell.kernels.common import intervals, ptx, soft_cap
from jax_fa_blackwell.kernels.common.params import Params, integer_names
from jax_fa_blackwell.kernels.sm100 import slices
from jax_fa_blackwell.plan.slices import LOG2_E, ROWS, SLICE, SLICE_BYTES

TENSOR_MEMORY_COLUMNS = 512
THREADS, COMPUTE_THREADS = 384, 256
MMA_WARP, LOAD_WARP, CLEAN_WARP = 8, 9, 10

# Byte offsets in shared memory.
BARRIERS = 0
TMEM_ADDRESS, NOTES = 512, 544
STATISTICS = 1024  # two buffers of 128 LSE, negated, then 128 delta
STATISTIC_BYTES = 4 * ROWS
STAGING = 3072
RESIDENT = STAGING + SLICE_BYTES


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """What is fixed when the kernel is compiled; everything else is a run-time parameter."""

    dtype: str
    transposed: bool
    soft_cap: bool = False
    group: int = 1  # blocks that work together
    columns: int = 128  # of a block

    @property
    def half(self) -> int:
        """Columns of a block that a compute warp handles."""
        return self.columns // 2

    @property
    def gradient_column(self) -> int:
        """First column of dP and dS in Tensor Memory; S and P begin at 0."""
        return self.columns

    @property
    def output_column(self) -> int:
        """First column of C1, which C2 follows, in Tensor Memory."""
        return 2 * self.columns

    @property
    def weight_columns(self) -> list[int]:
        """Where each 16 columns of P or dS lie in their tile.

        They take the first half of each half, so that each compute warp overwrites only what it has read.
        """
        steps = range(self.half // 16)
        return [first + 8 * step for first in (0, self.half) for step in steps]

    @property
    def packed(self) -> str:
        """The PTX name of the 16-bit type."""
        return {"bfloat16": "bf16", "float16": "f16"}[self.dtype]


class Smem:
    """Addresses in shared memory from its base."""

    def __init__(self, base: Int32, p, config: BackwardConfig, rank):
        names = ("a_full", "a_empty", "s_full", "p_full", "dp_full", "ds_full", "c_full", "c_empty")
        for index, name in enumerate(names):
            setattr(self, name, base + BARRIERS + 8 * index)
        ring_barriers = base + BARRIERS + 8 * len(names)
        self.tmem_address = base + TMEM_ADDRESS
        self.statistics = base + STATISTICS
        self.staging = base + STAGING
        self.a1 = base + RESIDENT
        self.a2 = self.a1 + slices.slices_of(p.a1_steps) * SLICE_BYTES
        data = self.a2 + p.a2_resident * SLICE_BYTES
        self.ring = slices.Ring(
            ring_barriers, base + NOTES, data, p.slots, p.cleaned, rank, rows=config.columns, group=config.group
        )
        # What the MMA warp waits for other warps on: the leader's. One address for all of them saves registers.
        leader = slices.of_leader(base, config.group)
        self.p_full_mma, self.ds_full_mma, self.c_empty_mma = (
            leader + BARRIERS + 8 * names.index(name) for name in ("p_full", "ds_full", "c_empty")
        )


@cute.jit
def part(first, limit, most):
    """Columns of an output part that begins at ``first``: at most ``most``, none beyond ``limit``."""
    return cutlass.max(cutlass.min(limit - first, most), 0)


class BackwardKernel:
    """One persistent block of 12 warps; the module's docstring has roles and barriers."""

    def __init__(self, config: BackwardConfig):
        self.config = config

    @cute.jit
    def work(self, p, blocks: cute.Pointer, item: Int32):
        """(batch, head, first row, part, first column block, count of column blocks) of an item, heavy ones first."""
        per_entry = p.parts * p.row_heads
        entry, rest = item // per_entry, item % per_entry
        batches = p.items // (per_entry * p.row_groups)
        row_group, batch = entry // batches, entry % batches
        if p.heavy_last != 0:
            row_group = p.row_groups - 1 - row_group
        columns = self.config.columns
        first_block, end_block = Int32(0), Int32(0)
        if p.rows_form != 0:
            batch, row_group, first_block, end_block = intervals.listed_work(blocks, entry)
            first_block, end_block = first_block * (ROWS // columns), end_block * (ROWS // columns)
        row = row_group * (ROWS * self.config.group)
        if p.rows_form == 0:
            last = cutlass.min(row + ROWS * self.config.group, p.rows) - 1
            first_block = cutlass.max(row + p.mask_low, 0) // columns
            end_block = (cutlass.min(last + p.mask_high, p.columns) + columns - 1) // columns
        index, head = rest % p.parts, rest // p.parts
        return batch, head, row, index, first_block, cutlass.max(end_block - first_block, 0)

    def column_head(self, p, head):
        """The streamed operands' first head of an item."""
        return head * p.group if self.config.transposed else head // p.group

    def next_block(self, column, column_head, first_column, block_count):
        """(first column, head) of the block after this one: the next of the head, else the first of the next head."""
        columns = self.config.columns
        column = column + columns
        if not self.config.transposed:
            return column, column_head
        wrapped = Int32(column == first_column + block_count * columns)
        return column - wrapped * (block_count * columns), column_head + wrapped

    @cute.kernel
    def kernel(
        self,
        a1_map: GridConstant[TensorMap],
        a2_map: GridConstant[TensorMap],
        b1_map: GridConstant[TensorMap],
        b2_map: GridConstant[TensorMap],
        c1_map: GridConstant[TensorMap],
        c2_map: GridConstant[TensorMap],
        lse: cute.Pointer,
        delta: cute.Pointer,
        low: cute.Pointer,
        high: cute.Pointer,
        blocks: cute.Pointer,
        column_low: cute.Pointer,
        column_high: cute.Pointer,
        scale: Float32,
        cap: Float32,
        out_scale: Float32,
        scalars: tuple,
    ):
        """The entry: sets up barriers and Tensor Memory, then each warp takes its role."""
        p = Params("backward_sm100", scalars, scale=scale, cap=cap, out_scale=out_scale)
        group = self.config.group
        rank = cute.arch.block_idx_in_cluster() if group == 2 else Int32(0)
        smem = Smem(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()), p, self.config, rank)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for barrier in (smem.a_full, smem.a_empty, smem.s_full, smem.dp_full, smem.c_full):
                ptx.mbarrier_init(barrier, 1)
            for barrier in (smem.p_full, smem.ds_full, smem.c_empty):
                ptx.mbarrier_init(barrier, 8 * group)
            slices.init_barriers(smem.ring)
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARP:
            ptx.tcgen05_alloc(smem.tmem_address, TENSOR_MEMORY_COLUMNS, group)
            ptx.tcgen05_relinquish_alloc_permit(group)
        ptx.tcgen05_fence_before()
        slices.sync_blocks(group)
        ptx.tcgen05_fence_after()
        tmem = ptx.ld_shared_b32(smem.tmem_address)

        if warp < MMA_WARP:
            cute.arch.setmaxregister_increase(208)
            c_maps = (c1_map.get_ptr().toint(), c2_map.get_ptr().toint())
            self.compute(p, smem, tmem, blocks, low, high, lse, delta, *c_maps)
        else:
            cute.arch.setmaxregister_decrease(72)
            if warp == MMA_WARP and rank == 0:
                self.mma(p, smem, tmem, blocks)
            if warp == LOAD_WARP:
                with cute.arch.elect_one():
                    maps = [m.get_ptr().toint() for m in (a1_map, a2_map, b1_map, b2_map)]
                    self.load(p, smem, blocks, *maps)
            if warp == CLEAN_WARP and p.cleaned != 0:
                slices.clean(smem.ring, p, p.columns, column_low, column_high)

        slices.sync_blocks(group)
        if warp == MMA_WARP:
            ptx.tcgen05_dealloc(tmem, TENSOR_MEMORY_COLUMNS, group)

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, blocks: cute.Pointer, a1_map: Int64, a2_map: Int64, b1_map: Int64, b2_map: Int64):
        """Load warp, one thread: the resident operands, then slices in the order of the module's docstring."""
        ring = smem.ring
        slot, phase, a_phase = Int32(0), Int32(0), Int32(1)
        group, rank, a1_slices = self.config.group, ring.rank, slices.slices_of(p.a1_steps)
        first_item, items = slices.first_item(group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            batch, head, row, index, first_block, block_count = self.work(p, blocks, item)
            row = row + rank * ROWS
            first1, first2 = index * p.c1_part, index * p.c2_part
            columns1, columns2 = part(first1, p.a2_columns, p.c1_part), part(first2, p.a1_columns, p.c2_part)
            count = block_count * p.column_heads
            first_column = first_block * self.config.columns
            at, of = first_column, self.column_head(p, head)
            if count > 0:
                ptx.mbarrier_wait(smem.a_empty, a_phase)
                a_phase = a_phase ^ 1
                barrier = slices.expect(smem.a_full, (a1_slices + p.a2_resident) * SLICE_BYTES, group, rank)
                slices.load_resident(smem.a1, a1_map, a1_slices, row, head, batch, barrier, group)
                slices.load_resident(smem.a2, a2_map, p.a2_resident, row, head, batch, barrier, group)
                slot, phase = slices.load_for_scores(ring, slot, phase, b1_map, p.a1_steps, at, of, batch)
                slot, phase = self.load_gradients(p, ring, slot, phase, a2_map, b2_map, row, head, at, of, batch)
            for i in cutlass.range(count, unroll=1):
                next_at, next_of = self.next_block(at, of, first_column, block_count)
                more = i + 1 < count
                slot, phase = slices.load_for_rows(ring, slot, phase, b2_map, first1, columns1, at, of, batch)
                if more:
                    slot, phase = slices.load_for_scores(ring, slot, phase, b1_map, p.a1_steps, next_at, next_of, batch)
                slot, phase = slices.load_for_rows(ring, slot, phase, b1_map, first2, columns2, at, of, batch)
                if more:
                    slot, phase = self.load_gradients(
                        p, ring, slot, phase, a2_map, b2_map, row, head, next_at, next_of, batch
                    )
                at, of = next_at, next_of
        slices.stop_cleaning(ring, slot, phase)

    @cute.jit
    def load_gradients(self, p, ring, slot, phase, a2_map: Int64, b2_map: Int64, row, head, at, of, batch):
        """Slots for dP: those of B2, and where A2 is not resident each after its slice of A2."""
        if p.c2_part > 0:
            if p.a2_resident > 0:
                slot, phase = slices.load_for_scores(ring, slot, phase, b2_map, p.a2_steps, at, of, batch)
            else:
                for index in cutlass.range(slices.slots_of(ring, p.a2_steps * 16), unroll=1):
                    for part in cutlass.range_constexpr(ring.group):
                        where = (index * ring.width + part * SLICE, row)
                        slot, phase = slices.load_slot(
                            ring, slot, phase, a2_map, where, None, True, head, batch, Int32(slices.SCORES)
                        )
                    slot, phase = slices.load_scores_slot(ring, slot, phase, b2_map, index, p.a2_steps, at, of, batch)
        return slot, phase

    # --- MMA ----------------------------------------------------------------------------------------------------

    @cute.jit
    def mma(self, p, smem, tmem: Int32, blocks: cute.Pointer):
        """MMA warp: while compute works on P or dS of a block, the products that do not need it."""
        ring = smem.ring
        slot, phase, a_phase, block_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        group, scope = self.config.group, ring.scope
        weight_columns, c1 = self.config.weight_columns, tmem + self.config.output_column
        c2 = c1 + p.c1_part
        first_item, items = slices.first_item(group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            _, _, _, index, _, block_count = self.work(p, blocks, item)
            first1, first2 = index * p.c1_part, index * p.c2_part
            columns1, columns2 = part(first1, p.a2_columns, p.c1_part), part(first2, p.a1_columns, p.c2_part)
            count = block_count * p.column_heads
            if count > 0:
                ptx.mbarrier_wait(smem.a_full, a_phase, scope)
                slot, phase = self.scores(p, smem, slot, phase, tmem)
                slot, phase = self.gradients(p, smem, slot, phase, tmem)
                ptx.mbarrier_wait(smem.c_empty, a_phase ^ 1, scope)
                a_phase = a_phase ^ 1
            for i in cutlass.range(count, unroll=1):
                ptx.mbarrier_wait(smem.p_full, block_phase, scope)
                ptx.tcgen05_fence_after()
                slot, phase = slices.multiply_rows(
                    ring, slot, phase, c1, tmem, weight_columns, columns1, p.row_instruction, i > 0, True
                )
                if i + 1 < count:
                    slot, phase = self.scores(p, smem, slot, phase, tmem)
                if p.c2_part > 0:
                    ptx.mbarrier_wait(smem.ds_full, block_phase, scope)
                    ptx.tcgen05_fence_after()
                    weights = tmem + self.config.gradient_column
                    slot, phase = slices.multiply_rows(
                        ring, slot, phase, c2, weights, weight_columns, columns2, p.row_instruction, i > 0, True
                    )
                    if i + 1 < count:
                        slot, phase = self.gradients(p, smem, slot, phase, tmem)
                block_phase = block_phase ^ 1
            if count > 0:
                with cute.arch.elect_one():
                    ptx.tcgen05_commit(smem.a_empty, group)
                    ptx.tcgen05_commit(smem.c_full, group)

    @cute.jit
    def scores(self, p, smem, slot, phase, tmem):
        """S = A1 B1^T."""
        slot, phase = slices.multiply_dims(
            smem.ring,
            slot,
            phase,
            tmem,
            smem.a1,
            p.a1_steps,
            p.score_instruction,
            True,
        )
        with cute.arch.elect_one():
            ptx.tcgen05_commit(smem.s_full, self.config.group)
        return slot, phase

    @cute.jit
    def gradients(self, p, smem, slot, phase, tmem):
        """Gradient of P, A2 B2^T, where that of S is wanted."""
        if p.c2_part > 0:
            ring, accumulator = smem.ring, tmem + self.config.gradient_column
            steps, instruction = p.a2_steps, p.gradient_instruction
            if p.a2_resident > 0:
                slot, phase = slices.multiply_dims(ring, slot, phase, accumulator, smem.a2, steps, instruction, True)
            else:
                slot, phase = slices.multiply_streamed_dims(ring, slot, phase, accumulator, steps, instruction)
            with cute.arch.elect_one():
                ptx.tcgen05_commit(smem.dp_full, self.config.group)
        return slot, phase

    # --- compute ------------------------------------------------------------------------------------------------

    @cute.jit
    def compute(
        self,
        p,
        smem,
        tmem,
        blocks: cute.Pointer,
        low: cute.Pointer,
        high: cute.Pointer,
        lse: cute.Pointer,
        delta: cute.Pointer,
        c1_map: Int64,
        c2_map: Int64,
    ):
        """Compute warps, one thread a row and half of the columns: P and dS of each block, then the outputs."""
        transposed, columns, columns_half = self.config.transposed, self.config.columns, self.config.half
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        half = warp // 4
        lane_row = (warp % 4) * 32 + cute.arch.lane_idx()
        lanes = (warp % 4) << 21
        block_phase, item_phase = Int32(0), Int32(0)
        first_item, items = slices.first_item(self.config.group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            batch, head, first_row, index, first_block, block_count = self.work(p, blocks, item)
            first_row = first_row + smem.ring.rank * ROWS
            row = first_row + lane_row
            first, end = intervals.interval(p, p.rows, p.columns, batch, row, low, high)
            count = block_count * p.column_heads
            shift, row_delta, incoming = Float32(0.0), Float32(0.0), Float32(0.0)
            first_column, column_head = first_block * columns, self.column_head(p, head)
            column = first_column
            if cutlass.const_expr(transposed):
                if count > 0:
                    incoming = self.column_statistic(p, lse, delta, batch, column_head, column)
            else:
                if row < p.rows:
                    at = (batch * p.row_heads + head) * p.rows + row
                    shift = minus_lse(cute.make_tensor(lse, cute.make_layout(1 << 30))[at])
                    row_delta = cute.make_tensor(delta, cute.make_layout(1 << 30))[at]
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            for i in cutlass.range(count, unroll=1):
                statistics = smem.statistics + block_phase * (2 * STATISTIC_BYTES)
                next_column, column_head = self.next_block(column, column_head, first_column, block_count)
                if cutlass.const_expr(transposed):
                    ptx.st_shared_b32(statistics + thread * 4, incoming)
                    cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)
                    if i + 1 < count:
                        incoming = self.column_statistic(p, lse, delta, batch, column_head, next_column)
                    cute.arch.sync_warp()
                whole = cute.arch.vote_all_sync((first <= column) & (column + columns <= end))
                visible = (first - column - half * columns_half, end - column - half * columns_half)
                address = tmem + lanes + half * columns_half
                statistics = statistics + half * columns_half * 4

                ptx.mbarrier_wait(smem.s_full, block_phase)
                ptx.tcgen05_fence_after()
                s = cute.make_rmem_tensor(cute.make_layout(columns_half), Float32)
                for place, value in enumerate(ptx.tcgen05_ld(address, columns_half)):
                    s[place] = value
                weights = cute.make_rmem_tensor(cute.make_layout(columns_half), Float32)
                self.probabilities(p, s, weights, statistics, shift)
                if whole == False:  # noqa: E712
                    slices.mask(weights, columns_half, visible[0], visible[1], 0.0)
                if p.c1_part > 0:
                    self.store_weights(address, weights)
                self.arrive(smem.p_full_mma)

                if p.c2_part > 0:
                    ptx.mbarrier_wait(smem.dp_full, block_phase)
                    ptx.tcgen05_fence_after()
                    self.score_gradients(address + self.config.gradient_column, s, weights, statistics, row_delta)
                    if whole == False:  # noqa: E712
                        slices.mask(weights, columns_half, visible[0], visible[1], 0.0)
                    self.store_weights(address + self.config.gradient_column, weights)
                    self.arrive(smem.ds_full_mma)
                column, block_phase = next_column, block_phase ^ 1

            if count > 0:
                ptx.mbarrier_wait(smem.c_full, item_phase)
                ptx.tcgen05_fence_after()
            first1, first2 = index * p.c1_part, index * p.c2_part
            columns1, columns2 = part(first1, p.a2_columns, p.c1_part), part(first2, p.a1_columns, p.c2_part)
            c1 = tmem + lanes + self.config.output_column
            c2 = c1 + p.c1_part
            where = (first_row, head, batch)
            self.output(p, smem, c1_map, c1, first1, columns1, Float32(1.0), count > 0, lane_row, half, where)
            self.output(p, smem, c2_map, c2, first2, columns2, p.out_scale, count > 0, lane_row, half, where)
            if count > 0:
                self.arrive(smem.c_empty_mma)
                item_phase = item_phase ^ 1

    @cute.jit
    def column_statistic(self, p, lse: cute.Pointer, delta: cute.Pointer, batch, column_head, first_column):
        """This thread's number for a block's columns: minus the LSE for threads 0-127, delta for 128-255."""
        thread, _, _ = cute.arch.thread_idx()
        column = first_column + thread % ROWS
        at = (batch * p.row_heads * p.group + column_head) * p.columns + column
        value = Float32(0.0)
        if column < p.columns:
            if thread < ROWS:
                value = minus_lse(cute.make_tensor(lse, cute.make_layout(1 << 30))[at])
            else:
                value = cute.make_tensor(delta, cute.make_layout(1 << 30))[at]
        return value

    @cute.jit
    def probabilities(self, p, s, weights, statistics, shift):
        """P = exp2(scale S - LSE) of half the columns; with a soft cap S becomes its tanh."""
        shifts = [shift] * 4
        if cutlass.const_expr(self.config.soft_cap):
            soft_cap.tanh(s, self.config.half, p.cap, True)
        for pair in cutlass.range_constexpr(self.config.half // 2):
            if cutlass.const_expr(self.config.transposed and pair % 2 == 0):
                shifts = ptx.ld_shared_f32x4(statistics, 8 * pair)
            at = 2 * (pair % 2)
            x = ptx.fma2((s[2 * pair], s[2 * pair + 1]), (p.scale, p.scale), (shifts[at], shifts[at + 1]))
            weights[2 * pair], weights[2 * pair + 1] = ptx.ex2(x[0]), ptx.ex2(x[1])

    @cute.jit
    def score_gradients(self, address, s, weights, statistics, row_delta):
        """Gradient of S, P o (dP - delta), in place of P, dP at ``address``; with a soft cap times 1 - tanh^2."""
        half = self.config.half
        at_once = 32 if self.config.soft_cap else half  # with s kept, 64 more registers would spill
        deltas = [row_delta] * 4
        for begin in cutlass.range_constexpr(0, half, at_once):
            gradients = ptx.tcgen05_ld(address + begin, at_once)
            for pair in cutlass.range_constexpr(begin // 2, (begin + at_once) // 2):
                if cutlass.const_expr(self.config.transposed and pair % 2 == 0):
                    deltas = ptx.ld_shared_f32x4(statistics, STATISTIC_BYTES + 8 * pair)
                at = 2 * (pair % 2)
                x = (gradients[2 * pair - begin], gradients[2 * pair + 1 - begin])
                x = ptx.sub2(x, (deltas[at], deltas[at + 1]))
                x = ptx.mul2(x, (weights[2 * pair], weights[2 * pair + 1]))
                if cutlass.const_expr(self.config.soft_cap):
                    t = (s[2 * pair], s[2 * pair + 1])
                    x = ptx.mul2(x, ptx.fma2((-t[0], -t[1]), t, (1.0, 1.0)))
                weights[2 * pair], weights[2 * pair + 1] = x

    @cute.jit
    def store_weights(self, address, weights):
        """Stores half the columns as 16-bit pairs in the first half of their place."""
        pairs = range(self.config.half // 2)
        packed = [ptx.pack(self.config.packed, weights[2 * i], weights[2 * i + 1]) for i in pairs]
        ptx.tcgen05_st(address, packed)
        ptx.tcgen05_wait_st()

    @cute.jit
    def arrive(self, barrier):
        """One arrival of this warp at a barrier of the MMA warp, after its Tensor Memory accesses."""
        ptx.tcgen05_fence_before()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            slices.arrive_at_leader(barrier, self.config.group)

    @cute.jit
    def output(self, p, smem, c_map: Int64, c, first, columns, factor, filled, lane_row, half, where):
        """Writes slices of an accumulator, zeros where nothing was accumulated, through the staging slice."""
        row, head, batch = where
        for index in cutlass.range((columns + SLICE - 1) // SLICE, unroll=1):
            values = cute.make_rmem_tensor(cute.make_layout(SLICE // 2), Float32)
            values.fill(0.0)
            if filled:
                for column, value in enumerate(ptx.tcgen05_ld(c + index * SLICE + half * (SLICE // 2), SLICE // 2)):
                    values[column] = value * factor
            for chunk in cutlass.range_constexpr(4):
                packed = [
                    ptx.pack(self.config.packed, values[8 * chunk + 2 * i], values[8 * chunk + 2 * i + 1])
                    for i in range(4)
                ]
                slices.stage(smem.staging, lane_row, half * 4 + chunk, packed)
            ptx.fence_proxy_async_shared()
            cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)
            if (lane_row == 0) & (half == 0):
                ptx.tma_store(4, smem.staging, c_map, (first + index * SLICE, row, head, batch))
                ptx.bulk_commit_group()
                ptx.bulk_wait_group_read()
            cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)


@cute.jit
def minus_lse(value):
    """Minus the LSE in log2 units; 0 for a row that sees nothing, whose columns are all masked."""
    out = value * -LOG2_E
    if value == -float("inf"):
        out = Float32(0.0)
    return out


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    config = BackwardConfig(**options)
    element = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
    backward = BackwardKernel(config)
    BackwardKernel.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(f32: cute.Pointer, i32: cute.Pointer, n: Int32, x: Float32, stream: cuda.CUstream):
        maps = [slices.nominal_tensor_map(f32, element, n) for _ in range(6)]
        backward.kernel(
            *maps, f32, f32, i32, i32, i32, i32, i32, x, x, x, (n,) * len(integer_names("backward_sm100"))
        ).launch(
            grid=(n, 1, 1),
            block=(THREADS, 1, 1),
            cluster=None if config.group == 1 else (config.group, 1, 1),
            smem=227 * 1024,
            stream=stream,
            min_blocks_per_mp=1,
        )

    f32, i32 = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Float32, Int32))
    return host, (f32, i32, Int32(1), Float32(1.0), cuda.CUstream(0))
