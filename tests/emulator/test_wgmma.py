"""wgmma: every form against the slow model and float64, a GEMM of the kernel DSL, and broken uses with verdicts."""

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import emulator
from emulator import mma_model
from emulator.kernels import build, hopper_gemm
from emulator.silicon.wgmma import BITS, Form, descriptor
from emulator.test_mma import numbers, special_values, sprinkle
from emulator.wgmma_kernels import Case, Inputs, launch, make_inputs, to_fragments

pytestmark = pytest.mark.emulator

MODES = ("eager", "lazy", "random")
CONTAINERS = {8: np.uint8, 16: np.uint16, 32: np.uint32}
DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "f32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def inputs_of(case: Case, seed: int = 0, spread: int = 4, specials: float = 0.0) -> Inputs:
    """Random operands with exponents around the middle, and an accumulator of their size."""
    rng, form = np.random.default_rng(seed), case.form

    def operand(rows: int, kind: str) -> np.ndarray:
        raw = numbers(rng, (rows, case.k), kind, spread)
        if specials:
            raw = sprinkle(rng, raw, special_values(kind), specials)
        return raw.astype(CONTAINERS[BITS[kind]])

    a = [operand(64, form.a) for _ in range(form.steps)]
    b = [operand(form.n, form.b_type) for _ in range(form.steps)]
    start = numbers(rng, (64, form.n), form.d, 3)
    if specials:
        start = sprinkle(rng, start, special_values(form.d), specials)
    return make_inputs(case, a, b, start.astype(np.uint32))


def decoded(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "tf32":  # the tensor core does not see the low bits of the container
        bits = bits.astype(np.uint32) & np.uint32(0xFFFFE000)
    return bits.astype(CONTAINERS[DTYPES[kind].itemsize * 8]).view(DTYPES[kind]).astype(np.float64)


def check_near(inputs: Inputs, out: np.ndarray):
    """The result against float64, within what the width of the sums allows."""
    form = inputs.case.form
    a, b = (np.concatenate([decoded(x, kind) for x in side], 1) for side, kind in
            ((inputs.a, form.a), (inputs.b, form.b_type)))  # fmt: skip
    c = decoded(inputs.start, form.d) * form.accumulate
    sign = -1 if form.negate_a != form.negate_b else 1
    exact, scale = sign * (a @ b.T) + c, np.abs(a) @ np.abs(b).T + np.abs(c)
    bits = 13 if BITS[form.a] == 8 else 23
    # each step cuts every term and the sum once
    bound = scale * 2.0**-bits * form.steps * (inputs.case.k + 2)
    if form.d == "f16":
        bound = bound + scale * 2.0**-11 * form.steps
    assert np.all(np.abs(decoded(out, form.d) - exact) <= bound)


def check(case: Case, *, mode: str = "random", seed: int = 0, **options):
    """The kernel's result, bit for bit: all of it by the library, two dozen elements by the slow model."""
    inputs = inputs_of(case, seed, **options)
    out, report = launch(inputs, mode=mode, seed=seed)
    np.testing.assert_array_equal(out, inputs.expected())
    rng = np.random.default_rng(seed)
    for row, column in zip(rng.integers(0, 64, 24), rng.integers(0, case.form.n, 24), strict=True):
        assert out[row, column] == inputs.modelled(row, column), (row, column)
    if not options.get("specials"):
        check_near(inputs, out)
    return report


# ---------------------------------------------------------------- forms

TYPES = [
    ("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"), ("e4m3", "e4m3", "f32"),
    ("e5m2", "e5m2", "f32"), ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f32"), ("f16", "f16", "f16"),
    ("e4m3", "e4m3", "f16"), ("e5m2", "e4m3", "f16"),
]  # fmt: skip


@pytest.mark.parametrize("registers", [False, True], ids=["SS", "RS"])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_types(types: tuple[str, str, str], registers: bool):
    a, b, d = types
    form = Form(a, b, d, n=24, registers=registers, steps=2)
    check(Case(form))
    check(Case(form), seed=1, specials=0.02)
    check(Case(dataclasses.replace(form, accumulate=False, negate_a=True)), seed=2)
    check(Case(dataclasses.replace(form, negate_b=True, steps=4)), seed=3, spread=1)
    check(Case(dataclasses.replace(form, negate_a=True, negate_b=True, steps=1)), seed=4)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n: int):
    kind, d = (("bf16", "f32"), ("f16", "f16"), ("tf32", "f32"), ("e4m3", "f32"))[n // 8 % 4]
    registers = n // 32 % 2 == 1
    report = check(Case(Form(kind, d=d, n=n, registers=registers)), seed=n)
    name = f"{kind} 64x{n}x{256 // BITS[kind]} wgmma {'RS' if registers else 'SS'}{' f16' * (d == 'f16')}"
    assert report.mma == {name: 1}


def layouts() -> list[Case]:
    out = []
    for swizzle in ("none", "32B", "64B", "128B"):
        for major_a, major_b in itertools.product((False, True), repeat=2):
            out += [Case(Form(k, n=n, mn_major_a=major_a, mn_major_b=major_b, steps=2), swizzle)
                    for k, n in (("bf16", 64), ("f16", 72))]  # fmt: skip
        out += [Case(Form("f16", n=136, registers=True, mn_major_b=m, steps=2), swizzle) for m in (False, True)]
        out += [Case(Form(kind, n=40, registers=r), swizzle) for kind in ("tf32", "e5m2") for r in (False, True)]
    return out


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_layouts(case: Case):
    check(case, mode=MODES[case.form.n % 3])


@pytest.mark.parametrize("mode", MODES)
def test_a_warpgroup_in_four_schedules(mode: str):
    """A chain of products in flight, whose operands and accumulators no thread touches before the wait."""
    for seed in range(4):
        check(Case(Form("bf16", n=32, steps=4, mn_major_b=True), "128B"), mode=mode, seed=seed)


def test_trace_and_mix():
    inputs = inputs_of(Case(Form("bf16", n=16, steps=3), "128B"))
    _, report = launch(inputs, mode="lazy", trace="role")
    assert report.mma == {"bf16 64x16x16 wgmma SS": 3}
    issued = {name: count for name, count in report.by_opcode.items() if name.startswith("wgmma")}
    mma = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    synchronising = (f"wgmma.{name}.sync.aligned" for name in ("fence", "commit_group", "wait_group"))
    assert issued == {mma: 12, **dict.fromkeys(synchronising, 4)}
    rows = [row for row in report.trace if row.kind == "tensor"]
    assert len(rows) == 12
    assert {row.warp for row in rows} == {0, 1, 2, 3}
    assert all(row.end > row.begin for row in rows)


def test_events_for_a_race_checker():
    """Shared memory is read by the tensor core in the async proxy, by each warp: its 16 rows of A, and all of B."""
    steps, warps = 2, 4
    inputs = inputs_of(Case(Form("bf16", n=16, steps=steps), "128B"))
    _, report = launch(inputs, check=emulator.Checks(events=True))
    a_runs, b_runs = 15, 15  # 16 rows of 32 bytes; swizzling puts the eighth at the end of its atom, beside the ninth
    want = {
        "shared read async": steps * warps * (a_runs + b_runs),
        "issue": steps * warps,
        "complete": steps * warps,
        "group_wait": warps * 32,
        "fence_proxy_async": warps * 32,
    }
    assert {name: report.events.get(name) for name in want} == want
    assert not any(name.startswith("shared read generic") for name in report.events)


# ---------------------------------------------------------------- the kernel DSL's GEMM

AXES = {
    "source": ("SS", "RS"),
    "dtype": ("f16", "bf16", "e4m3"),
    "a_major": ("K", "MN"),
    "b_major": ("K", "MN"),
    "swizzle": ("none", "32B", "64B", "128B"),
    "loop": (False, True),
    "m": (64, 128),
    "accumulator": ("f32", "f16"),
}


def pairwise() -> list[hopper_gemm.Config]:
    """Few configurations in which every legal pair of values of two axes occurs."""
    every = (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    configs = [hopper_gemm.Config(**c, k_tiles=4 if c["loop"] else 3) for c in every]
    legal = [c for c in configs if c.illegal() is None]
    pairs = {c: set(itertools.combinations([(axis, getattr(c, axis)) for axis in AXES], 2)) for c in legal}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(legal, key=lambda c: len(pairs[c] & left)))
        left -= pairs[chosen[-1]]
    return chosen


# The forms of attention: S = Q·Kᵀ and dP, O = P·V with P in registers, dK = dSᵀ·Q.
IMPORTANT = [
    hopper_gemm.Config(source, m, n, 4, "bf16", a_major=a, b_major=b, loop=True)
    for source, m, n, a, b in (
        ("SS", 128, 128, "K", "K"), ("RS", 128, 64, "K", "MN"), ("SS", 64, 64, "MN", "MN"), ("RS", 64, 128, "K", "K"),
    )
]  # fmt: skip
CONFIGS = list(dict.fromkeys(pairwise() + IMPORTANT))


def label(config: hopper_gemm.Config) -> str:
    return "-".join([*(str(getattr(config, axis)) for axis in AXES), str(config.n)])


@pytest.fixture(scope="module")
def compiled():
    build.prepare(CONFIGS, "sm_90a")


def gemm(config: hopper_gemm.Config, a: np.ndarray, b: np.ndarray, schedule: emulator.Schedule):
    """C [M, N] = A·Bᵀ and the report."""
    arrays = {"a": a if config.a_major == "K" else a.T, "b": b if config.b_major == "K" else b.T}
    params = []
    for name, array in arrays.items():
        memory = np.ascontiguousarray(array)
        if name == "a" and config.source == "RS":
            continue
        dtype = "u8" if config.dtype == "e4m3" else config.dtype
        params += [emulator.TensorMap(memory, dtype=dtype, **config.map_of(name)), bytes(8)]
    c = np.full((config.m, config.n), np.nan, DTYPES[config.accumulator])
    params += [np.ascontiguousarray(a), c] if config.source == "RS" else [c]
    report = emulator.load(build.ptx(config, "sm_90a")).launch(
        grid=(1, 1, 1),
        block=(config.threads, 1, 1),
        shared_bytes=config.shared_bytes,
        params=[*params, np.int32(config.k_tiles)],
        schedule=schedule,
    )
    return c, report


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("config", CONFIGS, ids=label)
def test_gemm(config: hopper_gemm.Config):
    rng = np.random.default_rng(5)
    dtype = DTYPES[config.dtype]
    shapes = ((config.m, config.k), (config.n, config.k))
    # Small integers: every partial sum is exact in every accumulator.
    a, b = (rng.integers(-3, 4, shape).astype(dtype) for shape in shapes)
    for seed, mode in enumerate(MODES):
        schedule = emulator.Schedule(seed=seed, async_=mode, spurious_wait=0.1 * seed)
        c, report = gemm(config, a, b, schedule)
        np.testing.assert_array_equal(c.astype(np.float32), a.astype(np.float32) @ b.astype(np.float32).T)
        steps = config.k * hopper_gemm.ELEMENT_BYTES[config.dtype] // 32
        assert sum(report.mma.values()) == steps * (config.m // 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"m": 256}, "M is 64 or 128"),
        ({"n": 12}, "multiple of 8"),
        ({"source": "RS", "a_major": "MN"}, "K-major"),
        ({"dtype": "e4m3", "b_major": "MN"}, "only 16-bit"),
        ({"dtype": "bf16", "accumulator": "f16"}, "f32 accumulators"),
        ({"n": 40, "b_major": "MN"}, "does not divide 40"),
    ],
)
def test_illegal_combinations_say_why(changes: dict, reason: str):
    assert reason in str(hopper_gemm.Config(**changes).illegal())


# ---------------------------------------------------------------- order of memory and groups


def changed(inputs: Inputs, *changes: tuple[str, str], count: int = 0) -> str:
    """The kernel's text with patterns replaced (all places, or the first `count`)."""
    text = inputs.text
    for old, new in changes:
        assert re.search(old, text), f"the kernel has no {old!r}"
        text = re.sub(old, new, text, count=count)
    return text


SS = Case(Form("bf16", n=16, steps=2), "128B")
RS = Case(Form("bf16", n=16, steps=2, registers=True), "128B")
FENCE, COMMIT = r"wgmma\.fence\.sync\.aligned;", r"wgmma\.commit_group\.sync\.aligned;"
WAIT = r"wgmma\.wait_group\.sync\.aligned 0;"
MMA = r"wgmma\.mma_async.*;"


def test_shared_memory_is_read_until_the_wait():
    """All threads clear B after the commit, before the wait: a lazy product sees that, an eager one does not."""
    inputs = inputs_of(SS)
    clear = "".join(f"    st.shared.b32 [tile+{i}], 0;\n" for i in range(0, inputs.image.size, 4))
    text = changed(inputs, (rf"({COMMIT})\n", rf"\1\n    bar.sync 0;\n{clear}"))
    eager, _ = launch(inputs, mode="eager", text=text)
    np.testing.assert_array_equal(eager, inputs.expected())
    lazy, _ = launch(inputs, mode="lazy", text=text)
    kept = mma_model.matmul(
        np.zeros((64, 16)), np.zeros((16, 16)), inputs.start, "bf16", "bf16"
    )  # the accumulator plus products of zeros
    np.testing.assert_array_equal(lazy, kept)


def test_each_warp_reads_b_for_itself():
    """The first warp clears B after its own product has run and before the other warps issue theirs."""
    inputs = inputs_of(RS)
    clear = "".join(f"    st.shared.b32 [tile+{i}], 0;\n" for i in range(0, inputs.image.size, 4))
    text = changed(
        inputs,
        (FENCE, "setp.lt.u32 p5, %t, 32;\n    @p5 bra GO;\n    bar.sync 1, 128;\nGO:\n    wgmma.fence.sync.aligned;"),
        (COMMIT, f"wgmma.commit_group.sync.aligned;\n    @!p5 bra HELD;\n{clear}    bar.sync 1, 128;\nHELD:"),
    )
    out, _ = launch(inputs, mode="eager", text=text)
    np.testing.assert_array_equal(out[:16], inputs.expected()[:16])
    np.testing.assert_array_equal(out[16:], inputs.start[16:])


def test_scale_d_may_be_negated():
    inputs = inputs_of(SS)
    text = changed(inputs, (FENCE, "setp.ne.u32 p3, 0, 0;\n    wgmma.fence.sync.aligned;"), ("p1, 1, 1", "!p3, 1, 1"))
    out, _ = launch(inputs, text=text)
    np.testing.assert_array_equal(out, inputs.expected())


def test_registers_may_be_touched_before_the_fence():
    inputs = inputs_of(RS)
    touch = "add.u32 r9, acc0, 1;\n    mov.b32 acc1, acc1;\n    add.u32 r9, frag0, 1;\n    mov.b32 frag5, frag5;"
    text = changed(inputs, (FENCE, f"wgmma.fence.sync.aligned;\n    {touch}\n    wgmma.fence.sync.aligned;"))
    for mode in MODES:
        out, _ = launch(inputs, mode=mode, text=text)
        np.testing.assert_array_equal(out, inputs.expected())


def two_groups(waits: str) -> tuple[Inputs, str]:
    """The second product goes to an accumulator and a group of its own; `waits` ends the text before the stores."""
    inputs = inputs_of(SS)
    other = "{" + ", ".join(f"r{100 + i}" for i in range(8)) + "}"
    second = re.sub(r"\{acc.*?\}", other, re.findall(MMA, inputs.text)[1])
    zeros = "".join(f"    mov.b32 r{100 + i}, 0;\n" for i in range(8))
    text = changed(
        inputs,
        (rf"({FENCE})", rf"{zeros}    \1"),
        (rf"({MMA})\n\s*{MMA}\n\s*({COMMIT})\n\s*{WAIT}", rf"\1\n    \2\n    {second}\n    \2\n{waits}"),
    )
    return inputs, text


@pytest.mark.parametrize("mode", MODES)
def test_wait_for_all_but_the_last_group(mode: str):
    stores = "".join(f"    st.global.b32 [d4+{4 * i}], acc{i};\n" for i in range(8))
    inputs, text = two_groups(f"    wgmma.wait_group.sync.aligned 1;\n{stores}    wgmma.wait_group.sync.aligned 0;")
    out, _ = launch(inputs, mode=mode, text=text)
    expected = mma_model.matmul(inputs.a[0], inputs.b[0], inputs.start, "bf16", "bf16")
    np.testing.assert_array_equal(out, expected)


def test_the_last_group_is_still_in_flight_then():
    waits = [f"    wgmma.wait_group.sync.aligned {n};" for n in (1, 0)]
    inputs, text = two_groups("\n    add.u32 r100, r100, 0; // early\n".join(waits))
    fails(
        inputs, text, "warpgroup", "reads a register of the accumulator .* has not waited for its group", line="early"
    )


# ---------------------------------------------------------------- faults


def fails(inputs: Inputs, text: str, fault: str, match: str, *, line: str = "", **options):
    """Every schedule gives this verdict at this line."""
    for mode in MODES:
        with pytest.raises(emulator.Verdict, match=match) as info:
            launch(inputs, mode=mode, text=text, **options)
        assert info.value.fault == fault, info.value
        assert line in info.value.text, info.value


def caught(fault: str, match: str, case: Case, *changes: tuple[str, str], line: str = "", count: int = 0, **options):
    inputs = inputs_of(case)
    fails(inputs, changed(inputs, *changes, count=count), fault, match, line=line, **options)


def test_no_fence():
    caught("warpgroup", r"no wgmma\.fence since the warp started", SS, (FENCE, ""), line="wgmma.mma_async")


def test_accumulator_written_after_the_fence():
    late = (FENCE, "wgmma.fence.sync.aligned;\n    add.u32 acc3, acc3, 0;")
    caught(
        "warpgroup", r"of the accumulator was written in line \d+: no wgmma\.fence since", SS, late, line="mma_async"
    )


def test_accumulator_read_after_the_fence():
    late = (FENCE, "wgmma.fence.sync.aligned;\n    add.u32 r9, acc3, 0;")
    caught("warpgroup", r"of the accumulator was read in line \d+: no wgmma\.fence since", SS, late, line="mma_async")


def test_a_written_after_the_fence():
    late = (FENCE, "wgmma.fence.sync.aligned;\n    mov.b32 frag5, 0;")
    caught("warpgroup", r"of A was written in line \d+: no wgmma\.fence since", RS, late, line="mma_async")


def test_no_wait():
    caught("warpgroup", "reads a register of the accumulator .* has not waited for its group", SS, (WAIT, ""),
           line="st.global.b32 [d4+0], acc0;")  # fmt: skip


def test_no_commit():
    """The wait has no group to wait for."""
    caught("warpgroup", "reads a register of the accumulator .* has not been committed", SS, (COMMIT, ""), line="acc0;")


def test_commit_before_the_last_product():
    early = (rf"({MMA})\n(\s*)({COMMIT})", r"\3\n\2\1")
    caught("warpgroup", "reads a register of the accumulator .* has not been committed", SS, early, line="acc0;")


def test_wait_for_too_few_groups():
    caught("warpgroup", "has not waited for its group", SS, (r"(wait_group\.sync\.aligned) 0;", r"\1 1;"), line="acc0;")


def test_accumulator_written_in_flight():
    caught("warpgroup", "writes a register of the accumulator of the wgmma in line", SS,
           (rf"({COMMIT})", r"\1\n    mov.b32 acc7, 0;"), line="mov.b32 acc7, 0;")  # fmt: skip


@pytest.mark.parametrize(("touch", "verb"), [("mov.b32 frag1, 0;", "writes"), ("add.u32 r9, frag6, 1;", "reads")])
def test_a_touched_in_flight(touch: str, verb: str):
    caught("warpgroup", f"{verb} a register of A of the wgmma in line", RS, (rf"({COMMIT})", rf"\1\n    {touch}"),
           line=touch)  # fmt: skip


def test_a_is_the_accumulator_of_a_product_in_flight():
    """As if P of one product were the result of the one before, without a wait between them."""
    own = (r"\{frag4, frag5, frag6, frag7\}", "{acc0, acc1, acc2, acc3}")
    caught("warpgroup", "A is in the accumulator of the wgmma in line .* in flight", RS, own, line="mma_async")


def test_accumulator_is_a_of_a_product_in_flight():
    own = (r"(\{)acc0, acc1(,.*frag4)", r"\1frag0, frag1\2")
    caught("warpgroup", "accumulator is in A of the wgmma in line .* in flight", RS, own, line="frag4")


def test_accumulator_of_another_shape_in_flight():
    caught("warpgroup", "in an accumulator of another shape, or at another place", SS,
           (r"(wgmma.*\{)acc0, acc1(,.*p2)", r"\1acc1, acc0\2"), line="p2")  # fmt: skip


def test_another_shape_after_the_wait_needs_a_fence():
    """Accumulators of one shape may follow each other without a fence, others not."""
    again = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {acc0, acc1, acc2, acc3}, d10, d11, p2, 1, 1, 0, 0;"
    both = f"\n    {again}\n    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;"
    caught("warpgroup", "of another shape or at another place: no wgmma.fence since", SS, (rf"({WAIT})", rf"\1{both}"),
           line="m64n8k16")  # fmt: skip
    inputs = inputs_of(SS)
    fenced = changed(inputs, (rf"({WAIT})", rf"\1\n    wgmma.fence.sync.aligned;{both}"))
    out, _ = launch(inputs, text=fenced)
    assert (out[:, 8:] == inputs.expected()[:, 8:]).all()
    assert (out[:, :8] != inputs.expected()[:, :8]).any()


def test_exit_without_a_wait():
    unread = rf"{WAIT}[\s\S]*ret;"
    caught("warpgroup", "has not waited for the group of this wgmma", SS, (unread, "ret;"), line="mma_async")


def test_exit_without_a_commit():
    unread = rf"{COMMIT}\s*{WAIT}[\s\S]*ret;"
    caught("warpgroup", "has not committed this wgmma to a group", SS, (unread, "ret;"), line="mma_async")


SKIP = "setp.ge.u32 p5, %t, 96;\n    @p5 bra SKIPPED;\n    "


def test_a_warp_that_skips_a_product():
    skip = (rf"({MMA})(\n\s*{COMMIT})", rf"{SKIP}\1\nSKIPPED:\2")
    caught("warpgroup", "the warps of the warpgroup are not in step", SS, skip, line="wgmma")


def test_warps_that_take_another_branch():
    """The same product, written twice: not the same instruction."""
    twice = (rf"(\n\s*)({MMA})(\n\s*{COMMIT})", rf"\1{SKIP}\2\1bra JOINED;\nSKIPPED:\1\2\nJOINED:\3")
    caught("warpgroup", "not in step: as wgmma instruction 3 of the warpgroup warp", SS, twice, line="wgmma.mma_async")


def test_a_warp_that_never_comes():
    """It waits at a barrier of its own; the others' products cannot complete."""
    stay = (FENCE, f"{SKIP}wgmma.fence.sync.aligned;")
    inputs = inputs_of(SS)
    text = changed(inputs, stay, (r"(\s)ret;", r"\1bra DONE;\nSKIPPED:\n    bar.sync 1, 64;\nDONE:\n    ret;"))
    for mode in MODES:
        with pytest.raises(emulator.Verdict) as info:
            launch(inputs, mode=mode, text=text)
        assert info.value.fault == "deadlock", info.value
        assert any("other warps of its warpgroup" in row.waits_for for row in info.value.waiting)


def test_a_warp_that_has_ended():
    gone = (FENCE, "setp.ge.u32 p5, %t, 96;\n    @p5 ret;\n    wgmma.fence.sync.aligned;")
    inputs = inputs_of(SS)
    for mode, seed in itertools.product(MODES, range(3)):
        with pytest.raises(emulator.Verdict, match=r"has ended|not all have executed this instruction") as info:
            launch(inputs, mode=mode, seed=seed, text=changed(inputs, gone))
        assert info.value.fault == "warpgroup" or "other warps of its warpgroup" in str(info.value.waiting)


def test_a_warp_that_skips_a_fence():
    """Nothing is in flight, but three warps wait for the fourth, as far as the ISA says."""
    end = (r"\sret;", f"\n    {SKIP}wgmma.fence.sync.aligned;\nSKIPPED:\n    bar.sync 0;\n    ret;")
    caught("warpgroup", "not all have executed this instruction", SS, end, line="wgmma.fence")


def test_half_a_warp():
    lanes = (FENCE, "setp.lt.u32 p5, %laneid, 16;\n    wgmma.fence.sync.aligned;")
    half = (rf"({MMA})", r"@p5 \1")
    caught("divergence", "predicated off for some lanes", SS, lanes, half, line="mma_async")


@pytest.mark.parametrize("threads", [96, 112])
def test_no_whole_warpgroup(threads: int):
    caught(
        "warpgroup", f"belongs to no whole warpgroup: the CTA has {threads} threads", SS, line="fence", threads=threads
    )


def test_threads_that_disagree():
    differs = (rf"({FENCE})", r"cvt.u64.u32 d50, %laneid;\n    add.u64 d11, d11, d50;\n    \1")
    caught("illegal_operand", "descriptor of B differs between the threads", SS, differs, line="mma_async")


def test_warps_that_disagree():
    """One row group of A for each warp, as tensor cores of another generation would take it."""
    differs = (rf"({FENCE})", r"shr.u32 r9, %t, 5;\n    cvt.u64.u32 d50, r9;\n    add.u64 d10, d10, d50;\n    \1")
    caught("illegal_operand", "differ between the warps of the warpgroup", SS, differs, line="mma_async")


def test_scale_d_that_differs():
    differs = (rf"({FENCE})", r"setp.lt.u32 p1, %t, 64;\n    \1")
    caught("illegal_operand", "scale-d 0 in warp|scale-d 1 in warp", SS, differs, line="mma_async")
    in_warp = (rf"({FENCE})", r"setp.lt.u32 p1, %laneid, 5;\n    \1")
    caught("illegal_operand", "scale-d differs between the threads", SS, in_warp, line="mma_async")


@pytest.mark.parametrize(
    ("change", "fault", "match"),
    [
        (lambda d: d | np.uint64(1 << 52), "descriptor", "bits 52-61"),
        (lambda d: d | np.uint64(1 << 46), "descriptor", "bits 46-48"),
        (lambda d: d | np.uint64(1 << 14), "descriptor", "bits 14-15"),
        (lambda d: d & ~np.uint64(3 << 62) | np.uint64(2 << 49), "descriptor", "base offset 2 without"),
        (lambda d: d + np.uint64(0x2000), "out_of_bounds", "wgmma.mma_async: [AB] of 16 bytes"),
        (lambda d: d | np.uint64(0x3000 << 32), "out_of_bounds", "wgmma.mma_async: [AB] of 16 bytes"),
    ],
    ids=["reserved", "constant", "start", "base", "outside", "stride"],
)
def test_descriptors(change, fault: str, match: str):
    inputs = inputs_of(SS)
    inputs.descriptors[:] = change(inputs.descriptors)
    fails(inputs, inputs.text, fault, match, line="mma_async")


@pytest.mark.parametrize("field", ["swizzle", "stride", "start"])
def test_wrong_but_legal_descriptor_shows_in_the_result(field: str):
    inputs = inputs_of(SS)
    change = {"swizzle": 1 << 62, "stride": -(8 << 32), "start": 1}[field]
    inputs.descriptors[:] = (inputs.descriptors.view(np.int64) + np.int64(change)).view(np.uint64)
    out, _ = launch(inputs)
    assert (out != inputs.expected()).any()


def test_descriptor_of_another_operand():
    """Not wrong to the hardware: it multiplies what it is given."""
    inputs = inputs_of(SS)
    inputs.descriptors[1] = inputs.descriptors[0]
    inputs.a[1], inputs.b[1] = inputs.a[0], inputs.b[0]
    out, _ = launch(inputs)
    np.testing.assert_array_equal(out, inputs.expected())


SHARED = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {acc0, acc1, acc2, acc3}, d10, d11, p1, 1, 1, 0, 0;"
IN_REGISTERS = SHARED.replace("d10", "{r4, r5, r6, r7}").replace("0, 0;", "0;")


@pytest.mark.parametrize(
    ("instruction", "change", "fault", "match"),
    [
        (SHARED, ("mma_async", "mma_async.sp"), "unsupported", "sparse"),
        (SHARED, ("m64n8k16.f32.bf16.bf16", "m64n8k32.s32.s8.s8"), "unsupported", "integers"),
        (SHARED, ("m64n8k16", "m64n12k16"), "unsupported", "N is 12"),
        (SHARED, ("m64n8k16", "m64n264k16"), "unsupported", "N is 264"),
        (SHARED, ("m64n8k16", "m64n8k8"), "unsupported", "K is 8; for .bf16 it is 16"),
        (SHARED, ("m64n8k16.f32", "f32"), "unsupported", "lacks a shape"),
        (SHARED, ("bf16.bf16", "bf16.f16"), "unsupported", "do not go together"),
        (SHARED, ("bf16.bf16", "e3m2.e3m2"), "unsupported", "type .e3m2 is not known"),
        (SHARED, ("f32.bf16", "f16.bf16"), "unsupported", "take .f32 accumulators"),
        (SHARED, (", acc3", ""), "unsupported", "takes 4 registers of D; got 3"),
        (SHARED, ("p1, 1, 1", "p1, 1, 2"), "unsupported", "imm-scale-b is 2"),
        (SHARED, ("0, 0;", "0, 2;"), "unsupported", "imm-trans-b is 2"),
        (SHARED, (".aligned", ""), "unsupported", "lacks .sync.aligned"),
        (SHARED, (", 0, 0;", ";"), "parse", "takes 8 operands; got 6"),
        (SHARED, ("k16.f32.bf16.bf16", "k8.f32.tf32.tf32"), "parse", "takes 6 operands; got 8"),
        (IN_REGISTERS, ("0;", "0, 0;"), "parse", "takes 7 operands; got 8"),
        (IN_REGISTERS, ("r4, r5, r6, r7", "r4, r5"), "unsupported", "takes 4 registers of A; got 2"),
        (IN_REGISTERS, ("r7", "0"), "unsupported", "constants are not known"),
    ],
)
def test_unknown_forms_are_refused_when_loading(instruction: str, change: tuple[str, str], fault: str, match: str):
    assert change[0] in instruction
    broken = instruction.replace(*change)
    text = inputs_of(SS).text
    emulator.load(re.sub(FENCE, instruction, text))
    with pytest.raises(emulator.Verdict, match=match) as info:
        emulator.load(re.sub(FENCE, broken, text))
    assert info.value.fault == fault
    assert info.value.text == broken


def test_other_architectures_have_no_wgmma():
    text = inputs_of(SS).text.replace("sm_90a", "sm_100a")
    with pytest.raises(emulator.Verdict, match=r"wgmma exists on sm_90a only; the module's target is sm_100a"):
        emulator.load(text)


def test_fragments_of_a_known_case():
    """By hand from the ISA's figures: thread 37 is lane 5 of warp 1, in row 17, columns 2 and 3."""
    d = np.arange(64 * 8, dtype=np.uint32).reshape(64, 8)
    assert to_fragments(d, "f32")[37].tolist() == [17 * 8 + 2, 17 * 8 + 3, 25 * 8 + 2, 25 * 8 + 3]
    assert to_fragments(d, "f16")[37].tolist() == [17 * 8 + 2 | (17 * 8 + 3) << 16, 25 * 8 + 2 | (25 * 8 + 3) << 16]
    assert descriptor(0x400, 16, 1024, "128B") == 0x40 | 1 << 16 | 0x40 << 32 | 1 << 62
