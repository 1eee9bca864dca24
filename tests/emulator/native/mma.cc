#include "mma.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define EMU_MMA_VECTOR 1
#endif

namespace emu::mma {
namespace {

constexpr int kWindow = 25;          // fraction bits of a sum below the largest exponent; fewer may be kept
constexpr int kHiddenBitOuter = 12;      // where a decoded significand's leading bit lies; the two sum to kWindow - 1 + 1, so
constexpr int kHiddenBitInner = 13;      // that a product of two significands is in units of 2**(sum of exponents - kWindow)
constexpr int kExponentOfZero = -8192;  // below every real exponent: a zero never moves the window
constexpr int kExactGroup = 16;      // products of 2**27 that an int32 holds
constexpr int kLanes = 8;
static_assert(kHiddenBitOuter + kHiddenBitInner == kWindow, "products must be in units of the window");

struct FloatFormat {
  int exponent_bits, mantissa_bits;
  bool infinities;  // all-ones exponent is infinity or NaN
  bool nan_top;     // e4m3: only all ones is NaN
};

FloatFormat format(Element element) {
  switch (element) {
    case Element::f16: return {5, 10, true, false};
    case Element::bf16: return {8, 7, true, false};
    case Element::tf32: return {8, 10, true, false};
    case Element::e4m3: return {4, 3, false, true};
    case Element::e5m2: return {5, 2, true, false};
    case Element::e2m3: return {2, 3, false, false};
    case Element::e3m2: return {3, 2, false, false};
    case Element::e2m1: return {2, 1, false, false};
    default: return {0, 0, false, false};
  }
}

// A finite accumulator input: significand in units of 2**(exponent - kWindow), not yet cut.
struct Addend {
  int64_t significand;
  int exponent;
  Multiplicand::Class kind;
};

Addend decode_c(uint32_t word, const Options& options) {
  if (!options.read_c) return {0, kExponentOfZero, Multiplicand::finite};
  const bool half = options.accumulator == Accumulator::f16;
  const int mantissa_bits = half ? 10 : 23, bias = half ? 15 : 127, top = half ? 31 : 255;
  const uint32_t bits = half ? word & 0xffff : word;
  const bool negative = (bits >> (half ? 15 : 31)) & 1;
  const int encoded = (bits >> mantissa_bits) & top;
  const uint32_t fraction = bits & ((1u << mantissa_bits) - 1);
  if (encoded == top) {
    if (fraction) return {0, 0, Multiplicand::nan};
    return {0, 0, negative ? Multiplicand::minus_inf : Multiplicand::plus_inf};
  }
  const int64_t significand = encoded ? fraction | (1u << mantissa_bits) : fraction;
  if (significand == 0) return {0, kExponentOfZero, Multiplicand::finite};
  const int64_t units = significand << (kWindow - mantissa_bits);
  return {negative ? -units : units, std::max(encoded, 1) - bias - options.scale_c, Multiplicand::finite};
}

int64_t cut(int64_t units, int shift) {  // toward zero
  if (shift > 62) return 0;
  return units < 0 ? -((-units) >> shift) : units >> shift;
}

int top_bit(uint64_t value) { return 63 - __builtin_clzll(value); }

/// Bits of an f32 that a result of fewer fraction bits does not have.
uint32_t dropped_bits(const Options& options) { return (1u << (23 - options.precision.fraction_bits)) - 1; }

/// A narrower window is one of 25 bits below an exponent that is greater by this.
int raise(const Options& options) { return kWindow - options.precision.window; }

// units * 2**quantum, cut toward zero to f32. Zero is always +0, an underflow too.
uint32_t to_f32(int64_t units, int quantum) {
  if (units == 0) return 0;
  const uint32_t sign = units < 0 ? 0x80000000u : 0;
  const uint64_t magnitude = units < 0 ? -static_cast<uint64_t>(units) : static_cast<uint64_t>(units);
  const int exponent = top_bit(magnitude) + quantum;
  if (exponent > 127) return sign | 0x7f800000u;
  const int unit = std::max(exponent, -126) - 23;  // exponent of the result's last bit
  const int shift = unit - quantum;
  const uint64_t significand = shift >= 64 ? 0 : shift >= 0 ? magnitude >> shift : magnitude << -shift;
  if (significand == 0) return 0;
  if (exponent < -126) return sign | static_cast<uint32_t>(significand);
  return sign | static_cast<uint32_t>(exponent + 127) << 23 | (static_cast<uint32_t>(significand) & 0x7fffffu);
}

// units * 2**quantum, rounded to nearest even to f16.
uint32_t to_f16(int64_t units, int quantum) {
  if (units == 0) return 0;
  const uint32_t sign = units < 0 ? 0x8000u : 0;
  const uint64_t magnitude = units < 0 ? -static_cast<uint64_t>(units) : static_cast<uint64_t>(units);
  const int exponent = top_bit(magnitude) + quantum;
  if (exponent > 15) return sign | 0x7c00u;
  const int unit = std::max(exponent, -14) - 10;
  const int shift = unit - quantum;
  uint64_t significand = 0;
  if (shift <= 0) {
    significand = magnitude << -shift;
  } else if (shift < 64) {
    significand = magnitude >> shift;
    const uint64_t rest = magnitude & ((uint64_t{1} << shift) - 1), half = uint64_t{1} << (shift - 1);
    if (rest > half || (rest == half && (significand & 1))) ++significand;
  }
  if (significand == 0) return 0;
  // A carry out of the significand moves into the exponent field by itself, up to infinity.
  const uint32_t encoded = exponent < -14 ? 0 : static_cast<uint32_t>(exponent + 14) << 10;
  return sign | std::min<uint32_t>(encoded + static_cast<uint32_t>(significand), 0x7c00u);
}

uint32_t special_result(Multiplicand::Class kind, Accumulator accumulator) {
  const bool half = accumulator == Accumulator::f16;
  switch (kind) {
    case Multiplicand::plus_inf: return half ? 0x7c00u : 0x7f800000u;
    case Multiplicand::minus_inf: return half ? 0xfc00u : 0xff800000u;
    default: return half ? kNanF16 : kNanF32;
  }
}

// The sum of two contributions of which at least one is not finite.
Multiplicand::Class add_special(Multiplicand::Class x, Multiplicand::Class y) {
  if (x == Multiplicand::finite) return y;
  if (y == Multiplicand::finite || x == y) return x;
  return Multiplicand::nan;
}

Multiplicand::Class product_class(const Multiplicand& a, int m, const Multiplicand& b, int n, int k) {
  const auto x = a.classify(m, k), y = b.classify(n, k);
  if (x == Multiplicand::finite && y == Multiplicand::finite) return Multiplicand::finite;
  if (x == Multiplicand::nan || y == Multiplicand::nan) return Multiplicand::nan;
  const int32_t sa = a.significand()[a.index(m, k)], sb = b.significand()[b.index(n, k)];
  const bool zero = (x == Multiplicand::finite && sa == 0) || (y == Multiplicand::finite && sb == 0);
  if (zero) return Multiplicand::nan;
  const bool negative_a = x == Multiplicand::finite ? sa < 0 : x == Multiplicand::minus_inf;
  const bool negative_b = y == Multiplicand::finite ? sb < 0 : y == Multiplicand::minus_inf;
  return negative_a != negative_b ? Multiplicand::minus_inf : Multiplicand::plus_inf;
}

uint32_t finish(int64_t units, int largest, const Options& options, uint16_t f16_high_half) {
  const int quantum = largest - kWindow;
  if (options.accumulator == Accumulator::f16) return static_cast<uint32_t>(f16_high_half) << 16 | to_f16(units, quantum);
  return to_f32(units, quantum) & ~dropped_bits(options);
}

// One output in plain C++: the definition of the rule, and the only path that knows NaN and infinity.
uint32_t dot(const Multiplicand& a, int m, const Multiplicand& b, int n, uint32_t c_word, const Options& options,
             uint16_t f16_high_half) {
  const int k_count = a.k();
  const Addend c = decode_c(c_word, options);
  auto kind = c.kind;
  if (a.row_has_special(m) || b.row_has_special(n)) {
    for (int k = 0; k < k_count; ++k) kind = add_special(kind, product_class(a, m, b, n, k));
  }
  if (kind != Multiplicand::finite) {
    const uint32_t high = options.accumulator == Accumulator::f16 ? static_cast<uint32_t>(f16_high_half) << 16 : 0;
    return high | special_result(kind, options.accumulator);
  }
  int largest = c.exponent;
  for (int k = 0; k < k_count; ++k) {
    const size_t i = a.index(m, k), j = b.index(n, k);
    largest = std::max(largest, a.exponent()[i] + b.exponent()[j]);
  }
  largest += raise(options);
  int64_t units = cut(c.significand, largest - c.exponent);
  for (int k = 0; k < k_count; ++k) {
    const size_t i = a.index(m, k), j = b.index(n, k);
    const int64_t product = static_cast<int64_t>(a.significand()[i]) * b.significand()[j];
    units += cut(product, largest - a.exponent()[i] - b.exponent()[j]);
  }
  return finish(units, largest, options, f16_high_half);
}

uint32_t integer_dot(const Multiplicand& a, int m, const Multiplicand& b, int n, uint32_t c_word, const Options& options) {
  int64_t sum = options.read_c ? static_cast<int32_t>(c_word) : 0;
  for (int k = 0; k < a.k(); ++k) {
    sum += static_cast<int64_t>(a.integer()[a.index(m, k)]) * b.integer()[b.index(n, k)];
  }
  if (options.saturate) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
  return static_cast<uint32_t>(sum);
}

#ifdef EMU_MMA_VECTOR
#define EMU_AVX2 __attribute__((target("avx2")))

// Eight accumulator inputs: cut them to the window of `largest` (raised here where C is the largest). False if one is
// NaN or infinite.
EMU_AVX2 inline bool c_exponents(__m256i words, const Options& options, __m256i* significand, __m256i* exponent) {
  const bool half = options.accumulator == Accumulator::f16;
  const int mantissa_bits = half ? 10 : 23;
  const __m256i top = _mm256_set1_epi32(half ? 31 : 255);
  const __m256i fraction_mask = _mm256_set1_epi32((1 << mantissa_bits) - 1);
  const __m256i encoded = _mm256_and_si256(_mm256_srli_epi32(words, mantissa_bits), top);
  if (_mm256_movemask_epi8(_mm256_cmpeq_epi32(encoded, top))) return false;
  const __m256i zero = _mm256_setzero_si256();
  const __m256i subnormal = _mm256_cmpeq_epi32(encoded, zero);
  const __m256i hidden = _mm256_andnot_si256(subnormal, _mm256_set1_epi32(1 << mantissa_bits));
  const __m256i bits = _mm256_or_si256(_mm256_and_si256(words, fraction_mask), hidden);
  *significand = _mm256_slli_epi32(bits, kWindow - mantissa_bits);
  const __m256i bias = _mm256_set1_epi32((half ? 15 : 127) + options.scale_c);
  const __m256i real = _mm256_sub_epi32(_mm256_sub_epi32(encoded, subnormal), bias);  // a mask is -1: max(encoded, 1)
  *exponent = _mm256_blendv_epi8(real, _mm256_set1_epi32(kExponentOfZero), _mm256_cmpeq_epi32(bits, zero));
  return true;
}

struct Window {
  __m256i largest;
  __m256i sum_low;   // of the first 16 products
  __m256i sum_high;  // of the rest
};

template <int rows>
EMU_AVX2 inline void sum_products(const Multiplicand& a, int m, const Multiplicand& b, int column, int raise, Window* window) {
  const int k_count = a.k(), pitch = b.padded_rows();
  const int32_t* exponent_b = b.exponent() + column;
  const int32_t* significand_b = b.significand() + column;
  const int32_t *exponent_a[rows], *significand_a[rows];
  __m256i largest[rows];
  for (int r = 0; r < rows; ++r) {
    exponent_a[r] = a.exponent() + static_cast<size_t>(m + r) * k_count;
    significand_a[r] = a.significand() + static_cast<size_t>(m + r) * k_count;
    largest[r] = window[r].largest;
  }
  for (int k = 0; k < k_count; ++k) {
    const __m256i eb = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponent_b + static_cast<size_t>(k) * pitch));
    for (int r = 0; r < rows; ++r) {
      largest[r] = _mm256_max_epi32(largest[r], _mm256_add_epi32(eb, _mm256_set1_epi32(exponent_a[r][k])));
    }
  }
  for (int r = 0; r < rows; ++r) largest[r] = _mm256_add_epi32(largest[r], _mm256_set1_epi32(raise));
  for (int begin = 0; begin < k_count; begin += kExactGroup) {
    const int end = std::min(k_count, begin + kExactGroup);
    __m256i sum[rows];
    for (int r = 0; r < rows; ++r) sum[r] = _mm256_setzero_si256();
    for (int k = begin; k < end; ++k) {
      const size_t at = static_cast<size_t>(k) * pitch;
      const __m256i eb = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponent_b + at));
      // 16-bit significands in 32-bit lanes: the multiply-add of pairs is then an exact product. Its other factor's
      // high half must be zero, which the mask sees to.
      const __m256i sb = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(significand_b + at));
      for (int r = 0; r < rows; ++r) {
        const __m256i sa = _mm256_set1_epi32(significand_a[r][k] & 0xffff);
        const __m256i product = _mm256_madd_epi16(sb, sa);
        const __m256i shift = _mm256_sub_epi32(_mm256_sub_epi32(largest[r], eb), _mm256_set1_epi32(exponent_a[r][k]));
        const __m256i kept = _mm256_srlv_epi32(_mm256_abs_epi32(product), shift);
        sum[r] = _mm256_add_epi32(sum[r], _mm256_sign_epi32(kept, product));
      }
    }
    for (int r = 0; r < rows; ++r) (begin == 0 ? window[r].sum_low : window[r].sum_high) = sum[r];
  }
  for (int r = 0; r < rows; ++r) window[r].largest = largest[r];
}

// Four sums of up to 34 bits, as doubles, times 2**(largest - 25), cut to f32 less the `dropped` bits. False if one is
// too small for a normal f32.
EMU_AVX2 inline bool four_to_f32(__m256d units, __m128i largest, uint32_t dropped, __m128* result) {
  const __m128i clamped = _mm_max_epi32(largest, _mm_set1_epi32(-900));
  const __m256i biased = _mm256_add_epi64(_mm256_cvtepi32_epi64(clamped), _mm256_set1_epi64x(1023 - kWindow));
  const __m256d value = _mm256_mul_pd(units, _mm256_castsi256_pd(_mm256_slli_epi64(biased, 52)));
  const __m256d magnitude = _mm256_andnot_pd(_mm256_set1_pd(-0.0), value);
  const __m256d small = _mm256_cmp_pd(magnitude, _mm256_set1_pd(0x1p-126), _CMP_LT_OQ);
  const __m256d nonzero = _mm256_cmp_pd(magnitude, _mm256_setzero_pd(), _CMP_NEQ_OQ);
  if (_mm256_movemask_pd(_mm256_and_pd(small, nonzero))) return false;
  // 29 bits off a double's mantissa leave f32's; the conversion is then exact, or overflows to infinity.
  const __m256d mask = _mm256_castsi256_pd(_mm256_set1_epi64x(~((int64_t{dropped} << 29) | ((int64_t{1} << 29) - 1))));
  *result = _mm256_cvtpd_ps(_mm256_and_pd(value, mask));
  return true;
}

EMU_AVX2 inline __m256d low_half(__m256i v) { return _mm256_cvtepi32_pd(_mm256_castsi256_si128(v)); }
EMU_AVX2 inline __m256d high_half(__m256i v) { return _mm256_cvtepi32_pd(_mm256_extracti128_si256(v, 1)); }

EMU_AVX2 inline void finish_vector(const Window& window, __m256i c, uint32_t* out, const Options& options,
                                   uint16_t f16_high_half) {
  const __m256d low = _mm256_add_pd(_mm256_add_pd(low_half(window.sum_low), low_half(window.sum_high)), low_half(c));
  const __m256d high = _mm256_add_pd(_mm256_add_pd(high_half(window.sum_low), high_half(window.sum_high)), high_half(c));
  if (options.accumulator == Accumulator::f32) {
    __m128 x, y;
    if (four_to_f32(low, _mm256_castsi256_si128(window.largest), dropped_bits(options), &x) &&
        four_to_f32(high, _mm256_extracti128_si256(window.largest, 1), dropped_bits(options), &y)) {
      _mm256_storeu_ps(reinterpret_cast<float*>(out), _mm256_set_m128(y, x));
      return;
    }
  }
  double units[kLanes];
  int32_t largest[kLanes];
  _mm256_storeu_pd(units, low);
  _mm256_storeu_pd(units + 4, high);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(largest), window.largest);
  for (int i = 0; i < kLanes; ++i) {
    out[i] = finish(static_cast<int64_t>(units[i]), largest[i], options, f16_high_half);
  }
}

// `rows` rows by eight columns. False: a NaN or an infinity in C; nothing was written.
template <int rows>
EMU_AVX2 bool vector_block(const Multiplicand& a, int m, const Multiplicand& b, int column, uint32_t* const* out,
                           const Options& options, uint16_t f16_high_half) {
  Window window[rows];
  __m256i c_significand[rows], c_exponent[rows], c_words[rows];
  for (int r = 0; r < rows; ++r) {
    c_words[r] = _mm256_setzero_si256();
    if (options.read_c) c_words[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(out[r]));
    if (!c_exponents(c_words[r], options, &c_significand[r], &c_exponent[r])) return false;
    window[r] = {c_exponent[r], _mm256_setzero_si256(), _mm256_setzero_si256()};
  }
  sum_products<rows>(a, m, b, column, raise(options), window);
  for (int r = 0; r < rows; ++r) {
    const __m256i kept = _mm256_srlv_epi32(c_significand[r], _mm256_sub_epi32(window[r].largest, c_exponent[r]));
    // The sign bit, with 1 below it so that +0's "sign" is not zero.
    const int sign_to_top = options.accumulator == Accumulator::f16 ? 16 : 0;
    const __m256i sign = _mm256_or_si256(_mm256_slli_epi32(c_words[r], sign_to_top), _mm256_set1_epi32(1));
    finish_vector(window[r], _mm256_sign_epi32(kept, sign), out[r], options, f16_high_half);
  }
  return true;
}
#endif

void scalar_block(const Multiplicand& a, int m, const Multiplicand& b, int column, int columns, uint32_t* out,
                  const Options& options, uint16_t f16_high_half) {
  for (int i = 0; i < columns; ++i) out[i] = dot(a, m, b, column + i, out[i], options, f16_high_half);
}

}  // namespace

int container_bits(Element element) {
  switch (element) {
    case Element::tf32: return 32;
    case Element::f16:
    case Element::bf16: return 16;
    default: return 8;
  }
}

const char* name(Element element) {
  constexpr const char* names[] = {"f16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8"};
  return names[static_cast<int>(element)];
}

const char* name(Accumulator accumulator) {
  constexpr const char* names[] = {"f16", "f32", "s32"};
  return names[static_cast<int>(accumulator)];
}

bool has_vector_path() {
#ifdef EMU_MMA_VECTOR
  static const bool avx2 = __builtin_cpu_supports("avx2");
  return avx2;
#else
  return false;
#endif
}

Multiplicand::Multiplicand(Side side, Element element, bool negate, const uint8_t* packed, int rows, int k, size_t pitch)
    : side_(side), element_(element), rows_(rows), k_(k), padded_rows_((rows + kLanes - 1) / kLanes * kLanes) {
  const size_t count = side == Side::outer ? static_cast<size_t>(rows) * k : static_cast<size_t>(padded_rows_) * k;
  significand_.assign(count, 0);
  row_special_.assign(padded_rows_, 0);
  if (is_integer(element)) {
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < k; ++i) {
        const uint8_t bits = packed[row * pitch + i];
        significand_[index(row, i)] = element == Element::u8 ? bits : static_cast<int8_t>(bits);
      }
    }
    return;
  }
  exponent_.assign(count, kExponentOfZero);
  switch (container_bits(element)) {
    case 32: decode_floats<uint32_t>(negate, packed, pitch); break;
    case 16: decode_floats<uint16_t>(negate, packed, pitch); break;
    default: decode_floats<uint8_t>(negate, packed, pitch);
  }
}

template <class Container>
void Multiplicand::decode_floats(bool negate, const uint8_t* packed, size_t pitch) {
  const FloatFormat f = format(element_);
  const uint32_t top = (1u << f.exponent_bits) - 1, fractions = (1u << f.mantissa_bits) - 1, sign_at = f.exponent_bits + f.mantissa_bits;
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int scale = (side_ == Side::outer ? kHiddenBitOuter : kHiddenBitInner) - f.mantissa_bits;
  const int dropped = element_ == Element::tf32 ? 13 : 0;  // cut before it is classified: a NaN may become an infinity
  const uint32_t flip = negate;
  for (int row = 0; row < rows_; ++row) {
    const uint8_t* in = packed + row * pitch;
    for (int k = 0; k < k_; ++k) {
      Container container;
      std::memcpy(&container, in + k * sizeof container, sizeof container);
      const uint32_t bits = static_cast<uint32_t>(container) >> dropped;
      const bool negative = ((bits >> sign_at) ^ flip) & 1;
      const uint32_t encoded = (bits >> f.mantissa_bits) & top, fraction = bits & fractions;
      const size_t at = index(row, k);
      if (encoded == top && (f.infinities || (f.nan_top && fraction == fractions))) {
        mark_special(at, row, f.nan_top || fraction ? nan : negative ? minus_inf : plus_inf);
        continue;
      }
      const int32_t significand = static_cast<int32_t>((fraction | (encoded ? fractions + 1 : 0)) << scale);
      significand_[at] = negative ? -significand : significand;
      exponent_[at] = significand ? static_cast<int>(std::max(encoded, 1u)) - bias : kExponentOfZero;
    }
  }
}

void Multiplicand::mark_special(size_t at, int row, Class kind) {
  if (!has_special_) class_.assign(significand_.size(), finite);
  class_[at] = kind;
  row_special_[row] = 1;
  has_special_ = true;
}

void multiply_accumulate(const Multiplicand& outer, const Multiplicand& inner, int first, int count,
                         uint32_t* const* accumulators, const Options& options, uint16_t f16_high_half) {
  if (options.accumulator == Accumulator::s32) {
    for (int o = 0; o < outer.rows(); ++o) {
      if (!accumulators[o]) continue;
      for (int i = 0; i < count; ++i) {
        accumulators[o][i] = integer_dot(outer, o, inner, first + i, accumulators[o][i], options);
      }
    }
    return;
  }
  const bool vector = has_vector_path() && !options.portable && outer.k() <= 2 * kExactGroup;
  const int whole = vector ? count / kLanes * kLanes : 0;
  for (int i = 0; i < whole; i += kLanes) {
    bool plain_inner = true;
    for (int j = 0; j < kLanes && inner.has_special(); ++j) plain_inner = plain_inner && !inner.row_has_special(first + i + j);
    for (int o = 0; o < outer.rows();) {
      if (!accumulators[o]) {
        ++o;
        continue;
      }
      int done = 0;
#ifdef EMU_MMA_VECTOR
      // Rows from here on that the vector path can take together.
      int run = 0;
      while (run < 4 && o + run < outer.rows() && accumulators[o + run] && plain_inner && !outer.row_has_special(o + run)) ++run;
      uint32_t* out[4];
      for (int r = 0; r < run; ++r) out[r] = accumulators[o + r] + i;
      if (run == 4 && vector_block<4>(outer, o, inner, first + i, out, options, f16_high_half)) done = 4;
      if (!done && run >= 2 && vector_block<2>(outer, o, inner, first + i, out, options, f16_high_half)) done = 2;
      if (!done && run >= 1 && vector_block<1>(outer, o, inner, first + i, out, options, f16_high_half)) done = 1;
#endif
      if (!done) {
        scalar_block(outer, o, inner, first + i, kLanes, accumulators[o] + i, options, f16_high_half);
        done = 1;
      }
      o += done;
    }
  }
  if (whole == count) return;
  for (int o = 0; o < outer.rows(); ++o) {
    if (!accumulators[o]) continue;
    scalar_block(outer, o, inner, first + whole, count - whole, accumulators[o] + whole, options, f16_high_half);
  }
}

}  // namespace emu::mma
