// Floating-point arithmetic of PTX, bit by bit: conversions between formats, rounding modes, packed forms, min/max,
// approximations.
//
// A library of pure functions without state: registers come and go as bit patterns. Two sorts:
//   * scalar functions on one value (any format, any rounding mode), written for plainness;
//   * "lane" functions on n values at once (n = 32 for a warp of 32-bit registers, 64 for a warp of f32x2 pairs),
//   written so that
//     the compiler vectorises them. They may work in place (d may equal a, b or c).
// Rules, from the PTX ISA (9.7.3-9.7.5, 9.7.9.21): subnormals count unless .ftz; a NaN result of f32 arithmetic is
// 0x7fffffff, of f16 and bf16 0x7fff; .sat clamps to [0, 1] and turns NaN into +0. Approximations are the correctly
// rounded result (or within 0.51 ulp of the exact one), which lies within the error bounds PTX states for the hardware,
// without being its bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace emu::fp {

enum class Round : uint8_t { rn, rz, rm, rp, rna };

// What the topmost exponent encodes.
enum class Special : uint8_t {
  ieee,         // infinities and NaNs, as IEEE 754
  nan_only,     // all ones is NaN, everything else is a number (e4m3)
  finite_only,  // no NaN and no infinity (e2m3, e3m2, e2m1)
};

// A binary floating-point format with sign bit, at most 64 bits wide.
struct Format {
  int exponent_bits;
  int mantissa_bits;
  Special special;
  uint64_t nan;  // the NaN that conversions and arithmetic give (finite_only: the value that stands in for it)

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int width() const { return 1 + exponent_bits + mantissa_bits; }
  constexpr uint64_t sign_bit() const { return uint64_t{1} << (exponent_bits + mantissa_bits); }
  constexpr uint64_t infinity() const { return ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
  constexpr uint64_t max_finite() const {
    return special == Special::ieee ? infinity() - 1 : (sign_bit() - 1) - (special == Special::nan_only ? 1 : 0);
  }
};

inline constexpr Format kF64{11, 52, Special::ieee, 0xfff8000000000000};
inline constexpr Format kF32{8, 23, Special::ieee, 0x7fffffff};
inline constexpr Format kF16{5, 10, Special::ieee, 0x7fff};
inline constexpr Format kBf16{8, 7, Special::ieee, 0x7fff};
inline constexpr Format kE5m2{5, 2, Special::ieee, 0x7f};
inline constexpr Format kE4m3{4, 3, Special::nan_only, 0x7f};
inline constexpr Format kE3m2{3, 2, Special::finite_only, 0x1f};
inline constexpr Format kE2m3{2, 3, Special::finite_only, 0x1f};
inline constexpr Format kE2m1{2, 1, Special::finite_only, 0x07};

// ---- scalar: formats ----------------------------------------------------------------------------

// NaNs between f32 and f64 keep sign and payload and become quiet.
uint64_t widen_nan(uint32_t f32_bits);
uint32_t narrow_nan(uint64_t f64_bits);

// The value of `bits` in `format`; exact for every format here. NaN becomes a double NaN.
double decode(uint64_t bits, const Format& format);

// `value` rounded once to `format`. satfinite: magnitudes beyond the largest number (infinity too) become it. relu:
// negative results, and -0, become +0.
uint64_t encode(double value, const Format& format, Round round, bool satfinite = false, bool relu = false);

// tf32 in its 32-bit container: f32 with the low 13 mantissa bits zero. NaN gives 0x7fffe000, except that rna only
// clears the low bits of a NaN.
uint32_t encode_tf32(float value, Round round, bool satfinite = false, bool relu = false);

// ue8m0: an unsigned power of two, 2^(bits - 127); 0xff is NaN. The sign of `value` is dropped. Only rz and rp exist.
uint32_t encode_ue8m0(double value, Round round, bool satfinite);
double decode_ue8m0(uint32_t bits);

// Bit-pattern views.
inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline double as_double(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint64_t as_bits64(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// f32 subnormals become zero of the same sign.
inline uint32_t flush_f32(uint32_t bits) { return (bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits; }

// ---- scalar: cvt between numbers ----------------------------------------------------------------

// Float to integer, rounded to integral by `round` (rn, rz, rm or rp stand for rni, rzi, rmi, rpi) and clamped to the
// range of the destination. NaN gives 0, or 1 << (bits - 1) when the destination has 64 bits or `source_is_f64`. The
// result is sign- or zero-extended to 64 bits.
uint64_t to_integer(double value, Round round, int bits, bool is_signed, bool source_is_f64);

// Integer (already extended to 64 bits) to float, rounded once.
uint64_t from_integer(uint64_t value, bool is_signed, const Format& format, Round round);

// Float to integral float of the same format.
double round_to_integral(double value, Round round);

// `value` clamped to [0, 1], NaN becomes +0.
double saturate(double value);

// Integer (extended to 64 bits by its own signedness) to integer of `bits` bits: wraps, or clamps with `sat`; the
// result is extended to 64 bits by the destination's signedness.
uint64_t convert_integer(uint64_t value, bool from_signed, int bits, bool to_signed, bool sat);

// ---- lanes: f32 ---------------------------------------------------------------------------------

struct Mode {
  Round round = Round::rn;
  bool ftz = false;
  bool sat = false;
};

void add_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode);
void sub_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode);
void mul_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode);
void fma_f32(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, Mode mode);

struct MinMax {
  bool is_max = false;
  bool nan = false;      // .NaN: a NaN input gives NaN; otherwise NaN inputs are ignored
  bool abs = false;      // compare magnitudes
  bool xorsign = false;  // sign of the result = XOR of the inputs' signs (two inputs only)
  bool ftz = false;
};

// c may be null: the two-input form.
void min_max_f32(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, MinMax op);

void neg_f32(const uint32_t* a, uint32_t* d, int n, bool ftz);
void abs_f32(const uint32_t* a, uint32_t* d, int n, bool ftz);
void copysign_f32(const uint32_t* sign, const uint32_t* magnitude, uint32_t* d, int n);

// Division and roots, correctly rounded in the given mode.
void div_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Mode mode);
void rcp_f32(const uint32_t* a, uint32_t* d, int n, Mode mode);
void sqrt_f32(const uint32_t* a, uint32_t* d, int n, Mode mode);

// Approximations. div.approx.f32 gives 0 for 2^126 < |b| < 2^128 and finite a, NaN for infinite a; div.full has no such
// hole.
enum class Approx : uint8_t { ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh };
void approx_f32(Approx function, const uint32_t* a, uint32_t* d, int n, bool ftz);
void div_approx_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, bool ftz);
void div_full_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, bool ftz);

// ---- lanes: f64 ---------------------------------------------------------------------------------

enum class Op64 : uint8_t { add, sub, mul, fma, div, rcp, sqrt, min, max };
// Unused operands may be null.
void arith_f64(Op64 op, const uint64_t* a, const uint64_t* b, const uint64_t* c, uint64_t* d, int n, Round round);

// ---- lanes: f16 and bf16 ------------------------------------------------------------------------
// One value in the low half of a register (packed = false) or one in each half. All round to nearest even, the only
// mode PTX has for them.

struct HalfMode {
  bool bf16 = false;
  bool packed = false;
  bool ftz = false;
  bool sat = false;
  bool relu = false;
  bool oob = false;  // fma.oob: an operand that is the out-of-bounds NaN 0x7ff7 makes the result +0
};

enum class OpHalf : uint8_t { add, sub, mul, fma };
void arith_half(OpHalf op, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, HalfMode mode);
void min_max_half(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, HalfMode mode,
                  MinMax op);
void neg_half(const uint32_t* a, uint32_t* d, int n, HalfMode mode);
void abs_half(const uint32_t* a, uint32_t* d, int n, HalfMode mode);
void approx_half(Approx function, const uint32_t* a, uint32_t* d, int n, HalfMode mode);

// add/sub/fma.f32.{f16,bf16}: the 16-bit operands (a, and b of fma) are widened exactly, c is f32. sub: a - c.
void mixed_f32(OpHalf op, const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* d, int n, bool bf16,
               Mode mode);

// ---- lanes: packing conversions -----------------------------------------------------------------

// cvt.rn.bf16x2.f32 d, a, b without modifiers: a to the high half, b to the low half.
void pack_bf16x2_rn(const uint32_t* a, const uint32_t* b, uint32_t* d, int n);

struct PackMode {
  Format format;
  Round round = Round::rn;
  bool satfinite = false;
  bool relu = false;
  int stride() const { return format.width() == 6 ? 8 : format.width(); }  // 6-bit values lie in bytes
};

// Two f32 to a pair of any format: a above, b below (bits [stride, 2*stride) and [0, stride)).
void pack2_f32(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, const PackMode& mode);
// A pair of f16 or bf16 to a pair of a smaller format, and back.
void pack2_half(const uint32_t* a, bool bf16, uint32_t* d, int n, const PackMode& mode);
void unpack2_f16(const uint32_t* a, const Format& from, bool relu, uint32_t* d, int n);
void pack2_ue8m0(const uint32_t* a, const uint32_t* b, uint32_t* d, int n, Round round, bool satfinite);
void pack2_ue8m0_bf16(const uint32_t* a, uint32_t* d, int n, Round round, bool satfinite);
void unpack2_ue8m0(const uint32_t* a, uint32_t* d, int n);

// ---- comparisons --------------------------------------------------------------------------------

enum class Compare : uint8_t { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan };
// Ordered forms are false, unordered (…u) forms true, when an operand is NaN. Operands decoded by decode() or
// as_float().
bool compare(Compare relation, double a, double b);

// redux.sync / atomics: the f32, f16 and bf16 adds of red, atom and TMA reductions round to nearest even.
uint32_t reduce_add_f32(uint32_t a, uint32_t b, bool ftz);
uint32_t reduce_add_half(uint32_t a, uint32_t b, bool bf16);

}  // namespace emu::fp
