// mma.sync (PTX ISA 9.7.14.5), by the same arithmetic as tcgen05.mma. On an H200 bf16, f16 and tf32 with any C, and f16
// accumulators, follow the rule bit by bit (tests/emulator/silicon).
//
// The fragments of all supported shapes are one map in bytes: register j of A holds bytes 16 (j / 2) + 4 (lane % 4) of
// row lane / 4 + 8 (j % 2); register j of B bytes 16 j + 4 (lane % 4) of column lane / 4; C and D hold two neighbours of
// row lane / 4, then of row lane / 4 + 8, in four registers or (f16) two.
//
// 8-bit floats have no instruction of their own on sm_90: the assembler converts them to f16, multiplies the low pairs of
// every register without C, then the high pairs onto that, and adds C in f32. An H200's results are exactly that.
#include <algorithm>
#include <optional>

#include "floats.h"
#include "machine.h"
#include "mma.h"

namespace emu {
namespace {

using mma::Accumulator;
using mma::Element;
using mma::Multiplicand;

constexpr int kM = 16, kN = 8, kMaxRowBytes = 32;

struct MmaSyncData : Payload {
  Element a = Element::f16, b = Element::f16;
  Accumulator d = Accumulator::f32;
  bool saturate = false;
  int k = 16;
  std::vector<Slot> regs_a, regs_b, regs_c, regs_d;
};

/// The matrices of a warp: rows of A and columns of B as bytes, C as words.
struct Matrices {
  int row_bytes = 0;
  uint8_t a[kM * kMaxRowBytes] = {}, b[kN * kMaxRowBytes] = {};
  uint32_t c[kM][kN];
};

void load(Warp& warp, const MmaSyncData& d, Matrices& m) {
  m.row_bytes = d.k * mma::container_bits(d.a) / 8;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int group = lane / 4, inside = lane % 4;
    for (size_t j = 0; j < d.regs_a.size(); ++j) {
      const size_t row = group + 8 * (j % 2);
      std::memcpy(m.a + row * m.row_bytes + 16 * (j / 2) + 4 * inside, warp.r32(d.regs_a[j]) + lane, 4);
    }
    for (size_t j = 0; j < d.regs_b.size(); ++j) {
      std::memcpy(m.b + group * m.row_bytes + 16 * j + 4 * inside, warp.r32(d.regs_b[j]) + lane, 4);
    }
    for (int i = 0; i < 4; ++i) {
      uint32_t& c = m.c[group + 8 * (i / 2)][2 * inside + i % 2];
      c = d.d == Accumulator::f16 ? warp.r32(d.regs_c[i / 2])[lane] >> (16 * (i % 2)) & 0xffff : warp.r32(d.regs_c[i])[lane];
    }
  }
}

void store(Warp& warp, const MmaSyncData& d, const Matrices& m) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int half = 0; half < 2; ++half) {
      const uint32_t* pair = &m.c[lane / 4 + 8 * half][2 * (lane % 4)];
      if (d.d == Accumulator::f16) {
        warp.r32(d.regs_d[half])[lane] = (pair[0] & 0xffff) | pair[1] << 16;
      } else {
        for (int i = 0; i < 2; ++i) warp.r32(d.regs_d[2 * half + i])[lane] = pair[i];
      }
    }
  }
}

void multiply(Element a, Element b, const uint8_t* rows, const uint8_t* columns, int k, int row_bytes, uint32_t (*c)[kN],
              const mma::Options& options) {
  const Multiplicand left(Multiplicand::Side::outer, a, false, rows, kM, k, row_bytes);
  const Multiplicand right(Multiplicand::Side::inner, b, false, columns, kN, k, row_bytes);
  uint32_t* out[kM];
  for (int m = 0; m < kM; ++m) out[m] = c[m];
  mma::multiply_accumulate(left, right, 0, kN, out, options);
}

/// Every other pair of 8-bit floats, beginning with the low or the high pair of each register, as f16.
void pairs_as_f16(const uint8_t* bytes, int count, Element element, int high, uint8_t* out) {
  const fp::Format& from = element == Element::e4m3 ? fp::kE4m3 : fp::kE5m2;
  for (int i = 0; i < count / 2; ++i) {
    const uint8_t value = bytes[i / 2 * 4 + 2 * high + i % 2];
    const uint16_t half = static_cast<uint16_t>(fp::encode(fp::decode(value, from), fp::kF16, fp::Round::rn));
    std::memcpy(out + 2 * i, &half, 2);
  }
}

void multiply_8_bit_floats(const MmaSyncData& d, Matrices& m) {
  uint32_t product[kM][kN] = {};
  mma::Options options;
  for (int high = 0; high < 2; ++high) {
    uint8_t rows[kM * kMaxRowBytes], columns[kN * kMaxRowBytes];
    pairs_as_f16(m.a, kM * m.row_bytes, d.a, high, rows);
    pairs_as_f16(m.b, kN * m.row_bytes, d.b, high, columns);
    options.read_c = high;
    multiply(Element::f16, Element::f16, rows, columns, d.k / 2, d.k, product, options);
  }
  for (int i = 0; i < kM * kN; ++i) {
    uint32_t& c = m.c[i / kN][i % kN];
    const float sum = fp::as_float(product[i / kN][i % kN]) + fp::as_float(c);
    c = sum != sum ? 0x7fffffffu : fp::as_bits(sum);
  }
}

Step run(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<MmaSyncData>();
  if (mask != kFull) fail(Fault::divergence, "mma.sync needs all 32 threads of its warp; 0x%08x execute it", mask);
  Matrices m;
  load(warp, d, m);
  if (mma::container_bits(d.a) == 8 && !mma::is_integer(d.a)) {
    multiply_8_bit_floats(d, m);
  } else {
    mma::Options options;
    options.accumulator = d.d;
    options.saturate = d.saturate;
    multiply(d.a, d.b, m.a, m.b, d.k, m.row_bytes, m.c, options);
  }
  store(warp, d, m);
  return Step::next;
}

std::optional<Element> element_of(const std::string& name) {
  constexpr std::pair<const char*, Element> names[] = {{"f16", Element::f16}, {"bf16", Element::bf16}, {"tf32", Element::tf32},
                                                       {"e4m3", Element::e4m3}, {"e5m2", Element::e5m2}, {"u8", Element::u8},
                                                       {"s8", Element::s8}};
  for (const auto& [known, element] : names)
    if (name == known) return element;
  return std::nullopt;
}

std::vector<Slot> registers(Decoder& decoder, const Statement& s, const Operand& operand, size_t count, Type type, bool write) {
  std::vector<Operand> items = operand.items;
  if (operand.kind != Operand::Kind::vector) items.assign(1, operand);
  if (items.size() != count) unsupported(s, format("'%s' takes %zu registers here; got %zu", s.mnemonic.c_str(), count, items.size()));
  std::vector<Slot> out;
  for (const Operand& item : items) out.push_back(write ? decoder.destination(item, type) : decoder.source(item, type));
  return out;
}

void decode(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<MmaSyncData>();
  if (!mods.take("aligned")) unsupported(s, "'" + s.mnemonic + "' lacks .aligned");
  const int shape = mods.take_one({"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"}, -2);
  d->k = 4 << shape;
  if (!mods.take("row") || !mods.take("col")) unsupported(s, "mma.sync is known with .row.col only");
  mods.take("kind::f8f6f4");
  d->saturate = mods.take("satfinite");
  constexpr Accumulator accumulators[] = {Accumulator::f32, Accumulator::s32, Accumulator::f16};
  const int type_d = mods.take_one({"f32", "s32", "f16"}, -2);
  std::optional<Element> types[2];
  for (std::optional<Element>& type : types) {
    const std::string name = mods.peek();
    type = element_of(name);
    if (!type) unsupported(s, "mma.sync of type ." + name + " is not known");
    mods.take(name.c_str());
  }
  d->a = *types[0];
  d->b = *types[1];
  const int type_c = mods.take_one({"f32", "s32", "f16"}, -2);
  d->d = accumulators[type_d];
  const bool integer = mma::is_integer(d->a), half = d->d == Accumulator::f16;
  if (type_c != type_d || integer != (d->d == Accumulator::s32) || integer != mma::is_integer(d->b) || (half && d->a != Element::f16)) {
    unsupported(s, "mma.sync: types do not go together");
  }
  if (d->saturate && !integer) unsupported(s, "mma.sync: .satfinite is for integers");
  const int bits = mma::container_bits(d->a), row_bytes = d->k * bits / 8;
  const bool both_8 = bits == 8 && mma::container_bits(d->b) == 8;
  if ((d->a != d->b && !both_8) || (row_bytes != 16 && row_bytes != 32)) unsupported(s, "mma.sync: this shape does not exist for these types");
  if (bits == 8 && !integer && decoder.program().target.rfind("sm_90", 0) != 0) {
    unsupported(s, "mma.sync of 8-bit floats is known for sm_90 only; the module's target is " + decoder.program().target);
  }
  decoder.operand_count(s, 4, 4);
  const size_t halves = static_cast<size_t>(row_bytes) / 16;
  const Type type = integer ? Type::s32 : half ? Type::b32 : Type::f32;
  const size_t words = half ? 2 : 4;
  d->regs_a = registers(decoder, s, s.operands[1], 2 * halves, Type::b32, false);
  d->regs_b = registers(decoder, s, s.operands[2], halves, Type::b32, false);
  d->regs_c = registers(decoder, s, s.operands[3], words, type, false);
  d->regs_d = registers(decoder, s, s.operands[0], words, type, true);
  in.aligned = true;
  in.exec = run;
  decoder.keep(in, std::move(d));
}

const Family family("mma.sync", decode);

}  // namespace
}  // namespace emu
