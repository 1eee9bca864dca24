// Opcode cvt in all its forms (PTX ISA 9.7.9.21), without stochastic rounding and the s2f6 format.
#include <string>

#include "floats.h"
#include "lanes.h"
#include "machine.h"
#include "program.h"

namespace emu {
namespace {

using fp::Format;
using fp::Round;

struct Form {
  Round round = Round::rn;
  bool float_round = false, integer_round = false, ftz = false, sat = false, satfinite = false, relu = false;
  Type to = Type::none, from = Type::none;
};

Form parse_form(const Statement& statement, Modifiers& mods) {
  Form form;
  const auto round = [&](Round value, bool integer) {
    form.round = value;
    (integer ? form.integer_round : form.float_round) = true;
  };
  for (;;) {
    if (mods.take("rn")) round(Round::rn, false);
    else if (mods.take("rz")) round(Round::rz, false);
    else if (mods.take("rm")) round(Round::rm, false);
    else if (mods.take("rp")) round(Round::rp, false);
    else if (mods.take("rna")) round(Round::rna, false);
    else if (mods.take("rni")) round(Round::rn, true);
    else if (mods.take("rzi")) round(Round::rz, true);
    else if (mods.take("rmi")) round(Round::rm, true);
    else if (mods.take("rpi")) round(Round::rp, true);
    else if (mods.take("ftz")) form.ftz = true;
    else if (mods.take("sat")) form.sat = true;
    else if (mods.take("satfinite")) form.satfinite = true;
    else if (mods.take("relu")) form.relu = true;
    else break;
  }
  form.to = mods.need_type();
  form.from = mods.need_type();
  mods.done();
  if (form.float_round && form.integer_round) unsupported(statement, "two rounding modifiers");
  return form;
}

// A scalar number type, as cvt's plain form takes it.
struct Number {
  bool is_float = false;
  bool is_signed = false;
  int bits = 0;
  const Format* format = nullptr;
};

bool number(Type type, Number* out) {
  switch (type) {
    case Type::f16: *out = {true, true, 16, &fp::kF16}; return true;
    case Type::bf16: *out = {true, true, 16, &fp::kBf16}; return true;
    case Type::f32: *out = {true, true, 32, &fp::kF32}; return true;
    case Type::f64: *out = {true, true, 64, &fp::kF64}; return true;
    case Type::u8:
    case Type::u16:
    case Type::u32:
    case Type::u64: *out = {false, false, type_bits(type), nullptr}; break;
    case Type::s8:
    case Type::s16:
    case Type::s32:
    case Type::s64: *out = {false, true, type_bits(type), nullptr}; break;
    default: return false;
  }
  if (type == Type::u8 || type == Type::s8) out->bits = 8;  // whatever register holds it
  return true;
}

struct CvtData : Payload {
  Form form;
  Number to, from;
  int to_register = 32, from_register = 32;  // declared widths
  fp::PackMode pack{fp::kF16};
  bool bf16 = false;
};

uint64_t truncate(uint64_t value, int bits) { return bits == 64 ? value : value & ((uint64_t{1} << bits) - 1); }

// ---- plain form: one number to one number -------------------------------------------------------

// Between f64 and the narrower formats a NaN keeps what fits of its payload, by way of f32.
uint64_t convert_nan(uint64_t raw, const CvtData& data) {
  if (data.form.sat) return 0;
  if (data.to.bits == 64) {
    if (data.from.bits == 16) raw = data.from.format == &fp::kBf16 ? raw << 16 : fp::kF32.nan;
    return fp::widen_nan(static_cast<uint32_t>(raw));
  }
  return data.to.bits == 32 ? fp::narrow_nan(raw) : data.to.format->nan;
}

uint64_t convert_one(uint64_t raw, const CvtData& data) {
  const Form& form = data.form;
  if (!data.from.is_float) {
    const uint64_t value = fp::convert_integer(raw, false, data.from.bits, data.from.is_signed, false);
    if (!data.to.is_float)
      return fp::convert_integer(value, data.from.is_signed, data.to.bits, data.to.is_signed, form.sat);
    const uint64_t bits = fp::from_integer(value, data.from.is_signed, *data.to.format, form.round);
    if (!form.sat) return bits;
    return fp::encode(fp::saturate(fp::decode(bits, *data.to.format)), *data.to.format, Round::rn);
  }
  raw = truncate(raw, data.from.bits);
  if (form.ftz && data.from.bits == 32) raw = fp::flush_f32(static_cast<uint32_t>(raw));
  double value = fp::decode(raw, *data.from.format);
  const bool crosses_f64 = (data.to.bits == 64) != (data.from.bits == 64);
  if (value != value && data.to.is_float && crosses_f64) return convert_nan(raw, data);
  if (!data.to.is_float) {
    return fp::to_integer(value, form.round, data.to.bits, data.to.is_signed, data.from.bits == 64);
  }
  if (form.integer_round) value = fp::round_to_integral(value, form.round);
  if (form.sat) value = fp::saturate(value);
  const uint64_t bits =
      fp::encode(value, *data.to.format, form.integer_round ? Round::rn : form.round, form.satfinite, form.relu);
  return form.ftz && data.to.bits == 32 ? fp::flush_f32(static_cast<uint32_t>(bits)) : bits;
}

template <class To, class From>
Step run_plain(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<CvtData>();
  const auto* a = reinterpret_cast<const From*>(warp.registers + in.slot[1]);
  auto* d = reinterpret_cast<To*>(warp.registers + in.slot[0]);
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i & 1) != 0) d[i] = static_cast<To>(truncate(convert_one(a[i], data), data.to_register));
  }
  return Step::next;
}

// Integers of the same signedness or mere truncation, the bulk of address arithmetic.
template <class To, class From, class Middle>
Step run_extend(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto* a = reinterpret_cast<const From*>(warp.registers + in.slot[1]);
  auto* d = reinterpret_cast<To*>(warp.registers + in.slot[0]);
  for (int i = 0; i < kLanes; ++i) {
    const To value = static_cast<To>(static_cast<Middle>(a[i]));
    d[i] = (mask >> i & 1) != 0 ? value : d[i];
  }
  return Step::next;
}

Step run_widen_bf16(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    const uint32_t* a = warp.r32(in.slot[1]);
    for (int i = 0; i < kLanes; ++i) d[i] = a[i] << 16;
  });
}

Exec integer_shortcut(const CvtData& data) {
  if (data.form.sat || data.to.is_float || data.from.is_float) return nullptr;
  if (data.to_register == 64 && data.to.bits == 64 && data.from_register == 32 && data.from.bits == 32) {
    return data.from.is_signed ? run_extend<uint64_t, uint32_t, int32_t> : run_extend<uint64_t, uint32_t, uint32_t>;
  }
  if (data.to_register == 32 && data.to.bits == 32 && data.from_register == 64 && data.from.bits == 64) {
    return run_extend<uint32_t, uint64_t, uint64_t>;
  }
  if (data.to_register == 16 && data.to.bits == 16 && data.from_register == 32)
    return run_extend<uint32_t, uint32_t, uint16_t>;
  if (data.to_register == 32 && data.to.bits == 32 && data.from_register == 16 && data.from.bits == 16 &&
      !data.from.is_signed) {
    return run_extend<uint32_t, uint32_t, uint16_t>;
  }
  return nullptr;
}

void check_plain(const Statement& statement, const CvtData& data) {
  const Form& form = data.form;
  const Number &to = data.to, &from = data.from;
  if (form.round == Round::rna) unsupported(statement, ".rna is for .tf32 only");
  if (!to.is_float && !from.is_float) {
    if (form.float_round || form.integer_round || form.ftz)
      unsupported(statement, "integer conversion with a float modifier");
  } else if (!to.is_float) {
    if (!form.integer_round) unsupported(statement, "float to integer needs .rni, .rzi, .rmi or .rpi");
  } else if (!from.is_float) {
    if (!form.float_round) unsupported(statement, "integer to float needs .rn, .rz, .rm or .rp");
  } else {
    const bool loses =
        to.format->mantissa_bits < from.format->mantissa_bits || to.format->exponent_bits < from.format->exponent_bits;
    if (loses && !form.float_round) unsupported(statement, "this float conversion needs a rounding modifier");
    if (!loses && form.float_round)
      unsupported(statement, "this float conversion is exact and takes no rounding modifier");
    if (form.integer_round && to.format != from.format)
      unsupported(statement, "rounding to integral needs equal types");
  }
  if ((form.relu || form.satfinite) && !(to.is_float && to.bits == 16 && from.is_float)) {
    unsupported(statement, ".relu and .satfinite are for conversions of floats to f16 and bf16");
  }
  if (form.ftz && to.bits != 32 && from.bits != 32) unsupported(statement, ".ftz needs an .f32 operand");
}

// Declared width of the register behind an operand; literals have the width of the type.
int register_bits(const Operand& operand, int type) {
  const int bits = operand.kind == Operand::Kind::reg ? operand.bits : type;
  return bits < 16 ? 16 : bits;
}

void decode_plain(Decoder& decoder, const Statement& statement, Instruction& instruction,
                  std::unique_ptr<CvtData> data) {
  check_plain(statement, *data);
  decoder.operand_count(statement, 2, 2);
  const Operand &d = statement.operands[0], &a = statement.operands[1];
  const bool wide_ok = data->form.to != Type::bf16;
  instruction.slot[0] = decoder.destination(d, data->form.to, false, wide_ok);
  instruction.slot[1] = decoder.source(a, data->form.from, data->form.from != Type::bf16);
  data->to_register = register_bits(d, data->to.bits);
  data->from_register = register_bits(a, data->from.bits);
  if (data->to_register < data->to.bits || data->from_register < data->from.bits) {
    unsupported(statement, "a register is narrower than its type");
  }
  const bool to64 = data->to_register == 64, from64 = data->from_register == 64;
  instruction.exec = to64 ? (from64 ? run_plain<uint64_t, uint64_t> : run_plain<uint64_t, uint32_t>)
                          : (from64 ? run_plain<uint32_t, uint64_t> : run_plain<uint32_t, uint32_t>);
  if (const Exec shortcut = integer_shortcut(*data)) instruction.exec = shortcut;
  if (data->form.to == Type::f32 && data->form.from == Type::bf16 && !data->form.ftz && !data->form.sat &&
      data->to_register == 32 && !data->form.integer_round) {
    instruction.exec = run_widen_bf16;
  }
  decoder.keep(instruction, std::move(data));
}

// ---- packed forms -------------------------------------------------------------------------------

const Format* packed_format(Type type) {
  switch (type) {
    case Type::f16x2: return &fp::kF16;
    case Type::bf16x2: return &fp::kBf16;
    case Type::e4m3x2: return &fp::kE4m3;
    case Type::e5m2x2: return &fp::kE5m2;
    case Type::e2m3x2: return &fp::kE2m3;
    case Type::e3m2x2: return &fp::kE3m2;
    case Type::e2m1x2: return &fp::kE2m1;
    default: return nullptr;
  }
}

Step run_pack_bf16_rn(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::pack_bf16x2_rn(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, kLanes);
  });
}

Step run_pack_f32(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::pack2_f32(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, kLanes, in.as<CvtData>().pack);
  });
}

Step run_pack_half(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::pack2_half(warp.r32(in.slot[1]), in.as<CvtData>().bf16, d, kLanes, in.as<CvtData>().pack);
  });
}

Step run_unpack(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<CvtData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::unpack2_f16(warp.r32(in.slot[1]), data.pack.format, data.form.relu, d, kLanes);
  });
}

Step run_pack_ue8m0(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<CvtData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    if (data.bf16) {
      fp::pack2_ue8m0_bf16(warp.r32(in.slot[1]), d, kLanes, data.form.round, data.form.satfinite);
    } else {
      fp::pack2_ue8m0(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, kLanes, data.form.round, data.form.satfinite);
    }
  });
}

Step run_unpack_ue8m0(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask,
                         [&](uint32_t* d) { fp::unpack2_ue8m0(warp.r32(in.slot[1]), d, kLanes); });
}

Step run_tf32(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& form = in.as<CvtData>().form;
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    const float* a = warp.f32(in.slot[1]);
    for (int i = 0; i < kLanes; ++i) d[i] = fp::encode_tf32(a[i], form.round, form.satfinite, form.relu);
  });
}

// The register that a packed type travels in.
Type container(Type type) {
  switch (type_bits(type)) {
    case 8: return Type::b8;
    case 16: return Type::b16;
    default: return Type::b32;
  }
}

void decode_packed(Decoder& decoder, const Statement& statement, Instruction& instruction,
                   std::unique_ptr<CvtData> data) {
  const Form& form = data->form;
  const Format* to = packed_format(form.to);
  const Format* from = packed_format(form.from);
  const bool from_half = form.from == Type::f16x2 || form.from == Type::bf16x2;
  if (form.sat || form.ftz || form.integer_round || !form.float_round) {
    unsupported(statement, "this conversion takes one float rounding modifier, .relu and .satfinite only");
  }
  const bool to_half = form.to == Type::f16x2 || form.to == Type::bf16x2;
  const bool two_sources = form.from == Type::f32 && form.to != Type::tf32;
  data->bf16 = form.from == Type::bf16x2;
  bool known = true;
  if (form.to == Type::tf32) {
    known = form.from == Type::f32 && (form.round == Round::rn || form.round == Round::rz || form.round == Round::rna);
    instruction.exec = run_tf32;
  } else if (form.to == Type::ue8m0x2) {
    known =
        (form.from == Type::f32 || data->bf16) && (form.round == Round::rz || form.round == Round::rp) && !form.relu;
    instruction.exec = run_pack_ue8m0;
  } else if (form.from == Type::ue8m0x2) {
    known = form.to == Type::bf16x2 && form.round == Round::rn && !form.relu && !form.satfinite;
    instruction.exec = run_unpack_ue8m0;
  } else if (to != nullptr && form.from == Type::f32) {
    known = form.round == Round::rn || (to_half && form.round == Round::rz);
    known = known && (to_half || form.satfinite);
    data->pack = {*to, form.round, form.satfinite, form.relu};
    const bool plain = form.to == Type::bf16x2 && form.round == Round::rn && !form.satfinite && !form.relu;
    instruction.exec = plain ? run_pack_bf16_rn : run_pack_f32;
  } else if (to != nullptr && !to_half && from_half) {
    known = form.round == Round::rn && form.satfinite;
    data->pack = {*to, form.round, form.satfinite, form.relu};
    instruction.exec = run_pack_half;
  } else if (from != nullptr && !from_half && form.to == Type::f16x2) {
    known = form.round == Round::rn && !form.satfinite;
    data->pack = {*from};
    instruction.exec = run_unpack;
  } else {
    known = false;
  }
  if (!known) unsupported(statement, "this conversion");
  decoder.operand_count(statement, two_sources ? 3 : 2, two_sources ? 3 : 2);
  const bool wide_ok = form.to != Type::bf16x2 && form.to != Type::tf32;
  instruction.slot[0] = decoder.destination(statement.operands[0], container(form.to), false, wide_ok);
  const Type source = form.from == Type::f32 ? Type::f32 : container(form.from);
  instruction.slot[1] = decoder.source(statement.operands[1], source, source != Type::f32 && !data->bf16);
  if (two_sources) instruction.slot[2] = decoder.source(statement.operands[2], source);
  if (register_bits(statement.operands[0], 32) == 64 || register_bits(statement.operands[1], 32) == 64) {
    unsupported(statement, "a 64-bit register in a packed conversion");
  }
  decoder.keep(instruction, std::move(data));
}

void decode_cvt(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  auto data = std::make_unique<CvtData>();
  data->form = parse_form(statement, mods);
  if (number(data->form.to, &data->to) && number(data->form.from, &data->from)) {
    return decode_plain(decoder, statement, instruction, std::move(data));
  }
  decode_packed(decoder, statement, instruction, std::move(data));
}

// ---- cvt.pack ----------------------------------------------------------------------------------

// Two s32, clamped, side by side in the low bits; 8-bit pairs push the low half of c up.
Step run_pack_integers(Warp& warp, const Instruction& in, uint32_t mask) {
  const bool is_signed = in.flags != 0;
  const int bits = static_cast<int>(in.imm);
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    for (int i = 0; i < kLanes; ++i) {
      const auto clamp = [&](Slot slot) {
        const auto wide = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(warp.r32(slot)[i])));
        return static_cast<uint32_t>(truncate(fp::convert_integer(wide, true, bits, is_signed, true), bits));
      };
      const uint32_t rest = bits == 8 ? warp.r32(in.slot[3])[i] << 16 : 0;
      d[i] = rest | clamp(in.slot[1]) << bits | clamp(in.slot[2]);
    }
  });
}

void decode_pack(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  if (!mods.take("sat")) unsupported(statement, "cvt.pack needs .sat");
  const int type = mods.take_one({"u16", "s16", "u8", "s8"}, -2);
  instruction.imm = type < 2 ? 16 : 8;
  instruction.flags = type % 2 == 1 ? 1 : 0;
  const bool third = instruction.imm == 8;
  if (!mods.take("s32") || (third && !mods.take("b32"))) unsupported(statement, "the types of cvt.pack");
  mods.done();
  decoder.operand_count(statement, third ? 4 : 3, third ? 4 : 3);
  instruction.slot[0] = decoder.destination(statement.operands[0], Type::b32);
  for (size_t i = 1; i < statement.operands.size(); ++i) {
    instruction.slot[i] = decoder.source(statement.operands[i], Type::b32);
  }
  instruction.exec = run_pack_integers;
}

const Family family("cvt", decode_cvt);
const Family pack_family("cvt.pack", decode_pack);

}  // namespace
}  // namespace emu
