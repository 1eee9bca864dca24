"""The kernel of exchange.py; imports the DSL."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .dsl import compile_to_ptx, pointer
from .exchange import THREADS, Config


class Exchange:
    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(self, out: cute.Pointer, stream: cuda.CUstream):
        cluster = (self.config.cluster, 1, 1)
        self.kernel(out).launch(grid=cluster, block=(THREADS, 1, 1), cluster=cluster, stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Pointer):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        following = (rank + 1) % config.cluster

        smem = cutlass.utils.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2)
        # two inboxes each, used in turn, so that a fast sender does not overtake a slow reader
        boxes = smem.allocate_array(Int32, 4 * THREADS)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barriers, 1)
                cute.arch.mbarrier_init(barriers + 1, THREADS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        asynchronous = 1000 * rank + thread
        remote = 7 * rank + 3 * thread
        for turn in cutlass.range_constexpr(config.rounds):
            inbox = boxes + 2 * THREADS * (turn % 2)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barriers, 4 * THREADS)
            cute.arch.store_async_dsmem(inbox + thread, asynchronous, barriers, following)
            mirrored = THREADS + THREADS - 1 - thread
            there = cute.arch.map_dsmem_ptr(inbox + mirrored, following)
            cute.arch.inline_ptx("st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[there.toint(), remote])
            there = cute.arch.map_dsmem_ptr(barriers + 1, following)
            cute.arch.inline_ptx(
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[there.toint()]
            )
            cute.arch.mbarrier_wait(barriers, turn % 2)
            cute.arch.inline_ptx(
                "{\n.reg .pred p;\nAGAIN:\n"
                "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1};\n@!p bra AGAIN;\n}",
                read_only_args=[(barriers + 1).toint(), Int32(turn % 2)],
            )
            asynchronous = asynchronous + cute.make_tensor(inbox, cute.make_layout(THREADS))[thread]
            remote = 2 * remote + cute.make_tensor(inbox + THREADS, cute.make_layout(THREADS))[thread]
            # everyone has read before anyone writes the inbox after next
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        result = cute.make_tensor(out, cute.make_layout((config.cluster, 2, THREADS), stride=(2 * THREADS, THREADS, 1)))
        result[rank, 0, thread] = asynchronous
        result[rank, 1, thread] = remote


def compile_ptx(config: Config) -> str:
    return compile_to_ptx(Exchange(config), pointer("s32"))
