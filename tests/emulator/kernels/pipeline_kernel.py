"""The kernel of pipeline.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, tcgen05

from .dsl import MAJORS, compile_to_ptx, pointer, smem_atom_kind
from .pipeline import STAGES, THREADS, TILE, Config

ACCUMULATORS = 2
STORING = 128  # threads of warps 4-7
COLUMNS = 128


class Pipeline:
    def __init__(self, config: Config):
        self.config = config
        self.dtype = cutlass.BFloat16
        self.stage_bytes = 2 * TILE[2] * (TILE[0] + TILE[1])

    def tiled_mma(self):
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype, self.dtype, MAJORS["K"], MAJORS["K"], cutlass.Float32, tcgen05.CtaGroup.ONE, TILE[:2]
        )

    def layouts(self, mma):
        atom = tcgen05.make_smem_layout_atom(smem_atom_kind("K", "128B"), self.dtype)
        shapes = mma.partition_shape_A((TILE[0], TILE[2])), mma.partition_shape_B((TILE[1], TILE[2]))
        return [tcgen05.tile_to_mma_shape(atom, cute.append(s, STAGES), order=(1, 2, 3)) for s in shapes]

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        mma = self.tiled_mma()
        a_layout, b_layout = self.layouts(mma)
        pitch = cute.assume(k, divby=8)
        op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        map_a, coordinates_a = cute.nvgpu.make_tiled_tma_atom_A(
            op,
            cute.make_tensor(a, cute.make_layout((m, k), stride=(pitch, 1))),
            cute.select(a_layout, mode=[0, 1, 2]),
            TILE,
            mma,
        )
        map_b, coordinates_b = cute.nvgpu.make_tiled_tma_atom_B(
            op,
            cute.make_tensor(b, cute.make_layout((n, k), stride=(pitch, 1))),
            cute.select(b_layout, mode=[0, 1, 2]),
            TILE,
            mma,
        )
        self.kernel(map_a, coordinates_a, map_b, coordinates_b, c, m, n, k).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, map_a, coordinates_a, map_b, coordinates_b, c: cute.Pointer, m: Int32, n: Int32, k: Int32):
        mma = self.tiled_mma()
        a_layout, b_layout = self.layouts(mma)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()

        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, STAGES)
        empty = smem.allocate_array(cutlass.Int64, STAGES)
        ready = smem.allocate_array(cutlass.Int64, ACCUMULATORS)
        free = smem.allocate_array(cutlass.Int64, ACCUMULATORS)
        holder = smem.allocate_array(Int32, 1)
        tile_a = smem.allocate_tensor(self.dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        tile_b = smem.allocate_tensor(self.dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        if warp == 0:
            cpasync.prefetch_descriptor(map_a)
            cpasync.prefetch_descriptor(map_b)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 1)
                for i in cutlass.range_constexpr(ACCUMULATORS):
                    cute.arch.mbarrier_init(ready + i, 1)
                    cute.arch.mbarrier_init(free + i, STORING)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(COLUMNS, holder)
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        cute.arch.griddepcontrol_wait()  # A and B may come from the grid before; the set-up above need not wait for it

        tiles_n = (n + TILE[1] - 1) // TILE[1]
        tiles = (m + TILE[0] - 1) // TILE[0] * tiles_n
        k_tiles = (k + TILE[2] - 1) // TILE[2]

        if warp >= 4 and warp < 8:
            cute.arch.setmaxregister_increase(self.config.many_registers)
            self.store(tmem, c, ready, free, thread - 128, block, blocks, tiles, tiles_n, m, n)
        else:
            cute.arch.setmaxregister_decrease(self.config.few_registers)
            if warp == 0:
                work = (block, blocks, tiles, tiles_n, k_tiles)
                self.load(map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, full, empty, work)
            if warp == 1:
                self.multiply(tile_a, tile_b, tmem, full, empty, ready, free, block, blocks, tiles, k_tiles)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(tmem, COLUMNS)

    @cute.jit
    def load(self, map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, full, empty, work):
        block, blocks, tiles, tiles_n, k_tiles = work
        mma = self.tiled_mma().get_slice(0)
        stage, parity = Int32(0), Int32(1)
        for tile in cutlass.range(block, tiles, blocks, unroll=1):
            global_a = cute.local_tile(coordinates_a, (TILE[0], TILE[2]), (tile // tiles_n, None))
            global_b = cute.local_tile(coordinates_b, (TILE[1], TILE[2]), (tile % tiles_n, None))
            to_a, from_a = self.partition(map_a, tile_a, mma.partition_A(global_a))
            to_b, from_b = self.partition(map_b, tile_b, mma.partition_B(global_b))
            for k_tile in cutlass.range(0, k_tiles, 1, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, parity)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                cute.copy(map_a, from_a[(None, k_tile)], to_a[(None, stage)], tma_bar_ptr=full + stage)
                cute.copy(map_b, from_b[(None, k_tile)], to_b[(None, stage)], tma_bar_ptr=full + stage)
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    parity ^= 1
        # no commit may be on its way to this memory when the CTA ends
        for _ in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_wait(empty + stage, parity)
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                parity ^= 1

    def partition(self, atom, tile, coordinates):
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 3), cute.group_modes(coordinates, 0, 3)
        )

    @cute.jit
    def multiply(self, tile_a, tile_b, tmem, full, empty, ready, free, block, blocks, tiles, k_tiles):
        mma = self.tiled_mma()
        fragment_a, fragment_b = mma.make_fragment_A(tile_a), mma.make_fragment_B(tile_b)
        shape = mma.make_fragment_C(mma.partition_shape_C(TILE[:2])).layout
        stage, parity = Int32(0), Int32(0)
        buffer, buffer_parity = Int32(0), Int32(1)
        for _ in cutlass.range(block, tiles, blocks, unroll=1):
            cute.arch.mbarrier_wait(free + buffer, buffer_parity)
            cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
            accumulator = cute.make_tensor(tmem + buffer * TILE[1], shape)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(0, k_tiles, 1, unroll=1):
                cute.arch.mbarrier_wait(full + stage, parity)
                for step in cutlass.range_constexpr(TILE[2] // 16):
                    part_a, part_b = fragment_a[None, None, step, stage], fragment_b[None, None, step, stage]
                    cute.gemm(mma, accumulator, part_a, part_b, accumulator)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                with cute.arch.elect_one():
                    tcgen05.commit(empty + stage)
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    parity ^= 1
            with cute.arch.elect_one():
                tcgen05.commit(ready + buffer)
            buffer ^= 1
            if buffer == 0:
                buffer_parity ^= 1

    @cute.jit
    def store(self, tmem, c, ready, free, thread, block, blocks, tiles, tiles_n, m, n):
        """Thread t has row t of the tile, 64 columns of it."""
        buffer, parity = Int32(0), Int32(0)
        for tile in cutlass.range(block, tiles, blocks, unroll=1):
            cute.arch.mbarrier_wait(ready + buffer, parity)
            cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
            address = tmem.toint() + buffer * TILE[1] + ((thread // 32) << 21)
            row = tile // tiles_n * TILE[0] + thread
            first = tile % tiles_n * TILE[1]
            for half in cutlass.range_constexpr(2):
                names = ", ".join(f"{{$w{i}}}" for i in range(32))
                values = cute.arch.inline_ptx(
                    f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{names}}}, [{{$r0}}];",
                    write_only_types=[cutlass.Float32] * 32,
                    read_only_args=[address + 32 * half],
                )
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(half == 1):
                    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
                    cute.arch.mbarrier_arrive(free + buffer)
                for i in cutlass.range_constexpr(32):
                    column = first + 32 * half + i
                    if row < m and column < n:
                        cute.make_tensor(c, cute.make_layout((m, n), stride=(n, 1)))[row, column] = values[i]
            buffer ^= 1
            if buffer == 0:
                parity ^= 1


def compile_ptx(config: Config) -> str:
    i = Int32(128)
    return compile_to_ptx(Pipeline(config), pointer("bf16"), pointer("bf16"), pointer("f32"), i, i, i, i)
