"""PTX kernels around tcgen05.mma for tests: operands and accumulator in, K steps of MMA, accumulator out.

One CTA, or a pair, of 128 threads. Each thread moves its lane of Tensor Memory; thread 0 of the (even) CTA issues.
Labels of the snippets are stable, so that a test may break one line of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import emulator
from emulator import mma_model, mma_native
from emulator.lane_kernels import HEADER

CHUNK = 8  # columns that a thread moves at once


@dataclass(frozen=True)
class MmaCase:
    """What the kernel multiplies. `m` counts the rows of both CTAs of a pair; K is 32 bytes a step."""

    m: int
    n: int
    a_type: str = "bf16"
    b_type: str | None = None
    d_type: str = "f32"
    group: int = 1
    a_in_tensor: bool = False
    ws: bool = False
    mn_major_a: bool = False
    mn_major_b: bool = False
    swizzle: str = "128B"
    steps: int = 2
    accumulate: bool = True  # the first step adds to what the accumulator held
    negate_a: bool = False
    scale: int | None = None
    disable: tuple[int, ...] = ()  # words of disable-output-lane
    collector: tuple[str, ...] = ()  # a modifier for each step
    lane: int = 0  # of the accumulator (16: the other half of layout F)
    data: dict = field(default_factory=dict, compare=False, hash=False)

    @property
    def types(self) -> tuple[str, str]:
        return self.a_type, self.b_type or self.a_type

    @property
    def kind(self) -> str:
        return mma_model.KINDS[self.a_type]

    @property
    def idesc(self) -> int:
        return mma_model.instruction_descriptor(
            self.m,
            self.n,
            *self.types,
            self.d_type,
            mn_major_a=self.mn_major_a,
            mn_major_b=self.mn_major_b,
            negate_a=self.negate_a,
        )

    @property
    def rows(self) -> int:
        """Rows of A in one CTA."""
        return self.m // self.group

    @property
    def columns(self) -> int:
        """Columns of the accumulator in Tensor Memory."""
        return mma_native.instruction(self.idesc, self.kind, cta_group=self.group, ws=self.ws).columns

    @property
    def a_column(self) -> int:
        return self.columns + CHUNK

    @property
    def allocated(self) -> int:
        need = self.a_column + 8 * self.steps if self.a_in_tensor else self.columns
        return max(32, 1 << (need - 1).bit_length())


def strides(case: MmaCase, rows: int, mn_major: bool, bits: int) -> tuple[int, int, int]:
    """LBO, SBO and bytes of one K step of an operand, laid out densely."""
    size = bits // 8
    width = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_32B": 8}[case.swizzle]
    row_bytes = 16 * width
    if not mn_major:
        # Swizzled rows are `row_bytes` wide, whatever part of them one step uses.
        lbo = 128 * (rows // 8) if case.swizzle == "none" else 16
        return lbo, 8 * row_bytes if case.swizzle != "none" else 128, max(rows * row_bytes, 2 * rows * 16)
    atom_k = 4 if case.swizzle == "128B_32B" else 8
    groups = -(-rows * size // row_bytes)
    atom = row_bytes * atom_k
    k_groups = max(32 // size // atom_k, 1)
    if case.swizzle == "none":
        return atom * groups, atom, atom * groups * k_groups
    return atom, atom * groups, atom * groups * k_groups


@dataclass
class MmaInputs:
    """Host side of one run: raw operands per step, and what the kernel is given."""

    case: MmaCase
    a: list[np.ndarray]  # [M, K] raw containers a step
    b: list[np.ndarray]  # [N, K]
    start: np.ndarray  # accumulator before, uint32 [CTAs, 128, columns]
    image: np.ndarray  # shared memory, uint8 [CTAs, bytes]
    descriptors: np.ndarray  # uint64 [steps, 2]
    tensor_a: np.ndarray  # uint32 [CTAs, 128, 8 * steps]

    def expected(self) -> np.ndarray:
        """The accumulator afterwards, from the (separately tested) arithmetic and layouts."""
        case = self.case
        out = self.start.copy()
        place = mma_native.place(
            case.idesc, case.kind, rows=case.rows, n=case.n, cta_group=case.group, ws=case.ws, lane=case.lane
        )
        lane, column = place[..., 0], place[..., 1]
        d = np.concatenate([self.start[r][lane, column] for r in range(case.group)])
        for step, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            use_c = step > 0 or case.accumulate
            d = mma_native.multiply(
                a, b, d if use_c else None, *case.types, case.d_type, negate_a=case.negate_a, scale_c=case.scale or 0
            )
        for r in range(case.group):
            part = d[r * case.rows : (r + 1) * case.rows]
            if case.d_type == "f16":
                part = part | 0x7FFF0000  # the upper half of a word is not stated: poison
            if case.disable:
                words = np.array(case.disable[4 * r : 4 * r + 4], np.uint64)
                off = (words[lane // 32] >> (lane % 32).astype(np.uint64)) & np.uint64(1)
                part = np.where(off == 1, self.start[r][lane, column], part)
            out[r][lane, column] = part
        return out


BASE = 1024  # where dynamic shared memory begins: the system's reserved part lies below


def make_inputs(case: MmaCase, operands) -> MmaInputs:
    """Builds memory images. `operands(step)` returns raw A [M, K] and B [N, K]; `case.data["start"]` is D before."""
    a_bits = mma_native.CONTAINER_BITS.get(case.a_type, 8)
    b_bits = mma_native.CONTAINER_BITS.get(case.types[1], 8)
    n_here = case.n // case.group
    lbo_a, sbo_a, bytes_a = strides(case, case.rows, case.mn_major_a, a_bits)
    lbo_b, sbo_b, bytes_b = strides(case, n_here, case.mn_major_b, b_bits)
    bytes_a, bytes_b = (-(-v // 1024) * 1024 for v in (bytes_a, bytes_b))
    a_all, b_all = zip(*(operands(step) for step in range(case.steps)), strict=True)
    image = np.zeros((case.group, case.steps * (bytes_a + bytes_b)), np.uint8)
    image[:] = 0xFF  # what is not an operand is NaN in every type
    descriptors = np.zeros((case.steps, 2), np.uint64)
    tensor_a = np.zeros((case.group, 128, 8 * case.steps), np.uint32)
    for step in range(case.steps):
        for operand, (raw, rows, major, bits, lbo, sbo) in enumerate(
            (
                (a_all[step], case.rows, case.mn_major_a, a_bits, lbo_a, sbo_a),
                (b_all[step], n_here, case.mn_major_b, b_bits, lbo_b, sbo_b),
            )
        ):
            begin = step * (bytes_a + bytes_b) + operand * bytes_a
            where = mma_model.canonical_addresses(
                BASE + begin, lbo, sbo, case.swizzle, mn_major=major, rows=rows, element_bits=bits
            )
            descriptors[step, operand] = mma_model.shared_descriptor(BASE + begin, lbo, sbo, case.swizzle)
            dtype = {32: np.uint32, 16: np.uint16, 8: np.uint8}[bits]
            for r in range(case.group):
                values = np.ascontiguousarray(raw[r * rows : (r + 1) * rows].astype(dtype))
                at = where[..., None] - BASE + np.arange(bits // 8)
                image[r][at] = values.view(np.uint8).reshape(at.shape)
                if operand == 0:
                    tensor_a[r][tensor_rows(case), 8 * step : 8 * step + 8] = values.view(np.uint32)[
                        tensor_sources(case)
                    ]
    start = case.data.get("start")
    if start is None:
        start = np.zeros((case.group, 128, case.columns), np.uint32)
    return MmaInputs(case, list(a_all), list(b_all), start, image, descriptors, tensor_a)


def tensor_rows(case: MmaCase) -> np.ndarray:
    """Lanes that hold A in Tensor Memory."""
    if case.group == 1 and case.m == 64:
        return np.add.outer(32 * np.arange(4), np.arange(16)).ravel() + case.lane
    return np.arange(128)


def tensor_sources(case: MmaCase) -> np.ndarray:
    """The row of A in each of those lanes; a pair with M = 128 holds its 64 rows twice."""
    return np.arange(len(tensor_rows(case))) % case.rows


def registers(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def move_columns(pointer: str, columns: int, base: int, label: str, *, store: bool) -> str:
    """Each thread moves its lane: global [128, columns] words to Tensor Memory, or back."""
    text = [f"// {label}", f"mul.wide.u32 %g, %tid, {columns * 4};", f"add.s64 %g, %g, {pointer};"]
    for c in range(0, columns, CHUNK):
        text.append(f"add.u32 %ta, %lane_base, {base + c};")
        words = [f"[%g+{(c + i) * 4}]" for i in range(CHUNK)]
        if store:
            text += [f"ld.global.b32 %v{i}, {words[i]};" for i in range(CHUNK)]
            text.append(f"tcgen05.st.sync.aligned.32x32b.x{CHUNK}.b32 [%ta], {registers('v', CHUNK)};")
        else:
            text.append(f"tcgen05.ld.sync.aligned.32x32b.x{CHUNK}.b32 {registers('v', CHUNK)}, [%ta];")
            text.append(f"tcgen05.wait::ld.sync.aligned; // {label}")
            text += [f"st.global.b32 {words[i]}, %v{i};" for i in range(CHUNK)]
    if store:
        text.append(f"tcgen05.wait::st.sync.aligned; // {label}")
    return "\n".join(text)


def mma_text(case: MmaCase) -> str:
    """The K steps, by one thread."""
    lines = []
    ws = ".ws" if case.ws else ""
    for step in range(case.steps):
        lines.append(f"ld.global.b64 %desc_a, [%descs+{16 * step}];\nld.global.b64 %desc_b, [%descs+{16 * step + 8}];")
        lines.append(f"setp.ne.b32 %acc, {int(step > 0 or case.accumulate)}, 0;")
        lines.append(f"add.u32 %ta, %tmem, {case.lane << 16};")
        a = "%desc_a"
        if case.a_in_tensor:
            lines.append(f"add.u32 %tb, %ta, {case.a_column + 8 * step};")
            a = "[%tb]"
        disable = ""
        if case.disable:
            lines += [f"mov.b32 %m{i}, {word};" for i, word in enumerate(case.disable)]
            disable = registers("m", len(case.disable)) + ", "
        collector = f".{case.collector[step]}" if case.collector else ""
        scale = "" if case.scale is None else f", {case.scale}"
        lines.append(
            f"tcgen05.mma{ws}.cta_group::{case.group}.kind::{case.kind}{collector} "
            f"[%ta], {a}, %desc_b, %idesc, {disable}%acc{scale}; // step {step}"
        )
    return "\n".join(lines)


def mma_ptx(case: MmaCase, image_bytes: int) -> str:
    """Kernel (image, descriptors, tensor_a, start, out)."""
    pair = case.group == 2
    cluster_sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" if pair else "bar.sync 0;"
    words = image_bytes // 4
    group = f"cta_group::{case.group}"
    if pair:
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %both;"
    else:
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.b64 [%bar];"
    copy_a = move_columns("%tensor_a", 8 * case.steps, case.a_column, "A in", store=True) if case.a_in_tensor else ""
    return f"""{HEADER}
.extern .shared .align 1024 .b8 shared[];
.visible .entry kernel(.param .u64 image, .param .u64 descs, .param .u64 tensor_a, .param .u64 start, .param .u64 out)
{{
.reg .b16 %both;
.reg .b32 %tid, %warp, %smem, %bar, %slot, %word, %at, %w, %tmem, %ta, %tb, %lane_base, %idesc, %rank;
.reg .b32 %v<{CHUNK}>, %m<8>;
.reg .b64 %image, %descs, %tensor_a, %start, %out, %g, %part, %desc_a, %desc_b;
.reg .pred %p, %first, %acc, %done, %leader;
mov.u32 %tid, %tid.x;
mov.u32 %rank, %cluster_ctarank;
shr.u32 %warp, %tid, 5;
setp.eq.b32 %first, %tid, 0;
setp.eq.and.b32 %leader, %rank, 0, %first;
mov.b16 %both, 3;
mov.b32 %smem, shared;
add.u32 %bar, %smem, {image_bytes};
add.u32 %slot, %bar, 8;
mov.b32 %idesc, {case.idesc};
ld.param.b64 %image, [image];
ld.param.b64 %descs, [descs];
ld.param.b64 %tensor_a, [tensor_a];
ld.param.b64 %start, [start];
ld.param.b64 %out, [out];
mul.wide.u32 %part, %rank, {image_bytes};
add.s64 %image, %image, %part;
mul.wide.u32 %part, %rank, {128 * 8 * case.steps * 4};
add.s64 %tensor_a, %tensor_a, %part;
mul.wide.u32 %part, %rank, {128 * case.columns * 4};
add.s64 %start, %start, %part;
add.s64 %out, %out, %part;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first fence.mbarrier_init.release.cluster;
setp.ne.b32 %p, %warp, 0;
@%p bra ALLOCATED;
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%slot], {case.allocated};
tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
ALLOCATED:
mov.b32 %word, %tid;
COPY:
mul.wide.u32 %g, %word, 4;
add.s64 %g, %g, %image;
ld.global.b32 %w, [%g];
mad.lo.u32 %at, %word, 4, %smem;
st.shared.b32 [%at], %w;
add.u32 %word, %word, 128;
setp.lt.u32 %p, %word, {words};
@%p bra COPY;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %tmem, [%slot];
shl.b32 %lane_base, %warp, 21;
add.u32 %lane_base, %lane_base, %tmem;
{move_columns("%start", case.columns, 0, "start in", store=True)}
{copy_a}
tcgen05.fence::before_thread_sync;
{cluster_sync} // operands ready
tcgen05.fence::after_thread_sync;
@!%leader bra WAIT;
{mma_text(case)}
{commit}
WAIT:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], 0;
@!%done bra WAIT;
tcgen05.fence::after_thread_sync;
{move_columns("%out", case.columns, 0, "out", store=False)}
tcgen05.fence::before_thread_sync;
{cluster_sync} // all read
setp.ne.b32 %p, %warp, 0;
@%p bra END;
tcgen05.dealloc.{group}.sync.aligned.b32 %tmem, {case.allocated};
END:
ret;
}}
"""


def launch_mma(inputs: MmaInputs, *, mode: str = "random", seed: int = 0, text: str | None = None):
    """Runs the kernel (or a changed text of it); the accumulator [CTAs, 128, columns] and the report."""
    case = inputs.case
    out = np.zeros_like(inputs.start)
    report = emulator.load(text or mma_ptx(case, inputs.image.shape[1])).launch(
        grid=(case.group, 1, 1),
        block=(128, 1, 1),
        cluster=(case.group, 1, 1),
        shared_bytes=inputs.image.shape[1] + 16,
        params=[inputs.image, inputs.descriptors, inputs.tensor_a, inputs.start, out],
        schedule=emulator.Schedule(seed=seed, async_=mode),
    )
    return out, report
