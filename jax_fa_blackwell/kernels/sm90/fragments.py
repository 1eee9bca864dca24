"""What a consumer thread does with its part of an accumulator: rows r = 0, 1 of a quad's eight columns each.

The layout is in ``instructions``: index 4 i + 2 r + e is column 8 i + 2 (lane mod 4) + e of row
16 warp + lane / 4 + 8 r.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from jax_fa_blackwell.kernels.common import ptx
from jax_fa_blackwell.kernels.sm90 import instructions


@cute.jit
def wait(pending: cutlass.Constexpr, *fragments):
    """Waits until all but the last ``pending`` products are done; the fragments are of products that are."""
    counts = [cute.size(fragment) for fragment in fragments]
    registers = [fragment[i] for fragment, count in zip(fragments, counts, strict=True) for i in range(count)]
    results = instructions.wait(pending, registers)
    first = 0
    for index in cutlass.range_constexpr(len(fragments)):
        for i in cutlass.range_constexpr(counts[index]):
            fragments[index][i] = results[first + i]
        first = first + counts[index]


@cute.jit
def multiply_dims(
    kind: cutlass.Constexpr, fragment, rows, columns, dims: cutlass.Constexpr, slice_bytes: cutlass.Constexpr
):
    """D = A B^T over ``dims`` head dims, issued.

    Args:
      kind: PTX name of the 16-bit type.
      fragment: D.
      rows: address of A, 64 rows.
      columns: address of B.
      dims: summed, a multiple of 16.
      slice_bytes: distances of A's and of B's slices.
    """
    offsets = [
        [step // 4 * (size >> 4) + step % 4 * instructions.SLICE_STEP for step in range(dims // 16)]
        for size in slice_bytes
    ]
    count = cute.size(fragment)
    a, b = instructions.descriptor(rows), instructions.descriptor(columns)
    results = instructions.multiply(kind, 2 * count, (a, offsets[0]), b, offsets[1])
    for i in cutlass.range_constexpr(count):
        fragment[i] = results[i]


@cute.jit
def load_rows(weights, rows):
    """Loads the warpgroup's 64 rows, slices at the address ``rows``, as the left operand of ``multiply_held``."""
    lane = cute.arch.lane_idx()
    row = cute.arch.warp_idx() % 4 * 16 + (lane // 8 % 2) * 8 + lane % 8
    for step in cutlass.range_constexpr(cute.size(weights) // 4):
        chunk = (step % 4 * 2 + lane // 16) ^ (lane % 8)
        address = rows + step // 4 * (instructions.TILE_ROWS * 128) + row * 128 + chunk * 16
        loaded = instructions.ld_matrix_x4(address)
        for i in cutlass.range_constexpr(4):
            weights[4 * step + i] = loaded[i]


@cute.jit
def multiply_held(kind: cutlass.Constexpr, fragment, weights, columns, slice_bytes: cutlass.Constexpr):
    """As ``multiply_dims`` with A in registers (``load_rows``)."""
    steps = cute.size(weights) // 4
    a = [[weights[4 * step + i] for i in range(4)] for step in range(steps)]
    offsets = [step // 4 * (slice_bytes >> 4) + step % 4 * instructions.SLICE_STEP for step in range(steps)]
    count = cute.size(fragment)
    results = instructions.multiply(kind, 2 * count, a, instructions.descriptor(columns), offsets)
    for i in cutlass.range_constexpr(count):
        fragment[i] = results[i]


@cute.jit
def multiply_rows(kind: cutlass.Constexpr, fragment, weights, rows, slice_bytes: cutlass.Constexpr):
    """D += W B over the rows of B, issued; W packed by ``pack``, B at the address ``rows``."""
    steps = cute.size(weights) // 4
    a = [[weights[4 * step + i] for i in range(4)] for step in range(steps)]
    b = instructions.descriptor(rows, slice_bytes)
    offsets = [step * instructions.ROW_STEP for step in range(steps)]
    count = cute.size(fragment)
    results = instructions.multiply(
        kind, 2 * count, a, b, offsets, rows_summed=True, accumulator=[fragment[i] for i in range(count)]
    )
    for i in cutlass.range_constexpr(count):
        fragment[i] = results[i]


@cute.jit
def multiply_transposed(
    kind: cutlass.Constexpr,
    fragment,
    columns,
    rows,
    steps: cutlass.Constexpr,
    tile_bytes: cutlass.Constexpr,
    slice_bytes: cutlass.Constexpr,
):
    """D = A^T B, issued: A of 64 columns, both summed over their rows.

    Args:
      kind: PTX name of the 16-bit type.
      fragment: D.
      columns: address of A, one slice.
      rows: address of B, in tiles of 64 rows.
      steps: of 16 rows.
      tile_bytes: distance of B's tiles.
      slice_bytes: distance of B's slices.
    """
    count = cute.size(fragment)
    a, b = instructions.descriptor(columns), instructions.descriptor(rows, slice_bytes)
    a_offsets = [step * instructions.ROW_STEP for step in range(steps)]
    b_offsets = [step // 4 * (tile_bytes >> 4) + step % 4 * instructions.ROW_STEP for step in range(steps)]
    results = instructions.multiply(kind, 2 * count, (a, a_offsets), b, b_offsets, a_rows_summed=True, rows_summed=True)
    for i in cutlass.range_constexpr(count):
        fragment[i] = results[i]


@cute.jit
def store_weights(weights, slices, slice_bytes: cutlass.Constexpr):
    """Stores weights packed by ``pack`` to shared memory, in slices of 64 columns; ``slices`` is the address of row 0.

    The warp's rows are 16 of the slice's.
    """
    lane = cute.arch.lane_idx()
    row = cute.arch.warp_idx() * 16 + (lane // 8 % 2) * 8 + lane % 8
    for i in cutlass.range_constexpr(cute.size(weights) // 4):  # two chunks of eight columns
        chunk = (2 * (i % 4) + lane // 16) ^ (lane % 8)
        address = slices + i // 4 * slice_bytes + row * 128 + chunk * 16
        instructions.st_matrix_x4(address, [weights[4 * i + j] for j in range(4)])


@cute.jit
def pack(kind: cutlass.Constexpr, fragment, weights):
    """A fragment as the left operand of ``multiply_rows``."""
    for i in cutlass.range_constexpr(cute.size(weights)):
        weights[i] = ptx.pack(kind, fragment[2 * i], fragment[2 * i + 1])


@cute.jit
def mask(fragment, r: cutlass.Constexpr, first, end, hidden):
    """Sets the columns j < first and end <= j of row r to ``hidden``, by one word of bits for 32 columns."""
    columns = 2 * cute.size(fragment)
    mine = 2 * (cute.arch.lane_idx() % 4)
    for word in cutlass.range_constexpr((columns + 31) // 32):
        before = ptx.shl(Int32(-1), cutlass.max(first - 32 * word, 0))
        after = ptx.shl(Int32(-1), cutlass.max(end - 32 * word, 0))
        visible = (before & (after ^ -1)) >> mine
        for i in cutlass.range_constexpr(4 * word, min(4 * word + 4, columns // 8)):
            for e in cutlass.range_constexpr(2):
                if (visible & (1 << (8 * (i % 4) + e))) == 0:
                    fragment[4 * i + 2 * r + e] = Float32(hidden)


@cute.jit
def store_row(kind: cutlass.Constexpr, fragment, r: cutlass.Constexpr, factor, address: Int64, is_row, dim):
    """Writes row r, times ``factor``, as 16-bit elements to global memory: ``dim`` of its columns, where ``is_row``."""
    columns = 2 * cute.size(fragment)
    quad = cute.arch.lane_idx() % 4
    for block in cutlass.range_constexpr((columns + 31) // 32):
        pairs = []
        for i in cutlass.range_constexpr(4 * block, 4 * block + 4):
            pair = Uint32(0)
            if cutlass.const_expr(8 * i < columns):
                first = 4 * i + 2 * r
                pair = ptx.pack(kind, fragment[first] * factor, fragment[first + 1] * factor)
            pairs.append(pair)
        pairs = transpose(pairs, quad)
        column = 32 * block + 8 * quad
        if is_row & (column < dim):
            instructions.st_global_v4(address + 2 * column, pairs)


@cute.jit
def transpose(pairs, quad):
    """Among four threads: thread t gets pair t of all, in their order."""
    is_upper, is_odd = (quad & 2) != 0, (quad & 1) != 0
    kept, sent = [], []
    for i in cutlass.range_constexpr(2):
        mine, other = pairs[i], pairs[2 + i]
        if is_upper:
            mine, other = other, mine
        kept.append(mine)
        sent.append(cute.arch.shuffle_sync_bfly(other, offset=2))
    rows = []
    for row in (kept, sent):
        mine, other = row[0], row[1]
        if is_odd:
            mine, other = other, mine
        rows.append((mine, cute.arch.shuffle_sync_bfly(other, offset=1)))
    a, b = rows[0]  # of the threads t and t ^ 1
    c, d = rows[1]  # t ^ 2 and t ^ 3
    if is_odd:
        a, b, c, d = b, a, d, c
    if is_upper:
        a, b, c, d = c, d, a, b
    return [a, b, c, d]
