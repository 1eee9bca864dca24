// Lane part of floats.h: arithmetic on the registers of a warp.
//
// The loops are written without branches and marked ivdep (element i of the result depends on element i of the operands
// only, so working in place is safe), so that the compiler turns the hot ones into vector code.
#include <cfenv>
#include <cmath>
#include <initializer_list>
#include <limits>

#include "floats.h"

namespace emu::fp {
namespace {

constexpr uint32_t kNan = 0x7fffffff;
constexpr int kMostLanes = 64;

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }

inline uint32_t canonical(float value) { return value != value ? kNan : as_bits(value); }

// `sum` is a rounded result and `error` the exact rest (or anything of its sign). Returns the neighbour rounding to odd
// would have given: a later rounding to any format of at most 51 digits, in any mode, is then the rounding of the exact
// value (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums").
inline double to_odd(double sum, double error) {
  const uint64_t bits = as_bits64(sum);
  if (error == 0 || (bits & 1) != 0 || !std::isfinite(sum)) return sum;
  return as_double((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

// a + b rounded to odd; an exact zero has the sign IEEE 754 asks for in mode `round`.
inline double add_odd(double a, double b, Round round) {
  const double sum = a + b;
  if (sum == 0) {
    if (std::signbit(a) == std::signbit(b)) return sum;
    return round == Round::rm ? -0.0 : 0.0;
  }
  const double part = sum - a;
  return to_odd(sum, (a - (sum - part)) + (b - part));
}

// Does .ftz flush a result? It does if the result, rounded as if exponents had no lower end, lies below the smallest
// normal number (IEEE 754's tininess after rounding; an H200 does so). `half_unit`: half of the last digit just below
// 1.
inline bool flushes(double exact, double smallest, double half_unit, Round round) {
  const double size = std::fabs(exact);
  if (round == Round::rn || round == Round::rna) return size < smallest * (1 - half_unit);
  const bool away = round == (std::signbit(exact) ? Round::rm : Round::rp);
  return away ? size <= smallest * (1 - 2 * half_unit) : size < smallest;
}

inline uint32_t finish_f32(double exact, Mode mode) {
  if (mode.ftz && flushes(exact, 0x1p-126, 0x1p-25, mode.round)) {
    return mode.sat || !std::signbit(exact) ? 0 : 0x80000000;
  }
  if (mode.sat) exact = saturate(exact);
  const auto bits = static_cast<uint32_t>(encode(exact, kF32, mode.round));
  return mode.ftz ? flush_f32(bits) : bits;
}

inline float input(uint32_t bits, bool ftz) { return as_float(ftz ? flush_f32(bits) : bits); }

// Rounds down (or up, mirrored) the exact sum `sum` + `error` to f32; branch-free for the vectoriser.
inline uint32_t round_down(double sum, double error) {
  const float nearest = static_cast<float>(sum);
  const double back = nearest;
  const uint32_t bits = as_bits(nearest);
  const bool above = (back > sum) | ((back == sum) & (error < 0));
  const uint32_t lower =
      (bits >> 31) != 0 ? bits + 1 : bits - 1;  // the next float below, except below +0 and from a NaN
  uint32_t result = above ? lower : bits;
  result = above & ((bits << 1) == 0) ? 0x80000001 : result;
  return sum != sum ? kNan : result;
}

// a + b rounded down. An exact cancellation gives -0.
inline uint32_t add_down(uint32_t a, uint32_t b) {
  const double x = as_float(a), y = as_float(b);
  const double sum = x + y;
  const double part = sum - x;
  const uint32_t bits = round_down(sum, (x - (sum - part)) + (y - part));
  return (sum == 0) & (((a ^ b) >> 31) != 0) ? 0x80000000 : bits;
}

template <typename F>
inline void each(int n, F&& f) {
#pragma GCC ivdep
  for (int i = 0; i < n; ++i) f(i);
}

// Round-to-nearest binary or ternary operation with the modifiers hoisted out of the loop.
template <typename F>
inline void nearest_f32(int n, uint32_t* d, Mode mode, F&& f) {
  if (!mode.ftz && !mode.sat) {
    each(n, [&](int i) { d[i] = canonical(f(i, [](uint32_t x) { return as_float(x); })); });
  } else if (mode.ftz && !mode.sat) {
    each(n, [&](int i) { d[i] = flush_f32(canonical(f(i, [](uint32_t x) { return as_float(flush_f32(x)); }))); });
  } else {
    for (int i = 0; i < n; ++i) {
      const float r = f(i, [&](uint32_t x) { return input(x, mode.ftz); });
      const uint32_t bits = as_bits(r > 0 ? (r < 1 ? r : 1.0f) : 0.0f);
      d[i] = mode.ftz ? flush_f32(bits) : bits;
    }
  }
}

}  // namespace

void add_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode) {
  if (mode.round == Round::rn) {
    nearest_f32(n, d, mode, [=](int i, auto in) { return in(a[i]) + in(b[i]); });
  } else if (mode.round == Round::rm && !mode.ftz && !mode.sat) {
    each(n, [=](int i) { d[i] = add_down(a[i], b[i]); });
  } else {
    for (int i = 0; i < n; ++i) {
      d[i] = finish_f32(add_odd(input(a[i], mode.ftz), input(b[i], mode.ftz), mode.round), mode);
    }
  }
}

void sub_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode) {
  if (mode.round == Round::rn) {
    nearest_f32(n, d, mode, [=](int i, auto in) { return in(a[i]) - in(b[i]); });
    return;
  }
  for (int i = 0; i < n; ++i) {
    d[i] = finish_f32(add_odd(input(a[i], mode.ftz), -input(b[i], mode.ftz), mode.round), mode);
  }
}

void mul_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode) {
  if (mode.round == Round::rn && !mode.ftz) {
    nearest_f32(n, d, mode, [=](int i, auto in) { return in(a[i]) * in(b[i]); });
    return;
  }
  for (int i = 0; i < n; ++i) {  // the product of two f32 is exact in f64
    d[i] = finish_f32(static_cast<double>(input(a[i], mode.ftz)) * input(b[i], mode.ftz), mode);
  }
}

void fma_f32(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, Mode mode) {
  if (mode.round == Round::rn && !mode.ftz) {
    nearest_f32(n, d, mode, [=](int i, auto in) { return std::fma(in(a[i]), in(b[i]), in(c[i])); });
    return;
  }
  for (int i = 0; i < n; ++i) {
    const double product = static_cast<double>(input(a[i], mode.ftz)) * input(b[i], mode.ftz);
    d[i] = finish_f32(add_odd(product, input(c[i], mode.ftz), mode.round), mode);
  }
}

namespace {

// min or max of two values that are not both to be treated specially; -0 < +0.
inline uint32_t pick(uint32_t a, uint32_t b, bool is_max, bool propagate_nan) {
  const float x = as_float(a), y = as_float(b);
  const uint32_t equal = is_max ? (a & b) : (a | b);  // differ only as -0 and +0
  const bool first = is_max ? x > y : x < y;
  uint32_t r = first ? a : b;
  r = x == y ? equal : r;
  r = is_nan(b) ? (propagate_nan ? kNan : a) : r;
  r = is_nan(a) ? (propagate_nan ? kNan : b) : r;
  return is_nan(r) ? kNan : r;
}

template <bool IsMax, bool Nan>
void min_max_plain(const uint32_t* a, const uint32_t* b, uint32_t* d, int n) {
  each(n, [=](int i) { d[i] = pick(a[i], b[i], IsMax, Nan); });
}

}  // namespace

void min_max_f32(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, MinMax op) {
  if (!op.abs && !op.ftz) {
    const auto plain = op.is_max ? (op.nan ? min_max_plain<true, true> : min_max_plain<true, false>)
                                 : (op.nan ? min_max_plain<false, true> : min_max_plain<false, false>);
    if (c == nullptr) return plain(a, b, d, n);
    uint32_t first[kMostLanes];
    plain(a, b, first, n);
    return plain(first, c, d, n);
  }
  const uint32_t keep = op.abs ? 0x7fffffff : 0xffffffff;
  for (int i = 0; i < n; ++i) {
    const auto in = [&](uint32_t x) { return (op.ftz ? flush_f32(x) : x) & keep; };
    uint32_t r = pick(in(a[i]), in(b[i]), op.is_max, op.nan);
    if (c != nullptr) r = pick(r, in(c[i]), op.is_max, op.nan);
    if (op.xorsign && !is_nan(r)) r |= (a[i] ^ b[i]) & 0x80000000;
    d[i] = r;
  }
}

void neg_f32(const uint32_t* a, uint32_t* d, int n, bool ftz) {
  each(n, [=](int i) { d[i] = is_nan(a[i]) ? kNan : (ftz ? flush_f32(a[i]) : a[i]) ^ 0x80000000; });
}

void abs_f32(const uint32_t* a, uint32_t* d, int n, bool ftz) {
  each(n, [=](int i) { d[i] = is_nan(a[i]) ? kNan : (ftz ? flush_f32(a[i]) : a[i]) & 0x7fffffff; });
}

void copysign_f32(const uint32_t* sign, const uint32_t* magnitude, uint32_t* d, int n) {
  each(n, [=](int i) { d[i] = (sign[i] & 0x80000000) | (magnitude[i] & 0x7fffffff); });
}

namespace {

double div_odd(double a, double b) {
  const double quotient = a / b;
  if (quotient == 0 || !std::isfinite(quotient) || std::isinf(b)) return quotient;
  const double rest = std::fma(-quotient, b, a);
  return to_odd(quotient, std::signbit(b) ? -rest : rest);
}

double sqrt_odd(double a) {
  const double root = std::sqrt(a);
  if (root == 0 || !std::isfinite(root)) return root;
  return to_odd(root, std::fma(-root, root, a));
}

}  // namespace

void div_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode) {
  for (int i = 0; i < n; ++i) d[i] = finish_f32(div_odd(input(a[i], mode.ftz), input(b[i], mode.ftz)), mode);
}

void rcp_f32(const uint32_t* a, uint32_t* d, int n, Mode mode) {
  for (int i = 0; i < n; ++i) d[i] = finish_f32(div_odd(1.0, input(a[i], mode.ftz)), mode);
}

void sqrt_f32(const uint32_t* a, uint32_t* d, int n, Mode mode) {
  for (int i = 0; i < n; ++i) d[i] = finish_f32(sqrt_odd(input(a[i], mode.ftz)), mode);
}

namespace {

// 2^x for f32 x, as a double of relative error below 2^-32 (exact for integers): 2^k times the Taylor polynomial of
// 2^f, |f| <= 1/2. Outside f32's range the result is beyond f32's range too.
inline double exp2_of(float x) {
  double t = x;
  t = t < -200.0 ? -200.0 : t;
  t = t > 200.0 ? 200.0 : t;
  constexpr double kShift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits of the sum
  const double shifted = t + kShift;
  const double f = t - (shifted - kShift);
  double p = 0x1.62c0223a5c822p-20;  // (ln 2)^k / k!, k = 8 ... 1
  p = std::fma(p, f, 0x1.ffcbfc588b0c5p-17);
  p = std::fma(p, f, 0x1.430912f86c786p-13);
  p = std::fma(p, f, 0x1.5d87fe78a6730p-10);
  p = std::fma(p, f, 0x1.3b2ab6fba4e77p-7);
  p = std::fma(p, f, 0x1.c6b08d704a0bfp-5);
  p = std::fma(p, f, 0x1.ebfbdff82c58ep-3);
  p = std::fma(p, f, 0x1.62e42fefa39efp-1);
  p = std::fma(p, f, 1.0);
  return as_double(as_bits64(p) + (as_bits64(shifted) << 52));
}

double approximate(Approx function, double x) {
  switch (function) {
    case Approx::ex2: return std::exp2(x);
    case Approx::lg2: return std::log2(x);
    case Approx::rcp: return 1.0 / x;
    case Approx::rsqrt: return 1.0 / std::sqrt(x);
    case Approx::sqrt: return std::sqrt(x);
    case Approx::sin: return std::sin(x);
    case Approx::cos: return std::cos(x);
    case Approx::tanh: return std::tanh(x);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

void ex2_f32(const uint32_t* a, uint32_t* d, int n, bool ftz) {
  if (ftz) {
    each(n, [=](int i) {
      const uint32_t bits = as_bits(static_cast<float>(exp2_of(as_float(a[i]))));
      const uint32_t flushed = bits < 0x00800000 ? 0 : bits;
      d[i] = is_nan(a[i]) ? kNan : flushed;
    });
  } else {
    each(n, [=](int i) {
      const uint32_t bits = as_bits(static_cast<float>(exp2_of(as_float(a[i]))));
      d[i] = is_nan(a[i]) ? kNan : bits;
    });
  }
}

}  // namespace

// tanh.approx.f32 may be wrong by 2^-11: cut to so many bits, so that what relies on more does not pass here and fail on
// a GPU. The other functions' errors are of an ulp or two, and their results here are exact but for the rounding.
uint32_t cut_tanh(uint32_t bits) {
  const uint32_t exponent = bits >> 23 & 0xff;
  return exponent == 0 || exponent == 0xff ? bits : bits & 0xfffff000;
}

void approx_f32(Approx function, const uint32_t* a, uint32_t* d, int n, bool ftz) {
  if (function == Approx::ex2) return ex2_f32(a, d, n, ftz);
  for (int i = 0; i < n; ++i) {
    uint32_t bits = canonical(static_cast<float>(approximate(function, input(a[i], ftz))));
    if (function == Approx::tanh) bits = cut_tanh(bits);
    d[i] = ftz ? flush_f32(bits) : bits;
  }
}

void div_full_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, bool ftz) {
  nearest_f32(n, d, {Round::rn, ftz, false}, [=](int i, auto in) { return in(a[i]) / in(b[i]); });
}

void div_approx_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, bool ftz) {
  for (int i = 0; i < n; ++i) {
    const float x = input(a[i], ftz), y = input(b[i], ftz);
    uint32_t bits = canonical(x / y);
    if (std::fabs(y) > 0x1p126f && std::isfinite(y) && !std::isnan(x)) {
      bits = std::isinf(x) ? kNan : (a[i] ^ b[i]) & 0x80000000;
    }
    d[i] = ftz ? flush_f32(bits) : bits;
  }
}

// ---- f64 ----------------------------------------------------------------------------------------

namespace {

int environment_mode(Round round) {
  switch (round) {
    case Round::rz: return FE_TOWARDZERO;
    case Round::rm: return FE_DOWNWARD;
    case Round::rp: return FE_UPWARD;
    case Round::rn:
    case Round::rna: break;
  }
  return FE_TONEAREST;
}

// The NaN of an f64 operation: its first NaN operand, made quiet, payload kept (H200).
uint64_t nan_of(double x, double y, double z) {
  for (const double operand : {x, y, z}) {
    if (std::isnan(operand)) return as_bits64(operand) | uint64_t{1} << 51;
  }
  return kF64.nan;
}

uint64_t pick64(uint64_t a, uint64_t b, bool is_max) {
  const double x = as_double(a), y = as_double(b);
  if (std::isnan(x) && std::isnan(y)) return kF64.nan;
  if (std::isnan(x)) return b;
  if (std::isnan(y)) return a;
  if (x == y) return is_max ? a & b : a | b;
  return (is_max ? x > y : x < y) ? a : b;
}

}  // namespace

void arith_f64(Op64 op, const uint64_t* a, const uint64_t* b, const uint64_t* c, uint64_t* d, int n, Round round) {
  if (op == Op64::min || op == Op64::max) {
    for (int i = 0; i < n; ++i) d[i] = pick64(a[i], b[i], op == Op64::max);
    return;
  }
  // volatile keeps the operations between the two changes of the rounding mode.
  const int before = std::fegetround();
  std::fesetround(environment_mode(round));
  for (int i = 0; i < n; ++i) {
    volatile double x = as_double(a[i]);
    volatile double y = b != nullptr ? as_double(b[i]) : 0;
    volatile double z = c != nullptr ? as_double(c[i]) : 0;
    volatile double r = 0;
    switch (op) {
      case Op64::add: r = x + y; break;
      case Op64::sub: r = x - y; break;
      case Op64::mul: r = x * y; break;
      case Op64::fma: r = std::fma(x, y, z); break;
      case Op64::div: r = x / y; break;
      case Op64::rcp: r = 1.0 / x; break;
      case Op64::sqrt: r = std::sqrt(x); break;
      case Op64::min:
      case Op64::max: break;
    }
    d[i] = std::isnan(r) ? nan_of(x, y, z) : as_bits64(r);
  }
  std::fesetround(before);
}

// ---- f16 and bf16 -------------------------------------------------------------------------------

namespace {

// f32 to a smaller format of E exponent and M mantissa bits, to nearest even, without branches. Values above max_finite
// give `overflow`. Subnormal results come from an addition whose result has the format's smallest unit as its last
// digit.
template <int E, int M>
inline uint32_t narrow(uint32_t x, uint32_t max_finite, uint32_t overflow, uint32_t nan) {
  constexpr int kBias = (1 << (E - 1)) - 1;
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 1 - kBias - M + 23) << 23;
  const uint32_t u = x & 0x7fffffff;
  const uint32_t small = as_bits(as_float(u) + as_float(kMagic)) - kMagic;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  const uint32_t normal = (u + ((1u << (22 - M)) - 1) + (u >> (23 - M) & 1) - kRebias) >> (23 - M);
  uint32_t r = u < kRebias + (1u << 23) ? small : normal;
  r = r > max_finite ? overflow : r;
  r |= x >> 31 << (E + M);
  return u > 0x7f800000 ? nan : r;
}

inline uint32_t narrow_bf16(uint32_t x) { return is_nan(x) ? 0x7fffu : (x + 0x7fff + (x >> 16 & 1)) >> 16; }
inline uint32_t narrow_f16(uint32_t x) { return narrow<5, 10>(x, 0x7bff, 0x7c00, 0x7fff); }

// A double that was rounded to odd, rounded to odd once more: the f32 still decides every later rounding to 16 bits.
inline uint32_t f32_to_odd(double exact) {
  const float nearest = static_cast<float>(exact);
  const double back = nearest;
  const uint32_t bits = as_bits(nearest);
  if (back == exact || (bits & 1) != 0 || !std::isfinite(exact)) return bits;
  return std::fabs(back) > std::fabs(exact) ? bits - 1 : bits + 1;
}

inline const Format& half_format(bool bf16) { return bf16 ? kBf16 : kF16; }

inline uint32_t flush_half(uint32_t bits, bool bf16) {
  const uint32_t exponent = bf16 ? 0x7f80 : 0x7c00;
  return (bits & exponent) == 0 ? bits & 0x8000 : bits;
}

inline float widen(uint32_t bits, bool bf16) {
  bits &= 0xffff;
  if (bf16) return as_float(bits << 16);
  const uint32_t sign = (bits & 0x8000) << 16;
  const uint32_t magnitude = (bits & 0x7fff) << 13;
  if (magnitude >= 0x7c00u << 13) return as_float(sign | 0x7f800000 | magnitude);
  return as_float(sign | as_bits(as_float(magnitude) * 0x1p112f));  // rebias; exact, subnormals included
}

inline bool is_oob_nan(uint32_t bits) { return (bits & 0xffff) == 0x7ff7; }

uint32_t arith_one_half(OpHalf op, uint32_t a, uint32_t b, uint32_t c, HalfMode mode) {
  if (mode.oob && (is_oob_nan(a) || is_oob_nan(b) || is_oob_nan(c))) return 0;
  const auto in = [&](uint32_t bits) -> double {
    return widen(mode.ftz ? flush_half(bits, mode.bf16) : bits, mode.bf16);
  };
  double exact = 0;
  switch (op) {
    case OpHalf::add: exact = add_odd(in(a), in(b), Round::rn); break;
    case OpHalf::sub: exact = add_odd(in(a), -in(b), Round::rn); break;
    case OpHalf::mul: exact = in(a) * in(b); break;
    case OpHalf::fma: exact = add_odd(in(a) * in(b), in(c), Round::rn); break;
  }
  if (mode.ftz && flushes(exact, 0x1p-14, 0x1p-12, Round::rn)) {  // f16 only: bf16 arithmetic has no .ftz
    return mode.sat || mode.relu || !std::signbit(exact) ? 0 : 0x8000;
  }
  if (mode.sat) exact = saturate(exact);
  const uint32_t odd = f32_to_odd(exact);
  uint32_t bits = mode.bf16 ? narrow_bf16(odd) : narrow_f16(odd);
  if (mode.relu && (bits & 0x8000) != 0) bits = 0;
  return mode.ftz ? flush_half(bits, mode.bf16) : bits;
}

// Applies f to the low half, or to both halves, of each register; null operands read as 0.
template <typename F>
void each_half(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, bool packed, F&& f) {
  for (int i = 0; i < n; ++i) {
    const uint32_t x = a[i], y = b != nullptr ? b[i] : 0, z = c != nullptr ? c[i] : 0;
    uint32_t r = f(x & 0xffff, y & 0xffff, z & 0xffff);
    if (packed) r |= f(x >> 16, y >> 16, z >> 16) << 16;
    d[i] = r;
  }
}

uint32_t pick_half(uint32_t a, uint32_t b, bool bf16, MinMax op) {
  const float x = widen(a, bf16), y = widen(b, bf16);
  const uint32_t nan = static_cast<uint32_t>(half_format(bf16).nan);
  if (std::isnan(x) || std::isnan(y)) {
    if (op.nan || (std::isnan(x) && std::isnan(y))) return nan;
    return std::isnan(x) ? b : a;
  }
  if (x == y) return op.is_max ? a & b : a | b;
  return (op.is_max ? x > y : x < y) ? a : b;
}

}  // namespace

void arith_half(OpHalf op, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, HalfMode mode) {
  each_half(a, b, c, d, n, mode.packed,
            [&](uint32_t x, uint32_t y, uint32_t z) { return arith_one_half(op, x, y, z, mode); });
}

void min_max_half(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, HalfMode mode,
                  MinMax op) {
  each_half(a, b, c, d, n, mode.packed, [&](uint32_t x, uint32_t y, uint32_t z) {
    const auto in = [&](uint32_t bits) {
      if (mode.ftz) bits = flush_half(bits, mode.bf16);
      return op.abs ? bits & 0x7fff : bits;
    };
    uint32_t r = pick_half(in(x), in(y), mode.bf16, op);
    if (c != nullptr) r = pick_half(r, in(z), mode.bf16, op);
    if (op.xorsign && !std::isnan(widen(r, mode.bf16))) r |= (x ^ y) & 0x8000;
    return r;
  });
}

void neg_half(const uint32_t* a, uint32_t* d, int n, HalfMode mode) {
  each_half(a, nullptr, nullptr, d, n, mode.packed,
            [&](uint32_t x, uint32_t, uint32_t) -> uint32_t {
    if (std::isnan(widen(x, mode.bf16))) return 0x7fff;
    return (mode.ftz ? flush_half(x, mode.bf16) : x) ^ 0x8000; });
}

void abs_half(const uint32_t* a, uint32_t* d, int n, HalfMode mode) {
  each_half(a, nullptr, nullptr, d, n, mode.packed,
            [&](uint32_t x, uint32_t, uint32_t) -> uint32_t {
    if (std::isnan(widen(x, mode.bf16))) return 0x7fff;
    return (mode.ftz ? flush_half(x, mode.bf16) : x) & 0x7fff; });
}

void approx_half(Approx function, const uint32_t* a, uint32_t* d, int n, HalfMode mode) {
  each_half(a, nullptr, nullptr, d, n, mode.packed, [&](uint32_t x, uint32_t, uint32_t) {
    const double value = approximate(function, widen(mode.ftz ? flush_half(x, mode.bf16) : x, mode.bf16));
    const auto bits = static_cast<uint32_t>(encode(value, half_format(mode.bf16), Round::rn));
    return mode.ftz ? flush_half(bits, mode.bf16) : bits;
  });
}

void mixed_f32(OpHalf op, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, bool bf16,
               Mode mode) {
  uint32_t x[kMostLanes], y[kMostLanes];
  for (int i = 0; i < n; ++i) x[i] = as_bits(widen(a[i], bf16));
  switch (op) {
    case OpHalf::add: return add_f32(x, c, d, n, mode);
    case OpHalf::sub: return sub_f32(x, c, d, n, mode);
    case OpHalf::mul: return;  // PTX has no such form; the decoder never asks for it
    case OpHalf::fma: break;
  }
  for (int i = 0; i < n; ++i) y[i] = as_bits(widen(b[i], bf16));
  fma_f32(x, y, c, d, n, mode);
}

// ---- packing ------------------------------------------------------------------------------------

void pack_bf16x2_rn(const uint32_t* a, const uint32_t* b, uint32_t* d, int n) {
  each(n, [=](int i) { d[i] = narrow_bf16(a[i]) << 16 | narrow_bf16(b[i]); });
}

namespace {

inline uint32_t convert(double value, const PackMode& mode) {
  return static_cast<uint32_t>(encode(value, mode.format, mode.round, mode.satfinite, mode.relu));
}

}  // namespace

void pack2_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, const PackMode& mode) {
  if (mode.round == Round::rn && !mode.relu) {  // the hot ones
    const auto max = static_cast<uint32_t>(mode.format.max_finite());
    const uint32_t overflow = mode.satfinite ? max : static_cast<uint32_t>(mode.format.infinity());
    const auto nan = static_cast<uint32_t>(mode.format.nan);
    const Format& format = mode.format;
    if (format.exponent_bits == 5 && format.mantissa_bits == 10) {
      return each(n, [=](int i) {
        d[i] = narrow<5, 10>(a[i], max, overflow, nan) << 16 | narrow<5, 10>(b[i], max, overflow, nan);
      });
    }
    if (format.exponent_bits == 4 && format.mantissa_bits == 3 && mode.satfinite) {
      return each(n, [=](int i) {
        d[i] = narrow<4, 3>(a[i], max, overflow, nan) << 8 | narrow<4, 3>(b[i], max, overflow, nan);
      });
    }
    if (format.exponent_bits == 5 && format.mantissa_bits == 2 && mode.satfinite) {
      return each(n, [=](int i) {
        d[i] = narrow<5, 2>(a[i], max, overflow, nan) << 8 | narrow<5, 2>(b[i], max, overflow, nan);
      });
    }
  }
  for (int i = 0; i < n; ++i) {
    d[i] = convert(as_float(a[i]), mode) << mode.stride() | convert(as_float(b[i]), mode);
  }
}

void pack2_half(const uint32_t* a, bool bf16, uint32_t* d, int n, const PackMode& mode) {
  for (int i = 0; i < n; ++i) {
    d[i] = convert(widen(a[i] >> 16, bf16), mode) << mode.stride() | convert(widen(a[i], bf16), mode);
  }
}

void unpack2_f16(const uint32_t* a, const Format& from, bool relu, uint32_t* d, int n) {
  const int stride = from.width() == 6 ? 8 : from.width();
  for (int i = 0; i < n; ++i) {
    const auto high = encode(decode(a[i] >> stride, from), kF16, Round::rn, false, relu);
    const auto low = encode(decode(a[i], from), kF16, Round::rn, false, relu);
    d[i] = static_cast<uint32_t>(high << 16 | low);
  }
}

void pack2_ue8m0(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Round round, bool satfinite) {
  for (int i = 0; i < n; ++i) {
    d[i] = encode_ue8m0(as_float(a[i]), round, satfinite) << 8 | encode_ue8m0(as_float(b[i]), round, satfinite);
  }
}

void pack2_ue8m0_bf16(const uint32_t* a, uint32_t* d, int n, Round round, bool satfinite) {
  for (int i = 0; i < n; ++i) {
    const uint32_t high = encode_ue8m0(widen(a[i] >> 16, true), round, satfinite);
    d[i] = high << 8 | encode_ue8m0(widen(a[i], true), round, satfinite);
  }
}

void unpack2_ue8m0(const uint32_t* a, uint32_t* d, int n) {
  for (int i = 0; i < n; ++i) {
    const auto high = encode(decode_ue8m0(a[i] >> 8), kBf16, Round::rn);
    d[i] = static_cast<uint32_t>(high << 16 | encode(decode_ue8m0(a[i]), kBf16, Round::rn));
  }
}

uint32_t reduce_add_f32(uint32_t a, uint32_t b, bool ftz) {
  uint32_t sum;
  add_f32(&a, &b, &sum, 1, {Round::rn, ftz, false});
  return sum;
}

uint32_t reduce_add_half(uint32_t a, uint32_t b, bool bf16) {
  HalfMode mode;
  mode.bf16 = bf16;
  return arith_one_half(OpHalf::add, a, b, 0, mode);
}

}  // namespace emu::fp
