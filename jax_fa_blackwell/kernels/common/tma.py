"""TMA tile loads whose box is the launch plan's choice.

The extent of a tile lives in the tensor map alone: the instruction names a map, coordinates, a shared-memory address
and a barrier. So a kernel compiles against a nominal box of 16 bytes and one cubin serves every box; the bytes to
expect on the barrier are a parameter. Elements are 32-bit words (``uint32`` in the plan's TensorMap): loads do not
convert, and 256 words are twice as many 16-bit elements as a box's extent limit would allow.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

WORD = Int32
_NOMINAL_WORDS = 4  # the least box: 16 bytes
_UNBOUNDED = 2**31 - 1


def _nominal(rank: int) -> tuple[int, ...]:
    return (_NOMINAL_WORDS,) + (1,) * (rank - 1)


@cute.jit
def make_load_atom(words: cute.Pointer, extent: Int32, rank: cute.Constexpr):
    """The copy atom of a tiled load; as a kernel argument it is one 128-byte tensor map, filled by the launch plan.

    Args:
      words: any global pointer to WORD. This and ``extent`` only feed the host code, which is thrown away.
      extent: any extent, so that nothing is folded.
      rank: rank of the tensor map, 1 to 5.
    """
    shape = (extent,) * rank
    stride = (1,) + (extent * _NOMINAL_WORDS,) * (rank - 1)
    tensor = cute.make_tensor(words, cute.make_layout(shape, stride=stride))
    box = _nominal(rank)
    atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, cute.make_layout(box), box)
    return atom


@cute.jit
def load_tile(atom: cute.CopyAtom, coordinates, shared: cute.Pointer, barrier: cute.Pointer):
    """Issues one tile load from a whole, converged warp; the DSL elects the thread.

    Args:
      atom: from make_load_atom.
      coordinates: of the tile's first element, innermost first, in elements of the tensor map.
      shared: WORD pointer to the tile, 128-byte aligned.
      barrier: mbarrier that has been told to expect the box's bytes.
    """
    rank = cute.rank(coordinates)
    box = _nominal(rank)
    everything = cute.make_identity_tensor((_UNBOUNDED,) * rank)
    source = cute.local_tile(cute.domain_offset(coordinates, everything), box, (0,) * rank)
    target = cute.make_tensor(shared, cute.make_layout(box))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, rank), cute.group_modes(source, 0, rank)
    )
    cute.copy(atom, source, target, tma_bar_ptr=barrier)
