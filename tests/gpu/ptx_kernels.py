"""Small kernels in PTX for the tests of the executor, assembled by the driver's own linker: no compiler is needed."""

from __future__ import annotations

import ctypes

# y[i] = factor * x[i] for i < n, after the kernel before it has ended (programmatic launches may begin earlier).
SCALE = """
.visible .entry scale(.param .u64 x, .param .u64 y, .param .s32 n, .param .f32 factor)
{
    .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<5>; .reg .f32 %f<3>;
    griddepcontrol.wait;
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r0, %r1, %r2;
    ld.param.s32 %r4, [n];
    setp.ge.s32 %p, %r3, %r4;
    @%p bra done;
    ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y]; ld.param.f32 %f0, [factor];
    cvta.to.global.u64 %d0, %d0; cvta.to.global.u64 %d1, %d1;
    mul.wide.s32 %d2, %r3, 4;
    add.s64 %d3, %d0, %d2; add.s64 %d4, %d1, %d2;
    ld.global.f32 %f1, [%d3];
    mul.f32 %f2, %f1, %f0;
    st.global.f32 [%d4], %f2;
done:
    griddepcontrol.launch_dependents;
    ret;
}
"""

# counter[0] += the block's rank in its cluster, from one thread of each block.
RANKS = """
.visible .entry ranks(.param .u64 counter)
{
    .reg .pred %p; .reg .b32 %r<3>; .reg .b64 %d;
    mov.u32 %r0, %tid.x;
    setp.ne.u32 %p, %r0, 0;
    @%p bra done;
    mov.u32 %r1, %cluster_ctarank;
    ld.param.u64 %d, [counter];
    cvta.to.global.u64 %d, %d;
    red.global.add.u32 [%d], %r1;
done:
    ret;
}
"""

# Loads the box of 32 x 8 fp32 at (column, row) by TMA and writes it to y; 256 threads, static shared memory.
TILE = """
.visible .entry tile(.param .align 64 .b8 map[128], .param .u64 y, .param .align 4 .b8 place[8])
{
    .shared .align 128 .b8 box[1024];
    .shared .align 8 .b64 barrier;
    .reg .pred %p, %q; .reg .b32 %r<8>; .reg .b64 %d<5>; .reg .f32 %f;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, box; mov.u32 %r2, barrier;
    setp.ne.u32 %p, %r0, 0;
    @%p bra ready;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 %d0, [%r2], 1024;
    mov.b64 %d1, map;
    cvta.param.u64 %d1, %d1;
    ld.param.b32 %r3, [place]; ld.param.b32 %r4, [place+4];
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%d1, {%r3, %r4}], [%r2];
ready:
    bar.sync 0;
again:
    mbarrier.try_wait.parity.shared::cta.b64 %q, [%r2], 0;
    @!%q bra again;
    shl.b32 %r5, %r0, 2;
    add.u32 %r6, %r1, %r5;
    ld.shared.f32 %f, [%r6];
    ld.param.u64 %d2, [y];
    cvta.to.global.u64 %d2, %d2;
    cvt.u64.u32 %d3, %r5;
    add.s64 %d4, %d2, %d3;
    st.global.f32 [%d4], %f;
    ret;
}
"""

# Takes blocks of 64 threads at most.
SMALL = """
.visible .entry small(.param .u64 x) .maxntid 64, 1, 1
{
    ret;
}
"""

KERNELS = (SCALE, RANKS, TILE, SMALL)


def source(arch: str) -> str:
    """The module's PTX."""
    return f".version 8.0\n.target {arch}\n.address_size 64\n" + "".join(KERNELS)


_INPUT_PTX = 1
_ERROR_LOG, _ERROR_LOG_BYTES, _TARGET = 5, 6, 9


def assemble(ptx: str, compute_capability: int) -> bytes:
    """The cubin of ``ptx`` for a compute capability such as 90; RuntimeError with the linker's own words.

    Uses the primary context of device 0, which JAX must have made.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    log = ctypes.create_string_buffer(8192)

    def check(result: int, what: str) -> None:
        if result:
            raise RuntimeError(f"{what} failed with {result}: {log.value.decode(errors='replace')}")

    context, state = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        # The API's int options stand by value in an array of pointers. A target with architecture-specific
        # instructions has 0x10000 (CU_COMPUTE_ACCELERATED_TARGET_BASE) added.
        target = compute_capability + (0x10000 if f"sm_{compute_capability}a" in ptx else 0)
        options = (ctypes.c_int * 3)(_ERROR_LOG, _ERROR_LOG_BYTES, _TARGET)
        values = (ctypes.c_void_p * 3)(ctypes.cast(log, ctypes.c_void_p).value, len(log), target)
        check(cuda.cuLinkCreate_v2(3, options, values, ctypes.byref(state)), "cuLinkCreate")
        data = ptx.encode() + b"\0"
        added = cuda.cuLinkAddData_v2(state, _INPUT_PTX, data, ctypes.c_size_t(len(data)), b"test.ptx", 0, None, None)
        check(added, "cuLinkAddData")
        cubin, size = ctypes.c_void_p(), ctypes.c_size_t()
        check(cuda.cuLinkComplete(state, ctypes.byref(cubin), ctypes.byref(size)), "cuLinkComplete")
        return ctypes.string_at(cubin, size.value)
    finally:
        if state:
            cuda.cuLinkDestroy(state)
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
