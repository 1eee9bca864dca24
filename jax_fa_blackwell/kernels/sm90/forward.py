"""Forward attention for sm_90a: O [B, T, N, Hv] and LSE [B, T, N] from query, key and value.

One persistent block of a producer warpgroup and two or three consumer warpgroups walks the work items with the grid's
stride, back and forth. An item is a tile of 64 query rows for each consumer and the KV blocks that the tile sees. A
variant is made for a class of head dims, because accumulators are registers; TMA fills what is beyond the head dim
with zeros. Everything else is a run-time parameter (``plan/hopper_forward.py``). Algorithm: FlashAttention-3.

Two overlaps hide the softmax. Within a warpgroup S of the next block is issued before P V of the present one, and its
softmax runs while P V is multiplied. Between warpgroups a token goes round: only who holds it issues products, so that
the others are in their softmax meanwhile. P stays in registers, as the left operand of P V.

The running maximum may lag by RESCALE_THRESHOLD in log2 units, so that the accumulator is seldom rescaled
(FlashAttention-4, conditional rescaling).

Barriers; w is a consumer warpgroup, s a stage, k the number of times the role has waited on it (parity k mod 2 unless
stated):

    barrier      count  arrives                                  waits      phase
    q_full[w]    1+tx   load, expecting the 64 rows              consumer   an item with keys
    q_empty[w]   4      each consumer warp, last S done          load       such an item; parity (k+1) mod 2
    k_full[s]    1+tx   load, expecting a block of keys          consumers  a use of stage s
    k_empty[s]   4 W    each consumer warp, S done               load       parity (k+1) mod 2
    v_full[s]    1+tx   load, expecting a block of values        consumers, or clean
    cleaned[s]   1      clean, unseen rows zeroed                consumers, where cleaned
    v_empty[s]   4 W    each consumer warp, P V done             load       parity (k+1) mod 2
    bar 1+w      256    the warpgroup before, products issued    consumer   a block; the token

Order of loads: Q, K_0, then K_j and V_(j-1) for each further block, then the last V: that of their first uses.
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

from jax_fa_blackwell.kernels.common import intervals, ptx, soft_cap, softmax
from jax_fa_blackwell.kernels.common.params import Params, integer_names
from jax_fa_blackwell.kernels.common.softmax import EXACT_BEYOND, INFINITY, RESCALE_THRESHOLD
from jax_fa_blackwell.kernels.sm90 import fragments, instructions, work
from jax_fa_blackwell.plan.hopper import SLICE, TILE_ROWS, ForwardTile

WARPGROUP = 128  # threads


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """What is fixed when the kernel is compiled; everything else is a run-time parameter."""

    dtype: str
    tile: ForwardTile

    @property
    def packed(self) -> str:
        """The PTX name of the 16-bit type."""
        return {"bfloat16": "bf16", "float16": "f16"}[self.dtype]


class Smem:
    """Addresses in shared memory from its base: barriers, then the query tile, keys and values by stage."""

    def __init__(self, base: Int32, tile: ForwardTile):
        self.q_full, self.q_empty = base, base + 8 * tile.warpgroups
        stages = base + 16 * tile.warpgroups
        names = ("k_full", "k_empty", "v_full", "cleaned", "v_empty")
        for index, name in enumerate(names):
            setattr(self, name, stages + 8 * tile.stages * index)
        self.query = base + tile.HEADER_BYTES
        self.keys = self.query + tile.warpgroups * tile.query_bytes
        self.values = self.keys + tile.stages * tile.key_bytes


class ForwardKernel:
    """One persistent block: consumer warpgroups first, then the producer's with warps load, clean and two idle."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.tile = config.tile

    # --- entry --------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[TensorMap],
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        out: cute.Pointer,
        lse: cute.Pointer,
        row_low: cute.Pointer,
        row_high: cute.Pointer,
        blocks: cute.Pointer,
        key_low: cute.Pointer,
        key_high: cute.Pointer,
        sinks: cute.Pointer,
        scale: Float32,
        cap: Float32,
        scalars: tuple,
    ):
        """The entry: sets up barriers, then each warp takes its role."""
        p = Params("forward_sm90", scalars, scale=scale, cap=cap)
        smem = Smem(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()), self.tile)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            self.init_barriers(smem)
        cute.arch.sync_threads()
        producer = 4 * self.tile.warpgroups
        if warp < producer:
            cute.arch.setmaxregister_increase(self.tile.consumer_registers)
            self.consume(p, smem, blocks, row_low, row_high, out, lse, sinks)
        else:
            cute.arch.setmaxregister_decrease(self.tile.producer_registers)
            if warp == producer:
                with cute.arch.elect_one():
                    maps = (q_map.get_ptr().toint(), k_map.get_ptr().toint(), v_map.get_ptr().toint())
                    self.load(p, smem, blocks, *maps)
            if warp == producer + 1 and p.cleaned != 0:
                self.clean(p, smem, blocks, key_low, key_high)

    @cute.jit
    def init_barriers(self, smem):
        """Barrier counts as in the module's table."""
        for w in cutlass.range_constexpr(self.tile.warpgroups):
            ptx.mbarrier_init(smem.q_full + 8 * w, 1)
            ptx.mbarrier_init(smem.q_empty + 8 * w, 4)
        for stage in cutlass.range_constexpr(self.tile.stages):
            for first in (smem.k_full, smem.v_full, smem.cleaned):
                ptx.mbarrier_init(first + 8 * stage, 1)
            for first in (smem.k_empty, smem.v_empty):
                ptx.mbarrier_init(first + 8 * stage, 4 * self.tile.warpgroups)
        cute.arch.mbarrier_init_fence()

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, blocks: cute.Pointer, q_map: Int64, k_map: Int64, v_map: Int64):
        """Load warp, one thread: the query tile, then blocks of keys and values in the order of their first uses."""
        tile = self.tile
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(1), Int32(0), Int32(1), Int32(1)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, head, row, first_block, count = work.find(p, tile, blocks, work.item(wave))
            kv_head = head // p.group
            if count > 0:
                for w in cutlass.range_constexpr(tile.warpgroups):
                    ptx.mbarrier_wait(smem.q_empty + 8 * w, q_phase)
                    ptx.mbarrier_arrive_expect_tx(smem.q_full + 8 * w, tile.query_bytes)
                    for index in cutlass.range_constexpr(tile.key_slices):
                        destination = smem.query + w * tile.query_bytes + index * TILE_ROWS * 128
                        where = (index * SLICE, row + w * TILE_ROWS, head, batch)
                        instructions.tma_load(destination, q_map, where, smem.q_full + 8 * w)
                q_phase = q_phase ^ 1
            for index in cutlass.range(count + 1, unroll=1):
                if index < count:
                    ptx.mbarrier_wait(smem.k_empty + 8 * k_stage, k_phase)
                    barrier, data = smem.k_full + 8 * k_stage, smem.keys + k_stage * tile.key_bytes
                    self.load_block(
                        data, k_map, tile.key_slices, (first_block + index) * tile.columns, kv_head, batch, barrier
                    )
                    k_stage, k_phase = work.advance(tile.stages, k_stage, k_phase)
                if index > 0:
                    ptx.mbarrier_wait(smem.v_empty + 8 * v_stage, v_phase)
                    barrier, data = smem.v_full + 8 * v_stage, smem.values + v_stage * tile.value_bytes
                    key = (first_block + index - 1) * tile.columns
                    self.load_block(data, v_map, tile.value_slices, key, kv_head, batch, barrier)
                    v_stage, v_phase = work.advance(tile.stages, v_stage, v_phase)

    @cute.jit
    def load_block(self, destination, tensor_map: Int64, slices: cutlass.Constexpr, key, head, batch, barrier):
        """Loads all slices of a block of keys or values."""
        slice_bytes = self.tile.slice_bytes
        ptx.mbarrier_arrive_expect_tx(barrier, slices * slice_bytes)
        for index in cutlass.range_constexpr(slices):
            where = (index * SLICE, key, head, batch)
            instructions.tma_load(destination + index * slice_bytes, tensor_map, where, barrier)

    # --- clean --------------------------------------------------------------------------------------------------

    @cute.jit
    def clean(self, p, smem, blocks: cute.Pointer, low: cute.Pointer, high: cute.Pointer):
        """Cleaning warp: zeroes the values of keys that no row sees."""
        tile = self.tile
        stage, phase = Int32(0), Int32(0)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, _, _, first_block, count = work.find(p, tile, blocks, work.item(wave))
            for index in cutlass.range(count, unroll=1):
                bits = work.unseen(p, batch, (first_block + index) * tile.columns, tile.columns, low, high)
                cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
                ptx.mbarrier_wait(smem.v_full + 8 * stage, phase)
                work.clean(smem.values + stage * tile.value_bytes, tile.columns, tile.value_slices, bits)
                work.release(smem.cleaned + 8 * stage)
                stage, phase = work.advance(tile.stages, stage, phase)

    # --- consumers ----------------------------------------------------------------------------------------------

    @cute.jit
    def consume(
        self,
        p,
        smem,
        blocks: cute.Pointer,
        row_low: cute.Pointer,
        row_high: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        sinks: cute.Pointer,
    ):
        """Consumer warpgroup: scores, softmax and output of 64 rows; a thread has rows g and g + 8 of its warp's 16."""
        tile = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        lane = cute.arch.lane_idx()
        lane_row = warp * 16 + lane // 4
        v_ready = smem.v_full + p.cleaned * (smem.cleaned - smem.v_full)
        query = smem.query + group * tile.query_bytes
        kind, slice_bytes = self.config.packed, (TILE_ROWS * 128, tile.slice_bytes)
        k_stage, k_phase, v_stage, v_phase, q_phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        s = cute.make_rmem_tensor(tile.columns // 2, Float32)
        o = cute.make_rmem_tensor(tile.value_dim // 2, Float32)
        weights = cute.make_rmem_tensor(tile.columns // 4, Uint32)
        state = cute.make_rmem_tensor(8, Float32)  # maxima, sums, rescale factors of the two rows
        if warp >= 4 * (tile.warpgroups - 1):
            self.pass_token(group)
        for wave in cutlass.range(work.waves(p), unroll=1):
            batch, head, row, first_block, count = work.find_uniform(p, tile, blocks, work.item(wave))
            low0, high0 = intervals.interval(p, p.rows, p.columns, batch, row + lane_row, row_low, row_high)
            low1, high1 = intervals.interval(p, p.rows, p.columns, batch, row + lane_row + 8, row_low, row_high)
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            for i in cutlass.range_constexpr(tile.value_dim // 2):
                o[i] = Float32(0.0)
            for r in cutlass.range_constexpr(2):
                state[r] = Float32(-INFINITY)
                state[2 + r] = Float32(0.0)
            if count > 0:
                first_key = first_block * tile.columns
                ptx.mbarrier_wait(smem.q_full + 8 * group, q_phase)
                q_phase = q_phase ^ 1
                ptx.mbarrier_wait(smem.k_full + 8 * k_stage, k_phase)
                self.take_token(group)
                fragments.multiply_dims(
                    kind, s, query, smem.keys + k_stage * tile.key_bytes, tile.head_dim, slice_bytes
                )
                self.pass_token(group)
                fragments.wait(0, s)
                work.release(smem.k_empty + 8 * k_stage)
                k_stage, k_phase = work.advance(tile.stages, k_stage, k_phase)
                self.softmax(p, s, state, low0 - first_key, high0 - first_key, low1 - first_key, high1 - first_key)
                fragments.pack(kind, s, weights)
                for index in cutlass.range(1, count, unroll=1):
                    first_key = (first_block + index) * tile.columns
                    ptx.mbarrier_wait(smem.k_full + 8 * k_stage, k_phase)
                    self.take_token(group)
                    fragments.multiply_dims(
                        kind, s, query, smem.keys + k_stage * tile.key_bytes, tile.head_dim, slice_bytes
                    )
                    ptx.mbarrier_wait(v_ready + 8 * v_stage, v_phase)
                    fragments.multiply_rows(
                        kind, o, weights, smem.values + v_stage * tile.value_bytes, tile.slice_bytes
                    )
                    self.pass_token(group)
                    fragments.wait(1, s)
                    work.release(smem.k_empty + 8 * k_stage)
                    k_stage, k_phase = work.advance(tile.stages, k_stage, k_phase)
                    self.softmax(p, s, state, low0 - first_key, high0 - first_key, low1 - first_key, high1 - first_key)
                    fragments.wait(0, o)
                    work.release(smem.v_empty + 8 * v_stage)
                    v_stage, v_phase = work.advance(tile.stages, v_stage, v_phase)
                    self.rescale(o, state)
                    fragments.pack(kind, s, weights)
                work.release(smem.q_empty + 8 * group)
                ptx.mbarrier_wait(v_ready + 8 * v_stage, v_phase)
                fragments.multiply_rows(kind, o, weights, smem.values + v_stage * tile.value_bytes, tile.slice_bytes)
                fragments.wait(0, o)
                work.release(smem.v_empty + 8 * v_stage)
                v_stage, v_phase = work.advance(tile.stages, v_stage, v_phase)
            self.finish(p, o, state, out, lse, sinks, batch, head, row + lane_row)
        if warp < 4:
            self.take_token(group)

    @cute.jit
    def take_token(self, group):
        """Waits until the warpgroup before has issued its products."""
        if cutlass.const_expr(self.tile.takes_turns):
            cute.arch.barrier(barrier_id=group + 1, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_token(self, group):
        """Lets the next warpgroup issue its products."""
        if cutlass.const_expr(self.tile.takes_turns):
            following = group + 1
            following = following * Int32(following != self.tile.warpgroups)
            cute.arch.barrier_arrive(barrier_id=following + 1, number_of_threads=2 * WARPGROUP)

    # --- softmax ------------------------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, p, s, state, low0, high0, low1, high1):
        """Scores to weights in place; intervals count from the block's first key.

        ``state``: maxima and sums of the thread's columns, updated, and the factors that O is to be multiplied with.
        """
        keys = self.tile.columns
        if p.has_cap != 0:
            soft_cap.tanh(s, keys // 2, p.cap, False)
        if p.negated != 0:
            for i in cutlass.range_constexpr(keys // 2):
                s[i] = -s[i]
        inside = (low0 <= 0) & (keys <= high0) & (low1 <= 0) & (keys <= high1)
        if cute.arch.vote_all_sync(inside) == False:  # noqa: E712
            fragments.mask(s, 0, low0, high0, -INFINITY)
            fragments.mask(s, 1, low1, high1, -INFINITY)
        shifts = [Float32(0.0), Float32(0.0)]
        bases = [Float32(0.0), Float32(0.0)]
        for r in cutlass.range_constexpr(2):
            previous = state[r]
            highest = self.row_maximum(s, r, previous)
            maximum = previous
            if (highest - previous) * p.scale > RESCALE_THRESHOLD:
                maximum = highest
            state[r] = maximum
            base = maximum
            if maximum == -INFINITY:
                base, previous = Float32(0.0), Float32(0.0)
            bases[r] = base
            shifts[r] = ptx.mul(base, p.scale)
            state[4 + r] = ptx.ex2((previous - base) * p.scale)
        sums = [Float32(0.0)] * 4
        for i in cutlass.range_constexpr(keys // 2):
            weight = ptx.ex2(ptx.fma(s[i], p.scale, -shifts[i // 2 % 2]))
            s[i] = weight
            sums[i % 4] = sums[i % 4] + weight
        # The shift is rounded once, in every use the same, so that its error cancels in the end. It grows with the
        # scores to more than a rounding of 16 bits: great ones are corrected, so that the maximum's weight is 1. The
        # branch comes last because it keeps the compiler from moving exponentials behind the wait for P V.
        great = cutlass.max(shifts[0], -shifts[0]) > EXACT_BEYOND
        great = great | (cutlass.max(shifts[1], -shifts[1]) > EXACT_BEYOND)
        if cute.arch.vote_any_sync(great):
            exact = [ptx.ex2(-ptx.fma(bases[r], p.scale, -shifts[r])) for r in range(2)]
            for i in cutlass.range_constexpr(keys // 2):
                s[i] = s[i] * exact[i // 2 % 2]
            for i in cutlass.range_constexpr(4):
                sums[i] = sums[i] * exact[i // 2]
        for r in cutlass.range_constexpr(2):
            state[2 + r] = state[2 + r] * state[4 + r] + (sums[2 * r] + sums[2 * r + 1])

    @cute.jit
    def row_maximum(self, s, r: cutlass.Constexpr, start):
        """Maximum of ``start`` and the whole row, which four threads share."""
        parts = [start, Float32(-INFINITY)]
        for i in cutlass.range_constexpr(self.tile.columns // 8):
            for e in cutlass.range_constexpr(2):
                parts[e] = cute.arch.fmax(parts[e], s[4 * i + 2 * r + e])
        highest = cute.arch.fmax(parts[0], parts[1])
        for offset in (1, 2):
            highest = cute.arch.fmax(highest, cute.arch.shuffle_sync_bfly(highest, offset=offset))
        return highest

    @cute.jit
    def rescale(self, o, state):
        """Multiplies O with the factors that the former maxima call for."""
        if cute.arch.vote_any_sync((state[4] != 1.0) | (state[5] != 1.0)):
            for i in cutlass.range_constexpr(self.tile.value_dim // 2):
                o[i] = o[i] * state[4 + i // 2 % 2]

    # --- epilogue -----------------------------------------------------------------------------------------------

    @cute.jit
    def finish(self, p, o, state, out: cute.Pointer, lse: cute.Pointer, sinks: cute.Pointer, batch, head, first_row):
        """Writes the outputs and log-sum-exps of the thread's two rows."""
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            total = state[2 + r]
            for offset in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            at = (batch * p.rows + row) * p.row_heads + head
            factor, value = softmax.log_sum_exp(p, sinks, total, state[r], batch * p.row_heads + head)
            if (row < p.rows) & (cute.arch.lane_idx() % 4 == 0):
                cute.make_tensor(lse, cute.make_layout(1 << 30))[at] = value
            address = out.toint() + 2 * Int64(at) * p.value_dim
            fragments.store_row(self.config.packed, o, r, factor, address, row < p.rows, p.value_dim)


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    tile = ForwardTile(**{f.name: options[f.name] for f in dataclasses.fields(ForwardTile)})
    config = ForwardConfig(options["dtype"], tile)
    element = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
    forward = ForwardKernel(config)
    ForwardKernel.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(f32: cute.Pointer, i32: cute.Pointer, n: Int32, x: Float32, stream: cuda.CUstream):
        maps = [instructions.nominal_tensor_map(f32, element, n) for _ in range(3)]
        forward.kernel(
            *maps, f32, f32, i32, i32, i32, i32, i32, f32, x, x, (n,) * len(integer_names("forward_sm90"))
        ).launch(grid=(n, 1, 1), block=(tile.threads, 1, 1), smem=227 * 1024, stream=stream, min_blocks_per_mp=1)

    f32, i32 = (make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=4) for t in (Float32, Int32))
    return host, (f32, i32, Int32(1), Float32(1.0), cuda.CUstream(0))
