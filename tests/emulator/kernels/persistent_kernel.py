"""The kernel of persistent.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .dsl import compile_to_ptx, pointer
from .persistent import THREADS, Config


class Persistent:
    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self, source: cute.Pointer, out: cute.Pointer, visits: cute.Pointer, items: Int32, stream: cuda.CUstream
    ):
        cluster = (self.config.cluster, 1, 1)
        self.kernel(source, out, visits).launch(
            grid=(items * self.config.cluster, 1, 1), block=(THREADS, 1, 1), cluster=cluster, stream=stream
        )

    @cute.kernel
    def kernel(self, source: cute.Pointer, out: cute.Pointer, visits: cute.Pointer):
        size = self.config.cluster
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        rank = block % size

        smem = cutlass.utils.SmemAllocator()
        answered = smem.allocate_array(cutlass.Int64, 1)
        answer = smem.allocate_array(Int32, 4, byte_alignment=16)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(answered, 1)
            cute.arch.mbarrier_init_fence()
        self.sync()

        first = block - rank  # of the work item's cluster
        parity = Int32(0)
        valid = Int32(1)
        while valid != 0:
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.issue_clc_query(answered, answer, multicast=size > 1)
            self.work(source, out, visits, first + rank, thread)
            cute.arch.mbarrier_wait(answered, parity)
            parity = parity ^ 1
            x, _, _, valid = cute.arch.clc_response(answer)
            first = x
            # the answer is read by generic loads and overwritten by the next query
            cute.arch.fence_proxy("async.shared", space="cta")
            self.sync()

    @cute.jit
    def sync(self):
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def work(self, source, out, visits, item, thread):
        layout = cute.make_layout(1 << 20)
        place = item * THREADS + thread
        cute.make_tensor(out, layout)[place] = 3 * cute.make_tensor(source, layout)[place] + 1
        if thread == 0:
            counter = cute.make_tensor(visits, layout)
            cute.arch.atomic_add((counter.iterator + item // self.config.cluster).llvm_ptr, Int32(1))


def compile_ptx(config: Config) -> str:
    return compile_to_ptx(Persistent(config), pointer("s32"), pointer("s32"), pointer("s32"), Int32(4))
