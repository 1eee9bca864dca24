// The arithmetic of NVIDIA's tensor cores, bit by bit.
//
// One rule serves tcgen05.mma, wgmma and mma.sync: within an instruction's K group all products and the accumulator
// are aligned to one window of 25 fraction bits below the largest encoded exponent, cut toward zero there, summed
// exactly, and the sum is cut to the destination's format. The rule was published for B200 (sf-tensor/tcgen05, MIT); an
// H200's mma.sync and wgmma give the same bits in every type of theirs (tests/emulator/silicon), except that wgmma of
// 8-bit floats is less precise. This file knows numbers only: no memory, no descriptors, no warps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emu::mma {

enum class Element : uint8_t { f16, bf16, tf32, e4m3, e5m2, e2m3, e3m2, e2m1, u8, s8 };
enum class Accumulator : uint8_t { f16, f32, s32 };

// Bits of an element's container in an operand: 32 (tf32), 16 or 8. Formats of 6 and 4 bits sit in 8-bit containers.
int container_bits(Element element);
const char* name(Element element);
const char* name(Accumulator accumulator);
inline bool is_integer(Element element) { return element == Element::u8 || element == Element::s8; }

// NaN that the tensor core makes, and infinities, per accumulator format.
constexpr uint32_t kNanF32 = 0x7fffffffu;
constexpr uint32_t kNanF16 = 0x7fffu;

// A decoded multiplicand. Values are significand * 2**(exponent - kScale) with one fixed kScale a side, so that the
// product of two significands is directly in units of 2**(exponent_a + exponent_b - 25), whatever the two formats are.
class Multiplicand {
 public:
  enum class Side : uint8_t { outer, inner };
  enum Class : uint8_t { finite = 0, nan = 1, plus_inf = 2, minus_inf = 3 };

  // `packed` holds `rows` rows (rows of A, columns of B), `k` containers each side by side, rows `pitch` bytes apart.
  // The rule is symmetric, so that either of A and B may be the inner side: the one whose rows the vector loop walks.
  // The outer side keeps [row][k], the inner side [k][row].
  Multiplicand(Side side, Element element, bool negate, const uint8_t* packed, int rows, int k, size_t pitch);

  Side side() const { return side_; }
  Element element() const { return element_; }
  int rows() const { return rows_; }
  int k() const { return k_; }
  // Row pitch of the inner tables, rounded up to the vector width (the rest is zero).
  int padded_rows() const { return padded_rows_; }

  size_t index(int row, int k) const {
    return side_ == Side::outer ? static_cast<size_t>(row) * k_ + k : static_cast<size_t>(k) * padded_rows_ + row;
  }
  const int32_t* significand() const { return significand_.data(); }
  const int32_t* exponent() const { return exponent_.data(); }
  const int32_t* integer() const { return significand_.data(); }  // u8 and s8: plain values
  Class classify(int row, int k) const { return has_special_ ? static_cast<Class>(class_[index(row, k)]) : finite; }
  bool row_has_special(int row) const { return row_special_[row] != 0; }
  bool has_special() const { return has_special_; }

 private:
  template <class Container>
  void decode_floats(bool negate, const uint8_t* packed, size_t pitch);
  void mark_special(size_t at, int row, Class kind);

  Side side_;
  Element element_;
  int rows_, k_, padded_rows_;
  bool has_special_ = false;
  std::vector<int32_t> significand_, exponent_;
  std::vector<uint8_t> class_, row_special_;
};

/// How much of a sum is kept.
struct Precision {
  int window = 25;         // fraction bits below the largest encoded exponent
  int fraction_bits = 23;  // of an f32 result
};
/// Of Hopper's wgmma with 8-bit floats, as measured on an H200.
constexpr Precision kHopper8Bit{13, 13};

struct Options {
  Accumulator accumulator = Accumulator::f32;
  bool read_c = true;     // false: D = A*B
  int scale_c = 0;        // D = A*B + C * 2**-scale_c
  bool saturate = false;  // s32 only
  Precision precision;
  bool portable = false;  // force the plain C++ path (its results are the same)
};

// D[o][i] = sum over k of outer[o][k] * inner[i][k] + C[o][i], for all outer rows and `count` inner rows from `first`.
// `accumulators[o]` points to `count` 32-bit words that hold C and receive D; null: nothing is computed for that row.
// An f16 accumulator sits in the low half of its word; the high half becomes `f16_high_half`.
void multiply_accumulate(const Multiplicand& outer, const Multiplicand& inner, int first, int count,
                         uint32_t* const* accumulators, const Options& options, uint16_t f16_high_half = 0);

// True if the vector path is used on this machine.
bool has_vector_path();

}  // namespace emu::mma
