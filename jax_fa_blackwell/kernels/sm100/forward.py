"""Forward attention for sm_100a and sm_103a: O [B, T, N, Hv] and LSE [B, T, N] from query, key and value.

A persistent block of 16 warps walks the work items with the grid's stride. An item is one or two tiles of 128 query
rows, a part of the value head dim, and the KV blocks of 128 keys that its rows see. All sizes are run-time
parameters from the launch plan (``plan/forward.py``): head dims are walked in slices of 64 (the 128-byte swizzle row),
so that one cubin serves every head dim. With ``group`` 2 two blocks work as a pair on an item of two tiles, one each,
and share its keys and values (``slices.py``): every block then reads half of them from shared memory.

Roles: softmax warps 0-3 (tile 0) and 4-7 (tile 1), one thread a row; correction and epilogue 8-11; MMA 12; load 13;
clean 14, where keys that no row sees may hold NaN (``slices.clean``); 15 idle.
With two tiles the MMA warp works on one tile while softmax works on the other; with one tile, score tiles alternate
between two buffers and the next scores are issued before the softmax of the present ones is awaited.

The running maximum may lag by RESCALE_THRESHOLD in log2 units, so that the accumulator is seldom rescaled
(FlashAttention-4, conditional rescaling).

Barriers; t is a tile, u a score buffer (u = t with two tiles, else the block number mod 2), k the number of times the
role has waited on it (parity k mod 2 unless stated). In a pair each block has them all; the MMA warp is the leader's,
its commits arrive at both blocks, and what it waits on counts the arrivals (+) and bytes of both:

    barrier        count  arrives                                waits                   phase
    q_full[t]      1+tx   load, expecting the tile's slices      MMA                     an item with keys
    no_keys[t]     1      load, the staging slices are free      correction              an item without keys
    q_empty[t]     1      correction, when the staged output     load                    an item; parity (k+1) mod 2
                          has been read by the store
    s_full[u]      1      tcgen05.commit after S = Q K^T         softmax                 a use of u
    p_full[u]      4+     each softmax warp, P stored            MMA                     a use of u
    stat_full[t]   4      each softmax warp: block's rescale     correction              a block but the first,
                          factor; at the end sum and maximum                             and the end
    stat_empty[t]  4      each correction warp, value read       softmax                 parity (k+1) mod 2
    o_full[t]      1      tcgen05.commit after O += P V          correction              a block
    o_ready[t]     4+     each correction warp: O rescaled, or   MMA                     a block; parity (k+1) mod 2
                          read at the item's end
    ring_full[s]   1+tx   load, expecting one slot               MMA, or clean           a use of slot s
    cleaned[s]     1+     clean, unseen rows zeroed              MMA, where cleaned      a use of slot s
    ring_empty[s]  1      tcgen05.commit after its last reader   load                    parity (k+1) mod 2
    bar 1          128    correction warps, output staged        same                    a tile

Order of ring slots, the same for load and MMA: K_0, then for each block j with two tiles V_j, K_{j+1}; with one tile
K_{j+1}, V_j. With two tiles V_j and K_{j+1} are held together until the second tile has used them, so the ring has at
least as many slots as both have slices; a smaller ring would deadlock.
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

from jax_fa_blackwell.kernels.common import intervals, ptx, soft_cap, softmax
from jax_fa_blackwell.kernels.common.params import Params, integer_names
from jax_fa_blackwell.kernels.common.softmax import EXACT_BEYOND, INFINITY, RESCALE_THRESHOLD
from jax_fa_blackwell.kernels.sm100 import slices
from jax_fa_blackwell.plan.slices import ROWS, SLICE, SLICE_BYTES

KEYS = ROWS  # keys of a KV block
TENSOR_MEMORY_COLUMNS = 512
OUTPUT_COLUMN = 256  # first column of the output accumulators; the score tiles lie below
THREADS = 512
CORRECTION_WARP, MMA_WARP, LOAD_WARP, CLEAN_WARP = 8, 12, 13, 14
SOFTMAX_REGISTERS = {1: 232, 2: 200}  # by query tiles; with 80 for correction and 32 for the others within the SM's

# 2**f on [-1/2, 1/2], highest power first.
EXP2_COEFFICIENTS = (
    0.001326472731307149,
    0.009671512991189957,
    0.05550733581185341,
    0.24022242426872253,
    0.6931470036506653,
    1.0,
)

# Byte offsets in shared memory.
BARRIERS = 0
TMEM_ADDRESS, NOTES = 512, 544
STATISTICS = 1024  # per tile 128 scales, then per tile 128 maxima
QUERY = 3072


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """What is fixed when the kernel is compiled; everything else is a run-time parameter."""

    dtype: str
    query_tiles: int  # of a block
    soft_cap: bool = False
    polynomial_every: int = 0  # of so many pairs of exponentials one is a polynomial; 0: none
    group: int = 1  # blocks that work together

    def __post_init__(self):
        if (self.query_tiles, self.group) not in ((1, 1), (2, 1), (1, 2)):
            raise ValueError(
                f"query_tiles and group must be 1, 1 or 2, 1 or 1, 2; got {self.query_tiles}, {self.group}"
            )

    @property
    def packed(self) -> str:
        """The PTX name of the 16-bit type."""
        return {"bfloat16": "bf16", "float16": "f16"}[self.dtype]


class Smem:
    """Addresses in shared memory from its base; barriers come in pairs, one a query tile or score buffer."""

    def __init__(self, base: Int32, group: int):
        names = ("q_full", "q_empty", "no_keys", "s_full", "p_full", "stat_full", "stat_empty", "o_full", "o_ready")
        for index, name in enumerate(names):
            setattr(self, name, base + BARRIERS + 16 * index)
        self.ring_barriers = base + BARRIERS + 16 * len(names)
        self.tmem_address = base + TMEM_ADDRESS
        self.notes = base + NOTES
        self.scale = base + STATISTICS
        self.maximum = base + STATISTICS + 8 * ROWS
        self.query = base + QUERY
        # What the MMA warp waits for other warps on: the leader's. One address for all of them saves registers.
        leader = slices.of_leader(base, group)
        self.p_full_mma, self.o_ready_mma = (
            leader + BARRIERS + 16 * names.index(name) for name in ("p_full", "o_ready")
        )

    def ring(self, p, config: ForwardConfig, rank) -> slices.Ring:
        """The ring, which lies behind the query tiles."""
        data = self.query + config.query_tiles * p.query_slices * SLICE_BYTES
        return slices.Ring(self.ring_barriers, self.notes, data, p.slots, p.cleaned, rank, group=config.group)


def exp2_polynomial(x):
    """2**x of a pair on the FMA pipe, relative error 1.7e-7; 0 where x <= -127, 1 where x is all but 0.

    x = n + f with n the nearest integer: 2**f by the quintic of least relative error on [-1/2, 1/2] with value 1 at 0,
    so that the greatest score's weight is 1 whichever side of 0 its argument is rounded to, and that the clamped
    argument gives 0; n is added to its exponent. A cubic would do for P in 16 bits, but not for the LSE.
    """
    magic = 12582912.0  # 1.5 * 2**23: adding it leaves the integer part in the low bits
    x = tuple(cute.arch.fmax(value, -127.0) for value in x)
    shifted = ptx.add2(x, (magic, magic))
    fraction = ptx.sub2(x, ptx.sub2(shifted, (magic, magic)))
    power = (EXP2_COEFFICIENTS[0],) * 2
    for coefficient in EXP2_COEFFICIENTS[1:]:
        power = ptx.fma2(power, fraction, (coefficient, coefficient))
    return tuple(ptx.shift_left_add(n, 23, f) for n, f in zip(shifted, power, strict=True))


class ForwardKernel:
    """One persistent block of 16 warps; softmax 0-3 and 4-7, correction 8-11, MMA 12, load 13."""

    def __init__(self, config: ForwardConfig):
        self.config = config

    @cute.jit
    def work(self, p, tile_blocks: cute.Pointer, item: Int32):
        """(batch, first head, first row, first value dim, first KV block, count of KV blocks) of a work item.

        The heaviest come first: row intervals are listed so (``blocks.py``); else items with the most rows before them.
        """
        per_entry = p.v_chunks * p.head_groups
        entry, rest = item // per_entry, item % per_entry
        batches = p.items // (per_entry * p.row_groups)
        row_group, batch = p.row_groups - 1 - entry // batches, entry % batches
        first_block, end_block = Int32(0), Int32(0)
        if p.rows_form != 0:
            batch, row_group, first_block, end_block = intervals.listed_work(tile_blocks, entry)
        row = row_group * p.group_rows
        if p.rows_form == 0:
            last = cutlass.min(row + p.group_rows, p.query_length) - 1
            first_block = cutlass.max(row + p.mask_low, 0) // KEYS
            end_block = (cutlass.min(last + p.mask_high, p.key_value_length) + KEYS - 1) // KEYS
        first_dim = (rest % p.v_chunks) * p.chunk_columns
        head = (rest // p.v_chunks) * (1 + p.head_step)
        return batch, head, row, first_dim, first_block, cutlass.max(end_block - first_block, 0)

    def place(self, p, row, head, tile, rank):
        """(first row, head) of one of this block's tiles."""
        number = tile if self.config.group == 1 else rank
        return row + number * p.row_step, head + number * p.head_step

    def chunk_columns(self, p, first_dim):
        """Columns of the accumulator of a chunk of the value head dim."""
        return cutlass.min(p.chunk_columns, p.v_columns - first_dim)

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[TensorMap],
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        o_map: GridConstant[TensorMap],
        lse: cute.Pointer,
        row_low: cute.Pointer,
        row_high: cute.Pointer,
        tile_blocks: cute.Pointer,
        key_low: cute.Pointer,
        key_high: cute.Pointer,
        sinks: cute.Pointer,
        scale: Float32,
        cap: Float32,
        scalars: tuple,
    ):
        """The entry: sets up barriers and Tensor Memory, then each warp takes its role."""
        p = Params("forward_sm100", scalars, scale=scale, cap=cap)
        group = self.config.group
        rank = cute.arch.block_idx_in_cluster() if group == 2 else Int32(0)
        smem = Smem(Int32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()), group)
        ring = smem.ring(p, self.config, rank)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            self.init_barriers(smem, ring)
        if warp == MMA_WARP:
            ptx.tcgen05_alloc(smem.tmem_address, TENSOR_MEMORY_COLUMNS, group)
            ptx.tcgen05_relinquish_alloc_permit(group)
        ptx.tcgen05_fence_before()
        slices.sync_blocks(group)
        ptx.tcgen05_fence_after()
        tmem = ptx.ld_shared_b32(smem.tmem_address)

        softmax_warps = 4 * self.config.query_tiles
        if warp < softmax_warps:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS[self.config.query_tiles])
            self.softmax(p, smem, rank, tmem, tile_blocks, row_low, row_high)
        if warp >= softmax_warps and warp < CORRECTION_WARP:
            cute.arch.setmaxregister_decrease(32)
        if warp >= CORRECTION_WARP and warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(80)
            self.correction(p, smem, rank, tmem, tile_blocks, lse, sinks, o_map.get_ptr().toint())
        if warp >= MMA_WARP:
            cute.arch.setmaxregister_decrease(32)
            if warp == MMA_WARP and rank == 0:
                self.mma(p, smem, ring, tmem, tile_blocks)
            if warp == LOAD_WARP:
                with cute.arch.elect_one():
                    maps = (q_map.get_ptr().toint(), k_map.get_ptr().toint(), v_map.get_ptr().toint())
                    self.load(p, smem, ring, tile_blocks, *maps)
            if warp == CLEAN_WARP and p.cleaned != 0:
                slices.clean(ring, p, p.key_value_length, key_low, key_high)

        slices.sync_blocks(group)
        if warp == MMA_WARP:
            ptx.tcgen05_dealloc(tmem, TENSOR_MEMORY_COLUMNS, group)

    @cute.jit
    def init_barriers(self, smem, ring):
        """Barrier counts as in the module's table."""
        for tile in cutlass.range_constexpr(2):
            for first in (smem.q_full, smem.q_empty, smem.no_keys, smem.s_full, smem.o_full):
                ptx.mbarrier_init(first + 8 * tile, 1)
            for first in (smem.stat_full, smem.stat_empty):
                ptx.mbarrier_init(first + 8 * tile, 4)
            for first in (smem.p_full, smem.o_ready):
                ptx.mbarrier_init(first + 8 * tile, 4 * self.config.group)
        slices.init_barriers(ring)
        cute.arch.mbarrier_init_fence()

    # --- load ---------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, p, smem, ring, tile_blocks: cute.Pointer, q_map: Int64, k_map: Int64, v_map: Int64):
        """Load warp, one thread: query tiles, then slices of keys and values in the order of the MMA warp."""
        tiles, group, rank = self.config.query_tiles, self.config.group, ring.rank
        slot, phase, item_phase = Int32(0), Int32(0), Int32(0)
        first_item, items = slices.first_item(group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            batch, head, row, first_dim, first_block, count = self.work(p, tile_blocks, item)
            kv_head, columns = head // p.group, self.chunk_columns(p, first_dim)
            for tile in cutlass.range_constexpr(tiles):
                ptx.mbarrier_wait(smem.q_empty + 8 * tile, item_phase ^ 1)
                if count == 0:
                    ptx.mbarrier_arrive(smem.no_keys + 8 * tile)
                else:
                    query_slices = slices.slices_of(p.k_steps)
                    barrier = slices.expect(smem.q_full + 8 * tile, query_slices * SLICE_BYTES, group, rank)
                    destination = smem.query + tile * p.query_slices * SLICE_BYTES
                    tile_row, tile_head = self.place(p, row, head, tile, rank)
                    slices.load_resident(destination, q_map, query_slices, tile_row, tile_head, batch, barrier, group)
            if count > 0:
                first_key = first_block * KEYS
                slot, phase = slices.load_for_scores(ring, slot, phase, k_map, p.k_steps, first_key, kv_head, batch)
            for index in cutlass.range(count, unroll=1):
                key = (first_block + index) * KEYS
                if cutlass.const_expr(tiles == 1):
                    if index + 1 < count:
                        slot, phase = slices.load_for_scores(
                            ring, slot, phase, k_map, p.k_steps, key + KEYS, kv_head, batch
                        )
                slot, phase = slices.load_for_rows(ring, slot, phase, v_map, first_dim, columns, key, kv_head, batch)
                if cutlass.const_expr(tiles == 2):
                    if index + 1 < count:
                        slot, phase = slices.load_for_scores(
                            ring, slot, phase, k_map, p.k_steps, key + KEYS, kv_head, batch
                        )
            item_phase = item_phase ^ 1
        slices.stop_cleaning(ring, slot, phase)

    # --- MMA ----------------------------------------------------------------------------------------------------

    @cute.jit
    def mma(self, p, smem, ring, tmem: Int32, tile_blocks: cute.Pointer):
        """MMA warp: scores of the next block before the values of the present one; elects a thread for each group."""
        tiles = self.config.query_tiles
        slot, phase, q_phase = Int32(0), Int32(0), Int32(0)
        score = Int32(0)  # number of the next P to consume: its buffer and phase
        scope = ring.scope
        first_item, items = slices.first_item(self.config.group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            _, _, _, first_dim, _, count = self.work(p, tile_blocks, item)
            columns = self.chunk_columns(p, first_dim)
            if count > 0:
                for tile in cutlass.range_constexpr(tiles):
                    ptx.mbarrier_wait(smem.q_full + 8 * tile, q_phase, scope)
                q_phase = q_phase ^ 1
                next_slot, next_phase = slot, phase
                for tile in cutlass.range_constexpr(tiles):
                    buffer = tile if tiles == 2 else score % 2
                    next_slot, next_phase = self.scores(p, smem, ring, slot, phase, tmem, tile, buffer)
                slot, phase = next_slot, next_phase
            for index in cutlass.range(count, unroll=1):
                more = index + 1 < count
                if cutlass.const_expr(tiles == 2):
                    end_slot, end_phase = slot, phase
                    for tile in cutlass.range_constexpr(2):
                        ptx.mbarrier_wait(smem.p_full + 8 * tile, score & 1)
                        ptx.mbarrier_wait(smem.o_ready + 8 * tile, (score & 1) ^ 1)
                        end_slot, end_phase = self.values(
                            p, smem, ring, slot, phase, tmem, tile, tile, columns, index > 0
                        )
                        if more:
                            end_slot, end_phase = self.scores(p, smem, ring, end_slot, end_phase, tmem, tile, tile)
                    slot, phase = end_slot, end_phase
                else:
                    if more:
                        slot, phase = self.scores(p, smem, ring, slot, phase, tmem, 0, (score + 1) % 2)
                    buffer = score % 2
                    ptx.mbarrier_wait(smem.p_full + 8 * buffer, (score // 2) & 1, scope)
                    ptx.mbarrier_wait(smem.o_ready, (score & 1) ^ 1, scope)
                    slot, phase = self.values(p, smem, ring, slot, phase, tmem, 0, buffer, columns, index > 0)
                score = score + 1

    @cute.jit
    def scores(self, p, smem, ring, slot, phase, tmem, tile: cutlass.Constexpr, buffer):
        """S = Q K^T; the last tile gives the slots back."""
        slot, phase = slices.multiply_dims(
            ring,
            slot,
            phase,
            tmem + buffer * KEYS,
            smem.query + tile * p.query_slices * SLICE_BYTES,
            p.k_steps,
            p.score_instruction,
            tile == self.config.query_tiles - 1,
        )
        with cute.arch.elect_one():
            ptx.tcgen05_commit(smem.s_full + 8 * buffer, self.config.group)
        return slot, phase

    @cute.jit
    def values(self, p, smem, ring, slot, phase, tmem, tile: cutlass.Constexpr, buffer, columns, accumulate):
        """O (+)= P V; the last tile gives the slots back."""
        ptx.tcgen05_fence_after()
        slot, phase = slices.multiply_rows(
            ring,
            slot,
            phase,
            tmem + OUTPUT_COLUMN + tile * ROWS,
            tmem + buffer * KEYS,
            [8 * step for step in range(KEYS // 16)],
            columns,
            p.value_instruction,
            accumulate,
            tile == self.config.query_tiles - 1,
        )
        with cute.arch.elect_one():
            ptx.tcgen05_commit(smem.o_full + 8 * tile, self.config.group)
        return slot, phase

    # --- softmax ------------------------------------------------------------------------------------------------

    @cute.jit
    def softmax(self, p, smem, rank, tmem, tile_blocks: cute.Pointer, row_low: cute.Pointer, row_high: cute.Pointer):
        """Softmax warps, one thread a row: reads S, writes P over it, publishes rescale factors and the row's sums."""
        tiles = self.config.query_tiles
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = warp // 4
        lane_row = (warp % 4) * 32 + cute.arch.lane_idx()
        lanes = (warp % 4) << 21
        score, stat_phase = Int32(0), Int32(1)
        statistic = smem.scale + (tile * ROWS + lane_row) * 4
        first_item, items = slices.first_item(self.config.group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            batch, head, first_row, _, first_block, count = self.work(p, tile_blocks, item)
            tile_row, _ = self.place(p, first_row, head, tile, rank)
            row = tile_row + lane_row
            low, high = intervals.interval(p, p.query_length, p.key_value_length, batch, row, row_low, row_high)
            cute.arch.sync_warp()  # together again: a wait must have one result for the whole warp
            maximum, total = Float32(-INFINITY), Float32(0.0)
            for index in cutlass.range(count, unroll=1):
                buffer = tile if tiles == 2 else score % 2
                phase = score & 1 if tiles == 2 else (score // 2) & 1
                ptx.mbarrier_wait(smem.s_full + 8 * buffer, phase)
                ptx.tcgen05_fence_after()
                address = tmem + buffer * KEYS + lanes
                s = cute.make_rmem_tensor(cute.make_layout(KEYS), Float32)
                for column, value in enumerate(ptx.tcgen05_ld(address, KEYS)):
                    s[column] = value
                if cutlass.const_expr(self.config.soft_cap):
                    soft_cap.tanh(s, KEYS, p.cap, True)
                first_key = (first_block + index) * KEYS
                if cute.arch.vote_all_sync((low <= first_key) & (first_key + KEYS <= high)) == False:  # noqa: E712
                    slices.mask(s, KEYS, low - first_key, high - first_key, -INFINITY)

                previous = maximum
                highest = self.row_maximum(s, previous)
                if (highest - previous) * p.scale > RESCALE_THRESHOLD:
                    maximum = highest
                base = maximum
                if maximum == -INFINITY:
                    previous, base = Float32(0.0), Float32(0.0)
                rescale = self.subtract_maximum(s, previous, base, p.scale)
                if index > 0:
                    ptx.mbarrier_wait(smem.stat_empty + 8 * tile, stat_phase)
                    ptx.st_shared_b32(statistic, rescale)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        ptx.mbarrier_arrive(smem.stat_full + 8 * tile)
                    stat_phase = stat_phase ^ 1

                sums = [(Float32(0.0), Float32(0.0)) for _ in range(2)]
                for part in cutlass.range_constexpr(KEYS // 64):
                    packed = []
                    for pair in cutlass.range_constexpr(32 * part, 32 * part + 32):
                        x = s[2 * pair], s[2 * pair + 1]
                        every = self.config.polynomial_every
                        if cutlass.const_expr(every > 0 and pair % max(every, 1) == every - 1):
                            x = exp2_polynomial(x)
                        else:
                            x = ptx.ex2(x[0]), ptx.ex2(x[1])
                        sums[pair % 2] = ptx.add2(sums[pair % 2], x)
                        packed.append(ptx.pack(self.config.packed, x[0], x[1]))
                    ptx.tcgen05_st(address + 32 * part, packed)
                block_sums = ptx.add2(sums[0], sums[1])
                total = total * rescale + (block_sums[0] + block_sums[1])
                ptx.tcgen05_wait_st()
                ptx.tcgen05_fence_before()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    slices.arrive_at_leader(smem.p_full_mma + 8 * buffer, self.config.group)
                score = score + 1

            ptx.mbarrier_wait(smem.stat_empty + 8 * tile, stat_phase)
            stat_phase = stat_phase ^ 1
            ptx.st_shared_b32(statistic, total)
            ptx.st_shared_b32(statistic + (smem.maximum - smem.scale), maximum)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.mbarrier_arrive(smem.stat_full + 8 * tile)

    @cute.jit
    def row_maximum(self, s, start):
        """Maximum of ``start`` and the row, in four chains."""
        parts = [start, Float32(-INFINITY), Float32(-INFINITY), Float32(-INFINITY)]
        for pair in cutlass.range_constexpr(KEYS // 2):
            parts[pair % 4] = ptx.max3(parts[pair % 4], s[2 * pair], s[2 * pair + 1])
        return cute.arch.fmax(ptx.max3(parts[0], parts[1], parts[2]), parts[3])

    @cute.jit
    def subtract_maximum(self, s, previous, maximum, scale):
        """Scores in log2 units below the maximum, in place; returns the factor that the former maximum calls for.

        Up to EXACT_BEYOND the shift is rounded once, in every use the same, so that its error cancels in the end. It
        would grow with the scores to more than a rounding of 16 bits; beyond, the difference comes first: it is exact
        near the maximum, whose weight is then exactly 1.
        """
        shift = ptx.mul(maximum, scale)
        rescale = ptx.ex2(ptx.mul(previous, scale) - shift)
        if cute.arch.vote_any_sync((shift > EXACT_BEYOND) | (shift < -EXACT_BEYOND)):
            rescale = ptx.ex2((previous - maximum) * scale)
            for pair in cutlass.range_constexpr(KEYS // 2):
                difference = ptx.sub2((s[2 * pair], s[2 * pair + 1]), (maximum, maximum))
                s[2 * pair], s[2 * pair + 1] = ptx.mul2(difference, (scale, scale))
        else:
            for pair in cutlass.range_constexpr(KEYS // 2):
                x = ptx.fma2((s[2 * pair], s[2 * pair + 1]), (scale, scale), (-shift, -shift))
                s[2 * pair], s[2 * pair + 1] = x
        return rescale

    # --- correction and epilogue --------------------------------------------------------------------------------

    @cute.jit
    def correction(
        self, p, smem, rank, tmem, tile_blocks: cute.Pointer, lse: cute.Pointer, sinks: cute.Pointer, o_map: Int64
    ):
        """Correction warps, one thread a row: rescales O when the running maximum rose, then writes O and LSE."""
        tiles = self.config.query_tiles
        lane_row = (cute.arch.warp_idx() % 4) * 32 + cute.arch.lane_idx()
        lanes = cute.arch.make_warp_uniform((cute.arch.warp_idx() % 4) << 21)
        stat_phase, o_phase, empty_phase = Int32(0), Int32(0), Int32(0)
        first_item, items = slices.first_item(self.config.group)
        for item in cutlass.range(first_item, p.items, items, unroll=1):
            batch, head, first_row, first_dim, _, count = self.work(p, tile_blocks, item)
            columns = self.chunk_columns(p, first_dim)
            chunks = (columns + 31) // 32
            for _ in cutlass.range(1, count, unroll=1):
                for tile in cutlass.range_constexpr(tiles):
                    statistic = smem.scale + (tile * ROWS + lane_row) * 4
                    ptx.mbarrier_wait(smem.stat_full + 8 * tile, stat_phase)
                    rescale = ptx.ld_shared_f32(statistic)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        ptx.mbarrier_arrive(smem.stat_empty + 8 * tile)
                    ptx.mbarrier_wait(smem.o_full + 8 * tile, o_phase)
                    ptx.tcgen05_fence_after()
                    if cute.arch.vote_any_sync(rescale < 1.0):
                        for chunk in cutlass.range(chunks, unroll=1):
                            address = tmem + OUTPUT_COLUMN + tile * 128 + lanes + chunk * 32
                            ptx.tcgen05_st(address, [o * rescale for o in ptx.tcgen05_ld(address, 32)])
                        ptx.tcgen05_wait_st()
                    ptx.tcgen05_fence_before()
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        slices.arrive_at_leader(smem.o_ready_mma + 8 * tile, self.config.group)
                stat_phase = stat_phase ^ 1
                o_phase = o_phase ^ 1
            for tile in cutlass.range_constexpr(tiles):
                statistic = smem.scale + (tile * ROWS + lane_row) * 4
                ptx.mbarrier_wait(smem.stat_full + 8 * tile, stat_phase)
                total = ptx.ld_shared_f32(statistic)
                maximum = ptx.ld_shared_f32(statistic + (smem.maximum - smem.scale))
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    ptx.mbarrier_arrive(smem.stat_empty + 8 * tile)
                row, tile_head = self.place(p, first_row, head, tile, rank)
                factor = self.finish(p, lse, sinks, total, maximum, batch, row + lane_row, tile_head, first_dim)
                cute.arch.sync_warp()
                staging = smem.query + tile * p.query_slices * SLICE_BYTES
                if count > 0:
                    ptx.mbarrier_wait(smem.o_full + 8 * tile, o_phase)
                    ptx.tcgen05_fence_after()
                    for chunk in cutlass.range(chunks, unroll=1):
                        address = tmem + OUTPUT_COLUMN + tile * 128 + lanes + chunk * 32
                        self.stage(staging, lane_row, chunk, ptx.tcgen05_ld(address, 32), factor)
                    ptx.tcgen05_fence_before()
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        slices.arrive_at_leader(smem.o_ready_mma + 8 * tile, self.config.group)
                else:
                    ptx.mbarrier_wait(smem.no_keys + 8 * tile, empty_phase)
                    for chunk in cutlass.range(chunks, unroll=1):
                        self.stage(staging, lane_row, chunk, [Float32(0.0)] * 32, factor)
                ptx.fence_proxy_async_shared()
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
                if lane_row == 0:
                    for index in cutlass.range((columns + SLICE - 1) // SLICE, unroll=1):
                        where = (first_dim + index * SLICE, row, tile_head, batch)
                        ptx.tma_store(4, staging + index * SLICE_BYTES, o_map, where)
                    ptx.bulk_commit_group()
                    ptx.bulk_wait_group_read()
                    ptx.mbarrier_arrive(smem.q_empty + 8 * tile)
                cute.arch.sync_warp()
            stat_phase = stat_phase ^ 1
            if count > 0:
                o_phase = o_phase ^ 1
            else:
                empty_phase = empty_phase ^ 1

    @cute.jit
    def finish(self, p, lse: cute.Pointer, sinks: cute.Pointer, total, maximum, batch, row, head, first_dim):
        """Writes the row's log-sum-exp; returns the factor that makes the accumulator the output."""
        factor, value = softmax.log_sum_exp(p, sinks, total, maximum, batch * p.heads + head)
        if (row < p.query_length) & (first_dim == 0):
            cute.make_tensor(lse, cute.make_layout(1 << 30))[(batch * p.query_length + row) * p.heads + head] = value
        return factor

    @cute.jit
    def stage(self, staging, row, chunk, values, factor):
        """Writes 32 output columns of a row to the staging slices."""
        for part in cutlass.range_constexpr(4):
            packed = [
                ptx.pack(self.config.packed, values[8 * part + 2 * i] * factor, values[8 * part + 2 * i + 1] * factor)
                for i in range(4)
            ]
            slices.stage(staging + (chunk // 2) * SLICE_BYTES, row, (chunk % 2) * 4 + part, packed)


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    config = ForwardConfig(**options)
    element = {"bfloat16": BFloat16, "float16": Float16}[config.dtype]
    forward = ForwardKernel(config)
    ForwardKernel.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(f32: cute.Pointer, i32: cute.Pointer, n: Int32, x: Float32, stream: cuda.CUstream):
        maps = [slices.nominal_tensor_map(f32, element, n) for _ in range(4)]
        forward.kernel(
            *maps, f32, i32, i32, i32, i32, i32, f32, x, x, (n,) * len(integer_names("forward_sm100"))
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
