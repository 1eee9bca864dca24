"""Slices of 64 head dims: how the Blackwell kernels hold, load and multiply operands.

A slice is 128 rows (queries or keys) by 64 head dims of 16-bit elements, in the 128-byte swizzle that TMA writes and
tcgen05.mma reads: 16 KiB, groups of eight rows 1024 bytes apart. Operands lie in memory as [B, rows, heads, dim]. A
ring of slots in shared memory streams slices; its users on both sides walk the same sequence, so that a slot's number
and phase follow from counting. Head dims are run-time values: TMA fills what lies beyond the last head dim or row with
zeros, and the multiplications of the last slice are only as wide as needed.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMapSwizzle, create_tensor_map_tiled

from jax_fa_blackwell.kernels.common import ptx
from jax_fa_blackwell.plan.slices import MAX_SLOTS, ROWS, SLICE, SLICE_BYTES


class Ring:
    """Slots of streamed slices.

    ``full``, ``empty`` and ``ready`` are the addresses of the first slot's barriers: filled by TMA, free again, and
    ready to be multiplied, which is ``full`` itself unless a cleaning warp stands between. ``data`` is the first slot,
    ``notes`` what the load warp tells the cleaning warp of each slot.
    """

    def __init__(self, barriers: Int32, notes: Int32, data: Int32, slots: Int32, cleaned: Int32):
        self.full, self.empty, self.cleaned = (barriers + 8 * MAX_SLOTS * index for index in range(3))
        self.ready = self.full + cleaned * (16 * MAX_SLOTS)
        self.notes, self.data, self.slots, self.is_cleaned = notes, data, slots, cleaned


RING_BARRIER_BYTES = 3 * 8 * MAX_SLOTS
# A slot's note: the first row it holds, or one of these; then the batch entry.
SCORES, STOP = -1, -2


# Functions, not methods of Ring: the DSL takes a method call in a loop or branch for a change of the object.
@cute.jit
def init_barriers(ring: Ring):
    """One arrival on each barrier: the load's expect_tx, the commit of the last reader, the cleaning warp."""
    for slot in cutlass.range_constexpr(MAX_SLOTS):
        ptx.mbarrier_init(ring.full + 8 * slot, 1)
        ptx.mbarrier_init(ring.empty + 8 * slot, 1)
        ptx.mbarrier_init(ring.cleaned + 8 * slot, 1)


def advance(ring: Ring, slot: Int32, phase: Int32):
    """The next slot and its phase."""
    wrapped = Int32(slot + 1 == ring.slots)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


def nominal_tensor_map(pointer: cute.Pointer, element: type, extent: Int32):
    """A tensor map argument for compilation; its box is that of the plan's, its contents are thrown away."""
    box = [SLICE, ROWS, 1, 1]
    return create_tensor_map_tiled(
        pointer.toint(), element, [extent] * 4, [extent] * 3, box, swizzle=TensorMapSwizzle.s128b
    )


def matrix_descriptor(address: Int32) -> Int64:
    """Shared-memory matrix descriptor of a slice: 128-byte swizzle, 1024 bytes between groups of eight rows."""
    fixed = (1 << 16) | (64 << 32) | (1 << 46) | (2 << 61)
    return Int64(fixed) | Int64((address >> 4) & 0x3FFF)


@cute.jit
def work_entry(blocks: cute.Pointer, index):
    """Entry of int32 [entries, 4]: batch, group of rows, first block of columns, and one past the last."""
    listed = cute.make_tensor(blocks, cute.make_layout(1 << 30))
    return listed[4 * index], listed[4 * index + 1], listed[4 * index + 2], listed[4 * index + 3]


@cute.jit
def interval(p, rows, columns, batch, row, low: cute.Pointer, high: cute.Pointer):
    """Columns first <= j < end that a row sees; ``low`` and ``high`` are int32 [B, rows] where p.rows_form is set."""
    first = cutlass.max(row + p.mask_low, 0)
    end = cutlass.min(row + p.mask_high, columns)
    if row >= rows:
        end = Int32(0)
    else:
        if p.rows_form != 0:
            at = batch * rows + row
            first = cute.make_tensor(low, cute.make_layout(1 << 30))[at]
            end = cute.make_tensor(high, cute.make_layout(1 << 30))[at]
    return first, end


@cute.jit
def mask(values, columns: cutlass.Constexpr, first, end, hidden: cutlass.Constexpr):
    """Sets the columns j of a row with j < first or end <= j to ``hidden``.

    By one word of bits for 32 columns, which costs a third of two comparisons a column.
    """
    for word in cutlass.range_constexpr(columns // 32):
        before = ptx.shl(Int32(-1), cutlass.max(first - 32 * word, 0))
        after = ptx.shl(Int32(-1), cutlass.max(end - 32 * word, 0))
        visible = before & (after ^ -1)
        for column in cutlass.range_constexpr(32):
            bit = 1 << column if column < 31 else -(1 << 31)
            if (visible & bit) == 0:
                values[32 * word + column] = cutlass.Float32(hidden)


@cute.jit
def load_resident(destination, tensor_map: Int64, slices, row, head, batch, barrier):
    """Loads the slices of 128 rows side by side; the barrier must expect them."""
    for index in cutlass.range(slices, unroll=1):
        ptx.tma_load(4, destination + index * SLICE_BYTES, tensor_map, (index * SLICE, row, head, batch), barrier)


@cute.jit
def load_slice(ring, slot, phase, tensor_map: Int64, index, row, head, batch, note):
    """Loads one slice of 128 rows into the ring; returns the next slot and phase."""
    ptx.mbarrier_wait(ring.empty + 8 * slot, phase ^ 1)
    if ring.is_cleaned != 0:
        ptx.st_shared_b32(ring.notes + 8 * slot, note)
        ptx.st_shared_b32(ring.notes + 8 * slot + 4, batch)
    barrier = ring.full + 8 * slot
    ptx.mbarrier_arrive_expect_tx(barrier, SLICE_BYTES)
    ptx.tma_load(4, ring.data + slot * SLICE_BYTES, tensor_map, (index * SLICE, row, head, batch), barrier)
    return advance(ring, slot, phase)


@cute.jit
def load_for_scores(ring, slot, phase, tensor_map: Int64, slices, row, head, batch):
    """Loads the slices of 128 rows for ``multiply_dims``; returns the next slot and phase."""
    for index in cutlass.range(slices, unroll=1):
        slot, phase = load_slice(ring, slot, phase, tensor_map, index, row, head, batch, Int32(SCORES))
    return slot, phase


@cute.jit
def load_for_rows(ring, slot, phase, tensor_map: Int64, first, slices, row, head, batch):
    """Loads slices ``first`` and on of 128 rows for ``multiply_rows``; returns the next slot and phase."""
    for index in cutlass.range(slices, unroll=1):
        slot, phase = load_slice(ring, slot, phase, tensor_map, first + index, row, head, batch, row)
    return slot, phase


@cute.jit
def stop_cleaning(ring, slot, phase):
    """Tells the cleaning warp that nothing more comes."""
    if ring.is_cleaned != 0:
        ptx.mbarrier_wait(ring.empty + 8 * slot, phase ^ 1)
        ptx.st_shared_b32(ring.notes + 8 * slot, Int32(STOP))
        ptx.mbarrier_arrive(ring.full + 8 * slot)


@cute.jit
def clean(ring, rows, rows_form, low: cute.Pointer, high: cute.Pointer, seen_low, seen_high):
    """Cleaning warp: zeroes the rows that nothing sees in slices for ``multiply_rows``.

    Their weights are 0, but 0 times a NaN or an infinity that stands in padding is NaN. A row j is seen if low[j] <
    high[j] (int32 [B, rows]), or without the arrays if seen_low <= j < seen_high.
    """
    lane = cute.arch.lane_idx()
    slot, phase, running = Int32(0), Int32(0), Int32(1)
    while running != 0:
        ptx.mbarrier_wait(ring.full + 8 * slot, phase)
        row, batch = ptx.ld_shared_b32(ring.notes + 8 * slot), ptx.ld_shared_b32(ring.notes + 8 * slot + 4)
        if row >= 0:
            for part in cutlass.range(ROWS // 32, unroll=1):
                local = part * 32 + lane
                j = row + local
                seen = Int32((seen_low <= j) & (j < seen_high))
                if rows_form != 0:
                    if j < rows:
                        first = cute.make_tensor(low, cute.make_layout(1 << 30))[batch * rows + j]
                        end = cute.make_tensor(high, cute.make_layout(1 << 30))[batch * rows + j]
                        seen = Int32(first < end)
                if seen == 0:
                    for chunk in cutlass.range_constexpr(SLICE // 8):
                        where = ring.data + slot * SLICE_BYTES + local * 128 + chunk * 16
                        ptx.st_shared_v4(where, [Int32(0)] * 4)
            ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(ring.cleaned + 8 * slot)
        running = Int32(row != STOP)
        slot, phase = advance(ring, slot, phase)


@cute.jit
def multiply_slices(accumulator, a: Int64, b: Int64, steps, instruction, accumulate):
    """D (+)= A B^T of two slices, ``steps`` times 16 head dims; by one thread."""
    for step in cutlass.range_constexpr(SLICE // 16):
        if step < steps:
            # 16 elements of 2 bytes, in units of 16 bytes.
            again = True if step > 0 else accumulate
            ptx.tcgen05_mma_ss(accumulator, a + 2 * step, b + 2 * step, instruction, again)


@cute.jit
def multiply_dims(
    ring, slot, phase, accumulator, resident, slices, tail_steps, instruction, release: cutlass.Constexpr
):
    """D = A B^T over the head dim: A resident, B streamed, both [rows, dims]; returns slot and phase.

    ``tail_steps`` is the number of 16-wide steps in the last slice. With ``release`` the slots are given back.
    """
    for index in cutlass.range(slices, unroll=1):
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase)
        ptx.tcgen05_fence_after()
        a = matrix_descriptor(resident + index * SLICE_BYTES)
        b = matrix_descriptor(ring.data + slot * SLICE_BYTES)
        steps = Int32(SLICE // 16)
        if index + 1 == slices:
            steps = tail_steps
        with cute.arch.elect_one():
            multiply_slices(accumulator, a, b, steps, instruction, index > 0)
            if cutlass.const_expr(release):
                ptx.tcgen05_commit(ring.empty + 8 * slot)
        slot, phase = advance(ring, slot, phase)
    return slot, phase


@cute.jit
def multiply_streamed_dims(ring, slot, phase, accumulator, slices, tail_steps, instruction):
    """As ``multiply_dims`` with A streamed too, each slice just before that of B."""
    for index in cutlass.range(slices, unroll=1):
        b_slot, b_phase = advance(ring, slot, phase)
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase)
        ptx.mbarrier_wait(ring.ready + 8 * b_slot, b_phase)
        ptx.tcgen05_fence_after()
        steps = Int32(SLICE // 16)
        if index + 1 == slices:
            steps = tail_steps
        a = matrix_descriptor(ring.data + slot * SLICE_BYTES)
        b = matrix_descriptor(ring.data + b_slot * SLICE_BYTES)
        with cute.arch.elect_one():
            multiply_slices(accumulator, a, b, steps, instruction, index > 0)
            ptx.tcgen05_commit(ring.empty + 8 * slot)
            ptx.tcgen05_commit(ring.empty + 8 * b_slot)
        slot, phase = advance(ring, b_slot, b_phase)
    return slot, phase


@cute.jit
def multiply_rows(
    ring,
    slot,
    phase,
    accumulator,
    weights,
    weight_columns: cutlass.Constexpr,
    slices,
    tail_columns,
    instruction,
    accumulate,
    release: cutlass.Constexpr,
):
    """D (+)= W B over 128 streamed rows: W in Tensor Memory, B [rows, dims]; returns the next slot and phase.

    ``weights`` is the first column of W, ``weight_columns[s]`` the offset of its s-th step of 16 rows; ``tail_columns``
    the head dims of the last slice, a multiple of 16; ``instruction`` the descriptor without N. D is overwritten where
    ``accumulate`` is false.
    """
    for index in cutlass.range(slices, unroll=1):
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase)
        ptx.tcgen05_fence_after()
        b = matrix_descriptor(ring.data + slot * SLICE_BYTES)
        columns = Int32(SLICE)
        if index + 1 == slices:
            columns = tail_columns
        sized = instruction | ((columns >> 3) << 17)
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(ROWS // 16):
                # 16 rows of B are two groups of eight.
                again = True if step > 0 else accumulate
                ptx.tcgen05_mma_ts(
                    accumulator + index * SLICE, weights + weight_columns[step], b + step * 128, sized, again
                )
            if cutlass.const_expr(release):
                ptx.tcgen05_commit(ring.empty + 8 * slot)
        slot, phase = advance(ring, slot, phase)
    return slot, phase


@cute.jit
def stage(staging, row, part, packed):
    """Writes 16 bytes, columns 8 * part and on, of a row into a swizzled slice."""
    ptx.st_shared_v4(staging + row * 128 + ((part ^ (row % 8)) << 4), packed)
