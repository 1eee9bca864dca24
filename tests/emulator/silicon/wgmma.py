"""wgmma: its arithmetic in every type, its operand layouts, its register fragments.

A block is a warpgroup. It copies an image to shared memory, multiplies once or several times through descriptors that
come with the image, and writes its accumulator registers. In the arithmetic kernels the place of an element does not
matter, so that images and registers are simply filled; in the layout kernels every element of the image differs from
its neighbours, inside and outside the operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import mma
from .micro import PROLOGUE, Micro, Pointer, entry, poison
from .values import generator

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
THREADS = 128
_F32_SPECIAL = (0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001)
_F16_SPECIAL = (0, 0x8000, 1, 0x83FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7C01)


@dataclass(frozen=True)
class Form:
    """One form of wgmma.mma_async.m64nNkK, and how often it is executed.

    Attributes:
      a, b, d: Element types.
      n: Columns.
      registers: Whether A comes from registers.
      mn_major_a, mn_major_b: Whether the operand in shared memory is transposed (16-bit types).
      steps: Wgmma in one chain on one accumulator.
      accumulate: scale-d of the first one.
      negate_a, negate_b: imm-scale of -1.
    """

    a: str
    b: str = ""
    d: str = "f32"
    n: int = 8
    registers: bool = False
    mn_major_a: bool = False
    mn_major_b: bool = False
    steps: int = 1
    accumulate: bool = True
    negate_a: bool = False
    negate_b: bool = False

    @property
    def b_type(self) -> str:
        return self.b or self.a

    @property
    def words(self) -> int:
        """Accumulator registers of a thread."""
        return self.n // 2 if self.d == "f32" else self.n // 4

    def instruction(self, a: str, b: str, accumulate: str, accumulator: str) -> str:
        shape = f"m64n{self.n}k{256 // BITS[self.a]}"
        scales = f"{-1 if self.negate_a else 1}, {-1 if self.negate_b else 1}"
        transposed = ""
        if BITS[self.a] == 16:
            transposed = f", {int(self.mn_major_b)}" if self.registers else ""
            if not self.registers:
                transposed = f", {int(self.mn_major_a)}, {int(self.mn_major_b)}"
        return (
            f"wgmma.mma_async.sync.aligned.{shape}.{self.d}.{self.a}.{self.b_type} "
            f"{accumulator}, {a}, {b}, {accumulate}, {scales}{transposed};"
        )


def kernel(form: Form, image_bytes: int) -> str:
    """Parameters: images [block, image_bytes], descriptors [block, steps, 2] relative to the image, A in registers
    [block, thread, 4 * steps], accumulators before and after [block, thread, words].
    """
    n, steps = form.words, form.steps
    lines = [PROLOGUE]
    lines.append(f"    .reg .b32 acc<{n}>, frag<{4 * steps}>;\n    .reg .b64 %thread, %descs, %source, %base;")
    lines.append(f"    mad.lo.u32 r0, %blk, {THREADS}, %t;\n    cvt.u64.u32 %thread, r0;\n    cvt.u64.u32 d1, %blk;")
    lines.append(f"    mad.lo.u64 %descs, d1, {16 * steps}, %d;\n    mad.lo.u64 %source, d1, {image_bytes}, %image;")
    # the image, 16 bytes a thread and step
    lines.append("    mov.u32 r1, tile;\n    shl.b32 r2, %t, 4;\n    add.u32 r3, r1, r2;\n    cvt.u64.u32 d2, r2;")
    lines.append("    add.u64 d2, %source, d2;\nCOPY:")
    lines.append("    ld.global.v4.b32 {r4, r5, r6, r7}, [d2];\n    st.shared.v4.b32 [r3], {r4, r5, r6, r7};")
    lines.append(f"    add.u64 d2, d2, {16 * THREADS};\n    add.u32 r3, r3, {16 * THREADS};")
    lines.append(f"    add.u32 r2, r2, {16 * THREADS};\n    setp.lt.u32 p0, r2, {image_bytes};\n    @p0 bra COPY;")
    lines.append("    fence.proxy.async.shared::cta;\n    bar.sync 0;")
    lines.append("    and.b32 r1, r1, 0x3ffff;\n    shr.u32 r1, r1, 4;\n    cvt.u64.u32 %base, r1;")
    for step in range(steps):
        for operand in range(2):
            register = f"d{10 + 2 * step + operand}"
            lines.append(f"    ld.global.b64 {register}, [%descs+{16 * step + 8 * operand}];")
            lines.append(f"    add.u64 {register}, {register}, %base;")
    lines.append(f"    mad.lo.u64 d3, %thread, {4 * n}, %c;\n    mad.lo.u64 d4, %thread, {4 * n}, %out;")
    lines += [f"    ld.global.b32 acc{i}, [d3+{4 * i}];" for i in range(n)]
    if form.registers:
        lines.append(f"    mad.lo.u64 d3, %thread, {16 * steps}, %a;")
        lines += [f"    ld.global.b32 frag{i}, [d3+{4 * i}];" for i in range(4 * steps)]
    lines.append(f"    setp.ne.u32 p1, {int(form.accumulate)}, 0;\n    setp.ne.u32 p2, 1, 0;")
    lines.append("    wgmma.fence.sync.aligned;")
    accumulator = "{" + ", ".join(f"acc{i}" for i in range(n)) + "}"
    for step in range(steps):
        a = f"d{10 + 2 * step}"
        if form.registers:
            a = "{" + ", ".join(f"frag{4 * step + i}" for i in range(4)) + "}"
        lines.append("    " + form.instruction(a, f"d{11 + 2 * step}", "p2" if step else "p1", accumulator))
    lines.append("    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;")
    lines += [f"    st.global.b32 [d4+{4 * i}], acc{i};" for i in range(n)]
    shared = f"    .shared .align 1024 .b8 tile[{image_bytes}];"
    return entry("u64 image, u64 d, u64 a, u64 c, u64 out", "\n".join(lines), shared=shared)


def _micro(
    name: str, form: Form, image: np.ndarray, descriptors: np.ndarray, a: np.ndarray | None, c: np.ndarray
) -> Micro:
    blocks, image_bytes = image.shape
    if image_bytes % (16 * THREADS):
        raise ValueError(f"image of {name} has {image_bytes} bytes; expected a multiple of {16 * THREADS}")
    fragments = np.zeros((blocks, THREADS, 4 * form.steps), np.uint32) if a is None else a
    if descriptors.shape != (blocks, form.steps, 2) or c.shape != (blocks, THREADS, form.words):
        raise ValueError(f"{name}: descriptors {descriptors.shape}, accumulators {c.shape} do not fit {blocks} blocks")
    if fragments.shape != (blocks, THREADS, 4 * form.steps):
        raise ValueError(f"{name}: fragments of A are {fragments.shape}; expected {blocks} blocks")
    buffers = {"image": image, "d": descriptors, "a": fragments, "c": c, "out": poison(c.size)}
    return Micro(
        name=name,
        ptx=kernel(form, image_bytes),
        buffers={key: np.ascontiguousarray(array) for key, array in buffers.items()},
        params=[Pointer(key) for key in buffers],
        grid=(blocks, 1, 1),
        block=(THREADS, 1, 1),
    )


def descriptor(start: int, leading: int, stride: int, mode: str, base_offset: int = 0) -> int:
    """A matrix descriptor of wgmma; offsets in bytes."""
    fields = [(value & 0x3FFFF) >> 4 for value in (start, leading, stride)]
    return fields[0] | fields[1] << 16 | fields[2] << 32 | base_offset << 49 | MODES[mode] << 62


# ---------------------------------------------------------------- arithmetic


def _mma_form(kind: str) -> mma.Form:
    """The form of mma.sync that has this element type, for its generators of operands."""
    return next(form for form in mma.FORMS if form.kind == kind)


def _elements(kind: str, count: int, block: int, seed: int) -> np.ndarray:
    """`count` elements for one block; what kind of numbers depends on the block, see `_BLOCKS`."""
    form, rng = _mma_form(kind), generator(seed)
    top_exponent = (1 << mma.LAYOUT[kind][1]) - 1
    m = mma.LAYOUT[kind][0]
    widest = min(top_exponent // 2 - 1, 40)
    what = _BLOCKS[block]
    spread = {"0": 0, "2": 2, "4": 4, "8": 8, "16": 16}.get(what, widest)
    values = mma.operands(form, count, min(spread, widest), seed + 1)
    if what == "sparse":
        values = np.where(rng.random(count) < 0.85, 0, values)
    elif what == "subnormal":
        values = mma.encode(form, rng.integers(0, 2, count), np.zeros(count, int), rng.integers(0, 1 << m, count))
    elif what == "cancel":
        half = count // 2
        values[half:] = values[:half] ^ (values.dtype.type(rng.integers(0, 2)) << values.dtype.type(BITS[kind] - 1))
    elif what == "large":
        exponent = np.full(count, top_exponent - 1)
        values = mma.encode(form, rng.integers(0, 2, count), exponent, rng.integers(0, 1 << m, count))
    elif what == "tiny":
        exponent = rng.integers(0, max(2, top_exponent // 3), count)
        values = mma.encode(form, rng.integers(0, 2, count), exponent, rng.integers(0, 1 << m, count))
    elif what in ("finite", "few", "many"):
        table = mma.specials(form)
        share = {"finite": 0.1, "few": 0.02, "many": 0.2}[what]
        values = np.where(
            rng.random(count) < share, rng.choice(table[:8] if what == "finite" else table, count), values
        )
    return values


#: What the operands of each block of an arithmetic kernel are: the spread of their exponents, or a case of its own.
_BLOCKS = (
    "0", "2", "4", "8", "16", "widest", "sparse", "sparse", "sparse", "widest", "widest", "cancel", "subnormal",
    "large", "tiny", "finite", "few", "many",
)  # fmt: skip
#: Exponent of C relative to 1 in those blocks; None: C is zero; 99: any.
_GAPS = (None, 0, 6, -6, 12, -12, None, 0, 99, 13, -14, 0, None, 0, 99, 99, 0, 99)


def _accumulators(form: Form, block: int, seed: int) -> np.ndarray:
    rng = generator(seed)
    count, gap = THREADS * form.words, _GAPS[block]
    special = _BLOCKS[block] in ("finite", "few", "many")
    if form.d == "f16":
        scale = 0 if gap is None else 1 if gap == 99 else 2.0 ** (gap / 2)
        halves = (rng.standard_normal(2 * count) * scale).astype(np.float16)
        if gap == 99:
            halves = np.ldexp(halves.astype(np.float64), rng.integers(-14, 12, 2 * count)).astype(np.float16)
        words = halves.view(np.uint16)
        table = np.array(_F16_SPECIAL[:6] if _BLOCKS[block] == "finite" else _F16_SPECIAL, np.uint16)
        if special:
            words = np.where(rng.random(2 * count) < 0.1, rng.choice(table, 2 * count), words)
        return np.ascontiguousarray(words.astype(np.uint16)).view(np.uint32).reshape(THREADS, form.words)
    values = rng.standard_normal(count).astype(np.float32)
    exponent = rng.integers(-40, 40, count) if gap == 99 else 0 if gap is None else gap
    values = np.ldexp(values, exponent).astype(np.float32) * np.float32(gap is not None)
    words = values.view(np.uint32)
    table = np.array(_F32_SPECIAL[:6] if _BLOCKS[block] == "finite" else _F32_SPECIAL, np.uint32)
    if special:
        words = np.where(rng.random(count) < 0.1, rng.choice(table, count), words)
    return words.astype(np.uint32).reshape(THREADS, form.words)


def _arithmetic(name: str, form: Form, seed: int, blocks: Sequence[int] = range(len(_BLOCKS))) -> Micro:
    """K-major operands without swizzle, the steps' operands one after the other."""
    a_bytes, b_bytes = 64 * 32, form.n * 32
    step_bytes = a_bytes + b_bytes
    image_bytes = -(-form.steps * step_bytes // (16 * THREADS)) * 16 * THREADS
    images = np.zeros((len(blocks), image_bytes), np.uint8)
    fragments = np.zeros((len(blocks), THREADS, 4 * form.steps), np.uint32)
    for i, block in enumerate(blocks):
        for step in range(form.steps):
            own = seed + 1000 * block + 10 * step
            a = _elements(form.a, a_bytes * 8 // BITS[form.a], block, own).view(np.uint8)
            b = _elements(form.b_type, b_bytes * 8 // BITS[form.b_type], block, own + 5).view(np.uint8)
            at = step * step_bytes
            images[i, at : at + a_bytes] = a
            images[i, at + a_bytes : at + step_bytes] = b
            fragments[i, :, 4 * step : 4 * step + 4] = a.view(np.uint32).reshape(THREADS, 4)
    descriptors = np.zeros((len(blocks), form.steps, 2), np.uint64)
    for step in range(form.steps):
        at = step * step_bytes
        descriptors[:, step, 0] = descriptor(at, 1024, 128, "none")
        descriptors[:, step, 1] = descriptor(at + a_bytes, 16 * form.n, 128, "none")
    c = np.stack([_accumulators(form, block, seed + 77 + 1000 * block) for block in blocks])
    return _micro(name, form, images, descriptors, fragments if form.registers else None, c)


def _arithmetic_cases() -> list[Micro]:
    forms = {
        "f16": Form("f16"),
        "bf16": Form("bf16"),
        "tf32": Form("tf32"),
        "e4m3": Form("e4m3"),
        "e5m2": Form("e5m2"),
        "e4m3_e5m2": Form("e4m3", "e5m2"),
        "f16_f16": Form("f16", d="f16"),
        "e4m3_f16": Form("e4m3", d="f16"),
        "e5m2_e4m3_f16": Form("e5m2", "e4m3", d="f16"),
    }
    out = [_arithmetic(f"wgmma_{name}", form, 100_000 * (i + 1)) for i, (name, form) in enumerate(forms.items())]
    some = (2, 5, 7, 16)
    others = {
        "rs_f16": Form("f16", registers=True),
        "rs_bf16": Form("bf16", registers=True),
        "rs_tf32": Form("tf32", registers=True),
        "rs_e4m3": Form("e4m3", registers=True),
        "rs_e5m2_f16": Form("e5m2", d="f16", registers=True),
        "chain_bf16": Form("bf16", steps=4),
        "chain_e4m3": Form("e4m3", steps=4),
        "chain_rs_f16_f16": Form("f16", d="f16", registers=True, steps=3),
        "negate_a_bf16": Form("bf16", negate_a=True),
        "negate_b_e4m3": Form("e4m3", negate_b=True),
        "negate_both_tf32": Form("tf32", negate_a=True, negate_b=True),
        "no_c_f16": Form("f16", accumulate=False),
        "no_c_e5m2": Form("e5m2", accumulate=False),
    }
    return out + [
        _arithmetic(f"wgmma_{name}", form, 3_000_000 + 100_000 * i, some)
        for i, (name, form) in enumerate(others.items())
    ]


# ---------------------------------------------------------------- layouts and fragments


def _small(kind: str, count: int, seed: int) -> np.ndarray:
    """Integers from -3 to 3 as elements: their sums are exact."""
    rng = generator(seed)
    value = rng.integers(-3, 4, count)
    if kind == "f16":
        return value.astype(np.float16).view(np.uint8)
    if kind in ("bf16", "tf32"):
        words = value.astype(np.float32).view(np.uint32)
        return (words >> 16).astype(np.uint16).view(np.uint8) if kind == "bf16" else words.view(np.uint8)
    m = mma.LAYOUT[kind][0]
    bias = (1 << (mma.LAYOUT[kind][1] - 1)) - 1
    code = {0: 0, 1: bias << m, 2: (bias + 1) << m, 3: (bias + 1) << m | 1 << (m - 1)}
    magnitude = np.array([code[int(v)] for v in np.abs(value)], np.uint8)
    return magnitude | np.where(value < 0, 128, 0).astype(np.uint8)


@dataclass(frozen=True)
class Place:
    """Where an operand lies in its part of the image. Offsets in bytes; `stated` is the descriptor's base offset."""

    mode: str
    start: int = 0
    stated: int = 0


#: K steps inside a swizzled row, patterns that begin at other rows, and what the base offset does about it.
_K_PLACES = (
    Place("none"), Place("32B"), Place("64B"), Place("128B"), Place("128B", 32), Place("128B", 96), Place("64B", 32),
    Place("128B", 1024 + 64), Place("128B", 256), Place("128B", 384, 3), Place("64B", 128, 1), Place("64B", 128),
    Place("32B", 512 + 128), Place("32B", 128, 1),
)  # fmt: skip
_MN_PLACES = (
    Place("none"), Place("32B"), Place("64B"), Place("128B"), Place("128B", 2048), Place("64B", 1024),
    Place("128B", 256), Place("128B", 384, 3), Place("64B", 128, 1), Place("32B", 128),
)  # fmt: skip


def _strides(place: Place, rows: int, mn_major: bool, bits: int) -> tuple[int, int]:
    """Leading and stride offsets, wide enough that nothing overlaps, and of no use for another layout."""
    row_bytes = 16 if place.mode == "none" else int(place.mode[:-1])
    if not mn_major:
        return (16 * rows + 128, 128) if place.mode == "none" else (16, 8 * row_bytes)
    atoms = -(-rows * bits // 8 // row_bytes)
    if place.mode == "none":  # the stride offset leads along M or N, the leading one along K
        return 128 * atoms + 256, 128
    return 8 * row_bytes, 8 * row_bytes * atoms + 1024


def _layout(name: str, form: Form, seed: int) -> Micro:
    """A block for each place of A and B; of unequal numbers the shorter list is repeated."""
    part = 16384
    places_a = (Place("none"),) if form.registers else _MN_PLACES if form.mn_major_a else _K_PLACES
    places_b = _MN_PLACES if form.mn_major_b else _K_PLACES
    blocks = max(len(places_a), len(places_b))
    bits = BITS[form.a]
    image = np.stack([_small(form.a, 2 * part * 8 // bits, seed + block) for block in range(blocks)])
    descriptors = np.zeros((blocks, 1, 2), np.uint64)
    for block in range(blocks):
        # another order for B, so that A and B differ
        a, b = places_a[block % len(places_a)], places_b[(5 * block + 3) % len(places_b)]
        a_strides, b_strides = _strides(a, 64, form.mn_major_a, bits), _strides(b, form.n, form.mn_major_b, bits)
        descriptors[block, 0, 0] = descriptor(a.start, *a_strides, a.mode, a.stated)
        descriptors[block, 0, 1] = descriptor(part + b.start, *b_strides, b.mode, b.stated)
    fragments = None
    if form.registers:
        fragments = _small(form.a, blocks * THREADS * 16 * 8 // bits, seed + 500).view(np.uint32)
        fragments = fragments.reshape(blocks, THREADS, 4)
    c = np.zeros((blocks, THREADS, form.words), np.uint32)
    return _micro(name, form, image, descriptors, fragments, c)


def _layout_cases() -> list[Micro]:
    forms = {
        "kk_bf16": Form("bf16", n=16),
        "kk_tf32": Form("tf32", n=16),
        "kk_e4m3": Form("e4m3", n=16),
        "km_f16": Form("f16", n=64, mn_major_b=True),
        "mk_bf16": Form("bf16", n=24, mn_major_a=True),
        "mm_f16": Form("f16", n=64, mn_major_a=True, mn_major_b=True),
        "rk_bf16": Form("bf16", n=40, registers=True),
        "rm_f16": Form("f16", n=64, registers=True, mn_major_b=True),
    }
    return [_layout(f"wgmma_layout_{name}", form, 9_000_000 + 1000 * i) for i, (name, form) in enumerate(forms.items())]


def _size_cases() -> list[Micro]:
    """Every kind of fragment at small and great N, on exact sums."""
    out = []
    for i, (kind, d, n) in enumerate(
        [("bf16", "f32", n) for n in (8, 128, 200, 256)] + [("f16", "f16", n) for n in (8, 24, 256)]
        + [("tf32", "f32", 72), ("e4m3", "f32", 136), ("e5m2", "f16", 64)]
    ):  # fmt: skip
        form = Form(kind, d=d, n=n)
        part = 64 * 32
        image_bytes = -(-(part + 32 * n) // (16 * THREADS)) * 16 * THREADS
        image = _small(kind, image_bytes * 8 // BITS[kind], 9_500_000 + i)[None]
        pair = [descriptor(0, 1024, 128, "none"), descriptor(part, 16 * n, 128, "none")]
        c = np.zeros((1, THREADS, form.words), np.uint32)
        out.append(_micro(f"wgmma_size_{kind}_{d}_n{n}", form, image, np.array([[pair]], np.uint64), None, c))
    return out


def cases() -> list[Micro]:
    return _arithmetic_cases() + _layout_cases() + _size_cases()
