"""Slices of 64 head dims: how the Blackwell kernels hold, load and multiply operands.

A slice is 128 rows (queries or keys) by 64 head dims of 16-bit elements, in the 128-byte swizzle that TMA writes and
tcgen05.mma reads: 16 KiB, groups of eight rows 1024 bytes apart. Operands lie in memory as [B, rows, heads, dim]. A
ring of slots in shared memory streams operands; its users on both sides walk the same sequence, so that a slot's number
and phase follow from counting. Head dims are run-time values: TMA fills what lies beyond the last head dim or row with
zeros, and the multiplications of the last slot are only as wide as needed.

A slot of the ring has as many rows as a block of columns: 128, or 64. With ``group`` 2 the blocks of a cluster of two
work as a pair (tcgen05 ``cta_group::2``): each has its own 128 rows, and they share the streamed operand. A slot then
stands for 128 head dims, half of it in the shared memory of each, as two boxes of half the rows by 64 head dims:

    for scores   half of the rows, 128 head dims: the boxes side by side
    for rows     all rows, half of the head dims (at most 64): one box under the other

The block of rank 0, the leader, issues the multiplications of both, so its barriers count the arrivals of both; what
it commits arrives at both.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.experimental.cuda.tensor_map import TensorMapSwizzle, create_tensor_map_tiled

from jax_fa_blackwell.kernels.common import intervals, ptx
from jax_fa_blackwell.plan.slices import MAX_SLOTS, ROWS, SLICE, SLICE_BYTES


class Ring:
    """Slots of streamed operands.

    ``full`` and ``empty`` are the addresses of the first slot's barriers: filled by TMA, free again. ``ready`` is what
    the multiplying warp waits on: ``full`` itself, unless a cleaning warp stands between, which arrives at
    ``cleaned``. ``data`` is the first slot, ``notes`` what the load warp tells the cleaning warp of each slot.
    """

    def __init__(
        self,
        barriers: Int32,
        notes: Int32,
        data: Int32,
        slots: Int32,
        cleaned: Int32,
        rank: Int32,
        *,
        rows: int = ROWS,
        group: int,
    ):
        self.full, self.empty, self.cleaned = (barriers + 8 * MAX_SLOTS * index for index in range(3))
        self.ready = self.full + cleaned * (16 * MAX_SLOTS)
        self.notes, self.data, self.slots, self.is_cleaned = notes, data, slots, cleaned
        self.rows, self.group, self.rank = rows, group, rank

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.rows * SLICE * 2

    @property
    def width(self) -> int:
        """Head dims of a slot."""
        return SLICE * self.group

    @property
    def scope(self) -> str:
        """Whose arrivals the multiplying warp waits for."""
        return "cluster" if self.group == 2 else "cta"


RING_BARRIER_BYTES = 3 * 8 * MAX_SLOTS
# A slot's note: the first row it holds, or one of these; then the batch entry.
SCORES, STOP = -1, -2


# Functions, not methods of Ring: the DSL takes a method call in a loop or branch for a change of the object.
@cute.jit
def init_barriers(ring: Ring):
    """One arrival on each barrier: the load's expect_tx, the commit of the last reader, each cleaning warp."""
    for slot in cutlass.range_constexpr(MAX_SLOTS):
        ptx.mbarrier_init(ring.full + 8 * slot, 1)
        ptx.mbarrier_init(ring.empty + 8 * slot, 1)
        ptx.mbarrier_init(ring.cleaned + 8 * slot, ring.group)


def first_item(group: int):
    """The number of this block's, or pair's, first work item, and of how many it takes one."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    return (block, blocks) if group == 1 else (block // 2, blocks // 2)


def of_leader(address: Int32, group: int) -> Int32:
    """The address, for ``arrive_at_leader``, of a barrier of the block that multiplies."""
    return address if group == 1 else ptx.mapa(address, 0)


def arrive_at_leader(barrier: Int32, group: int):
    """Arrives once at a barrier whose address is one of ``of_leader``."""
    if group == 1:
        ptx.mbarrier_arrive(barrier)
    else:
        ptx.mbarrier_arrive_remote(barrier)


def sync_blocks(group: int):
    """A barrier of all threads of the block, or of the pair."""
    if group == 1:
        cute.arch.sync_threads()
    else:
        ptx.cluster_sync()


@cute.jit
def expect(barrier, size, group: cutlass.Constexpr, rank):
    """Before ``size`` bytes are loaded by each block of a pair: the leader arrives for both; returns whose barrier."""
    at = barrier
    if cutlass.const_expr(group == 1):
        ptx.mbarrier_arrive_expect_tx(barrier, size)
    else:
        at = ptx.mapa(barrier, 0)
        if rank == 0:
            ptx.mbarrier_arrive_expect_tx(barrier, 2 * size)
    return at


def advance(ring: Ring, slot: Int32, phase: Int32):
    """The next slot and its phase."""
    wrapped = Int32(slot + 1 == ring.slots)
    return (slot + 1) * (1 - wrapped), phase ^ wrapped


def nominal_tensor_map(pointer: cute.Pointer, element: type, extent: Int32):
    """A tensor map argument for compilation; its box and contents are thrown away."""
    box = [SLICE, ROWS, 1, 1]
    return create_tensor_map_tiled(
        pointer.toint(), element, [extent] * 4, [extent] * 3, box, swizzle=TensorMapSwizzle.s128b
    )


def matrix_descriptor(address: Int32) -> Int64:
    """Shared-memory matrix descriptor of a slice: 128-byte swizzle, 1024 bytes between groups of eight rows."""
    fixed = (1 << 16) | (64 << 32) | (1 << 46) | (2 << 61)
    return Int64(fixed) | Int64((address >> 4) & 0x3FFF)


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
def load_resident(destination, tensor_map: Int64, slices, row, head, batch, barrier, group: cutlass.Constexpr):
    """Loads the slices of 128 rows side by side; the barrier must expect them."""
    for index in cutlass.range(slices, unroll=1):
        where = (index * SLICE, row, head, batch)
        ptx.tma_load(4, destination + index * SLICE_BYTES, tensor_map, where, barrier, group)


@cute.jit
def load_slot(ring, slot, phase, tensor_map: Int64, first, second, is_whole, head, batch, note):
    """Loads the next slot from (head dim, row) ``first`` and, if any, ``second``; returns the slot and phase after.

    Without ``is_whole`` the second box of two lies beyond the head dims, and is left out.
    """
    ptx.mbarrier_wait(ring.empty + 8 * slot, phase ^ 1)
    if ring.is_cleaned != 0:
        ptx.st_shared_b32(ring.notes + 8 * slot, note)
        ptx.st_shared_b32(ring.notes + 8 * slot + 4, batch)
    barrier, data = ring.full + 8 * slot, ring.data + slot * ring.slot_bytes
    if cutlass.const_expr(ring.group == 1):
        ptx.mbarrier_arrive_expect_tx(barrier, ring.slot_bytes)
    else:
        size = Int32(ring.slot_bytes // 2) * (1 + Int32(is_whole))
        if ring.is_cleaned != 0:
            ptx.mbarrier_arrive_expect_tx(barrier, size)
        else:
            barrier = expect(barrier, size, ring.group, ring.rank)
    ptx.tma_load(4, data, tensor_map, (*first, head, batch), barrier, ring.group)
    if cutlass.const_expr(second is not None):
        if is_whole:
            ptx.tma_load(4, data + ring.slot_bytes // 2, tensor_map, (*second, head, batch), barrier, ring.group)
    return advance(ring, slot, phase)


@cute.jit
def load_for_scores(ring, slot, phase, tensor_map: Int64, steps, row, head, batch):
    """Loads a block of rows, ``steps`` times 16 head dims, for ``multiply_dims``; returns the next slot and phase."""
    for index in cutlass.range(slots_of(ring, steps * 16), unroll=1):
        slot, phase = load_scores_slot(ring, slot, phase, tensor_map, index, steps, row, head, batch)
    return slot, phase


@cute.jit
def load_scores_slot(ring, slot, phase, tensor_map: Int64, index, steps, row, head, batch):
    """The ``index``-th slot of ``load_for_scores``."""
    at = row + ring.rank * (ring.rows // 2)
    first = (index * ring.width, at)
    second = None if ring.group == 1 else (index * ring.width + SLICE, at)
    is_whole = index * ring.width + SLICE < steps * 16
    return load_slot(ring, slot, phase, tensor_map, first, second, is_whole, head, batch, Int32(SCORES))


@cute.jit
def load_for_rows(ring, slot, phase, tensor_map: Int64, first, columns, row, head, batch):
    """Loads a block of rows, ``columns`` head dims from ``first``, for ``multiply_rows``; returns slot and phase."""
    for index in cutlass.range(slots_of(ring, columns), unroll=1):
        dim = first + index * ring.width
        if cutlass.const_expr(ring.group == 2):
            dim = dim + ring.rank * (cutlass.min(columns - index * ring.width, ring.width) // 2)
        second = None if ring.group == 1 else (dim, row + ring.rows // 2)
        slot, phase = load_slot(ring, slot, phase, tensor_map, (dim, row), second, True, head, batch, row)
    return slot, phase


def slices_of(steps):
    """Slices that hold ``steps`` times 16 head dims."""
    return (steps * 16 + SLICE - 1) // SLICE


def slots_of(ring, columns):
    """Slots that hold so many head dims."""
    return (columns + ring.width - 1) // ring.width


@cute.jit
def stop_cleaning(ring, slot, phase):
    """Tells the cleaning warp that nothing more comes."""
    if ring.is_cleaned != 0:
        ptx.mbarrier_wait(ring.empty + 8 * slot, phase ^ 1)
        ptx.st_shared_b32(ring.notes + 8 * slot, Int32(STOP))
        ptx.mbarrier_arrive(ring.full + 8 * slot)


@cute.jit
def clean(ring, p, rows, low: cute.Pointer, high: cute.Pointer):
    """Cleaning warp: zeroes the rows that nothing sees in slots for ``multiply_rows``.

    Their weights are 0, but 0 times a NaN or an infinity that stands in padding is NaN.
    """
    lane = cute.arch.lane_idx()
    slot, phase, running = Int32(0), Int32(0), Int32(1)
    cleaned = of_leader(ring.cleaned, ring.group)
    while running != 0:
        ptx.mbarrier_wait(ring.full + 8 * slot, phase)
        row, batch = ptx.ld_shared_b32(ring.notes + 8 * slot), ptx.ld_shared_b32(ring.notes + 8 * slot + 4)
        if row >= 0:
            for part in cutlass.range(ring.rows // 32, unroll=1):
                local = part * 32 + lane
                j = row + local
                if intervals.is_seen(p, rows, batch, j, low, high) == 0:
                    for chunk in cutlass.range_constexpr(SLICE // 8):
                        where = ring.data + slot * ring.slot_bytes + local * 128 + chunk * 16
                        ptx.st_shared_v4(where, [Int32(0)] * 4)
            ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            arrive_at_leader(cleaned + 8 * slot, ring.group)
        running = Int32(row != STOP)
        slot, phase = advance(ring, slot, phase)


@cute.jit
def multiply_slot(ring, accumulator, slices, data, steps, instruction, accumulate):
    """D (+)= A B^T over ``steps`` times 16 head dims, at most those of a slot; by one thread.

    ``slices`` are the addresses of A's, ``data`` that of B's slot, in which a pair's second box follows the first.
    """
    a, b = [matrix_descriptor(address) for address in slices], matrix_descriptor(data)
    most = ring.width // 16
    if steps >= most:  # without a branch for each step
        for step in cutlass.range_constexpr(most):
            multiply_step(ring, accumulator, a, b, step, instruction, accumulate)
    else:
        for step in cutlass.range_constexpr(most - 1):
            if step < steps:
                multiply_step(ring, accumulator, a, b, step, instruction, accumulate)


def multiply_step(ring, accumulator, a, b: Int64, step: int, instruction, accumulate):
    """D (+)= A B^T over 16 head dims of a slot."""
    # 16 elements of 2 bytes, in units of 16 bytes; then the next slice and the next box.
    within, beyond = 2 * (step % (SLICE // 16)), step // (SLICE // 16)
    again = True if step > 0 else accumulate
    b = b + (within + beyond * (ring.slot_bytes >> 5))
    ptx.tcgen05_mma_ss(accumulator, a[beyond] + within, b, instruction, again, ring.group)


@cute.jit
def multiply_dims(ring, slot, phase, accumulator, resident, steps, instruction, release: cutlass.Constexpr):
    """D = A B^T over ``steps`` times 16 head dims: A resident, B streamed, both [rows, dims]; returns slot and phase.

    With ``release`` the slots are given back.
    """
    in_slot = ring.width // 16
    for index in cutlass.range(slots_of(ring, steps * 16), unroll=1):
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase, ring.scope)
        ptx.tcgen05_fence_after()
        a = [resident + (index * ring.group + part) * SLICE_BYTES for part in range(ring.group)]
        b = ring.data + slot * ring.slot_bytes
        with cute.arch.elect_one():
            multiply_slot(ring, accumulator, a, b, steps - index * in_slot, instruction, index > 0)
            if cutlass.const_expr(release):
                ptx.tcgen05_commit(ring.empty + 8 * slot, ring.group)
        slot, phase = advance(ring, slot, phase)
    return slot, phase


@cute.jit
def multiply_streamed_dims(ring, slot, phase, accumulator, steps, instruction):
    """As ``multiply_dims`` with A streamed too, its slices, a slot each, just before the slot of B.

    Slots are of 128 rows.
    """
    in_slot = ring.width // 16
    for index in cutlass.range(slots_of(ring, steps * 16), unroll=1):
        used, slot, phase = wait_for_slots(ring, slot, phase, ring.group + 1)
        ptx.tcgen05_fence_after()
        a = [ring.data + one * ring.slot_bytes for one in used[:-1]]
        b = ring.data + used[-1] * ring.slot_bytes
        with cute.arch.elect_one():
            multiply_slot(ring, accumulator, a, b, steps - index * in_slot, instruction, index > 0)
            for one in used:
                ptx.tcgen05_commit(ring.empty + 8 * one, ring.group)
    return slot, phase


def wait_for_slots(ring, slot, phase, count: int):
    """Waits until the next ``count`` slots can be multiplied; returns them, and the slot and phase after them."""
    used = []
    for _ in range(count):
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase, ring.scope)
        used.append(slot)
        slot, phase = advance(ring, slot, phase)
    return used, slot, phase


@cute.jit
def multiply_rows(
    ring,
    slot,
    phase,
    accumulator,
    weights,
    weight_columns: cutlass.Constexpr,
    columns,
    instruction,
    accumulate,
    release: cutlass.Constexpr,
):
    """D (+)= W B over a block of streamed rows: W in Tensor Memory, B [rows, dims]; returns the next slot and phase.

    ``weights`` is the first column of W, ``weight_columns[s]`` the offset of its s-th step of 16 rows; ``columns`` the
    head dims, a multiple of 16, in a pair of 32; ``instruction`` the descriptor without N. D is overwritten where
    ``accumulate`` is false.
    """
    for index in cutlass.range(slots_of(ring, columns), unroll=1):
        ptx.mbarrier_wait(ring.ready + 8 * slot, phase, ring.scope)
        ptx.tcgen05_fence_after()
        b = matrix_descriptor(ring.data + slot * ring.slot_bytes)
        width = cutlass.min(columns - index * ring.width, ring.width)
        sized = instruction | ((width >> 3) << 17)
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(ring.rows // 16):
                # 16 rows of B are two groups of eight.
                again = True if step > 0 else accumulate
                ptx.tcgen05_mma_ts(
                    accumulator + index * ring.width,
                    weights + weight_columns[step],
                    b + step * 128,
                    sized,
                    again,
                    ring.group,
                )
            if cutlass.const_expr(release):
                ptx.tcgen05_commit(ring.empty + 8 * slot, ring.group)
        slot, phase = advance(ring, slot, phase)
    return slot, phase


@cute.jit
def stage(staging, row, part, packed):
    """Writes 16 bytes, columns 8 * part and on, of a row into a swizzled slice."""
    ptx.st_shared_v4(staging + row * 128 + ((part ^ (row % 8)) << 4), packed)
