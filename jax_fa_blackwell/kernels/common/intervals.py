"""Which columns each row sees, as kernels read it: affine in the row, or from arrays of intervals."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import cutlass
import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def listed_work(blocks: cute.Pointer, index):
    """Entry of int32 [entries, 4] (``blocks.py``): batch, group of rows, first block of columns, one past the last."""
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
def is_seen(p, rows, batch, row, low: cute.Pointer, high: cute.Pointer):
    """1 if anything sees the row: low[row] < high[row], or without the arrays seen_low <= row < seen_high."""
    seen = Int32((p.seen_low <= row) & (row < p.seen_high))
    if p.rows_form != 0:
        if row < rows:
            at = batch * rows + row
            first = cute.make_tensor(low, cute.make_layout(1 << 30))[at]
            end = cute.make_tensor(high, cute.make_layout(1 << 30))[at]
            seen = Int32(first < end)
    return seen
