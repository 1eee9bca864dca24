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

Roles: compute warps 0-7, one thread a row and half of the columns; MMA 8; load 9; clean 10, where columns that no row
sees may hold NaN (``slices.clean``); 11 idle.

Barriers, k the number of times the role has waited on it (parity k mod 2 unless stated):

    barrier      count  arrives                                 waits      phase
    a_full       1+tx   load, expecting A1 and A2               MMA        an item with columns
    a_empty      1      tcgen05.commit after the item           load       such an item; parity (k+1) mod 2
    s_full       1      tcgen05.commit after S                  compute    a block
    p_full       8      each compute warp: S read, P stored     MMA        a block
    dp_full      1      tcgen05.commit after dP                 compute    a block
    ds_full      8      each compute warp: dP read, dS stored   MMA        a block
    c_full       1      tcgen05.commit after the item           compute    an item with columns
    c_empty      8      each compute warp: C1 and C2 read       MMA        such an item; parity (k+1) mod 2
    ring_full    1+tx   load, expecting one slice               MMA/clean  a use of the slot
    cleaned      1      clean, unseen rows zeroed               MMA        a use of the slot, where cleaned
    ring_empty   1      tcgen05.commit after its only reader    load       a use of the slot; parity (k+1) mod 2
    bar 1        256    compute warps: column statistics        same       a block (transposed)
                        written; output staged; store read                 twice a slice of output

Order of ring slices, the same for load and MMA: B1 (for S of block 0), B2 (for dP of block 0), then for each block:
B2 for C1, B1 for the next S, B1 for C2, B2 for the next dP. Where A2 does not fit in shared memory its slices go
through the ring too, each before its slice of B2. Every slice is used once and released at once, so that the ring
cannot deadlock with two slots or more.
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

from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.kernels.common import ptx
from jax_fa_blackwell.kernels.sm100 import slices
from jax_fa_blackwell.plan.slices import LOG2_E, ROWS, SLICE, SLICE_BYTES

COLUMNS = ROWS  # columns of a block
HALF = COLUMNS // 2
TENSOR_MEMORY_COLUMNS = 512
SCORE_COLUMN, GRADIENT_COLUMN, OUTPUT_COLUMN = 0, 128, 256  # S and P; dP and dS; C1, then C2
# P and dS take the first half of each half of their tile, so that each compute warp overwrites only what it has read.
WEIGHT_COLUMNS = tuple(8 * step if step < 4 else HALF + 8 * (step - 4) for step in range(COLUMNS // 16))
THREADS, COMPUTE_THREADS = 384, 256
MMA_WARP, LOAD_WARP, CLEAN_WARP = 8, 9, 10

# Byte offsets in shared memory.
BARRIERS = 0
TMEM_ADDRESS, NOTES = 512, 544
STATISTICS = 1024  # two buffers of 128 LSE, then 128 delta
STAGING = 3072
RESIDENT = STAGING + SLICE_BYTES


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """What is fixed when the kernel is compiled; everything else is a run-time parameter."""

    dtype: str
    transposed: bool
    soft_cap: bool = False

    @property
    def packed(self) -> str:
        """The PTX name of the 16-bit type."""
        return {"bfloat16": "bf16", "float16": "f16"}[self.dtype]


class Smem:
    """Addresses in shared memory from its base."""

    def __init__(self, base: Int32, p):
        names = ("a_full", "a_empty", "s_full", "p_full", "dp_full", "ds_full", "c_full", "c_empty")
        for index, name in enumerate(names):
            setattr(self, name, base + BARRIERS + 8 * index)
        ring_barriers = base + BARRIERS + 8 * len(names)
        self.tmem_address = base + TMEM_ADDRESS
        self.statistics = base + STATISTICS
        self.staging = base + STAGING
        self.a1 = base + RESIDENT
        self.a2 = self.a1 + p.a1_slices * SLICE_BYTES
        data = self.a2 + p.a2_resident * SLICE_BYTES
        self.ring = slices.Ring(ring_barriers, base + NOTES, data, p.slots, p.cleaned)


class Params:
    """The kernel's scalar parameters by name."""

    NAMES = tuple(p.name for p in registry.KERNELS["backward_sm100"].parameters if p.kind == "int32")

    def __init__(self, scalars, scale, cap, out_scale):
        for name, value in zip(self.NAMES, scalars, strict=True):
            setattr(self, name, value)
        self.scale, self.cap, self.out_scale = scale, cap, out_scale


@cute.jit
def part(first, limit, most):
    """Slices of an output part that begins at ``first``: at most ``most``, none beyond ``limit``."""
    return cutlass.max(cutlass.min(limit - first, most), 0)


@cute.jit
def tail(first, count, total, last):
    """Head dims of the last slice of a part: ``last`` where it ends the whole."""
    width = Int32(SLICE)
    if first + count == total:
        width = last
    return width


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
        first_block, end_block = Int32(0), Int32(0)
        if p.rows_form != 0:
            batch, row_group, first_block, end_block = slices.work_entry(blocks, entry)
        row = row_group * ROWS
        if p.rows_form == 0:
            last = cutlass.min(row + ROWS, p.rows) - 1
            first_block = cutlass.max(row + p.mask_low, 0) // COLUMNS
            end_block = (cutlass.min(last + p.mask_high, p.columns) + COLUMNS - 1) // COLUMNS
        index, head = rest % p.parts, rest // p.parts
        return batch, head, row, index, first_block, cutlass.max(end_block - first_block, 0)

    @cute.jit
    def column_head(self, p, head, index, block_count):
        """The streamed operands' head of the index-th block of an item."""
        if cutlass.const_expr(self.config.transposed):
            return head * p.group + index // block_count
        else:
            return head // p.group

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
        p = Params(scalars, scale, cap, out_scale)
        smem = Smem(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()), p)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            for barrier in (smem.a_full, smem.a_empty, smem.s_full, smem.dp_full, smem.c_full):
                ptx.mbarrier_init(barrier, 1)
            for barrier in (smem.p_full, smem.ds_full, smem.c_empty):
                ptx.mbarrier_init(barrier, 8)
            slices.init_barriers(smem.ring)
            cute.arch.mbarrier_init_fence()
        if warp == MMA_WARP:
            ptx.tcgen05_alloc(smem.tmem_address, TENSOR_MEMORY_COLUMNS)
            ptx.tcgen05_relinquish_alloc_permit()
        ptx.tcgen05_fence_before()
        cute.arch.sync_threads()
        ptx.tcgen05_fence_after()
        tmem = ptx.ld_shared_b32(smem.tmem_address)

        if warp < MMA_WARP:
            cute.arch.setmaxregister_increase(208)
            c_maps = (c1_map.get_ptr().toint(), c2_map.get_ptr().toint())
            self.compute(p, smem, tmem, blocks, low, high, lse, delta, *c_maps)
        else:
            cute.arch.setmaxregister_decrease(72)
            if warp == MMA_WARP:
                self.mma(p, smem, tmem, blocks)
            if warp == LOAD_WARP:
                with cute.arch.elect_one():
                    maps = [m.get_ptr().toint() for m in (a1_map, a2_map, b1_map, b2_map)]
                    self.load(p, smem, blocks, *maps)
            if warp == CLEAN_WARP and p.cleaned != 0:
                seen = (p.seen_low, p.seen_high)
                slices.clean(smem.ring, p.columns, p.rows_form, column_low, column_high, *seen)

        cute.arch.sync_threads()
        if warp == MMA_WARP:
            ptx.tcgen05_dealloc(tmem, TENSOR_MEMORY_COLUMNS)

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, blocks: cute.Pointer, a1_map: Int64, a2_map: Int64, b1_map: Int64, b2_map: Int64):
        """Load warp, one thread: the resident operands, then slices in the order of the module's docstring."""
        ring = smem.ring
        slot, phase, a_phase = Int32(0), Int32(0), Int32(1)
        block, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(block, p.items, stride, unroll=1):
            batch, head, row, index, first_block, block_count = self.work(p, blocks, item)
            first1, first2 = index * p.c1_part, index * p.c2_part
            count1, count2 = part(first1, p.a2_slices, p.c1_part), part(first2, p.a1_slices, p.c2_part)
            count = block_count * p.column_heads
            if count > 0:
                ptx.mbarrier_wait(smem.a_empty, a_phase)
                a_phase = a_phase ^ 1
                ptx.mbarrier_arrive_expect_tx(smem.a_full, (p.a1_slices + p.a2_resident) * SLICE_BYTES)
                slices.load_resident(smem.a1, a1_map, p.a1_slices, row, head, batch, smem.a_full)
                slices.load_resident(smem.a2, a2_map, p.a2_resident, row, head, batch, smem.a_full)
                at, of = first_block * COLUMNS, self.column_head(p, head, Int32(0), block_count)
                slot, phase = slices.load_for_scores(ring, slot, phase, b1_map, p.a1_slices, at, of, batch)
                slot, phase = self.load_gradients(p, ring, slot, phase, a2_map, b2_map, row, head, at, of, batch)
            for i in cutlass.range(count, unroll=1):
                at = (first_block + i % block_count) * COLUMNS
                of = self.column_head(p, head, i, block_count)
                next_at = (first_block + (i + 1) % block_count) * COLUMNS
                next_of = self.column_head(p, head, i + 1, block_count)
                more = i + 1 < count
                slot, phase = slices.load_for_rows(ring, slot, phase, b2_map, first1, count1, at, of, batch)
                if more:
                    slot, phase = slices.load_for_scores(
                        ring, slot, phase, b1_map, p.a1_slices, next_at, next_of, batch
                    )
                slot, phase = slices.load_for_rows(ring, slot, phase, b1_map, first2, count2, at, of, batch)
                if more:
                    slot, phase = self.load_gradients(
                        p, ring, slot, phase, a2_map, b2_map, row, head, next_at, next_of, batch
                    )
        slices.stop_cleaning(ring, slot, phase)

    @cute.jit
    def load_gradients(self, p, ring, slot, phase, a2_map: Int64, b2_map: Int64, row, head, at, of, batch):
        """Slices for dP: those of B2, and where A2 is not resident each after its slice of A2."""
        if p.c2_part > 0:
            if p.a2_resident > 0:
                slot, phase = slices.load_for_scores(ring, slot, phase, b2_map, p.a2_slices, at, of, batch)
            else:
                note = Int32(slices.SCORES)
                for index in cutlass.range(p.a2_slices, unroll=1):
                    slot, phase = slices.load_slice(ring, slot, phase, a2_map, index, row, head, batch, note)
                    slot, phase = slices.load_slice(ring, slot, phase, b2_map, index, at, of, batch, note)
        return slot, phase

    # --- MMA ----------------------------------------------------------------------------------------------------

    @cute.jit
    def mma(self, p, smem, tmem: Int32, blocks: cute.Pointer):
        """MMA warp: while compute works on P or dS of a block, the products that do not need it."""
        ring = smem.ring
        slot, phase, a_phase, block_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        block, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        c1, c2 = tmem + OUTPUT_COLUMN, tmem + OUTPUT_COLUMN + p.c1_part * SLICE
        for item in cutlass.range(block, p.items, stride, unroll=1):
            _, _, _, index, _, block_count = self.work(p, blocks, item)
            first1, first2 = index * p.c1_part, index * p.c2_part
            count1, count2 = part(first1, p.a2_slices, p.c1_part), part(first2, p.a1_slices, p.c2_part)
            tail1 = tail(first1, count1, p.a2_slices, p.a2_tail_columns)
            tail2 = tail(first2, count2, p.a1_slices, p.a1_tail_columns)
            count = block_count * p.column_heads
            if count > 0:
                ptx.mbarrier_wait(smem.a_full, a_phase)
                slot, phase = self.scores(p, smem, slot, phase, tmem)
                slot, phase = self.gradients(p, smem, slot, phase, tmem)
                ptx.mbarrier_wait(smem.c_empty, a_phase ^ 1)
                a_phase = a_phase ^ 1
            for i in cutlass.range(count, unroll=1):
                ptx.mbarrier_wait(smem.p_full, block_phase)
                ptx.tcgen05_fence_after()
                weights = tmem + SCORE_COLUMN
                slot, phase = slices.multiply_rows(
                    ring, slot, phase, c1, weights, WEIGHT_COLUMNS, count1, tail1, p.row_instruction, i > 0, True
                )
                if i + 1 < count:
                    slot, phase = self.scores(p, smem, slot, phase, tmem)
                if p.c2_part > 0:
                    ptx.mbarrier_wait(smem.ds_full, block_phase)
                    ptx.tcgen05_fence_after()
                    weights = tmem + GRADIENT_COLUMN
                    slot, phase = slices.multiply_rows(
                        ring, slot, phase, c2, weights, WEIGHT_COLUMNS, count2, tail2, p.row_instruction, i > 0, True
                    )
                    if i + 1 < count:
                        slot, phase = self.gradients(p, smem, slot, phase, tmem)
                block_phase = block_phase ^ 1
            if count > 0:
                with cute.arch.elect_one():
                    ptx.tcgen05_commit(smem.a_empty)
                    ptx.tcgen05_commit(smem.c_full)

    @cute.jit
    def scores(self, p, smem, slot, phase, tmem):
        """S = A1 B1^T."""
        slot, phase = slices.multiply_dims(
            smem.ring,
            slot,
            phase,
            tmem + SCORE_COLUMN,
            smem.a1,
            p.a1_slices,
            (p.a1_tail_columns + 15) // 16,
            p.score_instruction,
            True,
        )
        with cute.arch.elect_one():
            ptx.tcgen05_commit(smem.s_full)
        return slot, phase

    @cute.jit
    def gradients(self, p, smem, slot, phase, tmem):
        """Gradient of P, A2 B2^T, where that of S is wanted."""
        if p.c2_part > 0:
            ring, accumulator, steps = smem.ring, tmem + GRADIENT_COLUMN, (p.a2_tail_columns + 15) // 16
            if p.a2_resident > 0:
                slot, phase = slices.multiply_dims(
                    ring, slot, phase, accumulator, smem.a2, p.a2_slices, steps, p.gradient_instruction, True
                )
            else:
                slot, phase = slices.multiply_streamed_dims(
                    ring, slot, phase, accumulator, p.a2_slices, steps, p.gradient_instruction
                )
            with cute.arch.elect_one():
                ptx.tcgen05_commit(smem.dp_full)
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
        transposed = self.config.transposed
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        half = warp // 4
        lane_row = (warp % 4) * 32 + cute.arch.lane_idx()
        lanes = (warp % 4) << 21
        block_phase, item_phase = Int32(0), Int32(0)
        block, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(block, p.items, stride, unroll=1):
            batch, head, first_row, index, first_block, block_count = self.work(p, blocks, item)
            row = first_row + lane_row
            first, end = slices.interval(p, p.rows, p.columns, batch, row, low, high)
            count = block_count * p.column_heads
            row_lse, row_delta, incoming = Float32(0.0), Float32(0.0), Float32(0.0)
            if cutlass.const_expr(transposed):
                if count > 0:
                    incoming = self.column_statistic(p, lse, delta, batch, head, first_block, block_count, Int32(0))
            else:
                if row < p.rows:
                    at = (batch * p.row_heads + head) * p.rows + row
                    row_lse = finite_lse(cute.make_tensor(lse, cute.make_layout(1 << 30))[at])
                    row_delta = cute.make_tensor(delta, cute.make_layout(1 << 30))[at]
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            for i in cutlass.range(count, unroll=1):
                statistics = smem.statistics + block_phase * (2 * COLUMNS * 4)
                if cutlass.const_expr(transposed):
                    ptx.st_shared_b32(statistics + thread * 4, incoming)
                    cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)
                    if i + 1 < count:
                        incoming = self.column_statistic(p, lse, delta, batch, head, first_block, block_count, i + 1)
                    cute.arch.sync_warp()
                first_column = (first_block + i % block_count) * COLUMNS
                whole = cute.arch.vote_all_sync((first <= first_column) & (first_column + COLUMNS <= end))
                visible = (first - first_column - half * HALF, end - first_column - half * HALF)
                address = tmem + lanes + half * HALF

                ptx.mbarrier_wait(smem.s_full, block_phase)
                ptx.tcgen05_fence_after()
                s = cute.make_rmem_tensor(cute.make_layout(HALF), Float32)
                for column, value in enumerate(ptx.tcgen05_ld(address + SCORE_COLUMN, HALF)):
                    s[column] = value
                weights = cute.make_rmem_tensor(cute.make_layout(HALF), Float32)
                self.probabilities(p, s, weights, statistics + half * HALF * 4, row_lse)
                if whole == False:  # noqa: E712
                    slices.mask(weights, HALF, visible[0], visible[1], 0.0)
                if p.c1_part > 0:
                    self.store_weights(address + SCORE_COLUMN, weights)
                self.arrive(smem.p_full)

                if p.c2_part > 0:
                    ptx.mbarrier_wait(smem.dp_full, block_phase)
                    ptx.tcgen05_fence_after()
                    gradients = ptx.tcgen05_ld(address + GRADIENT_COLUMN, HALF)
                    deltas = statistics + COLUMNS * 4 + half * HALF * 4
                    self.score_gradients(s, weights, gradients, deltas, row_delta)
                    if whole == False:  # noqa: E712
                        slices.mask(weights, HALF, visible[0], visible[1], 0.0)
                    self.store_weights(address + GRADIENT_COLUMN, weights)
                    self.arrive(smem.ds_full)
                block_phase = block_phase ^ 1

            if count > 0:
                ptx.mbarrier_wait(smem.c_full, item_phase)
                ptx.tcgen05_fence_after()
            first1, first2 = index * p.c1_part, index * p.c2_part
            count1, count2 = part(first1, p.a2_slices, p.c1_part), part(first2, p.a1_slices, p.c2_part)
            c1 = tmem + lanes + OUTPUT_COLUMN
            c2 = c1 + p.c1_part * SLICE
            where = (first_row, head, batch)
            self.output(p, smem, c1_map, c1, first1, count1, Float32(1.0), count > 0, lane_row, half, where)
            self.output(p, smem, c2_map, c2, first2, count2, p.out_scale, count > 0, lane_row, half, where)
            if count > 0:
                self.arrive(smem.c_empty)
                item_phase = item_phase ^ 1

    @cute.jit
    def column_statistic(self, p, lse: cute.Pointer, delta: cute.Pointer, batch, head, first_block, block_count, i):
        """This thread's number for a block's columns: LSE for threads 0-127, delta for 128-255."""
        thread, _, _ = cute.arch.thread_idx()
        column = (first_block + i % block_count) * COLUMNS + thread % COLUMNS
        at = (batch * p.row_heads * p.group + self.column_head(p, head, i, block_count)) * p.columns + column
        value = Float32(0.0)
        if column < p.columns:
            if thread < COLUMNS:
                value = finite_lse(cute.make_tensor(lse, cute.make_layout(1 << 30))[at])
            else:
                value = cute.make_tensor(delta, cute.make_layout(1 << 30))[at]
        return value

    @cute.jit
    def probabilities(self, p, s, weights, statistics, row_lse):
        """P = exp2(scale S - LSE) of 64 columns; with a soft cap S becomes its tanh."""
        for pair in cutlass.range_constexpr(HALF // 2):
            if cutlass.const_expr(self.config.soft_cap):
                s[2 * pair] = ptx.tanh(s[2 * pair] * p.cap)
                s[2 * pair + 1] = ptx.tanh(s[2 * pair + 1] * p.cap)
            shift = (row_lse, row_lse)
            if cutlass.const_expr(self.config.transposed):
                shift = ptx.ld_shared_f32x2(statistics + 8 * pair)
            x = ptx.fma2((s[2 * pair], s[2 * pair + 1]), (p.scale, p.scale), (-shift[0], -shift[1]))
            weights[2 * pair], weights[2 * pair + 1] = ptx.ex2(x[0]), ptx.ex2(x[1])

    @cute.jit
    def score_gradients(self, s, weights, gradients, statistics, row_delta):
        """Gradient of S, P o (dP - delta), in place of P; with a soft cap times 1 - tanh^2."""
        for pair in cutlass.range_constexpr(HALF // 2):
            delta = (row_delta, row_delta)
            if cutlass.const_expr(self.config.transposed):
                delta = ptx.ld_shared_f32x2(statistics + 8 * pair)
            x = ptx.sub2((gradients[2 * pair], gradients[2 * pair + 1]), delta)
            x = ptx.mul2(x, (weights[2 * pair], weights[2 * pair + 1]))
            if cutlass.const_expr(self.config.soft_cap):
                t = (s[2 * pair], s[2 * pair + 1])
                x = ptx.mul2(x, ptx.fma2((-t[0], -t[1]), t, (1.0, 1.0)))
            weights[2 * pair], weights[2 * pair + 1] = x

    @cute.jit
    def store_weights(self, address, weights):
        """Stores 64 columns as 16-bit pairs in the first 32 columns of their half."""
        packed = [ptx.pack(self.config.packed, weights[2 * i], weights[2 * i + 1]) for i in range(HALF // 2)]
        ptx.tcgen05_st(address, packed)
        ptx.tcgen05_wait_st()

    @cute.jit
    def arrive(self, barrier):
        """One arrival of this warp, after its Tensor Memory accesses."""
        ptx.tcgen05_fence_before()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(barrier)

    @cute.jit
    def output(self, p, smem, c_map: Int64, c, first, count, factor, filled, lane_row, half, where):
        """Writes slices of an accumulator, zeros where nothing was accumulated, through the staging slice."""
        row, head, batch = where
        for index in cutlass.range(count, unroll=1):
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
                ptx.tma_store(4, smem.staging, c_map, ((first + index) * SLICE, row, head, batch))
                ptx.bulk_commit_group()
                ptx.bulk_wait_group_read()
            cute.arch.barrier(barrier_id=1, number_of_threads=COMPUTE_THREADS)


@cute.jit
def finite_lse(value):
    """LSE in log2 units; 0 for a row that sees nothing, whose columns are all masked."""
    out = value * LOG2_E
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
        backward.kernel(*maps, f32, f32, i32, i32, i32, i32, i32, x, x, x, (n,) * len(Params.NAMES)).launch(
            grid=(n, 1, 1), block=(THREADS, 1, 1), smem=227 * 1024, stream=stream, min_blocks_per_mp=1
        )

    f32, i32 = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Float32, Int32))
    return host, (f32, i32, Int32(1), Float32(1.0), cuda.CUstream(0))
