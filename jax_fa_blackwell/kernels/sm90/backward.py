"""Gradients of attention for sm_90a: in passes without atomics, or in one that adds dQ in memory.

One kernel serves both directions. Its rows are the queries (for dQ) or, transposed, the keys (for dK and dV); its
columns are the other of the two. A work item keeps the operands of its rows resident and streams those of the columns:

    S  = A1 B1^T     A1, B1 = Q, K     transposed: K, Q
    dP = A2 B2^T     A2, B2 = dO, V    transposed: V, dO
    P  = exp(scale S - LSE),  dS = P o (dP - delta)
    C1 += P B2       dV                transposed only
    C2 += dS B1      dQ                transposed: dK

so P and dS stay in registers, as left operands of the products that follow. LSE and delta belong to queries: one number
a row, or transposed one a column, read from shared memory. Heads of a group that share keys are columns of one item, so
dK and dV are summed over the group in fp32. Where C1 and C2 do not both fit in registers, a pass computes one of them
(``plan/hopper_backward.py``). These passes give the same bits on every run. Algorithm: FlashAttention-2, backward,
split in kernels.

Where ``adds_dq``, a transposed pass with dK and dV also makes dQ of each block of queries,

    dQ = dS K        M = queries: both warpgroups store dS in shared memory, transposed as it is

and adds it to fp32 sums in memory, in no fixed order (``query_gradient.py`` rounds them). Five products in all.
Algorithm: FlashAttention-3, backward. dQ is multiplied a block late, during the softmax of the next, so that neither
warpgroup waits for the other's dS unless it is a whole block behind. S of the next block is begun before the end of a
block (``begins_early``): wgmma in flight may not cross the end of a loop's body, or the compiler serialises all of it.

A producer warpgroup (warps load, clean, statistics and an idle one) and consumer warpgroups of 64 rows. While a
warpgroup works on P or dS of a block, its own products that do not need them run, and those of the other warpgroup.

Barriers; w is a consumer warpgroup, s a slot, k the number of times the role has waited on it (parity k mod 2 unless
stated):

    barrier        count  arrives                               waits      phase
    a_full[w]      1+tx   load, expecting the 64 rows           consumer   an item with columns
    a_empty[w]     4      each consumer warp, last dP done      load       such an item; parity (k+1) mod 2
                   4 W    where adds_dq: last dQ done, by all
    full[s]        1+tx   load, expecting a part of B1 or B2    consumers, or clean
    cleaned[s]     1      clean, unseen columns zeroed          consumers, where cleaned
    empty[s]       4 W    each consumer warp, products done     load       parity (k+1) mod 2
    stat_full[s]   1      statistics, LSE and delta stored      consumers  a block, transposed
    stat_empty[s]  4 W    each consumer warp, both read         statistics parity (k+1) mod 2
    stored[s]      4 W    adds_dq: each consumer warp, dS of    consumers  the block after, or the end of an item
                          a block stored, s the block mod 2
    bar 1+w        256    adds_dq, where dS has one stage:      the other  a block, before it stores dS
                          warpgroup w, dQ done                  warpgroup

Order of slots: B1 and B2 of each part of a block. A consumer holds both of all parts and perhaps B1 of the next.
"""

# The DSL is found through a .pth file and rewrites what it decorates: neither is visible to a type checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import dataclasses

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, GridConstant, Int32, Int64, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda.tensor_map import TensorMap

from jax_fa_blackwell.kernels.common import intervals, ptx, soft_cap
from jax_fa_blackwell.kernels.common.params import Params, integer_names
from jax_fa_blackwell.kernels.sm90 import fragments, instructions, work
from jax_fa_blackwell.plan.hopper import (
    SLICE,
    STATISTIC_STAGES,
    TILE_ROWS,
    WARPGROUP_THREADS,
    BackwardTile,
)
from jax_fa_blackwell.plan.slices import LOG2_E

INFINITY = float("inf")
WEIGHTS_FREE = 1
"""Named barriers, one of each warpgroup: it has read dS of the block before."""


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """What is fixed when the kernel is compiled; everything else is a run-time parameter."""

    dtype: str
    tile: BackwardTile

    @property
    def packed(self) -> str:
        """The PTX name of the 16-bit type."""
        return {"bfloat16": "bf16", "float16": "f16"}[self.dtype]


class Smem:
    """Addresses in shared memory from its base: barriers, statistics, then the rows' operands and the slots."""

    def __init__(self, base: Int32, tile: BackwardTile):
        barriers = {
            "a_full": tile.warpgroups,
            "a_empty": tile.warpgroups,
            "full": tile.slots,
            "cleaned": tile.slots,
            "empty": tile.slots,
            "stat_full": STATISTIC_STAGES,
            "stat_empty": STATISTIC_STAGES,
            "stored": STATISTIC_STAGES,
        }
        at = base
        for name, count in barriers.items():
            setattr(self, name, at)
            at = at + 8 * count
        self.statistics = base + tile.BARRIER_BYTES
        self.a1 = base + tile.header_bytes
        self.a2 = self.a1 + tile.warpgroups * tile.a1_bytes
        self.weights = self.a2 + tile.warpgroups * tile.a2_bytes
        self.sums = self.weights + tile.weight_stages * tile.weight_bytes
        self.data = self.sums + tile.sum_bytes


class BackwardKernel:
    """One persistent block: consumer warpgroups first, then the producer's with load, clean and statistics."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.tile = config.tile

    @cute.jit
    def waves(self, p):
        """How many items this block has."""
        if cutlass.const_expr(self.tile.adds_dq):
            return work.waves_of_pairs(p)
        else:
            return work.waves(p)

    @cute.jit
    def item(self, p, wave):
        """This block's item of a wave."""
        if cutlass.const_expr(self.tile.adds_dq):
            return work.item_of_pairs(p, wave)
        else:
            return work.item(wave)

    @cute.jit
    def first_block_of(self, p, head, row, block_count):
        """The streamed operands' head of an item's first block, and where in its range of blocks that lies.

        Where dQ is added, each group of rows begins at a block of its own: persistent blocks that begin together would
        else all add to the same queries at a time.
        """
        tile = self.tile
        begin = Int32(0)
        if cutlass.const_expr(tile.adds_dq):
            begin = row // tile.rows % cutlass.max(block_count, 1)
        if cutlass.const_expr(tile.transposed):
            return head * p.group, begin
        else:
            return head // p.group, begin

    @cute.jit
    def next_block(self, head, block, begin, block_count):
        """Head and place of the block that follows: round the range, then the next head."""
        block = block + 1
        block = block * Int32(block != block_count)
        return head + Int32(block == begin), block

    # --- entry --------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        a1_map: GridConstant[TensorMap],
        a2_map: GridConstant[TensorMap],
        b1_map: GridConstant[TensorMap],
        b2_map: GridConstant[TensorMap],
        c1: cute.Pointer,
        c2: cute.Pointer,
        dq: cute.Pointer,
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
        """The entry: sets up barriers, then each warp takes its role."""
        p = Params("backward_sm90", scalars, scale=scale, cap=cap, out_scale=out_scale)
        tile = self.tile
        smem = Smem(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()), tile)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            self.init_barriers(smem)
        cute.arch.sync_threads()
        producer = 4 * tile.warpgroups
        if warp < producer:
            cute.arch.setmaxregister_increase(tile.consumer_registers)
            self.consume(p, smem, blocks, low, high, lse, delta, c1, c2, dq)
        else:
            cute.arch.setmaxregister_decrease(tile.producer_registers)
            waves = cute.arch.make_warp_uniform(self.waves(p))  # known to be uniform, it takes no register
            if warp == producer:
                with cute.arch.elect_one():
                    maps = [m.get_ptr().toint() for m in (a1_map, a2_map, b1_map, b2_map)]
                    self.load(p, smem, blocks, waves, *maps)
            if warp == producer + 1 and p.cleaned != 0:
                self.clean(p, smem, blocks, waves, column_low, column_high)
            if cutlass.const_expr(tile.transposed):
                if warp == producer + 2:
                    self.statistics(p, smem, blocks, waves, lse, delta)

    @cute.jit
    def init_barriers(self, smem):
        """Barrier counts as in the module's table."""
        tile = self.tile
        for w in cutlass.range_constexpr(tile.warpgroups):
            ptx.mbarrier_init(smem.a_full + 8 * w, 1)
            ptx.mbarrier_init(smem.a_empty + 8 * w, 4 * (tile.warpgroups if tile.adds_dq else 1))
        for slot in cutlass.range_constexpr(tile.slots):
            ptx.mbarrier_init(smem.full + 8 * slot, 1)
            ptx.mbarrier_init(smem.cleaned + 8 * slot, 1)
            ptx.mbarrier_init(smem.empty + 8 * slot, 4 * tile.warpgroups)
        for stage in cutlass.range_constexpr(STATISTIC_STAGES):
            ptx.mbarrier_init(smem.stat_full + 8 * stage, 1)
            ptx.mbarrier_init(smem.stat_empty + 8 * stage, 4 * tile.warpgroups)
            ptx.mbarrier_init(smem.stored + 8 * stage, 4 * tile.warpgroups)
        cute.arch.mbarrier_init_fence()

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, blocks: cute.Pointer, waves, a1_map: Int64, a2_map: Int64, b1_map: Int64, b2_map: Int64):
        """Load warp, one thread: the rows' operands, then B1 and B2 of each block."""
        tile = self.tile
        slot, phase, a_phase = Int32(0), Int32(1), Int32(1)
        for wave in cutlass.range(waves, unroll=1):
            batch, head, row, first_block, block_count = work.find(p, tile, blocks, self.item(p, wave))
            of, begin = self.first_block_of(p, head, row, block_count)
            block, count = begin, block_count * p.column_heads
            if count > 0:
                for w in cutlass.range_constexpr(tile.warpgroups):
                    barrier, first = smem.a_full + 8 * w, row + w * TILE_ROWS
                    ptx.mbarrier_wait(smem.a_empty + 8 * w, a_phase)
                    ptx.mbarrier_arrive_expect_tx(barrier, tile.a1_bytes + tile.a2_bytes)
                    self.load_tile(smem.a1 + w * tile.a1_bytes, a1_map, tile.score_slices, first, head, batch, barrier)
                    if cutlass.const_expr(tile.has_c2):
                        a2 = smem.a2 + w * tile.a2_bytes
                        self.load_tile(a2, a2_map, tile.value_slices, first, head, batch, barrier)
                a_phase = a_phase ^ 1
            for _ in cutlass.range(count, unroll=1):
                for part in cutlass.range_constexpr(tile.parts):
                    column = (first_block + block) * tile.columns + part * tile.part_columns
                    slot, phase = self.load_part(smem, slot, phase, b1_map, tile.score_slices, column, of, batch)
                    slot, phase = self.load_part(smem, slot, phase, b2_map, tile.value_slices, column, of, batch)
                of, block = self.next_block(of, block, begin, block_count)

    @cute.jit
    def load_tile(self, data, tensor_map: Int64, slices: cutlass.Constexpr, row, head, batch, barrier):
        """Loads all slices of 64 rows; the barrier must expect them."""
        for index in cutlass.range_constexpr(slices):
            where = (index * SLICE, row, head, batch)
            instructions.tma_load(data + index * (TILE_ROWS * 128), tensor_map, where, barrier)

    @cute.jit
    def load_part(self, smem, slot, phase, tensor_map: Int64, slices: cutlass.Constexpr, column, head, batch):
        """Loads all slices of a part of a block of columns into the next slot."""
        tile = self.tile
        ptx.mbarrier_wait(smem.empty + 8 * slot, phase)
        barrier, data = smem.full + 8 * slot, smem.data + slot * tile.slot_bytes
        ptx.mbarrier_arrive_expect_tx(barrier, slices * tile.slice_bytes)
        for index in cutlass.range_constexpr(slices):
            where = (index * SLICE, column, head, batch)
            instructions.tma_load(data + index * tile.slice_bytes, tensor_map, where, barrier)
        return work.advance(tile.slots, slot, phase)

    # --- clean and statistics -----------------------------------------------------------------------------------

    @cute.jit
    def clean(self, p, smem, blocks: cute.Pointer, waves, low: cute.Pointer, high: cute.Pointer):
        """Cleaning warp: zeroes the columns' operands where no row sees the column."""
        tile = self.tile
        slot, phase = Int32(0), Int32(0)
        for wave in cutlass.range(waves, unroll=1):
            batch, head, row, first_block, block_count = work.find(p, tile, blocks, self.item(p, wave))
            of, begin = self.first_block_of(p, head, row, block_count)
            block = begin
            for _ in cutlass.range(block_count * p.column_heads, unroll=1):
                for part in cutlass.range_constexpr(tile.parts):
                    column = (first_block + block) * tile.columns + part * tile.part_columns
                    bits = work.unseen(p, batch, column, tile.part_columns, low, high)
                    cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
                    for slices in cutlass.range_constexpr(2):
                        ptx.mbarrier_wait(smem.full + 8 * slot, phase)
                        count = tile.value_slices if slices else tile.score_slices
                        work.clean(smem.data + slot * tile.slot_bytes, tile.part_columns, count, bits)
                        work.release(smem.cleaned + 8 * slot)
                        slot, phase = work.advance(tile.slots, slot, phase)
                of, block = self.next_block(of, block, begin, block_count)

    @cute.jit
    def statistics(self, p, smem, blocks: cute.Pointer, waves, lse: cute.Pointer, delta: cute.Pointer):
        """Statistics warp: LSE in log2 units and delta of each block's columns."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(1)
        for wave in cutlass.range(waves, unroll=1):
            batch, head, row, first_block, block_count = work.find(p, tile, blocks, self.item(p, wave))
            of, begin = self.first_block_of(p, head, row, block_count)
            block, of = begin, batch * p.row_heads * p.group + of
            for _ in cutlass.range(block_count * p.column_heads, unroll=1):
                first = (first_block + block) * tile.columns
                numbers = []
                for part in cutlass.range_constexpr((tile.columns + 31) // 32):
                    numbers.append(row_statistics(lse, delta, of, first + 32 * part + lane, p.columns))
                cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
                ptx.mbarrier_wait(smem.stat_empty + 8 * stage, phase)
                data = smem.statistics + stage * tile.statistic_bytes
                for part in cutlass.range_constexpr((tile.columns + 31) // 32):
                    local = 32 * part + lane
                    if local < tile.columns:
                        ptx.st_shared_b32(data + 4 * local, numbers[part][0])
                        ptx.st_shared_b32(data + 4 * (tile.columns + local), numbers[part][1])
                work.release(smem.stat_full + 8 * stage)
                stage, phase = work.advance(STATISTIC_STAGES, stage, phase)
                of, block = self.next_block(of, block, begin, block_count)

    # --- consumers ----------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        p,
        smem,
        blocks: cute.Pointer,
        low: cute.Pointer,
        high: cute.Pointer,
        lse: cute.Pointer,
        delta: cute.Pointer,
        c1: cute.Pointer,
        c2: cute.Pointer,
        dq: cute.Pointer,
    ):
        """Consumer warpgroup: the gradients of 64 rows; a thread has rows g and g + 8 of its warp's 16."""
        tile, kind = self.tile, self.config.packed
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        lane_row = warp * 16 + cute.arch.lane_idx() // 4
        ready = smem.full + p.cleaned * (smem.cleaned - smem.full)
        a1 = smem.a1 + group * tile.a1_bytes
        slot, phase, stage, stat_phase, a_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        d_value = cute.make_rmem_tensor(tile.value_dim // 2 if tile.has_c1 else 1, Float32)
        d_score = cute.make_rmem_tensor(tile.head_dim // 2 if tile.has_c2 else 1, Float32)
        scores = cute.make_rmem_tensor(tile.part_columns // 2, Float32)
        rows = [
            cute.make_rmem_tensor(dim // 4 if tile.holds_rows else 1, Uint32) for dim in (tile.head_dim, tile.value_dim)
        ]
        d_query = cute.make_rmem_tensor(tile.dq_columns // 2 if tile.adds_dq else 1, Float32)
        statistic = cute.make_rmem_tensor(4, Float32)  # LSE, then delta, of the two rows
        if cutlass.const_expr(tile.adds_dq and tile.weight_stages == 1):
            self.arrive(WEIGHTS_FREE + group)
        for wave in cutlass.range(self.waves(p), unroll=1):
            batch, head, row, first_block, block_count = work.find_uniform(p, tile, blocks, self.item(p, wave))
            first_row, row = row, row + lane_row
            of, begin = self.first_block_of(p, head, first_row, block_count)
            block, of, count = begin, batch * p.row_heads * p.group + of, block_count * p.column_heads
            bounds = self.bounds(p, batch, row, low, high)
            # Columns that all rows of the warp see.
            seen = instructions.warp_max(cutlass.max(bounds[0], bounds[2]))
            seen_end = -instructions.warp_max(-cutlass.min(bounds[1], bounds[3]))
            if cutlass.const_expr(not tile.transposed):
                for r in cutlass.range_constexpr(2):
                    row_head = batch * p.row_heads + head
                    statistic[r], statistic[2 + r] = row_statistics(lse, delta, row_head, row + 8 * r, p.rows)
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            if cutlass.const_expr(tile.has_c1):
                d_value.fill(0.0)
            if cutlass.const_expr(tile.has_c2):
                d_score.fill(0.0)
            if count > 0:
                ptx.mbarrier_wait(smem.a_full + 8 * group, a_phase)
                a_phase = a_phase ^ 1
                if cutlass.const_expr(tile.adds_dq):
                    self.clean_rows(a1, bounds)
                if cutlass.const_expr(tile.holds_rows):
                    fragments.load_rows(rows[0], a1)
                    fragments.load_rows(rows[1], smem.a2 + group * tile.a2_bytes)
                if cutlass.const_expr(tile.begins_early):
                    self.multiply_scores(smem, ready, slot, phase, rows, scores)
                    fragments.wait(0, scores)
                state = (slot, phase, stage, stat_phase, of, block, Int32(0))
                fixed = (p, smem, ready, rows, scores, d_value, d_score, d_query, statistic, batch, row)
                extent = (first_block, begin, block_count, seen, seen_end)
                done = 0
                if cutlass.const_expr(tile.adds_dq):
                    state = self.block(True, *fixed, low, high, dq, *extent, count == 1, *state)
                    done = 1
                slot, phase, stage, stat_phase, of, block, past = state
                for index in cutlass.range(done, count, unroll=1):
                    slot, phase, stage, stat_phase, of, block, past = self.block(
                        False,
                        *fixed,
                        low,
                        high,
                        dq,
                        *extent,
                        index + 1 == count,
                        slot,
                        phase,
                        stage,
                        stat_phase,
                        of,
                        block,
                        past,
                    )
                if cutlass.const_expr(tile.adds_dq):
                    self.multiply_query_gradient(smem, stage, stat_phase, d_query)
                    fragments.wait(0, d_query)
                    self.add_query_gradient(smem, d_query, past, dq)
                    for w in cutlass.range_constexpr(tile.warpgroups):
                        work.release(smem.a_empty + 8 * w)
                else:
                    work.release(smem.a_empty + 8 * group)
            for r in cutlass.range_constexpr(2):
                is_row = row + 8 * r < p.rows
                at = Int64((batch * p.rows + row + 8 * r) * p.row_heads + head)
                if cutlass.const_expr(tile.has_c1):
                    address = c1.toint() + 2 * at * p.value_dim
                    fragments.store_row(kind, d_value, r, Float32(1.0), address, is_row, p.value_dim)
                if cutlass.const_expr(tile.has_c2):
                    address = c2.toint() + 2 * at * p.head_dim
                    fragments.store_row(kind, d_score, r, p.out_scale, address, is_row, p.head_dim)
        if cutlass.const_expr(tile.adds_dq):
            if cutlass.const_expr(tile.weight_stages == 1):
                self.meet(WEIGHTS_FREE + (1 - group))
            if cute.arch.lane_idx() == 0:
                ptx.bulk_wait_group()

    @cute.jit
    def wait_gradients(self, pending: cutlass.Constexpr, d_value, d_score):
        """Waits for C1 and C2 of a block."""
        if cutlass.const_expr(self.tile.has_c1 and self.tile.has_c2):
            fragments.wait(pending, d_value, d_score)
        elif cutlass.const_expr(self.tile.has_c1):
            fragments.wait(pending, d_value)
        else:
            fragments.wait(pending, d_score)

    @cute.jit
    def block(
        self,
        is_first: cutlass.Constexpr,
        p,
        smem,
        ready,
        rows,
        first_scores,
        d_value,
        d_score,
        d_query,
        statistic,
        batch,
        row,
        low: cute.Pointer,
        high: cute.Pointer,
        dq: cute.Pointer,
        first_block,
        begin,
        block_count,
        seen,
        seen_end,
        is_last,
        slot,
        phase,
        stage,
        stat_phase,
        of,
        block,
        past,
    ):
        """A block of columns: its products with S, dP, P and dS. Returns what changes from block to block.

        A block may have two parts. Where registers suffice, the scores of the second are multiplied while the first
        has its softmax. dQ is that of the block before (the tile of sums ``past``), for which dS of both warpgroups is
        needed: neither waits for the other as long as it is less than a block behind.
        """
        tile, kind, width = self.tile, self.config.packed, self.tile.part_columns
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        column = (first_block + block) * tile.columns
        if cutlass.const_expr(tile.slots == 2 * tile.parts * STATISTIC_STAGES):
            stage, stat_phase = slot // (2 * tile.parts), phase  # two counters less
        scores = [first_scores] + [cute.make_rmem_tensor(width // 2, Float32) for _ in range(1, tile.parts)]
        has_past = tile.adds_dq and not is_first
        if cutlass.const_expr(not tile.begins_early):
            self.multiply_scores(smem, ready, slot, phase, rows, first_scores)
        if cutlass.const_expr(has_past):
            self.multiply_query_gradient(smem, stage, stat_phase, d_query)
        if cutlass.const_expr(tile.transposed):
            ptx.mbarrier_wait(smem.stat_full + 8 * stage, stat_phase)
        before = slot, slot  # slots of the part before
        for part in cutlass.range_constexpr(tile.parts):
            s, first = scores[part], column + part * width
            b2_slot, b2_phase = self.skip(slot, phase, 1)
            b1, b2 = smem.data + slot * tile.slot_bytes, smem.data + b2_slot * tile.slot_bytes
            next_slot, next_phase = self.skip(slot, phase, 2)
            is_last_part = part + 1 == tile.parts
            numbers = smem.statistics + stage * tile.statistic_bytes + 4 * part * width
            dp = cute.make_rmem_tensor(width // 2, Float32)
            weights = cute.make_rmem_tensor(width // 4, Uint32)
            score_weights = cute.make_rmem_tensor(width // 4, Uint32)
            follows = tile.looks_ahead and not is_last_part
            late = part == 0 and has_past  # dP comes when dQ has left its registers
            if cutlass.const_expr(part > 0 and not tile.looks_ahead):
                self.multiply_scores(smem, ready, slot, phase, rows, s)
            ptx.mbarrier_wait(ready + 8 * b2_slot, b2_phase)
            if cutlass.const_expr(not late):
                self.multiply_values(smem, b2, rows, dp)
                if cutlass.const_expr(follows):
                    self.multiply_scores(smem, ready, next_slot, next_phase, rows, scores[part + 1])
            if cutlass.const_expr(part > 0 or not tile.begins_early):
                after = 1 if late else int(tile.has_c2) + follows + 2 * (tile.looks_ahead and part > 0)
                fragments.wait(after, s)

            whole = (seen <= first) & (first + width <= seen_end)
            hidden = Float32(-INFINITY)
            if p.scale < 0.0:
                hidden = Float32(INFINITY)
            if cutlass.const_expr(tile.caps):
                if p.has_cap != 0:
                    soft_cap.tanh(s, width // 2, p.cap, False)
            self.hide(p, s, whole, first, hidden, batch, row, low, high)
            self.probabilities(p, s, weights, numbers, statistic)
            if cutlass.const_expr(late):
                fragments.wait(0, d_query)
                self.add_query_gradient(smem, d_query, past, dq)
                self.multiply_values(smem, b2, rows, dp)
                if cutlass.const_expr(follows):
                    self.multiply_scores(smem, ready, next_slot, next_phase, rows, scores[part + 1])
            if cutlass.const_expr(tile.has_c1):
                fragments.multiply_rows(kind, d_value, weights, b2, tile.slice_bytes)
            if cutlass.const_expr(tile.has_c2):
                fragments.wait(int(tile.has_c1) + follows, dp)
                if cutlass.const_expr(part > 0):  # nor is anything in flight that reads the part before
                    work.release(smem.empty + 8 * before[0])
                    work.release(smem.empty + 8 * before[1])
                for i in cutlass.range_constexpr(width // 4):
                    deltas = self.pair(numbers + 4 * tile.columns, statistic, 2, i)
                    for e in cutlass.range_constexpr(2):
                        s[2 * i + e] = s[2 * i + e] * (dp[2 * i + e] - deltas[e])
                self.hide(p, s, whole, first, Float32(0.0), batch, row, low, high)
                fragments.pack(kind, s, score_weights)
                if cutlass.const_expr(tile.adds_dq):
                    if cutlass.const_expr(part == 0 and tile.weight_stages == 1):
                        self.meet(WEIGHTS_FREE + (1 - group))
                    at = smem.weights + stage % tile.weight_stages * tile.weight_bytes + part * tile.rows * 128
                    fragments.store_weights(score_weights, at, tile.rows * 128)
                if cutlass.const_expr(not is_last_part):
                    before, slot, phase = (slot, b2_slot), next_slot, next_phase
                fragments.multiply_rows(kind, d_score, score_weights, b1, tile.slice_bytes)

        if cutlass.const_expr(tile.adds_dq):
            ptx.fence_proxy_async_shared()
            work.release(smem.stored + 8 * stage)
        if cutlass.const_expr(tile.begins_early):
            # The last block has nothing to begin with: its own scores again, which nobody reads.
            s_slot, s_phase = next_slot, next_phase
            if is_last:
                s_slot, s_phase = slot, phase
            self.multiply_scores(smem, ready, s_slot, s_phase, rows, first_scores)
            fragments.wait(0, d_value, d_score, first_scores)
        else:
            self.wait_gradients(0, d_value, d_score)
        work.release(smem.empty + 8 * slot)
        work.release(smem.empty + 8 * b2_slot)
        if cutlass.const_expr(tile.transposed):
            work.release(smem.stat_empty + 8 * stage)
        if cutlass.const_expr(tile.adds_dq):
            tiles = (p.columns + tile.columns - 1) // tile.columns * (tile.columns // TILE_ROWS)
            past = of * tiles + column // TILE_ROWS
        of, block = self.next_block(of, block, begin, block_count)
        stage, stat_phase = work.advance(STATISTIC_STAGES, stage, stat_phase)
        return next_slot, next_phase, stage, stat_phase, of, block, past

    def skip(self, slot, phase, count: int):
        """The slot that comes ``count`` later, and its phase."""
        for _ in range(count):
            slot, phase = work.advance(self.tile.slots, slot, phase)
        return slot, phase

    @cute.jit
    def multiply_values(self, smem, b2, rows, dp):
        """Issues dP of a part."""
        tile = self.tile
        if cutlass.const_expr(tile.holds_rows):
            fragments.multiply_held(self.config.packed, dp, rows[1], b2, tile.slice_bytes)
        elif cutlass.const_expr(tile.has_c2):
            a2 = smem.a2 + cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 * tile.a2_bytes
            slices = (TILE_ROWS * 128, tile.slice_bytes)
            fragments.multiply_dims(self.config.packed, dp, a2, b2, tile.value_dim, slices)

    @cute.jit
    def multiply_scores(self, smem, ready, slot, phase, rows, scores):
        """Issues S of a part."""
        tile = self.tile
        a1 = smem.a1 + cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4 * tile.a1_bytes
        ptx.mbarrier_wait(ready + 8 * slot, phase)
        b1, slices = smem.data + slot * tile.slot_bytes, (TILE_ROWS * 128, tile.slice_bytes)
        if cutlass.const_expr(tile.holds_rows):
            fragments.multiply_held(self.config.packed, scores, rows[0], b1, tile.slice_bytes)
        else:
            fragments.multiply_dims(self.config.packed, scores, a1, b1, tile.head_dim, slices)

    @cute.jit
    def clean_rows(self, a1, bounds):
        """Zeroes the thread's part of those of its rows of K that see nothing.

        dS is 0 there, but 0 times a NaN or an infinity that stands in padding is NaN.
        """
        quad, row = cute.arch.lane_idx() % 4, cute.arch.warp_idx() % 4 * 16 + cute.arch.lane_idx() // 4
        for r in cutlass.range_constexpr(2):
            if bounds[2 * r] >= bounds[2 * r + 1]:
                for chunk in cutlass.range(2 * self.tile.score_slices, unroll=1):
                    at = a1 + (chunk // 2) * (TILE_ROWS * 128) + (row + 8 * r) * 128 + (chunk % 2 * 4 + quad) * 16
                    ptx.st_shared_v4(at, [Int32(0)] * 4)
        cute.arch.sync_warp()
        ptx.fence_proxy_async_shared()

    @cute.jit
    def multiply_query_gradient(self, smem, stage, stat_phase, d_query):
        """Issues dQ = dS K of the block before that of ``stage``, when both warpgroups have stored its dS.

        Each has 64 of the queries or, where a block has no more, half of the head dims.
        """
        tile = self.tile
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        past = 1 - stage
        ptx.mbarrier_wait(smem.stored + 8 * past, stat_phase ^ past)
        weights, keys = smem.weights + past % tile.weight_stages * tile.weight_bytes, smem.a1
        if cutlass.const_expr(tile.parts == 2):
            weights = weights + group * (tile.rows * 128)
        else:
            keys = keys + group * (TILE_ROWS * 128)
        fragments.multiply_transposed(
            self.config.packed, d_query, weights, keys, tile.rows // 16, tile.a1_bytes, TILE_ROWS * 128
        )

    @cute.jit
    def add_query_gradient(self, smem, d_query, past, dq: cute.Pointer):
        """Adds dQ in global memory to the tile ``past``, by way of shared memory: each warp its part in one copy.

        It lies there as accumulators do: for each 64 queries, and the head dims of a warpgroup, the parts of its warps,
        where four floats of each lane lie together.
        """
        tile = self.tile
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        part_bytes = tile.sum_bytes // (4 * tile.warpgroups)
        part = smem.sums + warp * part_bytes
        if cutlass.const_expr(tile.weight_stages == 1):
            self.arrive(WEIGHTS_FREE + warp // 4)
        if lane == 0:
            ptx.bulk_wait_group_read()
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(tile.dq_columns // 8):
            values = [d_query[4 * i + j] for j in range(4)]
            ptx.st_shared_v4(part + i * 512 + lane * 16, values)
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            # The other warpgroup has the next 64 queries, or the other head dims: both lie behind the first's.
            at = Int64(past) * (4 * TILE_ROWS * tile.head_dim) + warp * part_bytes
            instructions.bulk_add(dq.toint() + at, part, part_bytes)
            ptx.bulk_commit_group()

    @cute.jit
    def arrive(self, barrier):
        """Arrives at a barrier where the other warpgroup waits."""
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS * self.tile.warpgroups)

    @cute.jit
    def meet(self, barrier):
        """Waits for the other warpgroup."""
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS * self.tile.warpgroups)

    @cute.jit
    def pair(self, numbers, statistic, which: cutlass.Constexpr, i: cutlass.Constexpr):
        """LSE or delta of the i-th pair of a fragment: of its row, or transposed of its two columns."""
        if cutlass.const_expr(self.tile.transposed):
            return ptx.ld_shared_f32x2(numbers + 4 * (8 * (i // 2) + 2 * (cute.arch.lane_idx() % 4)))
        else:
            return statistic[which + i % 2], statistic[which + i % 2]

    @cute.jit
    def bounds(self, p, batch, row, low: cute.Pointer, high: cute.Pointer):
        """First column and one past the last that the thread's rows see: of row, then of row + 8."""
        ends = []
        for r in cutlass.range_constexpr(2):
            ends += intervals.interval(p, p.rows, p.columns, batch, row + 8 * r, low, high)
        return ends

    @cute.jit
    def hide(self, p, s, whole, first, hidden, batch, row, low: cute.Pointer, high: cute.Pointer):
        """Sets what the rows do not see of the columns from ``first`` to ``hidden``, unless they see the ``whole``.

        Bounds are found anew here, few times, because over all blocks they would take registers.
        """
        if whole == False:  # noqa: E712
            bounds = self.bounds(p, batch, row, low, high)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                fragments.mask(s, r, bounds[2 * r] - first, bounds[2 * r + 1] - first, hidden)

    @cute.jit
    def probabilities(self, p, s, weights, numbers, statistic):
        """P = exp2(scale S - LSE), packed for C1; what stays in ``s`` is the factor of dP - delta."""
        tile = self.tile
        if cutlass.const_expr(tile.caps):
            if p.has_cap != 0:
                self.capped_probabilities(p, s, weights, numbers, statistic)
            else:
                self.plain_probabilities(p, s, weights, numbers, statistic)
        else:
            self.plain_probabilities(p, s, weights, numbers, statistic)

    @cute.jit
    def plain_probabilities(self, p, s, weights, numbers, statistic):
        """Without a soft cap."""
        for i in cutlass.range_constexpr(self.tile.part_columns // 4):
            shifts = self.pair(numbers, statistic, 0, i)
            for e in cutlass.range_constexpr(2):
                s[2 * i + e] = ptx.ex2(ptx.fma(s[2 * i + e], p.scale, -shifts[e]))
            if cutlass.const_expr(self.tile.has_c1):
                weights[i] = ptx.pack(self.config.packed, s[2 * i], s[2 * i + 1])

    @cute.jit
    def capped_probabilities(self, p, s, weights, numbers, statistic):
        """The derivative of the cap is 1 - tanh^2; hidden scores make it NaN, and are masked again."""
        for i in cutlass.range_constexpr(self.tile.part_columns // 4):
            shifts = self.pair(numbers, statistic, 0, i)
            probabilities = [ptx.ex2(ptx.fma(s[2 * i + e], p.scale, -shifts[e])) for e in range(2)]
            if cutlass.const_expr(self.tile.has_c1):
                weights[i] = ptx.pack(self.config.packed, *probabilities)
            for e in cutlass.range_constexpr(2):
                tanh = s[2 * i + e]
                s[2 * i + e] = probabilities[e] * ptx.fma(-tanh, tanh, Float32(1.0))


@cute.jit
def row_statistics(lse: cute.Pointer, delta: cute.Pointer, head, query, queries):
    """LSE in log2 units and delta of a query; LSE is 0 where it sees nothing, whose scores are all masked."""
    number, difference = Float32(0.0), Float32(0.0)
    if query < queries:
        at = head * queries + query
        number = cute.make_tensor(lse, cute.make_layout(1 << 30))[at] * LOG2_E
        difference = cute.make_tensor(delta, cute.make_layout(1 << 30))[at]
        if number == -INFINITY:
            number = Float32(0.0)
    return number, difference


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    tile = BackwardTile(**{f.name: options[f.name] for f in dataclasses.fields(BackwardTile)})
    config = BackwardConfig(options["dtype"], tile)
    element = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
    backward = BackwardKernel(config)
    BackwardKernel.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(f32: cute.Pointer, i32: cute.Pointer, n: Int32, x: Float32, stream: cuda.CUstream):
        maps = [instructions.nominal_tensor_map(f32, element, n) for _ in range(4)]
        backward.kernel(
            *maps, f32, f32, f32, f32, f32, i32, i32, i32, i32, i32, x, x, x, (n,) * len(integer_names("backward_sm90"))
        ).launch(grid=(n, 1, 1), block=(tile.threads, 1, 1), smem=227 * 1024, stream=stream, min_blocks_per_mp=1)

    f32, i32 = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Float32, Int32))
    return host, (f32, i32, Int32(1), Float32(1.0), cuda.CUstream(0))
