"""PTX kernels around one bulk copy, for tests: shared memory to an array, or an array to shared memory.

All have one CTA of 128 threads. Dynamic shared memory holds the data (1024-byte aligned), then one mbarrier.
"""

from emulator.lane_kernels import HEADER

THREADS = 128


def _coordinates(count: int) -> tuple[str, str, str]:
    params = "".join(f", .param .u32 c{i}" for i in range(count))
    loads = "\n".join(f"ld.param.b32 %c{i}, [c{i}];" for i in range(count))
    return params, loads, ", ".join(f"%c{i}" for i in range(count))


PROLOGUE = """.reg .b32 %tid, %smem, %bar, %word, %value, %c<5>, %size;
.reg .b64 %map, %global, %array;
.reg .pred %p, %first, %done;
mov.u32 %tid, %tid.x;
setp.eq.b32 %first, %tid, 0;
mov.b32 %smem, shared;
"""
LOOP_HEAD = """mov.b32 %word, %tid;
{label}:
setp.ge.u32 %p, %word, {words};
@%p bra {label}_END;
mad.lo.s32 %value, %word, 4, %smem;
mul.wide.u32 %global, %word, 4;
add.s64 %global, %global, %array;
"""
LOOP_TAIL = """add.s32 %word, %word, 128;
bra {label};
{label}_END:
"""


def copy_out(nbytes: int, label: str = "OUT") -> str:
    """All threads copy shared memory to the array."""
    body = "{ .reg .b32 w; ld.shared.b32 w, [%value]; st.global.b32 [%global], w; }\n"
    return LOOP_HEAD.format(label=label, words=nbytes // 4) + body + LOOP_TAIL.format(label=label)


def copy_in(nbytes: int, label: str = "IN") -> str:
    """All threads copy the array to shared memory."""
    body = "{ .reg .b32 w; ld.global.b32 w, [%global]; st.shared.b32 [%value], w; }\n"
    return LOOP_HEAD.format(label=label, words=nbytes // 4) + body + LOOP_TAIL.format(label=label)


def load_ptx(
    instruction: str, nbytes: int, coordinates: int, *, shared_bytes: int | None = None, expect: int | None = None
) -> str:
    """A kernel (map, array, coordinates...): one thread runs `instruction`; all wait, then copy `shared_bytes` out.

    `instruction` may use %smem, %map, %bar, %size (nbytes) and {coords}. `expect`: bytes announced to the mbarrier.
    """
    params, loads, coords = _coordinates(coordinates)
    shared_bytes = shared_bytes or nbytes
    return f"""{HEADER}
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 array{params}) {{
{PROLOGUE}
add.s32 %bar, %smem, {shared_bytes};
mov.b64 %map, map;
cvta.param.u64 %map, %map;
ld.param.b64 %array, [array];
mov.b32 %size, {nbytes};
{loads}
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
bar.sync 0;
@!%first bra WAIT;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes if expect is None else expect};
{instruction.replace("{coords}", "{" + coords + "}")}
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
{copy_out(shared_bytes)}
ret;
}}"""


def store_ptx(
    instructions: str, nbytes: int, coordinates: int, *, after: str = "", wait: str = "cp.async.bulk.wait_group 0;"
) -> str:
    """A kernel (map, array, coordinates...) that fills shared memory from the array, then stores it in one thread.

    `after` runs in that thread between the commit and the wait.
    """
    params, loads, coords = _coordinates(coordinates)
    return f"""{HEADER}
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 array{params}) {{
{PROLOGUE}
mov.b64 %map, map;
cvta.param.u64 %map, %map;
ld.param.b64 %array, [array];
mov.b32 %size, {nbytes};
{loads}
{copy_in(nbytes)}
fence.proxy.async.shared::cta;
bar.sync 0;
@!%first bra END;
{instructions.replace("{coords}", "{" + coords + "}")}
cp.async.bulk.commit_group;
{after}
{wait}
END:
ret;
}}"""
