"""dQ [B, T, N, H] in 16 bits from its fp32 sums, which the one-pass backward for sm_90a adds up in memory.

The sums lie as accumulators do (``backward.BackwardKernel.add_query_gradient``). A block turns those of 64 queries of a
head into rows; it has one warpgroup.
"""

# The DSL is found through a .pth file and rewrites what it decorates: neither is visible to a type checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr

from jax_fa_blackwell.kernels.common.params import Params, integer_names
from jax_fa_blackwell.kernels.sm90 import fragments, instructions
from jax_fa_blackwell.plan.hopper import TILE_ROWS, WARPGROUP_THREADS

NAME = "query_gradient_sm90"


class QueryGradientKernel:
    """The kernel for one type and class of head dims.

    Attributes:
      kind: the PTX name of the 16-bit type.
      head_dim: of the sums.
      columns: head dims that lie together, those of a warpgroup.
    """

    def __init__(self, kind: str, head_dim: int, columns: int):
        self.kind = kind
        self.head_dim = head_dim
        self.columns = columns

    @cute.kernel
    def kernel(self, sums: cute.Pointer, dq: cute.Pointer, scale: Float32, scalars: tuple):
        """A block of 64 queries (x) of a head (y) of a batch entry (z)."""
        p = Params(NAME, scalars)
        tile, head, batch = cute.arch.block_idx()
        tiles, heads, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        at = Int64((batch * heads + head) * tiles + tile) * (4 * TILE_ROWS * self.head_dim)
        address = sums.toint() + at + thread // 32 * (64 * self.columns) + thread % 32 * 16
        gradient = cute.make_rmem_tensor(self.head_dim // 2, Float32)
        for i in cutlass.range_constexpr(self.head_dim // 8):
            of, within = divmod(8 * i, self.columns)
            loaded = instructions.ld_global_v4(address + of * (4 * TILE_ROWS * self.columns) + within * 64)
            for j in cutlass.range_constexpr(4):
                gradient[4 * i + j] = loaded[j]
        first_row = tile * TILE_ROWS + thread // 32 * 16 + thread % 32 // 4
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            address = dq.toint() + 2 * Int64((batch * p.rows + row) * heads + head) * p.head_dim
            fragments.store_row(self.kind, gradient, r, scale, address, row < p.rows, p.head_dim)


def build(name: str, options: dict):
    """The host function and its arguments for the DSL's compiler; the entry's symbol begins with ``name``."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[options["dtype"]]
    gradient = QueryGradientKernel(kind, options["head_dim"], options["columns"])
    QueryGradientKernel.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def host(f32: cute.Pointer, n: Int32, x: Float32, stream: cuda.CUstream):
        gradient.kernel(f32, f32, x, (n,) * len(integer_names(NAME))).launch(
            grid=(n, n, n), block=(WARPGROUP_THREADS, 1, 1), stream=stream
        )

    pointer = make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    return host, (pointer, Int32(1), Float32(1.0), cuda.CUstream(0))
