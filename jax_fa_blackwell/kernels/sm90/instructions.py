"""Instructions of Hopper's tensor cores (wgmma) and copy engine, and the layout of their operands.

A chain of products is one assembly statement, so that nothing can come between its instructions. Its results belong to
nobody before ``wait``: the accumulators pass through the wait as operands, so that no compiler moves a use before it.

Fragments (PTX ISA, wgmma.m64nNk16): of an accumulator of 64 rows and n columns a thread holds n / 2 floats. Those with
index 4 i + 2 r + e lie in row 16 warp + lane / 4 + 8 r, column 8 i + 2 (lane mod 4) + e. Packed in pairs, the same
order is that of the A operand in registers, four registers for 16 columns.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx

SLICE_STEP = 32 >> 4
"""What one step of 16 summed columns adds to the descriptor of a slice."""
ROW_STEP = 2 * 1024 >> 4
"""What one step of 16 summed rows adds to the descriptor of a slice."""
_SWIZZLE_128B = 1 << 62
_GROUP_BYTES = 1024  # eight rows of a slice


def descriptor(address: Int32, slice_bytes: int = 16) -> Int64:
    """Descriptor of a tile in slices of 64 columns, each row 128 swizzled bytes.

    Args:
      address: of the tile in shared memory, a multiple of 1024.
      slice_bytes: distance of the slices; used where rows are summed, which then may span several slices.
    """
    fixed = _SWIZZLE_128B | ((_GROUP_BYTES >> 4) << 32) | ((slice_bytes >> 4) << 16)
    return Int64(fixed) | Int64((address >> 4) & 0x3FFF)


def multiply(kind: str, columns: int, a: Sequence, b: Sequence, *, rows_summed: bool = False, accumulator=None):
    """D (+)= sum of A_s B_s over steps of 16, committed as one group and not awaited; returns D's registers.

    Args:
      kind: PTX name of the 16-bit type.
      columns: of D, a multiple of 8 up to 256.
      a: for each step the descriptor of 64 rows by 16 summed columns, or a list of four registers.
      b: for each step the descriptor of B: [columns, summed], or [summed, columns] with ``rows_summed``.
      rows_summed: the layout of B.
      accumulator: registers to add to; None begins from zero.
    """
    count = columns // 2
    begins = accumulator is None
    inputs = [] if begins else [Float32(x).ir_value() for x in accumulator]
    constraints = [] if begins else [str(i) for i in range(count)]
    d = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    # D's earlier values stand between the results and the operands of the steps.
    lines = []
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        at = count + len(inputs)
        if isinstance(left, list):
            text, layout = "{" + ", ".join(f"${at + i}" for i in range(4)) + "}", f"{int(rows_summed)}"
            inputs += [Uint32(x).ir_value() for x in left]
            constraints += ["r"] * 4
        else:
            text, layout = f"${at}", f"0, {int(rows_summed)}"
            inputs.append(Int64(left).ir_value())
            constraints.append("l")
        scale = "none" if begins and step == 0 else "all"
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {d}, {text}, ${count + len(inputs)}, "
            f"{scale}, 1, 1, {layout};"
        )
        inputs.append(Int64(right).ir_value())
        constraints.append("l")
    predicates = "{ .reg .pred all, none; setp.eq.b32 all, 0, 0; setp.ne.b32 none, 0, 0;"
    text = " ".join([predicates, "wgmma.fence.sync.aligned;", *lines, "wgmma.commit_group.sync.aligned; }"])
    return _in_place(text, count, inputs, constraints)


def wait(pending: int, accumulator: Sequence) -> list[Float32]:
    """Waits until at most ``pending`` groups are in flight; returns the registers of an accumulator that is done."""
    count = len(accumulator)
    inputs = [Float32(x).ir_value() for x in accumulator]
    text = f"wgmma.wait_group.sync.aligned {pending};"
    return _in_place(text, count, inputs, [str(i) for i in range(count)])


def _in_place(text: str, count: int, inputs: list, constraints: list[str]) -> list[Float32]:
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>")
    outputs = ",".join(["=f"] * count + constraints)
    result = llvm.inline_asm(struct, inputs, text, outputs, has_side_effects=True, asm_dialect=0)
    return [Float32(llvm.extractvalue(ir.F32Type.get(), result, [i])) for i in range(count)]


def tma_load(destination: Int32, tensor_map: Int64, coordinates, barrier: Int32):
    """Loads one box of a 4-D tensor map to shared memory; the barrier counts its bytes. Innermost coordinate first.

    In the form for clusters: the one that names this block's shared memory is newer than Hopper.
    """
    inline_ptx(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r3}, {$r4}, {$r5}, {$r6}}], [{$r2}];",
        read_only_args=[destination, tensor_map, barrier, *[Int32(c) for c in coordinates]],
    )


def st_global_v4(address: Int64, values: Sequence):
    """Stores 16 bytes to global memory."""
    inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])
