"""An independent model of PTX float arithmetic: exact rationals, rounded by comparison, one value at a time.

It shares nothing with the emulator's library (which rounds with error-free transformations and bit shifts), is slow,
and is plain enough to be checked against the PTX ISA by reading.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format with sign: `infinite` formats have infinities and NaNs in the top binade, as IEEE 754."""

    exponent_bits: int
    mantissa_bits: int
    nan: int
    infinite: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits


F32 = Format(8, 23, 0x7FFFFFFF)
F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
TF32 = Format(8, 10, 0x3FFFF)


def decode(bits: int, form: Format) -> float:
    """The value of a bit pattern as a Python float; every format here fits in one."""
    sign = -1.0 if bits & form.sign else 1.0
    exponent = bits >> form.mantissa_bits & ((1 << form.exponent_bits) - 1)
    mantissa = bits & ((1 << form.mantissa_bits) - 1)
    if exponent == (1 << form.exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - form.bias - form.mantissa_bits)
    return sign * math.ldexp((1 << form.mantissa_bits) + mantissa, exponent - form.bias - form.mantissa_bits)


def round_exact(value: Fraction, form: Format, mode: str, zero_sign: int = 0) -> int:
    """Rounds an exact value to one of the two patterns around it.

    Args:
        value: the exact result.
        form: target format, with infinities.
        mode: rn, rz, rm, rp or rna.
        zero_sign: 1 if an exact zero is negative.
    """
    if value == 0:
        return form.sign if zero_sign else 0
    negative, size = value < 0, abs(value)
    # The pattern at or below |value|, and how far above it the value lies, in units of its last digit.
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= int(size < Fraction(2) ** power)  # 2^power <= |value| < 2^(power + 1)
    power = max(power, 1 - form.bias)
    units = size / Fraction(2) ** (power - form.mantissa_bits)
    whole = math.floor(units)
    rest = units - whole
    low = whole + ((power + form.bias - 1) << form.mantissa_bits)
    if low >= form.infinity:  # beyond the largest number: neither of its neighbours is near
        low, rest = form.infinity - 1, Fraction(9, 10)
    if mode in ("rm", "rp"):
        up = rest > 0 and negative == (mode == "rm")
    elif mode == "rz":
        up = False
    else:
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and (mode == "rna" or low % 2 == 1))
    chosen = low + int(up)
    return chosen | (form.sign if negative else 0)


def flush(bits: int, form: Format) -> int:
    return bits & form.sign if bits & form.infinity == 0 else bits


def flushes(exact: Fraction, form: Format, mode: str) -> bool:
    """Whether .ftz flushes a result: rounded with a wider exponent range, it is below the smallest normal number.

    As recorded on an H200.
    """
    wide = Format(form.exponent_bits + 2, form.mantissa_bits, 0)
    rounded = round_exact(exact, wide, mode) & ~wide.sign
    return decode(rounded, wide) < 2.0 ** (1 - form.bias)


def special(result: float, form: Format) -> int:
    """Bits of a NaN, an infinity or a zero."""
    if math.isnan(result):
        return form.nan
    sign = form.sign if math.copysign(1.0, result) < 0 else 0
    return sign | (form.infinity if math.isinf(result) else 0)


def fma(a: int, b: int, c: int, form: Format, mode: str = "rn", ftz: bool = False) -> int:
    """a * b + c, rounded once."""
    if ftz:
        a, b, c = (flush(x, form) for x in (a, b, c))
    x, y, z = (decode(v, form) for v in (a, b, c))
    if not all(map(math.isfinite, (x, y, z))):
        with np.errstate(invalid="ignore", over="ignore"):
            # One non-finite operand decides; replacing the finite ones by their signs keeps products from overflowing.
            x, y, z = (np.float64(v if not math.isfinite(v) else math.copysign(v != 0, v)) for v in (x, y, z))
            return special(float(x * y + z), form)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    negative_product = math.copysign(1, x) * math.copysign(1, y) < 0
    if Fraction(x) * Fraction(y) == 0 and z == 0 and negative_product == (math.copysign(1, z) < 0):
        zero_sign = int(negative_product)
    else:
        zero_sign = int(mode == "rm")
    if ftz and exact != 0 and flushes(exact, form, mode):
        return form.sign if exact < 0 else 0
    return round_exact(exact, form, mode, zero_sign)


def add(a: int, b: int, form: Format, mode: str = "rn", ftz: bool = False) -> int:
    one = form.bias << form.mantissa_bits
    return fma(a, one, b, form, mode, ftz)


def sub(a: int, b: int, form: Format, mode: str = "rn", ftz: bool = False) -> int:
    return add(a, b ^ form.sign, form, mode, ftz) if not math.isnan(decode(b, form)) else form.nan


def mul(a: int, b: int, form: Format, mode: str = "rn", ftz: bool = False) -> int:
    if ftz:
        a, b = flush(a, form), flush(b, form)
    x, y = decode(a, form), decode(b, form)
    if not (math.isfinite(x) and math.isfinite(y)):
        return special(math.nan if x == 0 or y == 0 else x * y, form)
    zero_sign = int((a ^ b) & form.sign != 0)
    exact = Fraction(x) * Fraction(y)
    if ftz and flushes(exact, form, mode):
        return form.sign * zero_sign
    return round_exact(exact, form, mode, zero_sign)


def saturate(bits: int, form: Format) -> int:
    value = decode(bits, form)
    if math.isnan(value) or value <= 0:
        return 0
    return bits if value < 1 else form.bias << form.mantissa_bits


def samples(form: Format, count: int, seed: int) -> np.ndarray:
    """Bit patterns that matter: every special value, neighbours of powers of two, and uniformly random patterns."""
    rng = np.random.default_rng(seed)
    top = form.infinity
    one = form.bias << form.mantissa_bits
    normal = 1 << form.mantissa_bits
    specials = [0, 1, 2, normal - 1, normal, normal + 1, one - 1, one, one + 1, top - 1, top, top + 1, form.nan]
    specials += [s | form.sign for s in specials]
    random = rng.integers(0, 2 * form.sign, count, dtype=np.uint64)
    near = one + rng.integers(-3 << form.mantissa_bits, 3 << form.mantissa_bits, count)
    near = near.astype(np.uint64) | rng.choice(np.array([0, form.sign], np.uint64), count)
    pool = np.concatenate([np.array(specials, np.uint64), random, near])
    return rng.choice(pool, count)
