"""The hyperbolic tangent of soft caps.

Not the hardware's tanh.approx, whose relative error of 2**-11 is 200 ulp: multiplied with the cap it would show in the
logits, and in the log-sum-exp.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from jax_fa_blackwell.kernels.common import ptx

SMALL = 0.55
"""Up to here tanh(x) is x + x z q(z) with z = x**2, relative error 4e-8; beyond by exponentials, at most 3 ulp."""
AT_ONCE = {True: 32, False: 8}  # values between votes, by ``packed``; more, and the compiler runs out of registers
COEFFICIENTS = (0.016437580808997154, -0.05267181247472763, 0.13320724666118622, -0.3333294689655304)
"""Of q, highest power first: the cubic of least relative error of tanh on [0, SMALL]."""


@cute.jit
def tanh(values, count: cutlass.Constexpr, factor, packed: cutlass.Constexpr):
    """In place: the hyperbolic tangents of ``factor`` times ``count`` values; ``packed`` where the target has f32x2.

    Where no lane of the warp has one beyond SMALL, which is usual for caps that seldom bind, that takes no exponential.
    """
    at_once = AT_ONCE[packed]
    for first in cutlass.range_constexpr(0, count, at_once):
        end = min(first + at_once, count)
        largest = Float32(0.0)
        for i in cutlass.range_constexpr(first, end, 2):
            x = _mul((values[i], values[i + 1]), (factor, factor), packed)
            squares = _mul(x, x, packed)
            values[i], values[i + 1] = x
            largest = cute.arch.fmax(cute.arch.fmax(largest, squares[0]), squares[1])
        if cute.arch.vote_any_sync(largest > SMALL**2):
            for i in cutlass.range_constexpr(first, end, 2):
                x = values[i], values[i + 1]
                near = _polynomial(x, packed)
                for e in cutlass.range_constexpr(2):
                    far = _by_exponential(x[e])
                    values[i + e] = near[e]
                    if x[e] * x[e] > SMALL**2:
                        values[i + e] = far
        else:
            for i in cutlass.range_constexpr(first, end, 2):
                values[i], values[i + 1] = _polynomial((values[i], values[i + 1]), packed)


def _polynomial(x, packed: bool):
    z = _mul(x, x, packed)
    q = (Float32(COEFFICIENTS[0]),) * 2
    for coefficient in COEFFICIENTS[1:]:
        q = _fma(q, z, (Float32(coefficient),) * 2, packed)
    return _fma(_mul(q, z, packed), x, x, packed)


def _by_exponential(x):
    """(1 - t) / (1 + t) with t = exp(-2 |x|), and the sign of x."""
    t = ptx.ex2(ptx.mul(ptx.absolute(x), Float32(-2 * math.log2(math.e))))
    return ptx.copysign(ptx.mul(1.0 - t, ptx.rcp(1.0 + t)), x)


def _mul(a, b, packed: bool):
    return ptx.mul2(a, b) if packed else tuple(ptx.mul(*pair) for pair in zip(a, b, strict=True))


def _fma(a, b, c, packed: bool):
    return ptx.fma2(a, b, c) if packed else tuple(ptx.fma(*each) for each in zip(a, b, c, strict=True))
