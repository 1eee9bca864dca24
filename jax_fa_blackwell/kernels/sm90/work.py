"""The work of a persistent block on Hopper: which items it takes, and what an item is."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from jax_fa_blackwell.kernels.common import intervals, ptx


@cute.jit
def waves(p):
    """How many items this block has: one of each full wave of the grid, and perhaps one of the last."""
    blocks, _, _ = cute.arch.grid_dim()
    full = p.items // blocks
    return full + Int32(item(full) < p.items)


@cute.jit
def item(wave):
    """This block's item of a wave: every other wave runs backwards, so that each block gets heavy and light ones."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    turned = wave & 1
    return wave * blocks + block + turned * (blocks - 1 - 2 * block)


@cute.jit
def waves_of_pairs(p):
    """How many items this block has in the order of ``item_of_pairs``."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    return ((p.items >> p.paired) - block + blocks - 1) // blocks << p.paired


@cute.jit
def item_of_pairs(p, wave):
    """This block's item of a wave, few heads at a time, that what they add to stays in the cache.

    Items come in their order, or where ``paired`` the first of a head's groups of rows with the last, then the second
    with the last but one: under a causal mask all pairs have the same work.
    """
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    unit = (wave >> p.paired) * blocks + block
    groups = p.row_groups >> p.paired
    head, row_group = unit // groups, unit % groups
    if (wave & p.paired) != 0:
        row_group = p.row_groups - 1 - row_group
    return head * p.row_groups + row_group


@cute.jit
def find(p, tile: cutlass.Constexpr, blocks: cute.Pointer, index):
    """(batch, head, first row, first block, count of blocks) of an item, the heaviest first.

    Row intervals are listed so (``blocks.py``). Else all rows of ``section`` heads come before the next heads, that
    what they read may stay in the cache; within a section first those rows that a causal mask leaves most.
    """
    section_items = p.section * p.row_groups
    section, within = index // section_items, index % section_items
    pairs = cutlass.min(p.section, p.items // p.row_groups - section * p.section)
    pair = section * p.section + within % pairs
    row_group = within // pairs
    if p.heavy_last != 0:
        row_group = p.row_groups - 1 - row_group
    batch, head = pair // p.row_heads, pair % p.row_heads
    first, end = Int32(0), Int32(0)
    if p.rows_form != 0:
        head = index % p.row_heads
        batch, row_group, first, end = intervals.listed_work(blocks, index // p.row_heads)
    row = row_group * tile.rows
    if p.rows_form == 0:
        last = cutlass.min(row + tile.rows, p.rows) - 1
        first = cutlass.max(row + p.mask_low, 0) // tile.columns
        end = (cutlass.min(last + p.mask_high, p.columns) + tile.columns - 1) // tile.columns
    return batch, head, row, first, cutlass.max(end - first, 0)


@cute.jit
def find_uniform(p, tile: cutlass.Constexpr, blocks: cute.Pointer, index):
    """As ``find``, for whole warps: what is known to be the same in all lanes needs no register in each."""
    batch, head, row, first, count = find(p, tile, blocks, index)
    uniform = cute.arch.make_warp_uniform
    return uniform(batch), uniform(head), uniform(row), uniform(first), uniform(count)


def advance(stages: int, stage, phase):
    """The next stage of a ring and its phase."""
    wrapped = Int32(stage + 1 == stages)
    return (stage + 1) * (1 - wrapped), phase ^ wrapped


@cute.jit
def release(barrier):
    """One arrival of this warp."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        ptx.mbarrier_arrive(barrier)


@cute.jit
def unseen(p, batch, first, rows: cutlass.Constexpr, low: cute.Pointer, high: cute.Pointer):
    """Bit i is set if no row sees this lane's column 32 i + lane of the ``rows`` from ``first``."""
    lane = cute.arch.lane_idx()
    bits = Int32(0)
    for part in cutlass.range_constexpr((rows + 31) // 32):
        column = first + 32 * part + lane
        is_seen = intervals.is_seen(p, p.columns, batch, column, low, high)
        bits = bits | ((1 - is_seen) << part)
    return bits


@cute.jit
def clean(data, rows: cutlass.Constexpr, slices: cutlass.Constexpr, bits):
    """Zeroes the lane's rows whose bit is set in a tile of slices of ``rows`` rows.

    Their weights are 0, but 0 times a NaN or an infinity that stands in padding is NaN.
    """
    lane = cute.arch.lane_idx()
    for part in cutlass.range_constexpr((rows + 31) // 32):
        local = 32 * part + lane
        if ((bits & (1 << part)) != 0) & (local < rows):
            for chunk in cutlass.range(slices * 8, unroll=1):
                at = data + (chunk // 8) * (rows * 128) + local * 128 + (chunk % 8) * 16
                ptx.st_shared_v4(at, [Int32(0)] * 4)
    ptx.fence_proxy_async_shared()
