"""Hypothesis strategies for launch plans, and plans as text, field by field."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

from jax_fa_blackwell.plan import launch

NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=20)
WORDS = st.integers(0, 2**32 - 1)


def _multiple(step: int, least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(-(-least // step), most // step).map(lambda n: n * step)


@st.composite
def tensor_maps(draw, sizes: list[int]) -> launch.TensorMap:
    """A tensor map that fits one of the operands, each of which has at least 64 bytes."""
    operand = draw(st.integers(0, len(sizes) - 1))
    dtype = draw(st.sampled_from(launch.DTYPES))
    element = launch.DTYPE_BYTES[launch.DTYPES.index(dtype)]
    swizzle = draw(st.sampled_from(launch.SWIZZLES))
    row_most = 256 * element if swizzle == "none" else min(int(swizzle[:-1]), 256 * element)
    offset = draw(_multiple(16, 0, sizes[operand] - 64))
    left = sizes[operand] - offset
    dims = [draw(st.integers(1, min(left // element, 2**32)))]
    left -= dims[0] * element
    rank = draw(st.integers(1, 5))
    strides = []
    for _ in range(rank - 1):
        stride = draw(_multiple(16, 16, 2**40 - 16 if left < 16 else min(left, 2**40 - 16)))
        dims.append(1 + draw(st.integers(0, min(left // stride, 2**32 - 1))))
        strides.append(stride)
        left -= (dims[-1] - 1) * stride
    return launch.TensorMap(
        operand,
        dtype,
        tuple(dims),
        tuple(strides),
        (draw(_multiple(16, 16, row_most)) // element, *draw(_tuples(st.integers(1, 256), rank - 1))),
        offset,
        (1, *draw(_tuples(st.integers(1, 8), rank - 1))),
        swizzle,
        draw(st.sampled_from(launch.FILLS if dtype in launch.FLOATING else ("zero",))),
        draw(st.sampled_from(launch.L2_PROMOTIONS)),
    )


def _tuples(items: st.SearchStrategy[int], count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[items] * count)


@st.composite
def pointers(draw, sizes: list[int]) -> launch.Pointer:
    operand = draw(st.integers(0, len(sizes) - 1))
    return launch.Pointer(operand, draw(st.integers(0, sizes[operand] - 1)))


@st.composite
def fills(draw, sizes: list[int]) -> launch.Fill:
    operand = draw(st.integers(0, len(sizes) - 1))
    offset = draw(_multiple(4, 0, sizes[operand] - 4))
    return launch.Fill(operand, draw(st.integers(1, (sizes[operand] - offset) // 4)), draw(WORDS), offset)


@st.composite
def launches(draw, sizes: list[int]) -> launch.Launch:
    cluster = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (16, 1, 1), (2, 4, 2), (1, 1, 3)]))
    blocks = draw(st.tuples(st.integers(1, 2**27 - 1), st.integers(1, 1000), st.integers(1, 1000)))
    params = st.one_of(
        tensor_maps(sizes),
        pointers(sizes),
        st.integers(-(2**31), 2**31 - 1).map(launch.Int32),
        st.floats(width=32, allow_nan=False).map(launch.Float32),
        st.binary(min_size=1, max_size=40).map(launch.Bytes),
    )
    return launch.Launch(
        draw(NAMES),
        draw(st.binary(min_size=32, max_size=32)).hex(),
        draw(NAMES),
        (blocks[0] * cluster[0], blocks[1] * cluster[1], blocks[2] * cluster[2]),
        draw(st.sampled_from([(1, 1, 1), (1024, 1, 1), (1, 1024, 1), (4, 4, 64), (128, 3, 1)])),
        tuple(draw(st.lists(params, max_size=8))),
        cluster,
        draw(st.integers(0, 227 * 1024)),
        draw(st.booleans()),
    )


@st.composite
def plans(draw) -> launch.LaunchPlan:
    size = st.one_of(st.integers(64, 5000), st.integers(64, 2**45))
    arguments, results = draw(st.lists(size, max_size=4)), draw(st.lists(size, max_size=4))
    sizes = arguments + results
    steps = st.lists(st.one_of(fills(sizes), launches(sizes)), max_size=3) if sizes else st.just([])
    arches = draw(st.lists(st.sampled_from(["sm_90a", "sm_100a", "sm_103a", "sm_86a"]), unique=True, max_size=3))
    programs = tuple(launch.Program(arch, tuple(draw(steps))) for arch in arches)
    return launch.LaunchPlan(draw(NAMES), tuple(arguments), tuple(results), programs)


def describe(plan: launch.LaunchPlan) -> str:
    """The line that the native tool ``dump_plan`` writes for the plan."""

    def items(values) -> str:
        return "[" + ",".join(map(str, values)) + "]"

    def param(p: launch.Param) -> str:
        match p:
            case launch.TensorMap():
                return (
                    f"map(operand={p.operand} offset={p.offset_bytes} type={launch.DTYPES.index(p.dtype)}"
                    f" dims={items(p.dims)} strides={items(p.strides_bytes)} box={items(p.box)}"
                    f" steps={items(p.element_strides)} swizzle={launch.SWIZZLES.index(p.swizzle)}"
                    f" fill={launch.FILLS.index(p.fill)} l2={launch.L2_PROMOTIONS.index(p.l2_promotion)})"
                )
            case launch.Pointer():
                return f"pointer({p.operand} {p.offset_bytes})"
            case launch.Int32():
                return f"int32({p.value})"
            case launch.Float32():
                return f"float32({struct.unpack('<I', struct.pack('<f', p.value))[0]})"
            case launch.Bytes():
                return f"bytes({p.data.hex()})"

    def step(s: launch.Step) -> str:
        if isinstance(s, launch.Fill):
            return f"fill({s.operand} {s.offset_bytes} {s.words} {s.word})"
        extents = items(s.grid) + items(s.block) + items(s.cluster)
        params = "".join(" " + param(p) for p in s.params)
        return f"launch({s.kernel}|{s.sha256}|{s.symbol}|{extents} {s.shared_bytes} {int(s.programmatic)}{params})"

    programs = "".join(f" program({p.arch}{''.join(' ' + step(s) for s in p.steps)})" for p in plan.programs)
    return f"{plan.name}|{items(plan.argument_bytes)}{items(plan.result_bytes)}{programs}"
