// Scalar part of floats.h: formats, rounding, conversions.
#include "floats.h"

#include <cmath>
#include <limits>

namespace emu::fp {

double decode(uint64_t bits, const Format& format) {
  bits &= format.sign_bit() | (format.sign_bit() - 1);
  const bool negative = (bits & format.sign_bit()) != 0;
  const uint64_t magnitude = bits & (format.sign_bit() - 1);
  const uint64_t top = (uint64_t{1} << format.exponent_bits) - 1;
  const uint64_t exponent = magnitude >> format.mantissa_bits;
  const uint64_t mantissa = magnitude & ((uint64_t{1} << format.mantissa_bits) - 1);
  double value;
  if (format.special == Special::ieee && exponent == top) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (format.special == Special::nan_only && magnitude == format.sign_bit() - 1) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<double>(mantissa), 1 - format.bias() - format.mantissa_bits);
  } else {
    const uint64_t significand = mantissa | (uint64_t{1} << format.mantissa_bits);
    value =
        std::ldexp(static_cast<double>(significand), static_cast<int>(exponent) - format.bias() - format.mantissa_bits);
  }
  return negative ? -value : value;
}

namespace {

// Should the kept part of a magnitude be incremented, given the part cut off (rest, of 2 * half units)?
bool rounds_up(uint64_t kept, uint64_t rest, uint64_t half, bool sticky_only, bool negative, Round round) {
  switch (round) {
    case Round::rz: return false;
    case Round::rm: return negative && rest != 0;
    case Round::rp: return !negative && rest != 0;
    case Round::rna: return !sticky_only && rest >= half;
    case Round::rn: break;
  }
  return !sticky_only && (rest > half || (rest == half && (kept & 1) != 0));
}

uint64_t overflow_bits(const Format& format, bool negative, Round round, bool satfinite) {
  if (satfinite || format.special == Special::finite_only) return format.max_finite();
  const bool toward_zero = round == Round::rz || (round == Round::rm && !negative) || (round == Round::rp && negative);
  if (toward_zero) return format.max_finite();
  return format.special == Special::ieee ? format.infinity() : format.nan;
}

}  // namespace

uint64_t encode(double value, const Format& format, Round round, bool satfinite, bool relu) {
  if (std::isnan(value)) return format.nan;
  const bool negative = std::signbit(value);
  if (negative && relu) return 0;
  const uint64_t sign = negative ? format.sign_bit() : 0;
  if (value == 0) return sign;
  if (std::isinf(value)) {
    if (satfinite || format.special == Special::finite_only) return sign | format.max_finite();
    return format.special == Special::ieee ? sign | format.infinity() : format.nan;
  }
  // |value| = significand * 2^(exponent - 52), significand with its top bit at position 52.
  constexpr uint64_t kLeadingOne = uint64_t{1} << 52;
  uint64_t bits = as_bits64(value);
  int exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023;
  if (exponent == -1023) {  // a double subnormal
    bits = as_bits64(value * 0x1p64);
    exponent = static_cast<int>(bits >> 52 & 0x7ff) - 1023 - 64;
  }
  const uint64_t significand = (bits & (kLeadingOne - 1)) | kLeadingOne;
  const int smallest = 1 - format.bias();
  const int scale = exponent > smallest ? exponent : smallest;  // exponent of the format's leading digit
  const int drop = scale - exponent + 52 - format.mantissa_bits;
  uint64_t kept;
  if (drop <= 0) {
    kept = significand << -drop;
  } else if (drop > 54) {  // less than half of the smallest unit
    kept = rounds_up(0, 1, 2, true, negative, round) ? 1 : 0;
  } else {
    kept = significand >> drop;
    const uint64_t rest = significand & ((uint64_t{1} << drop) - 1);
    kept += rounds_up(kept, rest, uint64_t{1} << (drop - 1), false, negative, round) ? 1 : 0;
  }
  // The leading one of a normal number adds itself to the exponent field, as does a carry out of the mantissa.
  const uint64_t magnitude = (static_cast<uint64_t>(scale - smallest) << format.mantissa_bits) + kept;
  if (magnitude > format.max_finite()) return sign | overflow_bits(format, negative, round, satfinite);
  return sign | magnitude;
}

uint64_t widen_nan(uint32_t bits) {
  return uint64_t{bits >> 31} << 63 | uint64_t{0x7ff8} << 48 | uint64_t{bits & 0x7fffff} << 29;
}

uint32_t narrow_nan(uint64_t bits) {
  return static_cast<uint32_t>(bits >> 63) << 31 | 0x7fc00000 | (static_cast<uint32_t>(bits >> 29) & 0x7fffff);
}

uint32_t encode_tf32(float value, Round round, bool satfinite, bool relu) {
  constexpr Format kTf32{8, 10, Special::ieee, 0x3ffff};
  if (std::isnan(value) && round == Round::rna) return as_bits(value) & 0xffffe000;  // as an H200 does
  return static_cast<uint32_t>(encode(value, kTf32, round, satfinite, relu) << 13);
}

uint32_t encode_ue8m0(double value, Round round, bool satfinite) {
  if (std::isnan(value)) return 0xff;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return 0;
  if (std::isinf(magnitude)) return satfinite || round == Round::rz ? 0xfe : 0xff;
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);
  int code = exponent - 1 + 127;
  if (round == Round::rp && fraction != 0.5) code += 1;
  if (code < 0) return 0;
  if (code > 0xfe) return satfinite || round == Round::rz ? 0xfe : 0xff;
  return static_cast<uint32_t>(code);
}

double decode_ue8m0(uint32_t bits) {
  bits &= 0xff;
  if (bits == 0xff) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(1.0, static_cast<int>(bits) - 127);
}

double round_to_integral(double value, Round round) {
  switch (round) {
    case Round::rz: return std::trunc(value);
    case Round::rm: return std::floor(value);
    case Round::rp: return std::ceil(value);
    case Round::rna: return std::round(value);
    case Round::rn: break;
  }
  return std::nearbyint(value);  // the environment's mode is always to nearest even here
}

double saturate(double value) {
  if (!(value > 0)) return 0;  // negative, either zero, or NaN
  return value < 1 ? value : 1;
}

uint64_t to_integer(double value, Round round, int bits, bool is_signed, bool source_is_f64) {
  if (std::isnan(value)) {
    if (!source_is_f64 && bits != 64) return 0;
    const uint64_t top = uint64_t{1} << (bits - 1);
    return is_signed ? ~(top - 1) : top;
  }
  const double integral = round_to_integral(value, round);
  if (is_signed) {
    const double limit = std::ldexp(1.0, bits - 1);
    if (integral >= limit) return (uint64_t{1} << (bits - 1)) - 1;
    if (integral < -limit) return ~((uint64_t{1} << (bits - 1)) - 1);
    return static_cast<uint64_t>(static_cast<int64_t>(integral));
  }
  if (integral <= 0) return 0;
  if (integral >= std::ldexp(1.0, bits)) return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  return static_cast<uint64_t>(integral);
}

uint64_t from_integer(uint64_t value, bool is_signed, const Format& format, Round round) {
  const bool negative = is_signed && static_cast<int64_t>(value) < 0;
  const uint64_t magnitude = negative ? 0 - value : value;
  if (magnitude == 0) return 0;
  const uint64_t sign = negative ? format.sign_bit() : 0;
  const int exponent = 63 - __builtin_clzll(magnitude);
  const int drop = exponent - format.mantissa_bits;
  uint64_t kept = magnitude;
  if (drop <= 0) {
    kept = magnitude << -drop;
  } else {
    kept = magnitude >> drop;
    const uint64_t rest = magnitude & ((uint64_t{1} << drop) - 1);
    kept += rounds_up(kept, rest, uint64_t{1} << (drop - 1), false, negative, round) ? 1 : 0;
  }
  // As in encode: the leading one of `kept` counts in the exponent field.
  const uint64_t bits = (static_cast<uint64_t>(exponent + format.bias() - 1) << format.mantissa_bits) + kept;
  if (bits > format.max_finite()) return sign | overflow_bits(format, negative, round, false);
  return sign | bits;
}

uint64_t convert_integer(uint64_t value, bool from_signed, int bits, bool to_signed, bool sat) {
  if (sat) {
    const bool negative = from_signed && static_cast<int64_t>(value) < 0;
    const uint64_t top = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    if (to_signed) {
      const uint64_t most = top >> 1;
      if (!negative && value > most) return most;
      if (negative && static_cast<int64_t>(value) < -static_cast<int64_t>(most) - 1) return ~most;
    } else {
      if (negative) return 0;
      if (value > top) return top;
    }
  }
  if (bits == 64) return value;
  const int shift = 64 - bits;
  return to_signed ? static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift) : (value << shift) >> shift;
}

bool compare(Compare relation, double a, double b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (relation) {
    case Compare::num: return !unordered;
    case Compare::nan: return unordered;
    case Compare::eq: return a == b;
    case Compare::ne: return !unordered && a != b;
    case Compare::lt: return a < b;
    case Compare::le: return a <= b;
    case Compare::gt: return a > b;
    case Compare::ge: return a >= b;
    case Compare::equ: return unordered || a == b;
    case Compare::neu: return unordered || a != b;
    case Compare::ltu: return unordered || a < b;
    case Compare::leu: return unordered || a <= b;
    case Compare::gtu: return unordered || a > b;
    case Compare::geu: return unordered || a >= b;
  }
  return false;
}

}  // namespace emu::fp
