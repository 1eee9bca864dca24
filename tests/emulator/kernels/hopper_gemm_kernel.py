"""The kernel of hopper_gemm.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalSubscript=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from .dsl import DTYPES, compile_to_ptx, pointer
from .hopper_gemm import ELEMENT_BYTES, STAGES, WARPGROUP, Config

MAJORS = {"K": cute.nvgpu.OperandMajorMode.K, "MN": cute.nvgpu.OperandMajorMode.MN}


class HopperGemm:
    """See hopper_gemm.py."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.accumulator_dtype = DTYPES[config.accumulator]
        self.tiler = (config.m, config.n, config.k_tile)
        self.shared_a = config.source == "SS"
        self.consumers = config.m // 64
        bytes_k = config.k_tile * ELEMENT_BYTES[config.dtype]
        self.stage_bytes = bytes_k * (config.n + (config.m if self.shared_a else 0))

    def tiled_mma(self):
        return sm90_utils.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            MAJORS[self.config.a_major],
            MAJORS[self.config.b_major],
            self.accumulator_dtype,
            (self.consumers, 1, 1),
            (64, self.config.n),
            warpgroup.OperandSource.SMEM if self.shared_a else warpgroup.OperandSource.RMEM,
        )

    def smem_layout(self, rows: int, major: str):
        """Of all stages of one operand; MN-major operands stand K first, so that a box is one swizzle row by K."""
        swizzle = self.config.swizzle
        kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_{'INTER' if swizzle == 'none' else 'SW' + swizzle[:-1]}")
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        order = (0, 1, 2) if major == "K" else (1, 0, 2)
        return cute.tile_to_shape(atom, (rows, self.config.k_tile, STAGES), order=order)

    def global_tensor(self, ptr, rows: int, major: str):
        k = self.config.k
        stride = (k, 1) if major == "K" else (1, rows)
        return cute.make_tensor(ptr, cute.make_layout((Int32(rows), Int32(k)), stride=stride))

    def tma(self, ptr, rows: int, major: str):
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            self.global_tensor(ptr, rows, major),
            cute.slice_(self.smem_layout(rows, major), (None, None, 0)),
            (rows, self.config.k_tile),
        )

    @cute.jit
    def __call__(self, a: cute.Pointer, b: cute.Pointer, c: cute.Pointer, tiles: Int32, stream: cuda.CUstream):
        config = self.config
        map_b, coordinates_b = self.tma(b, config.n, config.b_major)
        if cutlass.const_expr(self.shared_a):
            map_a, coordinates_a = self.tma(a, config.m, config.a_major)
            launch = self.kernel(map_a, coordinates_a, map_b, coordinates_b, None, c, tiles)
        else:
            launch = self.kernel(None, None, map_b, coordinates_b, a, c, tiles)
        launch.launch(grid=(1, 1, 1), block=(config.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, map_a, coordinates_a, map_b, coordinates_b, a, c: cute.Pointer, tiles: Int32):
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, STAGES)
        empty = smem.allocate_array(cutlass.Int64, STAGES)
        b_layout = self.smem_layout(config.n, config.b_major)
        tile_b = smem.allocate_tensor(self.dtype, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        tile_a = None
        if cutlass.const_expr(self.shared_a):
            a_layout = self.smem_layout(config.m, config.a_major)
            tile_a = smem.allocate_tensor(self.dtype, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, self.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 4 * self.consumers:
            self.load(map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, full, empty, tiles)
        else:
            self.multiply(tile_a, tile_b, a, c, full, empty, tiles)

    @cute.jit
    def load(self, map_a, coordinates_a, map_b, coordinates_b, tile_a, tile_b, full, empty, tiles):
        """The producer warp."""
        config = self.config
        to_b, from_b = self.partition(map_b, tile_b, coordinates_b, config.n)
        to_a, from_a = None, None
        if cutlass.const_expr(self.shared_a):
            to_a, from_a = self.partition(map_a, tile_a, coordinates_a, config.m)
        for tile in cutlass.range(tiles, unroll=1):
            stage = tile % STAGES
            cute.arch.mbarrier_wait(empty + stage, (tile // STAGES + 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.stage_bytes)
            if cutlass.const_expr(self.shared_a):
                cute.copy(map_a, from_a[(None, tile)], to_a[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(map_b, from_b[(None, tile)], to_b[(None, stage)], tma_bar_ptr=full + stage)

    def partition(self, atom, tile, coordinates, rows: int):
        tiles = cute.local_tile(coordinates, (rows, self.config.k_tile), (0, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def multiply(self, tile_a, tile_b, a, c, full, empty, tiles):
        """The consumer warpgroups: the wgmma of one stage runs while the next one's are issued."""
        config = self.config
        mma = self.tiled_mma()
        thread, _, _ = cute.arch.thread_idx()
        mine = mma.get_slice(thread)
        fragment_b = mma.make_fragment_B(mine.partition_B(tile_b))
        accumulator = cute.make_rmem_tensor(mma.partition_shape_C((config.m, config.n)), self.accumulator_dtype)
        if cutlass.const_expr(self.shared_a):
            fragments_a = [mma.make_fragment_A(mine.partition_A(tile_a))]
            global_a = None
        else:
            # one set of registers a stage: those of the wgmma in flight must not change
            whole = cute.make_tensor(a, cute.make_layout((config.m, config.k), stride=(config.k, 1)))
            global_a = mine.partition_A(cute.local_tile(whole, (config.m, config.k_tile), (0, None)))
            shape = mma.partition_shape_A((config.m, config.k_tile))
            fragments_a = [cute.make_rmem_tensor(shape, self.dtype) for _ in range(STAGES)]
        mma.set(warpgroup.Field.ACCUMULATE, False)
        if cutlass.const_expr(config.loop):
            for round_ in cutlass.range(tiles // STAGES, unroll=1):
                for stage in cutlass.range_constexpr(STAGES):
                    self.step(mma, accumulator, fragments_a, fragment_b, global_a, full, empty, round_, stage)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
        else:
            for tile in cutlass.range_constexpr(config.k_tiles):
                round_, stage = tile // STAGES, tile % STAGES
                self.step(mma, accumulator, fragments_a, fragment_b, global_a, full, empty, round_, stage)
                mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.wait_group(0)
        target = mine.partition_C(cute.make_tensor(c, cute.make_layout((config.m, config.n), stride=(config.n, 1))))
        cute.autovec_copy(accumulator, target)

    @cute.jit
    def step(self, mma, accumulator, fragments_a, fragment_b, global_a, full, empty, round_, stage):
        """Issues the products of one stage, and gives the stage before back once its products are done."""
        tile = round_ * STAGES + stage
        fragment_a = fragments_a[0]
        if cutlass.const_expr(not self.shared_a):
            fragment_a = fragments_a[stage]
            cute.autovec_copy(global_a[None, None, None, tile], fragment_a)
        cute.arch.mbarrier_wait(full + stage, round_ % 2)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(fragment_b, mode=[2])):
            if cutlass.const_expr(self.shared_a):
                part_a = fragment_a[None, None, k, stage]
            else:
                part_a = fragment_a[None, None, k]
            cute.gemm(mma, accumulator, part_a, fragment_b[None, None, k, stage], accumulator)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if tile > 0:  # noqa: SIM102, the first may be a condition of the compiler
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                cute.arch.mbarrier_arrive(empty + (stage + STAGES - 1) % STAGES)


def compile_ptx(config: Config) -> str:
    return compile_to_ptx(
        HopperGemm(config), pointer(config.dtype), pointer(config.dtype), pointer(config.accumulator), Int32(1)
    )
