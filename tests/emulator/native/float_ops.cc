// Opcodes of floating-point arithmetic: decoding to the lane functions of floats.h.
//
// add, sub, mul, min, max, neg, abs, mad and div exist for integers too; here only their float forms are registered, by
// the components that set them apart ("add.rn", "add.f32", ...).
#include <cmath>
#include <string>

#include "floats.h"
#include "lanes.h"
#include "machine.h"
#include "program.h"

namespace emu {
namespace {

using fp::Approx;
using fp::Mode;
using fp::Round;

// Everything between the opcode's name and its types, in any order.
struct Form {
  Round round = Round::rn;
  bool has_round = false, ftz = false, sat = false, relu = false, nan = false, abs = false, xorsign = false;
  bool approx = false, full = false, oob = false;
  std::vector<Type> types;
};

Form parse_form(const Statement& statement, Modifiers& mods) {
  Form form;
  const auto round = [&](Round value) {
    form.round = value;
    form.has_round = true;
  };
  for (size_t i = 1; i < statement.opcode.size(); ++i) {
    const std::string& part = statement.opcode[i];
    if (part == "rn") round(Round::rn);
    else if (part == "rz") round(Round::rz);
    else if (part == "rm") round(Round::rm);
    else if (part == "rp") round(Round::rp);
    else if (part == "ftz") form.ftz = true;
    else if (part == "sat") form.sat = true;
    else if (part == "relu") form.relu = true;
    else if (part == "NaN") form.nan = true;
    else if (part == "abs") form.abs = true;
    else if (part == "xorsign") form.xorsign = true;
    else if (part == "approx") form.approx = true;
    else if (part == "full") form.full = true;
    else if (part == "oob") form.oob = true;
    else if (parse_type(part) != Type::none) form.types.push_back(parse_type(part));
    else unsupported(statement, "no float instruction has the modifier ." + part);
  }
  // The registered name may have taken some of these already; take the rest, so that nothing counts as left over.
  while (!mods.peek().empty()) mods.take(std::string(mods.peek()).c_str());
  return form;
}

struct FloatData : Payload {
  Mode mode;
  fp::HalfMode half;
  fp::MinMax choice;
  fp::OpHalf op = fp::OpHalf::add;
  fp::Op64 op64 = fp::Op64::add;
  Approx function = Approx::ex2;
  bool bf16 = false;
};

bool is_half(Type type) {
  return type == Type::f16 || type == Type::f16x2 || type == Type::bf16 || type == Type::bf16x2;
}

fp::HalfMode half_mode(Type type, const Form& form) {
  fp::HalfMode mode;
  mode.bf16 = type == Type::bf16 || type == Type::bf16x2;
  mode.packed = type == Type::f16x2 || type == Type::bf16x2;
  mode.ftz = form.ftz;
  mode.sat = form.sat;
  mode.relu = form.relu;
  mode.oob = form.oob;
  return mode;
}

// The type that operands are declared with: pairs travel in untyped registers.
Type operand_type(Type type) {
  switch (type) {
    case Type::f32x2: return Type::b64;
    case Type::f16x2:
    case Type::bf16x2: return Type::b32;
    case Type::bf16: return Type::b16;
    default: return type;
  }
}

// Destination and `sources` operands of one type to slots 0, 1, ...
void take_operands(Decoder& decoder, const Statement& statement, Instruction& instruction, Type type, size_t sources) {
  decoder.operand_count(statement, sources + 1, sources + 1);
  instruction.slot[0] = decoder.destination(statement.operands[0], operand_type(type));
  for (size_t i = 1; i <= sources; ++i) {
    instruction.slot[i] = decoder.source(statement.operands[i], operand_type(type));
  }
}

FloatData& attach(Decoder& decoder, Instruction& instruction, const Form& form) {
  auto data = std::make_unique<FloatData>();
  data->mode = {form.round, form.ftz, form.sat};
  FloatData& reference = *data;
  decoder.keep(instruction, std::move(data));
  return reference;
}

[[noreturn]] void bad_form(const Statement& statement) {
  unsupported(statement, "this combination of modifiers and types");
}

// ---- executors: N = 32 for 32-bit registers, 64 for pairs of f32 in 64-bit registers ------------

template <auto function, int N>
Step run_unary_flag(Warp& warp, const Instruction& in, uint32_t mask) {  // (a, d, n, ftz)
  return write_lanes<N>(warp, in.slot[0], mask,
                        [&](uint32_t* d) { function(warp.r32(in.slot[1]), d, N, in.as<FloatData>().mode.ftz); });
}

template <auto function, int N>
Step run_unary(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<N>(warp, in.slot[0], mask,
                        [&](uint32_t* d) { function(warp.r32(in.slot[1]), d, N, in.as<FloatData>().mode); });
}

template <auto function, int N>
Step run_binary(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<N>(warp, in.slot[0], mask, [&](uint32_t* d) {
    function(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, N, in.as<FloatData>().mode);
  });
}

template <int N>
Step run_fma(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<N>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::fma_f32(warp.r32(in.slot[1]), warp.r32(in.slot[2]), warp.r32(in.slot[3]), d, N, in.as<FloatData>().mode);
  });
}

Step run_mixed(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    const uint32_t* b = data.op == fp::OpHalf::fma ? warp.r32(in.slot[3]) : nullptr;
    fp::mixed_f32(data.op, warp.r32(in.slot[1]), b, warp.r32(in.slot[2]), d, kLanes, data.bf16, data.mode);
  });
}

Step run_half(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    const uint32_t* c = data.op == fp::OpHalf::fma ? warp.r32(in.slot[3]) : nullptr;
    fp::arith_half(data.op, warp.r32(in.slot[1]), warp.r32(in.slot[2]), c, d, kLanes, data.half);
  });
}

template <auto function>
Step run_half_unary(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask,
                         [&](uint32_t* d) { function(warp.r32(in.slot[1]), d, kLanes, in.as<FloatData>().half); });
}

Step run_f64(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes64(warp, in.slot[0], mask, [&](uint64_t* d) {
    const auto source = [&](int i) { return in.slot[i] == kNoSlot ? nullptr : warp.r64(in.slot[i]); };
    fp::arith_f64(data.op64, source(1), source(2), source(3), d, kLanes, data.mode.round);
  });
}

void use_f64(Decoder& decoder, const Statement& statement, Instruction& instruction, const Form& form, fp::Op64 op,
             size_t sources) {
  if (form.ftz || form.sat) bad_form(statement);
  instruction.slot[2] = instruction.slot[3] = kNoSlot;
  take_operands(decoder, statement, instruction, Type::f64, sources);
  attach(decoder, instruction, form).op64 = op;
  instruction.exec = run_f64;
}

// ---- add, sub, mul, fma -------------------------------------------------------------------------

struct Arithmetic {
  fp::OpHalf half;
  fp::Op64 f64;
  Exec f32, f32x2;
  size_t sources;
};

const Arithmetic kAdd{fp::OpHalf::add, fp::Op64::add, run_binary<fp::add_f32, 32>, run_binary<fp::add_f32, 64>, 2};
const Arithmetic kSub{fp::OpHalf::sub, fp::Op64::sub, run_binary<fp::sub_f32, 32>, run_binary<fp::sub_f32, 64>, 2};
const Arithmetic kMul{fp::OpHalf::mul, fp::Op64::mul, run_binary<fp::mul_f32, 32>, run_binary<fp::mul_f32, 64>, 2};
const Arithmetic kFma{fp::OpHalf::fma, fp::Op64::fma, run_fma<32>, run_fma<64>, 3};

const Arithmetic& arithmetic(const Statement& statement) {
  const std::string& name = statement.opcode[0];
  return name == "add" ? kAdd : name == "sub" ? kSub : name == "mul" ? kMul : kFma;  // mad of floats is fma
}

// add/sub/fma.f32.{f16,bf16}
void decode_mixed(Decoder& decoder, const Statement& statement, Instruction& instruction, const Form& form,
                  const Arithmetic& op) {
  if (form.types[0] != Type::f32 || op.half == fp::OpHalf::mul || form.ftz || form.relu || form.oob)
    bad_form(statement);
  if (form.types[1] != Type::f16 && form.types[1] != Type::bf16) bad_form(statement);
  decoder.operand_count(statement, op.sources + 1, op.sources + 1);
  instruction.slot[0] = decoder.destination(statement.operands[0], Type::f32);
  instruction.slot[1] = decoder.source(statement.operands[1], operand_type(form.types[1]));
  if (op.half == fp::OpHalf::fma)
    instruction.slot[3] = decoder.source(statement.operands[2], operand_type(form.types[1]));
  instruction.slot[2] = decoder.source(statement.operands[op.sources], Type::f32);
  FloatData& data = attach(decoder, instruction, form);
  data.op = op.half;
  data.bf16 = form.types[1] == Type::bf16;
  instruction.exec = run_mixed;
}

void decode_arithmetic(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const Form form = parse_form(statement, mods);
  const Arithmetic& op = arithmetic(statement);
  if (form.nan || form.abs || form.xorsign || form.approx || form.full || form.types.empty()) bad_form(statement);
  if (form.types.size() == 2) return decode_mixed(decoder, statement, instruction, form, op);
  if (form.types.size() != 1) bad_form(statement);
  const Type type = form.types[0];
  const bool is_fma = op.half == fp::OpHalf::fma;
  if ((form.relu || form.oob) && !(is_fma && is_half(type))) bad_form(statement);
  if (is_fma && !form.has_round) unsupported(statement, "fma needs a rounding modifier");
  if (type == Type::f64) return use_f64(decoder, statement, instruction, form, op.f64, op.sources);
  if (is_half(type)) {
    if (form.round != Round::rn) bad_form(statement);
    take_operands(decoder, statement, instruction, type, op.sources);
    FloatData& data = attach(decoder, instruction, form);
    data.half = half_mode(type, form);
    data.op = op.half;
    instruction.exec = run_half;
    return;
  }
  if ((type != Type::f32 && type != Type::f32x2) || (type == Type::f32x2 && form.sat)) bad_form(statement);
  take_operands(decoder, statement, instruction, type, op.sources);
  attach(decoder, instruction, form);
  instruction.exec = type == Type::f32 ? op.f32 : op.f32x2;
}

// ---- min, max -----------------------------------------------------------------------------------

Step run_choice(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    const uint32_t* c = in.slot[3] == kNoSlot ? nullptr : warp.r32(in.slot[3]);
    fp::min_max_f32(warp.r32(in.slot[1]), warp.r32(in.slot[2]), c, d, kLanes, in.as<FloatData>().choice);
  });
}

Step run_half_choice(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::min_max_half(warp.r32(in.slot[1]), warp.r32(in.slot[2]), nullptr, d, kLanes, data.half, data.choice);
  });
}

void decode_choice(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const Form form = parse_form(statement, mods);
  const bool is_max = statement.opcode[0] == "max";
  if (form.types.size() != 1 || form.has_round || form.sat || form.relu || form.approx || form.full || form.oob) {
    bad_form(statement);
  }
  const Type type = form.types[0];
  if (type == Type::f64) {
    if (form.nan || form.abs || form.xorsign) bad_form(statement);
    return use_f64(decoder, statement, instruction, form, is_max ? fp::Op64::max : fp::Op64::min, 2);
  }
  decoder.operand_count(statement, 3, 4);
  const bool three = statement.operands.size() == 4;
  if (three && (type != Type::f32 || form.xorsign)) bad_form(statement);
  if (form.xorsign && !form.abs) bad_form(statement);
  if (!three && form.abs && !form.xorsign) bad_form(statement);
  if (type != Type::f32 && !is_half(type)) bad_form(statement);
  instruction.slot[3] = kNoSlot;
  take_operands(decoder, statement, instruction, type, three ? 3 : 2);
  FloatData& data = attach(decoder, instruction, form);
  data.choice = {is_max, form.nan, form.abs, form.xorsign, form.ftz};
  data.half = half_mode(type, form);
  instruction.exec = type == Type::f32 ? run_choice : run_half_choice;
}

// ---- neg, abs, copysign, testp ------------------------------------------------------------------

template <bool negate>
Step run_sign64(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes64(warp, in.slot[0], mask, [&](uint64_t* d) {
    const uint64_t* a = warp.r64(in.slot[1]);
    constexpr uint64_t kSign = uint64_t{1} << 63;
    for (int i = 0; i < kLanes; ++i) d[i] = negate ? a[i] ^ kSign : a[i] & ~kSign;
  });
}

void decode_sign(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const bool negate = statement.opcode[0] == "neg";
  const Form form = parse_form(statement, mods);
  if (form.types.size() != 1 || form.has_round || form.sat || form.relu || form.nan || form.abs) bad_form(statement);
  const Type type = form.types[0];
  take_operands(decoder, statement, instruction, type, 1);
  FloatData& data = attach(decoder, instruction, form);
  if (type == Type::f64 && !form.ftz) {
    instruction.exec = negate ? run_sign64<true> : run_sign64<false>;
  } else if (type == Type::f32) {
    instruction.exec = negate ? run_unary_flag<fp::neg_f32, 32> : run_unary_flag<fp::abs_f32, 32>;
  } else if (is_half(type)) {
    data.half = half_mode(type, form);
    instruction.exec = negate ? run_half_unary<fp::neg_half> : run_half_unary<fp::abs_half>;
  } else {
    bad_form(statement);
  }
}

Step run_copysign(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask,
                         [&](uint32_t* d) { fp::copysign_f32(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, kLanes); });
}

void decode_copysign(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  if (mods.need_type() != Type::f32) bad_form(statement);
  mods.done();
  take_operands(decoder, statement, instruction, Type::f32, 2);
  instruction.exec = run_copysign;
}

enum class Test : uint8_t { finite, infinite, number, notanumber, normal, subnormal };

bool passes(Test test, float value) {
  switch (test) {
    case Test::finite: return std::isfinite(value);
    case Test::infinite: return std::isinf(value);
    case Test::number: return !std::isnan(value);
    case Test::notanumber: return std::isnan(value);
    case Test::normal: return std::isnormal(value) || value == 0;  // an H200 counts zero
    case Test::subnormal: return std::fpclassify(value) == FP_SUBNORMAL;
  }
  return false;
}

Step run_testp(Warp& warp, const Instruction& in, uint32_t mask) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) {
    if (passes(static_cast<Test>(in.flags), warp.f32(in.slot[1])[i])) result |= 1u << i;
  }
  uint32_t& d = warp.pred(in.slot[0]);
  d = (d & ~mask) | (result & mask);
  return Step::next;
}

void decode_testp(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  instruction.flags =
      static_cast<uint8_t>(mods.take_one({"finite", "infinite", "number", "notanumber", "normal", "subnormal"}, -2));
  if (mods.need_type() != Type::f32) bad_form(statement);
  mods.done();
  decoder.operand_count(statement, 2, 2);
  instruction.slot[0] = decoder.destination(statement.operands[0], Type::pred);
  instruction.slot[1] = decoder.source(statement.operands[1], Type::f32);
  instruction.exec = run_testp;
}

// ---- div, rcp, sqrt and approximations ----------------------------------------------------------

template <auto function>
Step run_div(Warp& warp, const Instruction& in, uint32_t mask) {
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    function(warp.r32(in.slot[1]), warp.r32(in.slot[2]), d, kLanes, in.as<FloatData>().mode.ftz);
  });
}

Step run_approx(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::approx_f32(data.function, warp.r32(in.slot[1]), d, kLanes, data.mode.ftz);
  });
}

Step run_approx_half(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& data = in.as<FloatData>();
  return write_lanes<32>(warp, in.slot[0], mask, [&](uint32_t* d) {
    fp::approx_half(data.function, warp.r32(in.slot[1]), d, kLanes, data.half);
  });
}

void decode_div(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const Form form = parse_form(statement, mods);
  if (form.types.size() != 1 || form.sat || form.relu || form.nan || form.abs) bad_form(statement);
  if (form.has_round + form.approx + form.full != 1) bad_form(statement);
  if (form.types[0] == Type::f64 && form.has_round) {
    return use_f64(decoder, statement, instruction, form, fp::Op64::div, 2);
  }
  if (form.types[0] != Type::f32) bad_form(statement);
  take_operands(decoder, statement, instruction, Type::f32, 2);
  attach(decoder, instruction, form);
  instruction.exec = form.approx ? run_div<fp::div_approx_f32>
                     : form.full ? run_div<fp::div_full_f32>
                                 : run_binary<fp::div_f32, 32>;
}

Approx approx_named(const std::string& name) {
  if (name == "ex2") return Approx::ex2;
  if (name == "lg2") return Approx::lg2;
  if (name == "rcp") return Approx::rcp;
  if (name == "rsqrt") return Approx::rsqrt;
  if (name == "sqrt") return Approx::sqrt;
  if (name == "sin") return Approx::sin;
  if (name == "cos") return Approx::cos;
  return Approx::tanh;
}

void decode_unary(Decoder& decoder, const Statement& statement, Modifiers& mods, Instruction& instruction) {
  const Form form = parse_form(statement, mods);
  const std::string& name = statement.opcode[0];
  if (form.types.size() != 1 || form.sat || form.relu || form.nan || form.abs || form.full) bad_form(statement);
  const Type type = form.types[0];
  if (form.has_round) {
    if (form.approx || (name != "rcp" && name != "sqrt")) bad_form(statement);
    if (type == Type::f64) {
      return use_f64(decoder, statement, instruction, form, name == "rcp" ? fp::Op64::rcp : fp::Op64::sqrt, 1);
    }
    if (type != Type::f32) bad_form(statement);
    take_operands(decoder, statement, instruction, type, 1);
    attach(decoder, instruction, form);
    instruction.exec = name == "rcp" ? run_unary<fp::rcp_f32, 32> : run_unary<fp::sqrt_f32, 32>;
    return;
  }
  if (!form.approx) bad_form(statement);
  const bool bf16 = type == Type::bf16 || type == Type::bf16x2;
  if (is_half(type)) {
    // ex2.approx.ftz is bf16's only form and f16 has none; tanh has no .ftz at all.
    if (name != "ex2" && name != "tanh") bad_form(statement);
    if (form.ftz != (name == "ex2" && bf16)) bad_form(statement);
  } else if (type != Type::f32 || (name == "tanh" && form.ftz)) {
    bad_form(statement);
  }
  take_operands(decoder, statement, instruction, type, 1);
  FloatData& data = attach(decoder, instruction, form);
  data.function = approx_named(name);
  data.half = half_mode(type, form);
  instruction.exec = type == Type::f32 ? run_approx : run_approx_half;
}

// ---- registration -------------------------------------------------------------------------------

void register_forms(std::initializer_list<const char*> names, std::initializer_list<const char*> forms, Decode decode) {
  for (const char* name : names) {
    for (const char* form : forms) Family((std::string(name) + "." + form).c_str(), decode);
  }
}

const bool registered = [] {
  register_forms({"add", "sub", "mul"},
                 {"rn", "rz", "rm", "rp", "ftz", "f32", "f32x2", "f64", "f16", "f16x2", "bf16", "bf16x2", "sat.f32",
                  "sat.f16", "sat.f16x2"},
                 decode_arithmetic);
  register_forms({"mad"}, {"rn", "rz", "rm", "rp"}, decode_arithmetic);
  register_forms({"min", "max"}, {"ftz", "NaN", "xorsign", "abs", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"},
                 decode_choice);
  register_forms({"neg", "abs"}, {"ftz", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"}, decode_sign);
  register_forms({"div"}, {"approx", "full", "rn", "rz", "rm", "rp"}, decode_div);
  for (const char* name : {"rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh"}) Family(name, decode_unary);
  Family("fma", decode_arithmetic);
  Family("copysign", decode_copysign);
  Family("testp", decode_testp);
  return true;
}();

}  // namespace
}  // namespace emu
