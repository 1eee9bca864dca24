#include "mma_operands.h"

#include <cstring>

#include "error.h"

namespace emu::mma {
namespace {

constexpr const char* kSharedDescriptor = "shared-memory descriptor";
constexpr uint32_t kAddressMask = 0x3ffffu;  // descriptors hold 18-bit addresses

uint32_t field(uint64_t bits, int low, int width) {
  return static_cast<uint32_t>((bits >> low) & ((uint64_t{1} << width) - 1));
}

bool packed_below_8_bits(Element element) {
  return element == Element::e2m3 || element == Element::e3m2 || element == Element::e2m1;
}

Element decode_element(uint32_t code, Kind kind, const char* field_name) {
  switch (kind) {
    case Kind::f16:
      if (code <= 1) return code ? Element::bf16 : Element::f16;
      break;
    case Kind::tf32:
      if (code == 2) return Element::tf32;
      break;
    case Kind::f8f6f4:
      switch (code) {
        case 0: return Element::e4m3;
        case 1: return Element::e5m2;
        case 3: return Element::e2m3;
        case 4: return Element::e3m2;
        case 5: return Element::e2m1;
      }
      break;
    case Kind::i8:
      if (code <= 1) return code ? Element::s8 : Element::u8;
      break;
  }
  fail(Fault::descriptor, "instruction descriptor: %s = %u is no type of kind::%s", field_name, code, name(kind));
}

Accumulator decode_accumulator(uint32_t code, Kind kind, Element a, Element b) {
  const bool half_allowed = kind == Kind::f8f6f4 || (kind == Kind::f16 && a == Element::f16 && b == Element::f16);
  if (kind == Kind::i8 && code == 2) return Accumulator::s32;
  if (kind != Kind::i8 && code == 1) return Accumulator::f32;
  if (half_allowed && code == 0) return Accumulator::f16;
  fail(Fault::descriptor, "instruction descriptor: dtype = %u is not allowed for kind::%s with A %s and B %s", code,
       name(kind), name(a), name(b));
}

void check_m(int m, int cta_group, bool ws) {
  const bool legal = ws ? m == 32 || m == 64 || m == 128 : cta_group == 1 ? m == 64 || m == 128 : m == 128 || m == 256;
  if (!legal) {
    fail(Fault::descriptor, "instruction descriptor: M = %d; cta_group::%d%s takes %s", m, cta_group, ws ? " .ws" : "",
         ws ? "32, 64 or 128" : cta_group == 1 ? "64 or 128" : "128 or 256");
  }
}

void check_n(const InstructionDescriptor& d, Kind kind, int cta_group, bool ws) {
  const int n = d.n;
  std::string rule;
  bool legal = false;
  if (ws) {
    legal = n == 64 || n == 128 || n == 256;
    rule = "64, 128 or 256";
  } else if (kind == Kind::i8) {
    if (cta_group == 1) {
      legal = n <= 32 ? n >= 8 && n % 8 == 0 : n <= 256 && n % 16 == 0;
      rule = "8, 16, 24, 32, 48, ... 256 (steps of 16)";
    } else {
      legal = n >= 32 && n <= 256 && n % 32 == 0;
      rule = "32, 64, ... 256";
    }
  } else {
    const int step = 8 * cta_group;
    legal = n >= step && n <= 256 && n % step == 0;
    rule = format("multiples of %d from %d to 256", step, step);
  }
  if (!legal) {
    fail(Fault::descriptor, "instruction descriptor: N = %d; kind::%s cta_group::%d%s takes %s", n, name(kind), cta_group,
         ws ? " .ws" : "", rule.c_str());
  }
  // Table "N shape with cta_group for 8-bit transpose B".
  const int step = 16 * cta_group;
  if (d.mn_major_b && container_bits(d.b) == 8 && n % step != 0) {
    fail(Fault::descriptor, "instruction descriptor: N = %d; a transposed 8-bit B with cta_group::%d takes multiples of %d",
         n, cta_group, step);
  }
}

void check_zero(uint64_t bits, int low, int width, const char* descriptor) {
  const uint32_t value = field(bits, low, width);
  if (value) {
    fail(Fault::descriptor, "%s: bits %d-%d must be zero, are 0x%x (descriptor 0x%llx)", descriptor, low, low + width - 1,
         value, static_cast<unsigned long long>(bits));
  }
}

uint32_t swizzle(const SharedDescriptor& d, uint32_t address) {
  // The pattern's rows are 128 bytes; base_offset says which of eight such rows of the address space it begins in.
  const uint32_t row = ((address >> 7) - static_cast<uint32_t>(d.base_offset)) & 7;
  switch (d.swizzle) {
    case Swizzle::none: return address;
    case Swizzle::b32: return address ^ (row & 1) << 4;
    case Swizzle::b64: return address ^ (row & 3) << 4;
    case Swizzle::b128: return address ^ row << 4;
    case Swizzle::b128_atom32: return address ^ (row & 3) << 5;
  }
  return address;
}

// Units of 128 bits that a row of the swizzle atom holds along the leading dimension.
uint32_t atom_units(Swizzle mode) {
  switch (mode) {
    case Swizzle::none: return 1;
    case Swizzle::b32: return 2;
    case Swizzle::b64: return 4;
    default: return 8;
  }
}

uint32_t place(const SharedDescriptor& d, uint32_t offset) { return swizzle(d, (d.start + offset) & kAddressMask); }

// Sixteen elements of 6 or 4 bits, one after the other from the lowest bit on, to a byte each.
void unpack_unit(const uint8_t* unit, int bits, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    const int at = i * bits;
    const uint32_t pair = unit[at / 8] | (at / 8 + 1 < kUnitBytes ? unit[at / 8 + 1] : 0u) << 8;
    out[i] = static_cast<uint8_t>(pair >> (at % 8) & ((1u << bits) - 1));
  }
}

}  // namespace

const char* name(Kind kind) {
  constexpr const char* names[] = {"f16", "tf32", "f8f6f4", "i8"};
  return names[static_cast<int>(kind)];
}

InstructionDescriptor decode_instruction_descriptor(uint32_t bits, Kind kind, int cta_group, bool ws) {
  constexpr const char* what = "instruction descriptor";
  if (field(bits, 2, 1)) fail(Fault::descriptor, "%s: the sparsity bit is set (0x%08x), but the MMA is not .sp", what, bits);
  check_zero(bits, 0, 2, what);
  check_zero(bits, 6, 1, what);
  check_zero(bits, 23, 1, what);
  check_zero(bits, 29, 1, what);
  if (kind != Kind::i8) check_zero(bits, 3, 1, what);
  if (kind == Kind::i8) check_zero(bits, 13, 2, what);
  if (!ws) check_zero(bits, 30, 2, what);
  InstructionDescriptor d;
  d.saturate = field(bits, 3, 1);
  d.a = decode_element(field(bits, 7, 3), kind, "atype");
  d.b = decode_element(field(bits, 10, 3), kind, "btype");
  d.d = decode_accumulator(field(bits, 4, 2), kind, d.a, d.b);
  d.negate_a = field(bits, 13, 1);
  d.negate_b = field(bits, 14, 1);
  d.mn_major_a = field(bits, 15, 1);
  d.mn_major_b = field(bits, 16, 1);
  d.n = static_cast<int>(field(bits, 17, 6)) * 8;
  d.m = static_cast<int>(field(bits, 24, 5)) * 16;
  const uint32_t shift = field(bits, 30, 2);
  d.max_shift = shift ? 4 << shift : 0;
  check_m(d.m, cta_group, ws);
  check_n(d, kind, cta_group, ws);
  return d;
}

namespace {

SharedDescriptor fields_of(uint64_t bits, uint32_t mode) {
  SharedDescriptor d;
  d.start = field(bits, 0, 14) << 4;
  d.leading = field(bits, 16, 14) << 4;
  d.stride = field(bits, 32, 14) << 4;
  d.base_offset = static_cast<int>(field(bits, 49, 3));
  d.swizzle = static_cast<Swizzle>(mode);
  if (d.swizzle == Swizzle::none && d.base_offset) {
    fail(Fault::descriptor, "%s: base offset %d without swizzling", kSharedDescriptor, d.base_offset);
  }
  return d;
}

}  // namespace

SharedDescriptor decode_wgmma_descriptor(uint64_t bits) {
  for (const auto& [low, width] : {std::pair(14, 2), {30, 2}, {46, 3}, {52, 10}}) check_zero(bits, low, width, kSharedDescriptor);
  return fields_of(bits, field(bits, 62, 2) << 1);
}

SharedDescriptor decode_shared_descriptor(uint64_t bits) {
  constexpr const char* what = kSharedDescriptor;
  const uint32_t version = field(bits, 46, 3);
  if (version != 1) {
    fail(Fault::descriptor, "%s: bits 46-48 must be 0b001, are 0x%x (descriptor 0x%016llx)", what, version,
         static_cast<unsigned long long>(bits));
  }
  check_zero(bits, 14, 2, what);
  check_zero(bits, 30, 2, what);
  check_zero(bits, 53, 8, what);
  if (field(bits, 52, 1)) {
    fail(Fault::unsupported, "%s: absolute leading-dimension addresses (bit 52, sm_103a with K of 48 bytes) are not known",
         what);
  }
  const uint32_t mode = field(bits, 61, 3);
  if (mode == 3 || mode == 5 || mode == 7) {
    fail(Fault::descriptor, "%s: swizzle mode %u (bits 61-63) is invalid; 0, 1, 2, 4 and 6 exist", what, mode);
  }
  return fields_of(bits, mode);
}

std::vector<uint32_t> k_major_units(const SharedDescriptor& d, int rows, int units_per_row) {
  // ((8, m), units) : ((atom row, SBO), next unit): the next unit lies LBO away without swizzling, else beside the first.
  const uint32_t row_bytes = atom_units(d.swizzle) * kUnitBytes;
  const uint32_t unit_step = d.swizzle == Swizzle::none ? d.leading : kUnitBytes;
  std::vector<uint32_t> units;
  units.reserve(static_cast<size_t>(rows) * units_per_row);
  for (int row = 0; row < rows; ++row) {
    const uint32_t offset = row % 8 * row_bytes + row / 8 * d.stride;
    for (int u = 0; u < units_per_row; ++u) units.push_back(place(d, offset + u * unit_step));
  }
  return units;
}

std::vector<uint32_t> mn_major_units(const SharedDescriptor& d, int rows, int element_bytes) {
  // Swizzled: ((T, s, m), (8, k)) : ((1, T, LBO), (s T, SBO)), four instead of eight K rows an atom of 32-byte units.
  // Not swizzled: ((T, 1, m), (8, k)) : ((1, T, SBO), (T, LBO)).
  const uint32_t s = atom_units(d.swizzle);
  const bool plain = d.swizzle == Swizzle::none;
  const int atom_k = d.swizzle == Swizzle::b128_atom32 ? 4 : 8;
  const uint32_t next_group = plain ? d.stride : d.leading, next_k = plain ? d.leading : d.stride;
  const int groups = rows * element_bytes / kUnitBytes, k_count = kRowBytes / element_bytes;
  std::vector<uint32_t> units;
  units.reserve(static_cast<size_t>(groups) * k_count);
  for (int g = 0; g < groups; ++g) {
    const uint32_t along_mn = g % s * kUnitBytes + g / s * next_group;
    for (int k = 0; k < k_count; ++k) {
      units.push_back(place(d, along_mn + k % atom_k * s * kUnitBytes + k / atom_k * next_k));
    }
  }
  return units;
}

SharedOperand::SharedOperand(const SharedDescriptor& descriptor, Element element_, bool mn_major_, int rows_,
                             const char* what)
    : element(element_), mn_major(mn_major_), rows(rows_) {
  const bool atom32 = descriptor.swizzle == Swizzle::b128_atom32;
  const int bytes = container_bits(element) / 8;
  if (!mn_major) {
    if (atom32) {
      fail(Fault::unsupported, "%s: 128-byte swizzling with 32-byte atoms is known only for MN-major operands", what);
    }
    units = k_major_units(descriptor, rows, kRowBytes / kUnitBytes);
    return;
  }
  if (packed_below_8_bits(element)) {
    fail(Fault::descriptor, "%s of type %s cannot be transposed (MN-major)", what, name(element));
  }
  if (element == Element::tf32 && !atom32) {
    fail(Fault::descriptor, "%s of type tf32 is transposed (MN-major): only 128-byte swizzling with 32-byte atoms is legal",
         what);
  }
  if (element != Element::tf32 && atom32) {
    fail(Fault::descriptor, "%s of type %s is transposed (MN-major): 128-byte swizzling with 32-byte atoms is not legal",
         what, name(element));
  }
  units = mn_major_units(descriptor, rows, bytes);
}

SharedOperand SharedOperand::part(int first, int count) const {
  const int rows_a_unit = mn_major ? kUnitBytes * 8 / container_bits(element) : 1;
  const size_t row_units = mn_major ? kRowBytes * 8 / container_bits(element) : kRowBytes / kUnitBytes;
  SharedOperand out;
  out.element = element;
  out.mn_major = mn_major;
  out.rows = count;
  const auto begin = units.begin() + static_cast<ptrdiff_t>(first / rows_a_unit * row_units);
  out.units.assign(begin, begin + static_cast<ptrdiff_t>(count / rows_a_unit * row_units));
  return out;
}

std::vector<uint8_t> SharedOperand::gather(const uint8_t* shared) const {
  std::vector<uint8_t> packed(static_cast<size_t>(rows) * kRowBytes);
  if (!mn_major) {
    const int bits = element == Element::e2m1 ? 4 : packed_below_8_bits(element) ? 6 : 0;
    for (size_t i = 0; i < units.size(); ++i) {
      if (bits) {
        unpack_unit(shared + units[i], bits, packed.data() + i * kUnitBytes);
      } else {
        std::memcpy(packed.data() + i * kUnitBytes, shared + units[i], kUnitBytes);
      }
    }
    return packed;
  }
  const int bytes = container_bits(element) / 8;
  const int per_unit = kUnitBytes / bytes, k_count = kRowBytes / bytes;
  for (size_t i = 0; i < units.size(); ++i) {
    const size_t first_row = i / k_count * per_unit, k = i % k_count;
    for (int e = 0; e < per_unit; ++e) {
      std::memcpy(packed.data() + (first_row + e) * kRowBytes + k * bytes, shared + units[i] + e * bytes, bytes);
    }
  }
  return packed;
}

std::vector<uint8_t> SharedOperand::snapshot(const uint8_t* shared) const {
  std::vector<uint8_t> bytes(units.size() * kUnitBytes);
  for (size_t i = 0; i < units.size(); ++i) std::memcpy(bytes.data() + i * kUnitBytes, shared + units[i], kUnitBytes);
  return bytes;
}

bool SharedOperand::unchanged(const uint8_t* shared, const std::vector<uint8_t>& snapshot) const {
  for (size_t i = 0; i < units.size(); ++i)
    if (std::memcmp(snapshot.data() + i * kUnitBytes, shared + units[i], kUnitBytes) != 0) return false;
  return true;
}

char layout_letter(const InstructionDescriptor& d, int cta_group, bool ws) {
  if (cta_group == 2) return d.m == 256 ? 'A' : 'B';
  if (d.m == 128) return 'D';
  return d.m == 32 ? 'G' : ws ? 'E' : 'F';
}

int accumulator_columns(const InstructionDescriptor& d, int cta_group, bool ws) {
  switch (layout_letter(d, cta_group, ws)) {
    case 'B':
    case 'E': return d.n / 2;
    case 'G': return d.n / 4;
    default: return d.n;
  }
}

std::vector<PlacedBlock> place_accumulator(const InstructionDescriptor& d, int cta_group, bool ws, int lane) {
  const char layout = layout_letter(d, cta_group, ws);
  const bool half_path = layout == 'F';
  if (lane != 0 && !(half_path && lane == 16)) {
    fail(Fault::descriptor, "the accumulator of an MMA with M = %d, cta_group::%d%s (layout %c) begins in lane %d; it must be %s",
         d.m, cta_group, ws ? " .ws" : "", layout, lane, half_path ? "0 or 16" : "0");
  }
  const int columns = accumulator_columns(d, cta_group, ws);
  std::vector<PlacedBlock> blocks;
  switch (layout) {
    case 'F':
      for (int q = 0; q < 4; ++q) blocks.push_back({16 * q, 16, 32 * q + lane, 0, columns});
      break;
    case 'B':
    case 'E':
      for (int h = 0; h < 2; ++h) blocks.push_back({0, 64, 64 * h, h * columns, columns});
      break;
    case 'G':
      for (int q = 0; q < 4; ++q) blocks.push_back({0, 32, 32 * q, q * columns, columns});
      break;
    default: blocks.push_back({0, 128, 0, 0, columns});
  }
  return blocks;
}

}  // namespace emu::mma
