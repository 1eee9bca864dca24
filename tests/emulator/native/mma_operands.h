// Where the operands of a tcgen05 matrix multiplication lie: instruction descriptors, shared-memory matrix descriptors
// with their canonical layouts, and the data-path layouts of D in tensor memory (PTX ISA 9.7.16.2-4 and .10).
//
// Everything illegal throws Verdict(descriptor) with the field, its value and what is legal; what is legal but not
// known here throws Verdict(unsupported).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mma.h"

namespace emu::mma {

enum class Kind : uint8_t { f16, tf32, f8f6f4, i8 };
const char* name(Kind kind);

constexpr int kRowBytes = 32;   // bytes of K in one row of A (and one column of B) of a dense MMA, in containers
constexpr int kUnitBytes = 16;  // descriptors move units of 128 bits

/// The instruction descriptor of a dense MMA.
struct InstructionDescriptor {
  Element a = Element::f16, b = Element::f16;
  Accumulator d = Accumulator::f32;
  bool saturate = false;
  bool negate_a = false, negate_b = false;
  bool mn_major_a = false, mn_major_b = false;
  int m = 0, n = 0;        // of the whole operation: with cta_group::2, of both CTAs together
  int max_shift = 0;       // .ws only

  int k() const { return kRowBytes * 8 / container_bits(a); }
};

/// Decodes and checks every field against kind, cta_group (1 or 2) and .ws.
InstructionDescriptor decode_instruction_descriptor(uint32_t bits, Kind kind, int cta_group, bool ws);

enum class Swizzle : uint8_t { none = 0, b128_atom32 = 1, b128 = 2, b64 = 4, b32 = 6 };

/// A shared-memory matrix descriptor. Addresses and strides in bytes.
struct SharedDescriptor {
  uint32_t start = 0;
  uint32_t leading = 0, stride = 0;
  int base_offset = 0;
  Swizzle swizzle = Swizzle::none;
};

/// Of tcgen05 (PTX ISA 9.7.16.4.1).
SharedDescriptor decode_shared_descriptor(uint64_t bits);
/// Of wgmma (PTX ISA 9.7.15.5.1.2.2): the swizzle mode has two bits, and the constant 0b001 is missing.
SharedDescriptor decode_wgmma_descriptor(uint64_t bits);

/// Shared-memory offsets of the 16-byte units of an operand of `rows` rows (of A; columns of B).
/// K-major: `units_per_row` units a row, unit u of row r at [r * units_per_row + u].
/// `element_bytes` is the container's; MN-major: unit (g, k) at [g * k_count + k] holds elements g*T .. g*T+T-1 of
/// K index k, with T = 16 / element_bytes and k_count = 32 / element_bytes.
std::vector<uint32_t> k_major_units(const SharedDescriptor& descriptor, int rows, int units_per_row);
std::vector<uint32_t> mn_major_units(const SharedDescriptor& descriptor, int rows, int element_bytes);

/// An operand's units, and how they become rows of 32 bytes.
struct SharedOperand {
  SharedOperand() = default;
  std::vector<uint32_t> units;
  Element element = Element::f16;
  bool mn_major = false;
  int rows = 0;

  /// Checks that element, major-ness and swizzle go together. `what` is "A" or "B", for the message.
  SharedOperand(const SharedDescriptor& descriptor, Element element, bool mn_major, int rows, const char* what);
  /// `count` rows from `first` on; for MN-major operands both are multiples of the elements in a unit.
  SharedOperand part(int first, int count) const;
  /// `shared` is indexed by the units' offsets. The result has `rows` rows of kRowBytes, one container an element.
  std::vector<uint8_t> gather(const uint8_t* shared) const;
  /// The units' bytes as they lie in memory, and whether they are still the same: cheaper than to gather them again.
  std::vector<uint8_t> snapshot(const uint8_t* shared) const;
  bool unchanged(const uint8_t* shared, const std::vector<uint8_t>& snapshot) const;
};

/// Consecutive rows of D, in consecutive lanes: D[row + i][n + j] lies in lane + i, column j of the accumulator.
struct PlacedBlock {
  int row, rows, lane, n, columns;
};

/// The part of D that one CTA holds; `lane` is the lane of the accumulator's address (0, or 16 for half data paths).
std::vector<PlacedBlock> place_accumulator(const InstructionDescriptor& descriptor, int cta_group, bool ws, int lane);
/// Letter of the data-path layout, for reports.
char layout_letter(const InstructionDescriptor& descriptor, int cta_group, bool ws);
/// Tensor-memory columns of D in each CTA.
int accumulator_columns(const InstructionDescriptor& descriptor, int cta_group, bool ws);

}  // namespace emu::mma
