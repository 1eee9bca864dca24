"""Gradients of attention for sm_90a in passes without atomics: the same bits on every run.

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
(``plan/hopper_backward.py``). Algorithm: FlashAttention-2, backward, split in kernels.

A producer warpgroup (warps load, clean, statistics and an idle one) and consumer warpgroups of 64 rows. While a
warpgroup works on P or dS of a block, its own products that do not need them run, and those of the other warpgroup.

Barriers; w is a consumer warpgroup, s a slot, k the number of times the role has waited on it (parity k mod 2 unless
stated):

    barrier        count  arrives                               waits      phase
    a_full[w]      1+tx   load, expecting the 64 rows           consumer   an item with columns
    a_empty[w]     4      each consumer warp, last dP done      load       such an item; parity (k+1) mod 2
    full[s]        1+tx   load, expecting a block of B1 or B2   consumers, or clean
    cleaned[s]     1      clean, unseen columns zeroed          consumers, where cleaned
    empty[s]       4 W    each consumer warp, products done     load       parity (k+1) mod 2
    stat_full[s]   1      statistics, LSE and delta stored      consumers  a block, transposed
    stat_empty[s]  4 W    each consumer warp, both read         statistics parity (k+1) mod 2

Order of slots: B1 and B2 of each block. A consumer holds both of a block and B1 of the next.
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
from jax_fa_blackwell.plan.hopper import SLICE, STATISTIC_STAGES, TILE_ROWS, BackwardTile
from jax_fa_blackwell.plan.slices import LOG2_E

INFINITY = float("inf")


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
        }
        at = base
        for name, count in barriers.items():
            setattr(self, name, at)
            at = at + 8 * count
        self.statistics = base + tile.BARRIER_BYTES
        self.a1 = base + tile.header_bytes
        self.a2 = self.a1 + tile.warpgroups * tile.a1_bytes
        self.data = self.a2 + tile.warpgroups * tile.a2_bytes


class BackwardKernel:
    """One persistent block: consumer warpgroups first, then the producer's with load, clean and statistics."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.tile = config.tile

    @cute.jit
    def column_head(self, p, head, index, block_count):
        """The streamed operands' head of the index-th block of an item."""
        if cutlass.const_expr(self.tile.transposed):
            return head * p.group + index // block_count
        else:
            return head // p.group

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
            self.consume(p, smem, blocks, low, high, lse, delta, c1, c2)
        else:
            cute.arch.setmaxregister_decrease(tile.producer_registers)
            if warp == producer:
                with cute.arch.elect_one():
                    maps = [m.get_ptr().toint() for m in (a1_map, a2_map, b1_map, b2_map)]
                    self.load(p, smem, blocks, *maps)
            if warp == producer + 1 and p.cleaned != 0:
                self.clean(p, smem, blocks, column_low, column_high)
            if cutlass.const_expr(tile.transposed):
                if warp == producer + 2:
                    self.statistics(p, smem, blocks, lse, delta)

    @cute.jit
    def init_barriers(self, smem):
        """Barrier counts as in the module's table."""
        tile = self.tile
        for w in cutlass.range_constexpr(tile.warpgroups):
            ptx.mbarrier_init(smem.a_full + 8 * w, 1)
            ptx.mbarrier_init(smem.a_empty + 8 * w, 4)
        for slot in cutlass.range_constexpr(tile.slots):
            ptx.mbarrier_init(smem.full + 8 * slot, 1)
            ptx.mbarrier_init(smem.cleaned + 8 * slot, 1)
            ptx.mbarrier_init(smem.empty + 8 * slot, 4 * tile.warpgroups)
        for stage in cutlass.range_constexpr(STATISTIC_STAGES):
            ptx.mbarrier_init(smem.stat_full + 8 * stage, 1)
            ptx.mbarrier_init(smem.stat_empty + 8 * stage, 4 * tile.warpgroups)
        cute.arch.mbarrier_init_fence()

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, blocks: cute.Pointer, a1_map: Int64, a2_map: Int64, b1_map: Int64, b2_map: Int64):
        """Load warp, one thread: the rows' operands, then B1 and B2 of each block."""
        tile = self.tile
        slot, phase, a_phase = Int32(0), Int32(1), Int32(1)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, head, row, first_block, block_count = work.find(p, tile, blocks, work.item(wave))
            count = block_count * p.column_heads
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
            for index in cutlass.range(count, unroll=1):
                column = (first_block + index % block_count) * tile.columns
                of = self.column_head(p, head, index, block_count)
                slot, phase = self.load_block(smem, slot, phase, b1_map, tile.score_slices, column, of, batch)
                slot, phase = self.load_block(smem, slot, phase, b2_map, tile.value_slices, column, of, batch)

    @cute.jit
    def load_tile(self, data, tensor_map: Int64, slices: cutlass.Constexpr, row, head, batch, barrier):
        """Loads all slices of 64 rows; the barrier must expect them."""
        for index in cutlass.range_constexpr(slices):
            where = (index * SLICE, row, head, batch)
            instructions.tma_load(data + index * (TILE_ROWS * 128), tensor_map, where, barrier)

    @cute.jit
    def load_block(self, smem, slot, phase, tensor_map: Int64, slices: cutlass.Constexpr, column, head, batch):
        """Loads all slices of a block of columns into the next slot."""
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
    def clean(self, p, smem, blocks: cute.Pointer, low: cute.Pointer, high: cute.Pointer):
        """Cleaning warp: zeroes the columns' operands where no row sees the column."""
        tile = self.tile
        slot, phase = Int32(0), Int32(0)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, _, _, first_block, block_count = work.find(p, tile, blocks, work.item(wave))
            for index in cutlass.range(block_count * p.column_heads, unroll=1):
                column = (first_block + index % block_count) * tile.columns
                bits = work.unseen(p, batch, column, tile.columns, low, high)
                cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
                for slices in cutlass.range_constexpr(2):
                    ptx.mbarrier_wait(smem.full + 8 * slot, phase)
                    count = tile.value_slices if slices else tile.score_slices
                    work.clean(smem.data + slot * tile.slot_bytes, tile.columns, count, bits)
                    work.release(smem.cleaned + 8 * slot)
                    slot, phase = work.advance(tile.slots, slot, phase)

    @cute.jit
    def statistics(self, p, smem, blocks: cute.Pointer, lse: cute.Pointer, delta: cute.Pointer):
        """Statistics warp: LSE in log2 units and delta of each block's columns."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(1)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, head, _, first_block, block_count = work.find(p, tile, blocks, work.item(wave))
            for index in cutlass.range(block_count * p.column_heads, unroll=1):
                of = batch * p.row_heads * p.group + self.column_head(p, head, index, block_count)
                first = (first_block + index % block_count) * tile.columns
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
    ):
        """Consumer warpgroup: the gradients of 64 rows; a thread has rows g and g + 8 of its warp's 16."""
        tile, kind = self.tile, self.config.packed
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        lane_row = warp * 16 + cute.arch.lane_idx() // 4
        ready = smem.full + p.cleaned * (smem.cleaned - smem.full)
        a1 = smem.a1 + group * tile.a1_bytes
        slices = (TILE_ROWS * 128, tile.slice_bytes)
        slot, phase, stage, stat_phase, a_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        s = cute.make_rmem_tensor(tile.columns // 2, Float32)
        d_value = cute.make_rmem_tensor(tile.value_dim // 2 if tile.has_c1 else 1, Float32)
        d_score = cute.make_rmem_tensor(tile.head_dim // 2 if tile.has_c2 else 1, Float32)
        statistic = cute.make_rmem_tensor(4, Float32)  # LSE, then delta, of the two rows
        bounds = cute.make_rmem_tensor(4, Int32)  # first column and one past the last, of the two rows
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, head, row, first_block, block_count = work.find_uniform(p, tile, blocks, work.item(wave))
            row = row + lane_row
            count = block_count * p.column_heads
            for r in cutlass.range_constexpr(2):
                first, end = intervals.interval(p, p.rows, p.columns, batch, row + 8 * r, low, high)
                bounds[2 * r], bounds[2 * r + 1] = first, end
                if cutlass.const_expr(not tile.transposed):
                    of = batch * p.row_heads + head
                    statistic[r], statistic[2 + r] = row_statistics(lse, delta, of, row + 8 * r, p.rows)
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            if cutlass.const_expr(tile.has_c1):
                d_value.fill(0.0)
            if cutlass.const_expr(tile.has_c2):
                d_score.fill(0.0)
            if count > 0:
                ptx.mbarrier_wait(smem.a_full + 8 * group, a_phase)
                a_phase = a_phase ^ 1
                for index in cutlass.range(count, unroll=1):
                    column = (first_block + index % block_count) * tile.columns
                    ptx.mbarrier_wait(ready + 8 * slot, phase)
                    fragments.multiply_dims(kind, s, a1, smem.data + slot * tile.slot_bytes, tile.head_dim, slices)
                    self.gradients(
                        p, smem, ready, slot, phase, stage, stat_phase, s, d_value, d_score, statistic, bounds, column
                    )
                    self.wait_gradients(0, d_value, d_score)
                    b2_slot, b2_phase = work.advance(tile.slots, slot, phase)
                    work.release(smem.empty + 8 * slot)
                    work.release(smem.empty + 8 * b2_slot)
                    slot, phase = work.advance(tile.slots, b2_slot, b2_phase)
                    stage, stat_phase = work.advance(STATISTIC_STAGES, stage, stat_phase)
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
    def gradients(self, p, smem, ready, slot, phase, stage, stat_phase, s, d_value, d_score, statistic, bounds, column):
        """From issued scores to issued products of P and dS with the block's operands."""
        tile, kind = self.tile, self.config.packed
        group = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        b1 = smem.data + slot * tile.slot_bytes
        b2_slot, b2_phase = work.advance(tile.slots, slot, phase)
        b2 = smem.data + b2_slot * tile.slot_bytes
        slices = (TILE_ROWS * 128, tile.slice_bytes)
        dp = cute.make_rmem_tensor(tile.columns // 2, Float32)
        weights = cute.make_rmem_tensor(tile.columns // 4, Uint32)
        score_weights = cute.make_rmem_tensor(tile.columns // 4, Uint32)
        numbers = smem.statistics + stage * tile.statistic_bytes
        if cutlass.const_expr(tile.transposed):
            ptx.mbarrier_wait(smem.stat_full + 8 * stage, stat_phase)
        ptx.mbarrier_wait(ready + 8 * b2_slot, b2_phase)
        if cutlass.const_expr(tile.has_c2):
            fragments.multiply_dims(kind, dp, smem.a2 + group * tile.a2_bytes, b2, tile.value_dim, slices)
            fragments.wait(1, s)
        else:
            fragments.wait(0, s)

        inside = (bounds[0] <= column) & (column + tile.columns <= bounds[1])
        inside = inside & (bounds[2] <= column) & (column + tile.columns <= bounds[3])
        whole = cute.arch.vote_all_sync(inside)
        self.probabilities(p, s, weights, whole, numbers, statistic, bounds, column)
        if cutlass.const_expr(tile.has_c1):
            fragments.multiply_rows(kind, d_value, weights, b2, tile.slice_bytes)
        if cutlass.const_expr(tile.has_c2):
            fragments.wait(1 if tile.has_c1 else 0, dp)
            for i in cutlass.range_constexpr(tile.columns // 4):
                deltas = self.pair(numbers + 4 * tile.columns, statistic, 2, i)
                for e in cutlass.range_constexpr(2):
                    s[2 * i + e] = s[2 * i + e] * (dp[2 * i + e] - deltas[e])
            if whole == False:  # noqa: E712
                for r in cutlass.range_constexpr(2):
                    fragments.mask(s, r, bounds[2 * r] - column, bounds[2 * r + 1] - column, 0.0)
            fragments.pack(kind, s, score_weights)
            fragments.multiply_rows(kind, d_score, score_weights, b1, tile.slice_bytes)
        if cutlass.const_expr(tile.transposed):
            work.release(smem.stat_empty + 8 * stage)

    @cute.jit
    def pair(self, numbers, statistic, which: cutlass.Constexpr, i: cutlass.Constexpr):
        """LSE or delta of the i-th pair of a fragment: of its row, or transposed of its two columns."""
        if cutlass.const_expr(self.tile.transposed):
            return ptx.ld_shared_f32x2(numbers + 4 * (8 * (i // 2) + 2 * (cute.arch.lane_idx() % 4)))
        else:
            return statistic[which + i % 2], statistic[which + i % 2]

    @cute.jit
    def probabilities(self, p, s, weights, whole, numbers, statistic, bounds, column):
        """P = exp2(scale S - LSE), packed for C1; what stays in ``s`` is the factor of dP - delta."""
        tile = self.tile
        if p.has_cap != 0:
            soft_cap.tanh(s, tile.columns // 2, p.cap, False)
        if whole == False:  # noqa: E712
            hidden = Float32(-INFINITY)
            if p.scale < 0.0:
                hidden = Float32(INFINITY)
            for r in cutlass.range_constexpr(2):
                fragments.mask(s, r, bounds[2 * r] - column, bounds[2 * r + 1] - column, hidden)
        if p.has_cap != 0:
            # The derivative of the cap is 1 - tanh^2; hidden scores make it NaN, and are masked again.
            for i in cutlass.range_constexpr(tile.columns // 4):
                shifts = self.pair(numbers, statistic, 0, i)
                probabilities = [ptx.ex2(ptx.fma(s[2 * i + e], p.scale, -shifts[e])) for e in range(2)]
                if cutlass.const_expr(tile.has_c1):
                    weights[i] = ptx.pack(self.config.packed, *probabilities)
                for e in cutlass.range_constexpr(2):
                    tanh = s[2 * i + e]
                    s[2 * i + e] = probabilities[e] * ptx.fma(-tanh, tanh, Float32(1.0))
        else:
            for i in cutlass.range_constexpr(tile.columns // 4):
                shifts = self.pair(numbers, statistic, 0, i)
                for e in cutlass.range_constexpr(2):
                    s[2 * i + e] = ptx.ex2(ptx.fma(s[2 * i + e], p.scale, -shifts[e]))
                if cutlass.const_expr(tile.has_c1):
                    weights[i] = ptx.pack(self.config.packed, s[2 * i], s[2 * i + 1])


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
            *maps, f32, f32, f32, f32, i32, i32, i32, i32, i32, x, x, x, (n,) * len(integer_names("backward_sm90"))
        ).launch(grid=(n, 1, 1), block=(tile.threads, 1, 1), smem=227 * 1024, stream=stream, min_blocks_per_mp=1)

    f32, i32 = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Float32, Int32))
    return host, (f32, i32, Int32(1), Float32(1.0), cuda.CUstream(0))
