"""What the Blackwell kernels execute is what their plans say: products, exponentials, and the blocks a mask leaves."""

import pytest

from emulator import attention_counts as counts
from jax_fa_blackwell import export
from jax_fa_blackwell.plan import backward, forward
from jax_fa_blackwell.plan.slices import ROWS, SLICE_BYTES, round_up
from jax_fa_blackwell.plan.target import get_target

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(export.toolchain() is None, reason="the kernel DSL is not installed"),
]

TARGET = get_target(counts.ARCH)
LENGTH = 512  # whole work items of every variant
HEAD_DIMS = ((16, 16), (64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (256, 256), (320, 320), (64, 512))


def exponentials(run, spec):
    """The least of some orders of warps: a warp that is split executes an instruction twice."""
    return min(counts.exponentials(run(spec, seed)) for seed in range(3))


def written_bytes(scores, plan):
    """What TMA writes to shared memory of the streamed operands, by the plan's account."""
    return scores // ROWS**2 * plan.account().written_dims * ROWS * 2


class TestForward:
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize(("H", "Hv"), HEAD_DIMS)
    def test_products_and_exponentials(self, H, Hv, causal):
        spec = counts.make_spec(LENGTH, H, Hv, causal)
        plan = forward.plan_forward(spec, TARGET)
        report = counts.run_forward(spec)
        scores = counts.scores_of_blocks(spec, plan)
        dims = plan.value_chunks * round_up(H, 16) + round_up(Hv, 16 * plan.group)
        assert counts.mma_flop(report) == 2 * scores * dims
        if not causal and H % 16 == Hv % (16 * plan.group) == 0 and Hv <= 256:
            assert counts.mma_flop(report) == 2 * LENGTH * LENGTH * (H + Hv)
        if not causal:
            queries = LENGTH // ROWS * plan.value_chunks * plan.k_slices * SLICE_BYTES
            assert report.tma_bytes_in == queries + written_bytes(scores, plan)
        by_polynomial = ROWS // plan.polynomial_every if plan.polynomial_every else 0
        a_row = ROWS - by_polynomial + 1  # and the factor that rescales the row
        assert exponentials(counts.run_forward, spec) == plan.value_chunks * scores // ROWS * a_row

    def test_blocks_of_a_causal_mask(self):
        assert counts.causal_blocks(512, 128) == 1 + 2 + 3 + 4
        assert counts.causal_blocks(512, 256) == 2 * 2 + 2 * 4


class TestBackward:
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize(("H", "Hv"), HEAD_DIMS)
    def test_products_and_exponentials(self, H, Hv, causal):
        spec = counts.make_spec(LENGTH, H, Hv, causal)
        passes = backward.plan_backward(spec, TARGET)
        report = counts.run_backward(spec)
        scores = [counts.scores_of_blocks(spec, one) for one in passes]  # that each pass computes once a part
        computed = sum(count * one.parts for count, one in zip(scores, passes, strict=True))
        assert exponentials(counts.run_backward, spec) == computed
        flop = sum(2 * count * one.account().mma_dims for count, one in zip(scores, passes, strict=True))
        assert counts.mma_flop(report) == flop
        if not causal:
            rows = sum(LENGTH // ROWS * one.parts * one.resident_slices * SLICE_BYTES for one in passes)
            assert report.tma_bytes_in == rows + sum(written_bytes(LENGTH**2, one) for one in passes)
        if H % 32 == Hv % 32 == 0:
            products = sum(count * one.gemms for count, one in zip(scores, passes, strict=True))
            assert flop == pytest.approx(2 * products * (H + Hv) / 2, rel=1e-12)

    @pytest.mark.parametrize("H", [64, 96, 128, 160, 192, 256])
    def test_number_of_products(self, H):
        report = counts.run_backward(counts.make_spec(LENGTH, H, H, causal=False))
        assert counts.mma_flop(report) == (7 if H <= 192 else 8) * 2 * LENGTH * LENGTH * H


class TestLoop:
    def test_ways_through_a_loop(self):
        lines = ["S2R R0, SR_TID.X", ".L_x_1:", "LDTM.x4 R4, tmem[UR4]", "@P0 BRA `(.L_x_2)"]
        lines += ["FSEL R4, R4, -INF , P1", "FSEL R5, R5, -INF , P2", ".L_x_2:"]  # masks
        lines += ["BRA.U UP1, `(.L_x_3)", "FADD R4, R4, R6", "FADD R5, R5, R6", "FMUL R4, R4, R7"]  # the long way
        lines += ["BRA `(.L_x_4)", ".L_x_3:", "FFMA2 R4, R4, R6, R7", ".L_x_4:"]  # or the short one
        lines += ["@P3 BRA `(.L_x_5)", "SYNCS.ARRIVE", ".L_x_5:", "MUFU.EX2 R4, R4", "MUFU.EX2 R5, R5"]
        lines += ["BRA.U UP0, `(.L_x_1)", "EXIT"]
        listing = "\n".join(line if line.startswith(".") else f"        /*0010*/    {line} ;" for line in lines)
        assert counts.find_loop(listing, 2) == counts.Loop(scores=2, whole=9, masked=11)

    @pytest.mark.skipif(counts.disassembler() is None, reason="nvdisasm is not installed")
    @pytest.mark.parametrize("name", ["forward_sm100_bfloat16_1tile", "backward_sm100_bfloat16_dq"])
    def test_machine_code(self, name):
        loop = counts.exponential_loop(name)
        # Every score costs a load, an exponential, a packed fused multiply-add and half a conversion at least.
        assert 2 * loop.scores < loop.whole < 5 * loop.scores
        assert loop.scores < loop.masked - loop.whole < 4 * loop.scores
