"""The kernel of tiles.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from .dsl import DTYPES, compile_to_ptx, pointer, smem_atom_kind
from .tiles import BYTES, Config

THREADS = 64


class Tiles:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tile = (config.tile_rows, config.tile_columns)

    def smem_layout(self):
        if self.config.swizzle == "none":
            return cute.make_composed_layout(
                cute.make_swizzle(0, 4, 3), 0, cute.make_layout(self.tile, stride=(self.tile[1], 1))
            )
        atom = tcgen05.make_smem_layout_atom(smem_atom_kind("K", self.config.swizzle), self.dtype)
        return cute.tile_to_shape(atom, self.tile, order=(0, 1))

    @cute.jit
    def __call__(self, source: cute.Pointer, target: cute.Pointer, rows: Int32, columns: Int32, stream: cuda.CUstream):
        config = self.config
        layout = self.smem_layout()
        pitch = cute.assume(columns, divby=16 // BYTES[config.dtype])
        matrix = cute.make_tensor(source, cute.make_layout((rows, columns), stride=(pitch, 1)))
        copies = 1 if config.reduce else config.cluster
        stack = cute.make_tensor(
            target,
            cute.make_layout((rows, columns, Int32(copies)), stride=(pitch, 1, cute.assume(rows * pitch, divby=8))),
        )
        if cutlass.const_expr(config.cluster > 1):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        else:
            load = cpasync.CopyBulkTensorTileG2SOp()
        if cutlass.const_expr(config.reduce):
            store = cpasync.CopyReduceBulkTensorTileS2GOp()
        else:
            store = cpasync.CopyBulkTensorTileS2GOp()
        map_in, in_coordinates = cpasync.make_tiled_tma_atom(load, matrix, layout, self.tile, config.cluster)
        map_out, out_coordinates = cpasync.make_tiled_tma_atom(store, stack, layout, self.tile)
        tiles = (rows + self.tile[0] - 1) // self.tile[0], (columns + self.tile[1] - 1) // self.tile[1]
        self.kernel(map_in, in_coordinates, map_out, out_coordinates).launch(
            grid=(config.cluster * tiles[0], tiles[1], 1),
            block=(THREADS, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, map_in, in_coordinates, map_out, out_coordinates):
        config = self.config
        layout = self.smem_layout()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, column, _ = cute.arch.block_idx()
        rank = block % config.cluster
        row = block // config.cluster

        smem = cutlass.utils.SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        tile = smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

        source = cute.local_tile(in_coordinates, self.tile, (row, column))
        part_smem, part_source = cpasync.tma_partition(
            map_in, rank, cute.make_layout(config.cluster), cute.group_modes(tile, 0, 2), cute.group_modes(source, 0, 2)
        )
        if warp == 0:
            with cute.arch.elect_one():
                size = config.tile_rows * config.tile_columns * BYTES[config.dtype]
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            if cutlass.const_expr(config.cluster > 1):
                cute.copy(
                    map_in,
                    part_source,
                    part_smem,
                    tma_bar_ptr=barrier,
                    mcast_mask=cutlass.Int16((1 << config.cluster) - 1),
                )
            else:
                cute.copy(map_in, part_source, part_smem, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)

        copy = 0 if cutlass.const_expr(config.reduce) else rank
        target = cute.local_tile(out_coordinates, self.tile, (row, column, copy))
        from_smem, to_target = cpasync.tma_partition(
            map_out, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(target, 0, 2)
        )
        if warp == 0:
            cute.copy(map_out, from_smem, to_target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def compile_ptx(config: Config) -> str:
    return compile_to_ptx(Tiles(config), pointer(config.dtype), pointer(config.dtype), Int32(40), Int32(64))
