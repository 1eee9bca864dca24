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

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.experimental.cuda.tensor_map import TensorMapSwizzle, create_tensor_map_tiled

from jax_fa_blackwell.plan.hopper import SLICE, TILE_ROWS

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


def multiply(
    kind: str,
    columns: int,
    a,
    b: Int64,
    b_offsets: Sequence[int],
    *,
    a_rows_summed=False,
    rows_summed=False,
    accumulator=None,
):
    """D (+)= sum of A_s B_s over steps of 16, committed as one group and not awaited; returns D's registers.

    Args:
      kind: PTX name of the 16-bit type.
      columns: of D, a multiple of 8 up to 256.
      a: 64 rows of A: descriptor and what each step adds to it, or for each step a list of four registers.
      b: descriptor of B: [columns, summed], or [summed, columns] with ``rows_summed``.
      b_offsets: what each step adds to it.
      a_rows_summed: the layout of A in shared memory: [64 rows, summed], or [summed, 64 rows].
      rows_summed: the layout of B.
      accumulator: registers to add to; None begins from zero.
    """
    count = columns // 2
    begins = accumulator is None
    inputs = [] if begins else [Float32(x).ir_value() for x in accumulator]
    constraints = [] if begins else [str(i) for i in range(count)]
    d = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    # D's earlier values stand between the results and the other operands.
    b_operand = f"${count + len(inputs)}"
    inputs.append(Int64(b).ir_value())
    constraints.append("l")
    a_offsets = None
    if isinstance(a, tuple):
        first, a_offsets = a
        a_operand = f"${count + len(inputs)}"
        inputs.append(Int64(first).ir_value())
        constraints.append("l")
    # Descriptors are added up here, next to their use: a compiler would keep all of them in registers over a loop.
    lines = [
        "{ .reg .pred all, none; .reg .b64 a, b; setp.eq.b32 all, 0, 0; setp.ne.b32 none, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for step, offset in enumerate(b_offsets):
        lines.append(f"add.s64 b, {b_operand}, {offset};")
        if a_offsets is not None:
            lines.append(f"add.s64 a, {a_operand}, {a_offsets[step]};")
            left, layout = "a", f"{int(a_rows_summed)}, {int(rows_summed)}"
        else:
            at = count + len(inputs)
            left, layout = "{" + ", ".join(f"${at + i}" for i in range(4)) + "}", f"{int(rows_summed)}"
            inputs += [Uint32(x).ir_value() for x in a[step]]
            constraints += ["r"] * 4
        scale = "none" if begins and step == 0 else "all"
        shape = f"m64n{columns}k16.f32.{kind}.{kind}"
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {d}, {left}, b, {scale}, 1, 1, {layout};")
    lines.append("wgmma.commit_group.sync.aligned; }")
    return _in_place(" ".join(lines), count, inputs, constraints)


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


def nominal_tensor_map(pointer, element: type, extent: Int32):
    """A tensor map argument for compilation; its contents are thrown away."""
    box = [SLICE, TILE_ROWS, 1, 1]
    return create_tensor_map_tiled(
        pointer.toint(), element, [extent] * 4, [extent] * 3, box, swizzle=TensorMapSwizzle.s128b
    )


def st_global_v4(address: Int64, values: Sequence):
    """Stores 16 bytes to global memory."""
    inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def ld_matrix_x4(address: Int32) -> list[Uint32]:
    """Loads four 8 x 8 matrices of 16-bit elements; lane 8 m + i has the address of row i of matrix m."""
    return list(
        inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def st_matrix_x4(address: Int32, values: Sequence):
    """Stores four 8 x 8 matrices of 16-bit elements; lane 8 m + i has the address of row i of matrix m."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def bulk_add(destination: Int64, source: Int32, size: int):
    """Adds ``size`` bytes of floats in shared memory to global memory; part of the thread's current bulk group."""
    inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[destination, source, Int32(size)],
    )


def ld_global_v4(address: Int64) -> list[Float32]:
    """Loads four floats from global memory."""
    return list(
        inline_ptx(
            "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )


def warp_max(x: Int32) -> Int32:
    """The greatest of a warp's numbers, known to be the same in all lanes."""
    text = "redux.sync.max.s32 {$w0}, {$r0}, 0xffffffff;"
    return cute.arch.make_warp_uniform(inline_ptx(text, write_only_types=[Int32], read_only_args=[Int32(x)]))
