"""What the forward kernels of every architecture make of a row's maximum and sum of weights."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import cutlass.cute as cute
from cutlass import Float32

from jax_fa_blackwell.kernels.common import ptx
from jax_fa_blackwell.plan.slices import LOG2_E

EXACT_BEYOND = 256.0
"""Maxima in log2 units whose differences from the scores are taken exactly."""
RESCALE_THRESHOLD = 8.0
"""Log2 units that the running maximum may lag behind."""
LN_2_HIGH, LN_2_LOW = 0.693147182464599609375, -1.9046542121259336e-09
INFINITY = float("inf")


@cute.jit
def log_sum_exp(p, sinks: cute.Pointer, total, maximum, sink_index):
    """The factor that makes a row's accumulator the output, and the row's log-sum-exp (natural logarithm).

    ``total`` is the sum of exp2(p.scale * (score - maximum)), ``maximum`` -inf if the row sees nothing; ``sink_index``
    is the place of the head's sink in ``sinks`` (float32), used where p.has_sinks is set.
    """
    factor = ptx.rcp(total)
    peak = ptx.mul(maximum, p.scale)  # log2 units
    remainder = Float32(0.0)
    if (peak > EXACT_BEYOND) | (peak < -EXACT_BEYOND):
        remainder = ptx.fma(maximum, p.scale, -peak)
    sink = Float32(-INFINITY)
    if p.has_sinks != 0:
        sink = cute.make_tensor(sinks, cute.make_layout(1 << 30))[sink_index]
        sink_peak = sink * LOG2_E
        if sink_peak > peak:
            shrink = ptx.ex2(peak - sink_peak)
            total = total * shrink + 1.0
            factor = shrink * ptx.rcp(total)
            peak, remainder = sink_peak, ptx.fma(sink, LOG2_E, -sink_peak)
        else:
            total = total + ptx.ex2(sink_peak - peak)
            factor = ptx.rcp(total)
    # peak * ln 2 in two parts: the LSE of great scores keeps its last bits.
    value = ptx.fma(peak, LN_2_HIGH, ptx.fma(peak, LN_2_LOW, cute.math.log(total) + remainder * LN_2_HIGH))
    if maximum == -INFINITY:
        factor, value = Float32(0.0), sink
    return factor, value
