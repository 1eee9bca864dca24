"""PTX instructions that the kernels use, one function each; names follow the PTX ISA.

Addresses are 32-bit integers: shared memory in the ``.shared`` window, Tensor Memory as lane << 16 | column.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm, nvvm
from cutlass.cute.arch import inline_ptx


def _list(prefix: str, count: int, start: int = 0) -> str:
    return ", ".join(f"{{${prefix}{start + i}}}" for i in range(count))


# --- mbarrier -------------------------------------------------------------------------------------------------------


def mbarrier_init(barrier: Int32, count: int):
    """Makes the barrier ready for ``count`` arrivals a phase."""
    inline_ptx("mbarrier.init.shared.b64 [{$r0}], {$r1};", read_only_args=[barrier, Int32(count)])


def mbarrier_arrive(barrier: Int32):
    """Arrives once, release.cta."""
    inline_ptx("mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_arrive_expect_tx(barrier: Int32, size: Int32):
    """Arrives once and expects ``size`` more bytes in this phase."""
    inline_ptx("mbarrier.arrive.expect_tx.shared.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, Int32(size)])


def mbarrier_arrive_remote(barrier: Int32):
    """Arrives once at a barrier of any block of the cluster, release.cluster; the address is one of ``mapa``."""
    inline_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_wait(barrier: Int32, phase: Int32, scope: str = "cta"):
    """Waits until the phase of this parity has completed; acquire at ``scope``, "cluster" for remote arrivals.

    Not the DSL's own wait: that branches with ``.uni``, and lanes that were apart before it may get different answers.
    """
    inline_ptx(
        f"{{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, "
        "[{$r0}], {$r1}, 10000000; @done bra ended; bra again; ended: }",
        read_only_args=[barrier, Int32(phase)],
    )


# --- Clusters -------------------------------------------------------------------------------------------------------


def mapa(address: Int32, rank: Int32) -> Int32:
    """The address, in the window of the cluster, of the same place in the shared memory of another of its blocks."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, Int32(rank)]
    )


def cluster_sync():
    """A barrier of all threads of the cluster."""
    inline_ptx("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")


# --- TMA ------------------------------------------------------------------------------------------------------------


def prefetch_tensor_map(tensor_map: Int64):
    """Brings a tensor map into the descriptor cache."""
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map])


def tma_load(rank: int, destination: Int32, tensor_map: Int64, coordinates, barrier: Int32, group: int = 1):
    """Loads one box to shared memory; the barrier counts its bytes. Coordinates run from the innermost dimension.

    With ``group`` 2 the barrier may be that of either block of the pair.
    """
    where = "shared::cluster" if group == 2 else "shared::cta"
    inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.{where}.global.tile.mbarrier::complete_tx::bytes"
        f"{'.cta_group::2' if group == 2 else ''} [{{$r0}}], [{{$r1}}, {{{_list('r', rank, 3)}}}], [{{$r2}}];",
        read_only_args=[destination, tensor_map, barrier, *[Int32(c) for c in coordinates]],
    )


def tma_store(rank: int, source: Int32, tensor_map: Int64, coordinates):
    """Stores one box from shared memory; part of the thread's current bulk group."""
    inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "
        f"[{{$r1}}, {{{_list('r', rank, 2)}}}], [{{$r0}}];",
        read_only_args=[source, tensor_map, *[Int32(c) for c in coordinates]],
    )


def bulk_commit_group():
    """Closes the thread's current bulk group."""
    inline_ptx("cp.async.bulk.commit_group;")


def bulk_wait_group_read(pending: int = 0):
    """Waits until at most ``pending`` groups still read their shared memory."""
    inline_ptx(f"cp.async.bulk.wait_group.read {pending};")


def bulk_wait_group(pending: int = 0):
    """Waits until at most ``pending`` groups are not yet written."""
    inline_ptx(f"cp.async.bulk.wait_group {pending};")


def fence_proxy_async_shared():
    """Orders this thread's generic accesses to shared memory before later ones of the async proxy."""
    inline_ptx("fence.proxy.async.shared::cta;")


# --- Tensor Memory and tcgen05: ``group`` is 1, or 2 in a kernel whose blocks work in pairs -------------------------


def tcgen05_alloc(address: Int32, columns: int, group: int = 1):
    """Allocates columns (a power of two, at least 32); the base address is written to shared memory at ``address``."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};", read_only_args=[address]
    )


def tcgen05_relinquish_alloc_permit(group: int = 1):
    """Gives up the right to allocate, so that another block on this SM may."""
    inline_ptx(f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;")


def tcgen05_dealloc(tmem: Int32, columns: int, group: int = 1):
    """Frees what ``tcgen05_alloc`` gave."""
    inline_ptx(f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[tmem])


def tcgen05_fence_before():
    """Orders this thread's earlier tcgen05 operations before the synchronisation that follows."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


def tcgen05_fence_after():
    """Orders the tcgen05 operations that follow after the synchronisation before."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


def tcgen05_commit(barrier: Int32, group: int = 1):
    """Arrives once at the barrier when all earlier mma, cp and shift of this thread have completed.

    With ``group`` 2 at that of either block of a cluster of two.
    """
    if group == 1:
        inline_ptx(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];", read_only_args=[barrier]
        )
    else:
        inline_ptx(
            "{ .reg .b16 both; mov.b16 both, 3; "
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [{$r0}], both; }",
            read_only_args=[barrier],
        )


def _tensor_memory(address: Int32):
    """A pointer to Tensor Memory (LLVM address space 6)."""
    return llvm.inttoptr(llvm.PointerType.get(6), Int32(address).ir_value())


def _tcgen05_mma(accumulator: Int32, a, b: Int64, instruction: Int32, accumulate, group: int):
    # Callers elect a thread inside the innermost loop: compilers up to 4.8.1 crash where the election is outside.
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F16,
        nvvm.CTAGroupKind.CTA_2 if group == 2 else nvvm.CTAGroupKind.CTA_1,
        _tensor_memory(accumulator),
        a,
        Int64(b).ir_value(),
        Int32(instruction).ir_value(),
        Boolean(accumulate).ir_value(),
    )


def tcgen05_mma_ss(accumulator: Int32, a: Int64, b: Int64, instruction: Int32, accumulate, group: int = 1):
    """D (+)= A B with both operands in shared memory, kind f16."""
    _tcgen05_mma(accumulator, Int64(a).ir_value(), b, instruction, accumulate, group)


def tcgen05_mma_ts(accumulator: Int32, a: Int32, b: Int64, instruction: Int32, accumulate, group: int = 1):
    """D (+)= A B with A in Tensor Memory, kind f16."""
    _tcgen05_mma(accumulator, _tensor_memory(a), b, instruction, accumulate, group)


def tcgen05_ld(tmem: Int32, columns: int) -> list[Float32]:
    """Loads ``columns`` columns of the thread's lane, complete when it returns; at most 32 registers a load."""
    step = min(columns, 32)
    loads = "".join(
        f"tcgen05.ld.sync.aligned.32x32b.x{step}.b32 {{{_list('w', step, start)}}}, [{{$r{start // step}}}]; "
        for start in range(0, columns, step)
    )
    values = inline_ptx(
        loads + "tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * columns,
        read_only_args=[tmem + start for start in range(0, columns, step)],
    )
    return list(values) if columns > 1 else [values]


def tcgen05_st(tmem: Int32, values):
    """Stores registers to as many columns of the thread's lane (a power of two, at most 32); not awaited."""
    count = len(values)
    inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r0}}], {{{_list('r', count, 1)}}};",
        read_only_args=[tmem, *values],
    )


def tcgen05_wait_st():
    """Waits for this thread's earlier stores to Tensor Memory."""
    inline_ptx("tcgen05.wait::st.sync.aligned;")


# --- Arithmetic -----------------------------------------------------------------------------------------------------


def ex2(x: Float32) -> Float32:
    """2**x, at most 2 ulp, subnormals flushed."""
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def lg2(x: Float32) -> Float32:
    """Binary logarithm; 0 gives -inf."""
    return inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def rcp(x: Float32) -> Float32:
    """1/x; 0 gives inf."""
    return inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def pack(kind: str, low: Float32, high: Float32) -> Uint32:
    """Two floats as one register of ``kind`` ("bf16" or "f16"), rounded to nearest even; ``low`` in the low half."""
    return inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def st_shared_v4(address: Int32, values):
    """Stores 16 bytes."""
    inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def st_shared_b32(address: Int32, value):
    """Stores 4 bytes."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def ld_shared_b32(address: Int32) -> Int32:
    """Loads 4 bytes."""
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def ld_shared_f32(address: Int32) -> Float32:
    """Loads a float."""
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def absolute(x: Float32) -> Float32:
    """|x|."""
    return inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def copysign(magnitude: Float32, sign: Float32) -> Float32:
    """The magnitude of the first with the sign of the second."""
    return inline_ptx("copysign.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Float32], read_only_args=[magnitude, sign])


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """A * b + c, rounded once."""
    return inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def mul(a: Float32, b: Float32) -> Float32:
    """Product, rounded: never fused into what follows."""
    return inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def shl(x: Int32, bits: Int32) -> Int32:
    """Shift to the left; 0 where ``bits``, taken as unsigned, is 32 or more."""
    return inline_ptx("shl.b32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[x, bits])


def _packed(operation: str, operands: int):
    """A packed f32x2 instruction on pairs of floats."""
    names = "abc"[:operands]
    packs = " ".join(f"mov.b64 {n}, {{{{$r{2 * i}}}, {{$r{2 * i + 1}}}}};" for i, n in enumerate(names))
    text = (
        "{ .reg .b64 d, " + ", ".join(names) + "; " + packs + f" {operation} d, " + ", ".join(names) + "; "
        "mov.b64 {{$w0}, {$w1}}, d; }"
    )

    def call(*pairs):
        flat = [value for pair in pairs for value in pair]
        return inline_ptx(text, write_only_types=[Float32, Float32], read_only_args=flat)

    return call


fma2 = _packed("fma.rn.f32x2", 3)
"""fma2(a, b, c): a * b + c of pairs, each rounded once."""
add2 = _packed("add.rn.f32x2", 2)
"""add2(a, b): sums of pairs."""
sub2 = _packed("sub.rn.f32x2", 2)
"""sub2(a, b): differences of pairs."""
mul2 = _packed("mul.rn.f32x2", 2)
"""mul2(a, b): products of pairs."""


def max3(a: Float32, b: Float32, c: Float32) -> Float32:
    """Greatest of three, ignoring NaN."""
    return inline_ptx("max.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def shift_left_add(x: Float32, bits: int, y: Float32) -> Float32:
    """(x << bits) + y on the bit patterns."""
    return inline_ptx(
        f"mad.lo.s32 {{$w0}}, {{$r0}}, {1 << bits}, {{$r1}};", write_only_types=[Float32], read_only_args=[x, y]
    )


def ld_shared_f32x2(address: Int32) -> tuple[Float32, Float32]:
    """Loads two floats from an 8-byte aligned address."""
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32, Float32], read_only_args=[address]
    )


def ld_shared_f32x4(address: Int32, offset: int = 0) -> list[Float32]:
    """Loads four floats from a 16-byte aligned address, ``offset`` bytes further."""
    return list(
        inline_ptx(
            f"ld.shared.v4.f32 {{{_list('w', 4)}}}, [{{$r0}}+{offset}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )
