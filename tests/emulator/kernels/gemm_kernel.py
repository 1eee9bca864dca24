"""The kernel of gemm.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
from cutlass.cute.nvgpu import cpasync, tcgen05

from .dsl import DTYPES, MAJORS, compile_to_ptx, pointer, smem_atom_kind
from .gemm import ELEMENT_BYTES, K_TILES, STAGES, Config

THREADS = 128


class Gemm:
    """See gemm.py."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.tiler = (config.m, config.n, config.k_tile)
        self.pair = config.cta_group == 2
        self.group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE
        self.shared_a = config.source == "SS"
        # A in TMEM stands behind the accumulator
        self.a_columns = 0 if self.shared_a else config.k * ELEMENT_BYTES[config.dtype] // 4
        self.columns = 32
        while self.columns < config.n + self.a_columns:
            self.columns *= 2
        # of 64 rows a CTA of a pair keeps the right half of N in the upper lanes
        self.accumulator_columns = config.n // 2 if config.m_cta == 64 and self.pair else config.n
        bytes_k = config.k_tile * ELEMENT_BYTES[config.dtype]
        self.stage_bytes = bytes_k * (config.n + (config.m if self.shared_a else 0))

    def tiled_mma(self):
        return sm100_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            MAJORS[self.config.a_major],
            MAJORS[self.config.b_major],
            cutlass.Float32,
            self.group,
            self.tiler[:2],
            tcgen05.OperandSource.SMEM if self.shared_a else tcgen05.OperandSource.TMEM,
        )

    def smem_layout(self, shape, major: str):
        """Of all stages of one operand; MN-major operands stand K first, so that a box is one swizzle row by K."""
        atom = tcgen05.make_smem_layout_atom(smem_atom_kind(major, self.config.swizzle), self.dtype)
        order = (1, 2, 3) if major == "K" else (2, 1, 3)
        return tcgen05.tile_to_mma_shape(atom, cute.append(shape, STAGES), order=order)

    def layouts(self, mma):
        a = None
        if self.shared_a:
            a = self.smem_layout(mma.partition_shape_A(cute.dice(self.tiler, (1, None, 1))), self.config.a_major)
        return a, self.smem_layout(mma.partition_shape_B(cute.dice(self.tiler, (None, 1, 1))), self.config.b_major)

    def global_tensor(self, ptr, rows: int, major: str):
        k = self.config.k
        stride = (k, 1) if major == "K" else (1, rows)
        return cute.make_tensor(ptr, cute.make_layout((cutlass.Int32(rows), cutlass.Int32(k)), stride=stride))

    @cute.jit
    def __call__(self, a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, stream: cuda.CUstream):
        config = self.config
        mma = self.tiled_mma()
        a_layout, b_layout = self.layouts(mma)
        cluster = cute.tiled_divide(cute.make_layout((config.cta_group, 1, 1)), (mma.thr_id.shape,))
        op = cpasync.CopyBulkTensorTileG2SOp(self.group)
        map_b, coordinates_b = cute.nvgpu.make_tiled_tma_atom_B(
            op,
            self.global_tensor(b, config.n, config.b_major),
            cute.select(b_layout, mode=[0, 1, 2]),
            self.tiler,
            mma,
            cluster.shape,
        )
        if cutlass.const_expr(self.shared_a):
            map_a, coordinates_a = cute.nvgpu.make_tiled_tma_atom_A(
                op,
                self.global_tensor(a, config.m, config.a_major),
                cute.select(a_layout, mode=[0, 1, 2]),
                self.tiler,
                mma,
                cluster.shape,
            )
            launch = self.kernel(map_a, coordinates_a, map_b, coordinates_b, None, c)
        else:
            launch = self.kernel(None, None, map_b, coordinates_b, a, c)
        launch.launch(
            grid=(config.cta_group, 1, 1), block=(THREADS, 1, 1), cluster=(config.cta_group, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, map_a, coordinates_a, map_b, coordinates_b, a, c):
        mma = self.tiled_mma()
        a_layout, b_layout = self.layouts(mma)
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if self.pair else 0

        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, STAGES)
        empty = smem.allocate_array(cutlass.Int64, STAGES)
        done = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(cutlass.Int32, 1)
        tile_b = smem.allocate_tensor(self.dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        tile_a = None
        if cutlass.const_expr(self.shared_a):
            tile_a = smem.allocate_tensor(self.dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)

        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 1)
                cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(self.columns, holder, is_two_cta=self.pair)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)

        slice_mma = mma.get_slice(rank)
        accumulator = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout)
        fragment_b = mma.make_fragment_B(tile_b)
        if cutlass.const_expr(self.shared_a):
            fragment_a = mma.make_fragment_A(tile_a)
        else:
            fragment_a = self.a_in_tmem(mma, tmem)
            self.fill_a(a, tmem, thread, rank)

        if warp == 0:
            self.main_loop(
                slice_mma, map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, fragment_a, fragment_b,
                accumulator, full, empty, done, rank,
            )  # fmt: skip
        cute.arch.mbarrier_wait(done, 0)
        self.store(slice_mma, accumulator, c, thread)
        # the peer may still read this CTA's memory, and the columns are given back by both
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
            cute.arch.dealloc_tmem(tmem, self.columns, is_two_cta=self.pair)

    @cute.jit
    def main_loop(
        self, slice_mma, map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, fragment_a, fragment_b,
        accumulator, full, empty, done, rank,
    ):  # fmt: skip
        """Warp 0: loads ahead by the ring's depth, then multiplies (the leader's warp 0 for both CTAs of a pair)."""
        parts_b = self.partition(map_b, tile_b, slice_mma.partition_B(
            cute.local_tile(coordinates_b, cute.select(self.tiler, mode=[1, 2]), (0, None))))  # fmt: skip
        parts_a = None
        if cutlass.const_expr(self.shared_a):
            parts_a = self.partition(map_a, tile_a, slice_mma.partition_A(
                cute.local_tile(coordinates_a, cute.select(self.tiler, mode=[0, 2]), (0, None))))  # fmt: skip
        mask = 3 if cutlass.const_expr(self.pair) else None
        for tile in cutlass.range_constexpr(K_TILES + STAGES - 1):
            if cutlass.const_expr(tile < K_TILES):
                stage = tile % STAGES
                if cutlass.const_expr(tile >= STAGES):
                    cute.arch.mbarrier_wait(empty + stage, (tile // STAGES - 1) % 2)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
                if cutlass.const_expr(self.shared_a):
                    cute.copy(map_a, parts_a[1][(None, tile)], parts_a[0][(None, stage)], tma_bar_ptr=full + stage)
                cute.copy(map_b, parts_b[1][(None, tile)], parts_b[0][(None, stage)], tma_bar_ptr=full + stage)
            if cutlass.const_expr(tile >= STAGES - 1):  # noqa: SIM102, one condition is of the compiler, one of the kernel
                if rank == 0:
                    self.multiply(tile - STAGES + 1, fragment_a, fragment_b, accumulator, full, empty, mask)
        if rank == 0:
            with cute.arch.elect_one():
                tcgen05.commit(done, mask, self.group)

    @cute.jit
    def multiply(self, tile: cutlass.Constexpr, fragment_a, fragment_b, accumulator, full, empty, mask):
        mma = self.tiled_mma()  # its own, since setting a field changes the object within this branch only
        stage = tile % STAGES
        cute.arch.mbarrier_wait(full + stage, tile // STAGES % 2)
        steps = cute.size(fragment_b, mode=[2])
        for step in cutlass.range_constexpr(steps):
            mma.set(tcgen05.Field.ACCUMULATE, tile + step > 0)
            if cutlass.const_expr(self.shared_a):
                part_a = fragment_a[None, None, step, stage]
            else:
                part_a = fragment_a[None, None, step, tile]
            cute.gemm(mma, accumulator, part_a, fragment_b[None, None, step, stage], accumulator)
        if cutlass.const_expr(tile + STAGES < K_TILES):  # nobody waits for the last ones
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage, mask, self.group)

    def partition(self, atom, tile, coordinates):
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 3), cute.group_modes(coordinates, 0, 3)
        )

    def a_in_tmem(self, mma, tmem):
        """A as the MMA sees it in TMEM, tiles of K side by side, behind the accumulator."""
        layout = sm100_utils.make_smem_layout_a(mma, self.tiler, self.dtype, K_TILES)
        start = cute.recast_ptr(tmem + self.config.n, dtype=self.dtype)
        # make_fragment_A gives the layout; of the place it knows nothing
        return cute.make_tensor(start, mma.make_fragment_A(cute.make_tensor(start, layout.outer)).layout)

    @cute.jit
    def fill_a(self, a, tmem, thread, rank):
        """Every thread copies one row of A, as 32-bit words, into its TMEM lane."""
        config = self.config
        words = self.a_columns
        # lanes to rows: all 128; or 16 of every 32 lanes (M = 64); or both halves alike (M = 128 of a pair)
        row = thread
        if cutlass.const_expr(config.m_cta == 64):
            row = thread % 64 if cutlass.const_expr(self.pair) else thread // 32 * 16 + thread % 16
        row = row + rank * config.m_cta
        source = cute.make_tensor(
            cute.recast_ptr(a, dtype=cutlass.Int32), cute.make_layout((config.m, words), stride=(words, 1))
        )
        lane = (thread // 32) << 21
        address = tmem.toint() + config.n + lane
        for start in cutlass.range_constexpr(0, words, 8):
            values = [source[row, start + i] for i in range(8)]
            names = ", ".join(f"{{$r{i + 1}}}" for i in range(8))
            cute.arch.inline_ptx(
                f"tcgen05.st.sync.aligned.32x32b.x8.b32 [{{$r0}}], {{{names}}};",
                read_only_args=[address + start, *values],
            )
        cute.arch.fence_view_async_tmem_store()
        cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")
        cute.arch.sync_threads()
        if cutlass.const_expr(self.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")

    @cute.jit
    def store(self, slice_mma, accumulator, c, thread):
        """TMEM to registers to global memory; which lane and column is which row and column of C, the DSL knows."""
        config = self.config
        tensor = cute.make_tensor(c, cute.make_layout((config.m, config.n), stride=(config.n, 1)))
        part = slice_mma.partition_C(tensor)
        columns = min(128, self.accumulator_columns)
        tile = ((cute.size(accumulator, mode=[0, 0]), columns * config.n // self.accumulator_columns),)
        source, target = cute.zipped_divide(accumulator, tile), cute.zipped_divide(part, tile)
        if cutlass.const_expr(config.m_cta == 64 and not self.pair):
            op = tcgen05.Ld16x256bOp(getattr(tcgen05.Repetition, f"x{columns // 8}"))
        else:
            op = tcgen05.Ld32x32bOp(getattr(tcgen05.Repetition, f"x{columns}"))
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, cutlass.Float32), source[None, 0])
        mine = copy.get_slice(thread)
        loaded, stored = mine.partition_S(source), mine.partition_D(target)
        registers = cute.make_rmem_tensor(stored[None, None, 0].shape, cutlass.Float32)
        cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")
        for i in cutlass.range_constexpr(cute.size(stored, mode=[2])):
            cute.copy(copy, loaded[None, None, i], registers)
            cute.arch.fence_view_async_tmem_load()
            cute.autovec_copy(registers, stored[None, None, i])
        cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def compile_ptx(config: Config) -> str:
    return compile_to_ptx(Gemm(config), pointer(config.dtype), pointer(config.dtype), pointer("f32"))
