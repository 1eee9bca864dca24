"""Broken uses of Tensor Memory and tcgen05, each one change away from a kernel that works, each with its verdict."""

import re

import numpy as np
import pytest

import emulator
from emulator import mma_model
from emulator.tcgen05_kernels import MmaCase, launch_mma, mma_ptx
from emulator.test_tcgen05 import inputs_of, run_tmem, tmem_ptx

SS = MmaCase(128, 32)
TS = MmaCase(128, 32, a_in_tensor=True)
PAIR = MmaCase(256, 32, group=2)
HALF = MmaCase(64, 32)
MODES = ("eager", "lazy", "random")


def run(
    case: MmaCase, *changes: tuple[str, str], mode: str = "random", seed: int = 0, count: int = 0, descriptors=None
):
    """The kernel of `case` with text replaced (all places, or the first `count`); its result must not be trusted."""
    inputs = inputs_of(case)
    text = mma_ptx(case, inputs.image.shape[1])
    for old, new in changes:
        assert re.search(old, text), f"the kernel has no {old!r}"
        text = re.sub(old, new, text, count=count)
    if descriptors is not None:
        inputs.descriptors[:] = descriptors(inputs.descriptors)
    out, _ = launch_mma(inputs, mode=mode, seed=seed, text=text)
    return out, inputs.expected()


def caught(fault: str, match: str, case: MmaCase, *changes: tuple[str, str], modes=MODES, line: str = "", **options):
    """Every schedule gives this verdict at this line."""
    for mode in modes:
        with pytest.raises(emulator.Verdict, match=match) as info:
            run(case, *changes, mode=mode, **options)
        assert info.value.fault == fault, info.value
        assert line in info.value.text, info.value


def test_the_kernels_themselves_are_right():
    for case in (SS, TS, PAIR, HALF):
        for mode in MODES:
            out, expected = run(case, mode=mode)
            np.testing.assert_array_equal(out, expected)


# ---------------------------------------------------------------- order


def test_no_commit():
    """Nobody ever signals the barrier."""
    caught("deadlock", "deadlock", SS, (r"tcgen05\.commit.*;", ""))


def test_commit_before_the_last_mma():
    """The signal does not cover the second step: the accumulator is read while that step may still run."""
    early = (r"(tcgen05\.mma.* // step 1\n)(tcgen05\.commit.*;)", r"\2\n\1")
    caught("tensor_memory", "has yet to write", SS, early, modes=("lazy",), line="tcgen05.ld")


def test_read_without_waiting_for_the_commit():
    no_wait = (r"WAIT:\n.*\n.*bra WAIT;", "WAIT:")
    caught("tensor_memory", "has yet to write", SS, no_wait, modes=("lazy",), line="tcgen05.ld")


def test_no_wait_for_the_store_of_the_accumulator():
    """tcgen05.st, signal, MMA on the same columns, without tcgen05.wait::st."""
    caught(
        "tensor_memory",
        r"tcgen05\.st of warp .* in flight",
        SS,
        (r"tcgen05\.wait::st.*// start in", ""),
        modes=("lazy",),
    )


def test_no_wait_for_the_store_of_a():
    caught(
        "tensor_memory", r"tcgen05\.st of warp .* in flight", TS, (r"tcgen05\.wait::st.*// A in", ""), modes=("lazy",)
    )


def test_no_wait_for_a_load_before_its_place_is_written_again():
    """ld of the accumulator, signal, and an MMA into it: tcgen05.wait::ld is missing."""
    again = """tcgen05.ld.sync.aligned.32x32b.x8.b32 {%v0, %v1, %v2, %v3, %v4, %v5, %v6, %v7}, [%lane_base];
bar.sync 0; // operands ready"""
    caught(
        "tensor_memory",
        r"overwrites Tensor Memory .* tcgen05\.ld of warp .* in flight",
        SS,
        (r"bar\.sync 0; // operands ready", again),
        modes=("lazy",),
    )


def test_a_that_an_mma_writes_is_read_by_the_next_mma():
    """Only a commit and a wait order an accumulator before its use as A."""
    own = (r"add\.u32 %tb, %ta, \d+;\n(tcgen05.mma.*step 1)", r"mov.b32 %tb, %ta;\n\1")
    caught(
        "tensor_memory", "has yet to write: only a wait for its tcgen05.commit", TS, own, modes=("lazy",), line="step 1"
    )


def test_exit_with_an_mma_in_flight():
    no_end = (r"WAIT:\n[\s\S]*// all read\n", "WAIT:\n")
    caught("tensor_memory", "tcgen05.dealloc touches", SS, no_end, modes=("lazy",))


# ---------------------------------------------------------------- allocation


def test_columns_left_at_exit():
    caught("tensor_memory", "still allocated", SS, (r"tcgen05\.dealloc.*;", ""), line="tcgen05.alloc")


def test_dealloc_of_fewer_columns():
    caught("tensor_memory", "dealloc of 16|takes a power of two", SS, (r"(tcgen05\.dealloc.*, )\d+;", r"\g<1>16;"))


def test_dealloc_of_another_address():
    moved = (r"(tcgen05\.dealloc.*) %tmem,", r"add.u32 %tmem, %tmem, 4;\n\1 %tmem,")
    caught("tensor_memory", "is no live allocation", SS, moved, line="tcgen05.dealloc")


def test_dealloc_twice():
    caught("tensor_memory", "is no live allocation", SS, (r"(tcgen05\.dealloc.*;)", r"\1\n\1"))


def test_alloc_after_relinquish():
    swapped = (r"(tcgen05\.alloc.*;)\n(tcgen05\.relinquish.*;)", r"\2\n\1")
    caught("tensor_memory", "after a thread of the CTA executed", SS, swapped, line="tcgen05.alloc")


@pytest.mark.parametrize("columns", [0, 16, 48, 1024])
def test_alloc_of_an_illegal_size(columns):
    caught("tensor_memory", f"alloc of {columns} columns", SS, (r"(tcgen05\.alloc.*, )\d+;", rf"\g<1>{columns};"))


def test_alloc_of_more_than_before():
    twice = (r"(tcgen05\.alloc.*), \d+;", r"\1, 32;\n\1, 64;")
    caught("tensor_memory", "must not grow", SS, twice, line="64")


def test_columns_outside_the_allocation():
    less = (r"(tcgen05\.(alloc|dealloc).*, )\d+;", r"\g<1>32;")
    caught("tensor_memory", "column 32 is not allocated", MmaCase(128, 64), less, modes=("eager", "lazy"))


def test_half_of_a_collective_allocation():
    """One CTA of the pair allocates, the other ends."""
    skip = "mov.u32 %n, %cluster_ctarank;\nsetp.ne.b32 %p, %n, 0;\n@%p bra END;\nmov.u32 %tid, %tid.x;"
    text = tmem_ptx("").replace("cta_group::1", "cta_group::2").replace("mov.u32 %tid, %tid.x;", skip)
    with pytest.raises(emulator.Verdict, match="deadlock") as info:
        run_tmem(text, np.zeros(1, np.uint32), 1, ctas=2)
    assert any("peer CTA's warp" in row.waits_for for row in info.value.waiting)


def test_collective_allocations_that_disagree():
    differs = (r"(tcgen05\.alloc.*), \d+;", r"shl.b32 %w, 32, %rank;\n\1, %w;")
    caught("tensor_memory", "disagree", PAIR, differs)


def test_dealloc_before_the_cluster_barrier_in_one_cta():
    """Legal only if dealloc does not block; the lazy schedule blocks."""
    barrier = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    late = f"""bar.sync 0;
setp.eq.b32 %p, %rank, 0;
@%p bra EARLY;
{barrier}
EARLY:
setp.ne.b32 %p, %warp, 0;
@%p bra FREED;
\\1
FREED:
setp.ne.b32 %p, %rank, 0;
@%p bra END;
{barrier}
END:"""
    end = rf"{re.escape(barrier)} // all read\nsetp.*\n@%p bra END;\n(tcgen05\.dealloc.*;)\nEND:"
    caught("deadlock", "deadlock", PAIR, (end, late), modes=("lazy",))
    out, expected = run(PAIR, (end, late), mode="eager")
    np.testing.assert_array_equal(out, expected)


def test_two_cta_groups_in_one_kernel():
    other = (r"commit\.cta_group::1", "commit.cta_group::2")
    caught("tensor_memory", "cta_group::2 in a kernel that uses cta_group::1", SS, other)


def test_pair_without_a_peer():
    text = tmem_ptx("").replace("cta_group::1", "cta_group::2")
    with pytest.raises(emulator.Verdict, match="there is no peer CTA"):
        run_tmem(text, np.zeros(1, np.uint32), 1)


# ---------------------------------------------------------------- ownership and addresses


def test_a_warp_in_another_warps_lanes():
    caught(
        "tensor_memory", r"warp \d may touch lanes", SS, (r"shl\.b32 %lane_base, %warp, 21;", "mov.b32 %lane_base, 0;")
    )


def test_a_lane_that_is_not_aligned():
    body = "add.u32 %ta, %lane_base, 524288;\ntcgen05.ld.sync.aligned.16x64b.x1.b32 {%v0}, [%ta];"
    with pytest.raises(emulator.Verdict, match=r"lane \d+ is not a multiple of 16"):
        run_tmem(tmem_ptx(body), np.zeros(1, np.uint32), 1)


def test_threads_that_disagree_about_the_address():
    body = "add.u32 %ta, %lane_base, %tid;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%ta];"
    with pytest.raises(emulator.Verdict, match="taddr differs between the threads"):
        run_tmem(tmem_ptx(body), np.zeros(1, np.uint32), 1)


def test_columns_beyond_tensor_memory():
    body = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v0, %v1}, [%lane_base+511];"
    with pytest.raises(emulator.Verdict, match=r"not allocated|Tensor Memory has 512"):
        run_tmem(tmem_ptx(body, columns=512), np.zeros(1, np.uint32), 1)


def test_a_load_that_only_some_threads_execute():
    body = "setp.lt.u32 %p, %tid, 16;\n@%p tcgen05.ld.sync.aligned.32x32b.x1.b32 {%v0}, [%lane_base];"
    with pytest.raises(emulator.Verdict) as info:
        run_tmem(tmem_ptx(body), np.zeros(1, np.uint32), 1)
    assert info.value.fault == "divergence"


def test_accumulator_in_the_wrong_lane():
    caught(
        "descriptor",
        "begins in lane 16; it must be 0",
        SS,
        (r"add\.u32 %ta, %tmem, 0;", "add.u32 %ta, %tmem, 1048576;"),
        line="tcgen05.mma",
    )


def test_a_and_accumulator_in_different_halves():
    half = MmaCase(64, 32, a_in_tensor=True)
    other = (r"add\.u32 %tb, %ta, (\d+);", r"add.u32 %tb, %ta, \1;\nadd.u32 %tb, %tb, 1048576;")
    caught("descriptor", "must begin in the same lane", half, other, line="tcgen05.mma")


# ---------------------------------------------------------------- descriptors


def idesc(**changes):
    values = {"m": 128, "n": 32, "a_type": "bf16"} | changes
    return (r"mov\.b32 %idesc, \d+;", f"mov.b32 %idesc, {mma_model.instruction_descriptor(**values)};")


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"m": 256}, "M = 256; cta_group::1 takes 64 or 128"), ({"n": 4}, "N = 0"), ({"n": 264}, "N = 264"),
     ({"a_type": "tf32"}, "atype = 2 is no type of kind::f16"), ({"d_type": "f16"}, "dtype = 0 is not allowed")],
)  # fmt: skip
def test_instruction_descriptor(changes, match):
    caught("descriptor", match, SS, idesc(**changes), line="tcgen05.mma")


def test_instruction_descriptor_of_one_cta_in_a_pair():
    caught("descriptor", "M = 64; cta_group::2 takes 128 or 256", PAIR, idesc(m=64))


def test_n_of_the_whole_pair_missing():
    """N of one CTA: legal, but half of the columns are missing: a wrong result that no rule forbids."""
    out, expected = run(PAIR, idesc(m=256, n=16))
    assert (out != expected).any()


def test_wider_accumulator_than_allocated():
    caught("tensor_memory", "column .* is not allocated", SS, idesc(n=64), line="tcgen05.mma", modes=("eager", "lazy"))


@pytest.mark.parametrize(
    ("change", "fault", "match"),
    [(lambda d: d & ~np.uint64(1 << 46), "descriptor", "bits 46-48"),
     (lambda d: d | np.uint64(3 << 61), "descriptor", "swizzle mode 3"),
     (lambda d: d | np.uint64(0x3FFF), "out_of_bounds", "tcgen05.mma: [AB] of 16 bytes"),
     (lambda d: d | np.uint64(0x3000 << 32), "out_of_bounds", "tcgen05.mma: [AB] of 16 bytes")],
    ids=["version", "swizzle", "start", "stride"],
)  # fmt: skip
def test_shared_memory_descriptor(change, fault, match):
    caught(fault, match, SS, descriptors=change, line="tcgen05.mma")


@pytest.mark.parametrize("field", ["swizzle", "stride", "start"])
def test_wrong_but_legal_descriptor_shows_in_the_result(field):
    """No rule forbids it; what is not the operand is NaN here, and the result shows it."""
    change = {
        "swizzle": lambda d: d ^ np.uint64(2 << 61 | 6 << 61),
        "stride": lambda d: d - np.uint64(8 << 32),
        "start": lambda d: d + np.uint64(1),
    }[field]
    out, expected = run(SS, descriptors=change)
    assert (out != expected).any()


def test_mn_major_of_tf32_needs_32_byte_atoms():
    case = MmaCase(128, 32, "tf32")
    caught("descriptor", "tf32 is transposed", case, idesc(a_type="tf32", mn_major_b=True), line="tcgen05.mma")


def test_a_in_tensor_memory_cannot_be_transposed():
    caught(
        "descriptor", "A lies in Tensor Memory and cannot be transposed", TS, idesc(mn_major_a=True), line="tcgen05.mma"
    )


# ---------------------------------------------------------------- collector, commit


def test_collector_used_without_fill():
    case = MmaCase(128, 32, collector=("collector::a::use", "collector::a::discard"))
    caught("illegal_operand", "holds no a", case, line="step 0")


def test_collector_used_for_another_matrix():
    case = MmaCase(128, 32, collector=("collector::a::fill", "collector::a::use"))
    caught("illegal_operand", r"use of shared memory, descriptor .*, but ::fill in line", case, line="step 1")


def test_collector_used_after_the_matrix_changed():
    case = MmaCase(128, 32, collector=("collector::a::fill", "collector::a::lastuse"))
    change = """mov.b32 %w, 0;
st.shared.b32 [%smem], %w;
fence.proxy.async.shared::cta;
"""
    same = (r"ld\.global\.b64 %desc_a, \[%descs\+16\];", change)
    caught("illegal_operand", "the matrix has changed since its ::fill", case, same, modes=("eager",), line="step 1")


def test_commit_to_no_barrier():
    caught(
        "barrier_state",
        "no mbarrier has been initialised",
        SS,
        (r"(tcgen05\.commit.*)\[%bar\]", r"\1[%bar+8]"),
        line="tcgen05.commit",
    )


def test_commit_to_a_cta_that_does_not_exist():
    caught("illegal_operand", "ctaMask 0x7 in a cluster of 2", PAIR, (r"mov\.b16 %both, 3;", "mov.b16 %both, 7;"))


def test_commit_that_forgets_the_peer():
    caught("deadlock", "deadlock", PAIR, (r"mov\.b16 %both, 3;", "mov.b16 %both, 1;"))


def test_a_second_commit_that_nobody_waits_for():
    """It may still be in flight when the CTA ends, and signals a barrier in memory that is then someone else's."""
    caught("in_flight", "tcgen05.commit", SS, (r"(tcgen05\.commit.*;)", r"\1\n\1"), modes=("lazy",))


# ---------------------------------------------------------------- what is not known stops the run

SCALED = "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%ta], %desc_a, %desc_b, %idesc, [%ta], [%ta], %acc;"


@pytest.mark.parametrize(
    ("instruction", "match"),
    [("tcgen05.mma.sp.cta_group::1.kind::f16 [%ta], %desc_a, %desc_b, [%ta], %idesc, %acc;", "sparse"),
     (SCALED, "block-scaled"),
     ("tcgen05.mma.cta_group::1.kind::f16.ashift [%ta], [%tb], %desc_b, %idesc, %acc;", "ashift"),
     ("tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%ta], %desc_a;", "decompression"),
     ("tcgen05.cp.cta_group::1.64x128b [%ta], %desc_a;", "warpx2"),
     ("tcgen05.mma.cta_group::1.kind::f8f6f4 [%ta], %desc_a, %desc_b, %idesc, %acc, 2;", "scale-input-d exists"),
     ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%v0}, [%ta];", "at most .x32"),
     ("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%v0, %v1}, [%ta];", "vector of 4 registers; got 2")],
)  # fmt: skip
def test_unknown_forms_are_refused_when_loading(instruction, match):
    with pytest.raises(emulator.Verdict, match=match) as info:
        emulator.load(mma_ptx(SS, 16384).replace("WAIT:", f"{instruction}\nWAIT:", 1))
    assert info.value.fault == "unsupported"
    assert info.value.text == instruction
