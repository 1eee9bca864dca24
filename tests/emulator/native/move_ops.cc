// Moving, choosing and comparing values: mov, selp, slct, setp, set (PTX ISA 9.7.6, 9.7.9.2).
#include <cmath>

#include "floats.h"
#include "vector_ops.h"

namespace emu {
namespace {

// ---------------------------------------------------------------- mov

Step run_mov32(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t* a = w.r32(in.slot[1]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return a[i]; });
  return Step::next;
}

Step run_mov64(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* a = w.r64(in.slot[1]);
  for_lanes(w.r64(in.slot[0]), mask, [&](int i) { return a[i]; });
  return Step::next;
}

Step run_mov128(Warp& w, const Instruction& in, uint32_t mask) {
  for (int half = 0; half < 2; ++half) {
    const uint64_t* a = w.r64(in.slot[1]) + half * kLanes;
    for_lanes(w.r64(in.slot[0]) + half * kLanes, mask, [&](int i) { return a[i]; });
  }
  return Step::next;
}

Step run_mov_pred(Warp& w, const Instruction& in, uint32_t mask) {
  set_predicate(w, in.slot[0], w.pred(in.slot[1]), mask);
  return Step::next;
}

// {a, b} -> 64 bits and back: the forms that compiled code uses most.
Step run_pack64(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]);
  for_lanes(w.r64(in.slot[0]), mask, [&](int i) { return static_cast<uint64_t>(b[i]) << 32 | a[i]; });
  return Step::next;
}

Step run_unpack64(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* a = w.r64(in.slot[2]);
  if (in.slot[0] != kNoSlot) for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return static_cast<uint32_t>(a[i]); });
  if (in.slot[1] != kNoSlot) for_lanes(w.r32(in.slot[1]), mask, [&](int i) { return static_cast<uint32_t>(a[i] >> 32); });
  return Step::next;
}

// Every other packing. Parts of `part` bits, lowest first; the whole has parts * part bits.
struct PackData : Payload {
  std::vector<Slot> parts;
  int part = 0;
};

Step run_pack(Warp& w, const Instruction& in, uint32_t mask) {
  const PackData& p = in.as<PackData>();
  int bits = p.part * static_cast<int>(p.parts.size());
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint64_t word[2] = {0, 0};
    for (size_t k = 0; k < p.parts.size(); ++k) {
      uint64_t v = p.part == 64 ? w.r64(p.parts[k])[i] : w.r32(p.parts[k])[i] & (p.part == 32 ? 0xffffffffu : (1u << p.part) - 1);
      int at = static_cast<int>(k) * p.part;
      word[at / 64] |= v << (at % 64);
    }
    if (bits <= 32) w.r32(in.slot[0])[i] = static_cast<uint32_t>(word[0]);
    else w.r64(in.slot[0])[i] = word[0];
    if (bits == 128) w.r64(in.slot[0])[kLanes + i] = word[1];
  }
  return Step::next;
}

Step run_unpack(Warp& w, const Instruction& in, uint32_t mask) {
  const PackData& p = in.as<PackData>();
  int bits = p.part * static_cast<int>(p.parts.size());
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    uint64_t word[2] = {bits <= 32 ? w.r32(in.slot[0])[i] : w.r64(in.slot[0])[i], bits == 128 ? w.r64(in.slot[0])[kLanes + i] : 0};
    for (size_t k = 0; k < p.parts.size(); ++k) {
      if (p.parts[k] == kNoSlot) continue;
      int at = static_cast<int>(k) * p.part;
      uint64_t v = word[at / 64] >> (at % 64);
      if (p.part == 64) w.r64(p.parts[k])[i] = v;
      else w.r32(p.parts[k])[i] = static_cast<uint32_t>(v) & (p.part == 32 ? 0xffffffffu : (1u << p.part) - 1);
    }
  }
  return Step::next;
}

// Special registers that change. imm: the Special.
Step run_mov_clock(Warp& w, const Instruction& in, uint32_t mask) {
  uint64_t now = w.cta->cluster->clock;
  uint64_t value = now;
  bool wide = false;
  switch (static_cast<Special>(in.imm)) {
    case Special::clock: value = now & 0xffffffffu; break;
    case Special::clock_hi: value = now >> 32; break;
    case Special::clock64: wide = true; break;
    case Special::globaltimer: wide = true; break;
    case Special::globaltimer_lo: value = now & 0xffffffffu; break;
    default: value = now >> 32; break;
  }
  if (wide) for_lanes(w.r64(in.slot[0]), mask, [&](int) { return value; });
  else for_lanes(w.r32(in.slot[0]), mask, [&](int) { return static_cast<uint32_t>(value); });
  return Step::next;
}

bool decode_clock(Decoder& d, const Statement& s, Type type, Instruction& in) {
  static const std::pair<const char*, Special> names[] = {
      {"%clock", Special::clock}, {"%clock_hi", Special::clock_hi}, {"%clock64", Special::clock64},
      {"%globaltimer", Special::globaltimer}, {"%globaltimer_lo", Special::globaltimer_lo}, {"%globaltimer_hi", Special::globaltimer_hi}};
  if (s.operands[1].kind != Operand::Kind::symbol) return false;
  for (auto [name, special] : names) {
    if (s.operands[1].name != name) continue;
    bool wide = special == Special::clock64 || special == Special::globaltimer;
    if (type_bits(type) != (wide ? 64 : 32)) unsupported(s, "");
    in.imm = static_cast<uint64_t>(special);
    in.slot[0] = d.destination(s.operands[0], type);
    in.exec = run_mov_clock;
    return true;
  }
  return false;
}

Type part_type(int bits) {
  switch (bits) {
    case 8: return Type::b8;
    case 16: return Type::b16;
    case 32: return Type::b32;
    case 64: return Type::b64;
    default: return Type::none;
  }
}

void decode_mov(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  int bits = type_bits(type);
  d.operand_count(s, 2, 2);
  const Operand &to = s.operands[0], &from = s.operands[1];
  if (to.kind == Operand::Kind::vector || from.kind == Operand::Kind::vector) {
    const bool pack = from.kind == Operand::Kind::vector;
    const std::vector<Operand>& items = pack ? from.items : to.items;
    if (to.kind == from.kind || items.empty() || bits % static_cast<int>(items.size()) || is_float(type)) unsupported(s, "");
    int part = bits / static_cast<int>(items.size());
    Type part_of = part_type(part);
    if (part_of == Type::none || (items.size() != 2 && items.size() != 4)) unsupported(s, "");
    auto data = std::make_unique<PackData>();
    data->part = part;
    if (pack) {
      for (const Operand& item : items) data->parts.push_back(d.source(item, part_of));
      in.slot[0] = d.destination(to, type);
      if (bits == 64 && part == 32) {
        in.slot[1] = data->parts[0];
        in.slot[2] = data->parts[1];
        in.exec = run_pack64;
        return;
      }
      in.exec = run_pack;
    } else {
      Slot whole = d.source(from, type);
      for (const Operand& item : items) data->parts.push_back(d.destination(item, part_of, true));
      if (bits == 64 && part == 32) {
        in.slot[2] = whole;
        in.slot[0] = data->parts[0];
        in.slot[1] = data->parts[1];
        in.exec = run_unpack64;
        return;
      }
      in.slot[0] = whole;
      in.exec = run_unpack;
    }
    d.keep(in, std::move(data));
    return;
  }
  if (decode_clock(d, s, type, in)) return;
  in.slot[1] = d.source(from, type);
  in.slot[0] = d.destination(to, type);
  switch (bits) {
    case 1: in.exec = run_mov_pred; return;
    case 16: case 32: in.exec = run_mov32; return;
    case 64: in.exec = run_mov64; return;
    case 128: in.exec = run_mov128; return;
    default: unsupported(s, "");
  }
}

// ---------------------------------------------------------------- selp, slct

template <class C>
Step run_selp(Warp& w, const Instruction& in, uint32_t mask) {
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[1]);
  const C* b = reinterpret_cast<C*>(w.registers + in.slot[2]);
  uint32_t p = w.pred(in.slot[3]);
  if (in.flags) p = ~p;
  for_lanes(reinterpret_cast<C*>(w.registers + in.slot[0]), mask, [&](int i) {
    C choose = lane_bits<C>(p, i);
    return static_cast<C>((a[i] & choose) | (b[i] & ~choose));
  });
  return Step::next;
}

void decode_selp(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  d.operand_count(s, 4, 4);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], type);
  Operand predicate = s.operands[3];
  in.flags = predicate.negated;
  predicate.negated = false;
  in.slot[3] = d.source(predicate, Type::pred);
  in.slot[0] = d.destination(s.operands[0], type);
  switch (type_bits(type)) {
    case 16: case 32: in.exec = run_selp<uint32_t>; return;
    case 64: in.exec = run_selp<uint64_t>; return;
    default: unsupported(s, "");
  }
}

template <class C, bool Float>
Step run_slct(Warp& w, const Instruction& in, uint32_t mask) {
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[1]);
  const C* b = reinterpret_cast<C*>(w.registers + in.slot[2]);
  const uint32_t* c = w.r32(in.slot[3]);
  for_lanes(reinterpret_cast<C*>(w.registers + in.slot[0]), mask, [&](int i) {
    bool first;
    if (Float) {
      float x = fp::as_float(in.flags ? fp::flush_f32(c[i]) : c[i]);
      first = x >= 0;   // NaN chooses b
    } else {
      first = static_cast<int32_t>(c[i]) >= 0;
    }
    return first ? a[i] : b[i];
  });
  return Step::next;
}

void decode_slct(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = m.take("ftz");
  Type type = m.need_type(), chooser = m.need_type();
  if (chooser != Type::s32 && chooser != Type::f32) unsupported(s, "");
  d.operand_count(s, 4, 4);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], type);
  in.slot[3] = d.source(s.operands[3], chooser);
  in.slot[0] = d.destination(s.operands[0], type);
  bool wide = type_bits(type) == 64, flt = chooser == Type::f32;
  if (type_bits(type) < 16 || type_bits(type) > 64) unsupported(s, "");
  in.exec = wide ? (flt ? run_slct<uint64_t, true> : run_slct<uint64_t, false>) : (flt ? run_slct<uint32_t, true> : run_slct<uint32_t, false>);
}

// ---------------------------------------------------------------- comparisons

using Compare = fp::Compare;

struct Eq { template <class T> bool operator()(T a, T b) const { return a == b; } };
struct Ne { template <class T> bool operator()(T a, T b) const { return a != b; } };
struct Lt { template <class T> bool operator()(T a, T b) const { return a < b; } };
struct Le { template <class T> bool operator()(T a, T b) const { return a <= b; } };
struct Gt { template <class T> bool operator()(T a, T b) const { return a > b; } };
struct Ge { template <class T> bool operator()(T a, T b) const { return a >= b; } };
// Float relations: ordered ones are false with a NaN (C++'s != is unordered, so ordered != is < or >).
struct NeOrdered { template <class T> bool operator()(T a, T b) const { return (a < b) | (a > b); } };
struct EqU { template <class T> bool operator()(T a, T b) const { return !((a < b) | (a > b)); } };
struct LtU { template <class T> bool operator()(T a, T b) const { return !(a >= b); } };
struct LeU { template <class T> bool operator()(T a, T b) const { return !(a > b); } };
struct GtU { template <class T> bool operator()(T a, T b) const { return !(a <= b); } };
struct GeU { template <class T> bool operator()(T a, T b) const { return !(a < b); } };
struct Num { template <class T> bool operator()(T a, T b) const { return (a == a) & (b == b); } };
struct Nan { template <class T> bool operator()(T a, T b) const { return (a != a) | (b != b); } };

/// The relation as a mask of lanes.
using Relation = uint32_t (*)(Warp& w, const Instruction& in);

template <class T, class F>
uint32_t relate(Warp& w, const Instruction& in) {
  const auto *a = registers<T>(w, in.slot[2]), *b = registers<T>(w, in.slot[3]);
  if constexpr (sizeof(T) == 8) return mask_of64([&](int i) { return F()(static_cast<T>(a[i]), static_cast<T>(b[i])); });
  else return mask_of([&](int i) { return F()(from_container<T>(a[i]), from_container<T>(b[i])); });
}

template <class F>
uint32_t relate_f32(Warp& w, const Instruction& in) {
  const float *a = w.f32(in.slot[2]), *b = w.f32(in.slot[3]);
  if (in.flags & 1) {
    const uint32_t *x = w.r32(in.slot[2]), *y = w.r32(in.slot[3]);
    return mask_of([&](int i) { return F()(fp::as_float(fp::flush_f32(x[i])), fp::as_float(fp::flush_f32(y[i]))); });
  }
  return mask_of([&](int i) { return F()(a[i], b[i]); });
}

template <class F>
uint32_t relate_f64(Warp& w, const Instruction& in) {
  const double *a = w.f64(in.slot[2]), *b = w.f64(in.slot[3]);
  return mask_of64([&](int i) { return F()(a[i], b[i]); });
}

template <class F, bool Bf16, bool High>
uint32_t relate_half(Warp& w, const Instruction& in) {
  const uint32_t *a = w.r32(in.slot[2]), *b = w.r32(in.slot[3]);
  const fp::Format& format = Bf16 ? fp::kBf16 : fp::kF16;
  auto value = [&](uint32_t bits) {
    bits = High ? bits >> 16 : bits & 0xffff;
    if ((in.flags & 1) && (bits & format.infinity()) == 0) bits &= 0x8000;
    return fp::decode(bits, format);
  };
  return mask_of64([&](int i) { return F()(value(a[i]), value(b[i])); });
}

template <class F>
Relation integer_relation(Type type) {
  switch (type) {
    case Type::b16: case Type::u16: return relate<uint16_t, F>;
    case Type::s16: return relate<int16_t, F>;
    case Type::b32: case Type::u32: return relate<uint32_t, F>;
    case Type::s32: return relate<int32_t, F>;
    case Type::b64: case Type::u64: return relate<uint64_t, F>;
    case Type::s64: return relate<int64_t, F>;
    default: return nullptr;
  }
}

template <class F>
Relation float_relation(Type type, bool high) {
  switch (type) {
    case Type::f32: return relate_f32<F>;
    case Type::f64: return relate_f64<F>;
    case Type::f16: return relate_half<F, false, false>;
    case Type::bf16: return relate_half<F, true, false>;
    case Type::f16x2: return high ? relate_half<F, false, true> : relate_half<F, false, false>;
    case Type::bf16x2: return high ? relate_half<F, true, true> : relate_half<F, true, false>;
    default: return nullptr;
  }
}

Relation relation_of(const Statement& s, const std::string& op, Type type, bool high = false) {
  Relation out = nullptr;
  if (is_float(type)) {
    if (op == "eq") out = float_relation<Eq>(type, high);
    else if (op == "ne") out = float_relation<NeOrdered>(type, high);
    else if (op == "lt") out = float_relation<Lt>(type, high);
    else if (op == "le") out = float_relation<Le>(type, high);
    else if (op == "gt") out = float_relation<Gt>(type, high);
    else if (op == "ge") out = float_relation<Ge>(type, high);
    else if (op == "equ") out = float_relation<EqU>(type, high);
    else if (op == "neu") out = float_relation<Ne>(type, high);
    else if (op == "ltu") out = float_relation<LtU>(type, high);
    else if (op == "leu") out = float_relation<LeU>(type, high);
    else if (op == "gtu") out = float_relation<GtU>(type, high);
    else if (op == "geu") out = float_relation<GeU>(type, high);
    else if (op == "num") out = float_relation<Num>(type, high);
    else if (op == "nan") out = float_relation<Nan>(type, high);
  } else {
    bool is_b = type >= Type::b8 && type <= Type::b128;
    if (op == "eq") out = integer_relation<Eq>(type);
    else if (op == "ne") out = integer_relation<Ne>(type);
    else if (is_b) unsupported(s, "bit types compare with .eq and .ne only");
    else if (op == "lt") out = integer_relation<Lt>(type);
    else if (op == "le") out = integer_relation<Le>(type);
    else if (op == "gt") out = integer_relation<Gt>(type);
    else if (op == "ge") out = integer_relation<Ge>(type);
    else if (!is_signed(type)) {
      if (op == "lo") out = integer_relation<Lt>(type);
      else if (op == "ls") out = integer_relation<Le>(type);
      else if (op == "hi") out = integer_relation<Gt>(type);
      else if (op == "hs") out = integer_relation<Ge>(type);
    }
  }
  if (!out) unsupported(s, "unknown comparison '." + op + "." + type_name(type) + "'");
  return out;
}

struct CompareData : Payload {
  Relation relation = nullptr, relation_high = nullptr;
  int combine = -1;       // 0 and, 1 or, 2 xor
  bool negate_c = false;
  Type result = Type::none;   // of set
};

// slot: 0 p, 1 q, 2 a, 3 b, 4 c
template <bool Second>
Step run_setp(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t r = reinterpret_cast<Relation>(in.imm)(w, in);
  set_predicate(w, in.slot[0], r, mask);
  if (Second) set_predicate(w, in.slot[1], ~r, mask);
  return Step::next;
}

uint32_t combined(uint32_t r, uint32_t c, int how) { return how == 0 ? r & c : how == 1 ? r | c : r ^ c; }

Step run_setp_combined(Warp& w, const Instruction& in, uint32_t mask) {
  const CompareData& data = in.as<CompareData>();
  uint32_t r = data.relation(w, in);
  uint32_t c = w.pred(in.slot[4]);
  if (data.negate_c) c = ~c;
  if (in.slot[0] != kNoSlot) set_predicate(w, in.slot[0], combined(r, c, data.combine), mask);
  if (in.slot[1] != kNoSlot) set_predicate(w, in.slot[1], combined(~r, c, data.combine), mask);
  return Step::next;
}

// Packed halves: p from the low half, q from the high half.
Step run_setp_packed(Warp& w, const Instruction& in, uint32_t mask) {
  const CompareData& data = in.as<CompareData>();
  uint32_t low = data.relation(w, in), high = data.relation_high(w, in);
  if (data.combine >= 0) {
    uint32_t c = w.pred(in.slot[4]);
    if (data.negate_c) c = ~c;
    low = combined(low, c, data.combine);
    high = combined(high, c, data.combine);
  }
  if (in.slot[0] != kNoSlot) set_predicate(w, in.slot[0], low, mask);
  if (in.slot[1] != kNoSlot) set_predicate(w, in.slot[1], high, mask);
  return Step::next;
}

/// What "true" is in a result type of set; 0 if the type is none.
uint32_t true_of(Type result) {
  switch (result) {
    case Type::u32: case Type::s32: return 0xffffffffu;
    case Type::u16: case Type::s16: return 0xffffu;
    case Type::f32: return 0x3f800000u;
    case Type::f16: return 0x3c00u;
    case Type::bf16: return 0x3f80u;
    case Type::f16x2: return 0x3c003c00u;
    case Type::bf16x2: return 0x3f803f80u;
    default: return 0;
  }
}

Step run_set(Warp& w, const Instruction& in, uint32_t mask) {
  const CompareData& data = in.as<CompareData>();
  auto relation = [&](Relation relate) {
    uint32_t r = relate(w, in);
    if (data.combine < 0) return r;
    uint32_t c = w.pred(in.slot[4]);
    return combined(r, data.negate_c ? ~c : c, data.combine);
  };
  uint32_t low = relation(data.relation), yes = true_of(data.result);
  if (!data.relation_high) {
    for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return lane_bits<uint32_t>(low, i) & yes; });
    return Step::next;
  }
  uint32_t high = relation(data.relation_high);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) {
    return (lane_bits<uint32_t>(low, i) & yes & 0xffffu) | (lane_bits<uint32_t>(high, i) & yes & 0xffff0000u);
  });
  return Step::next;
}

void decode_compare(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool to_predicate = s.opcode[0] == "setp";
  std::string op = m.peek();
  if (op.empty()) unsupported(s, "");
  m.take(op.c_str());
  int combine = m.take_one({"and", "or", "xor"});
  bool ftz = m.take("ftz");
  Type result = to_predicate ? Type::pred : m.need_type();
  Type type = m.need_type();
  d.operand_count(s, combine < 0 ? 3 : 4, combine < 0 ? 3 : 4);
  bool packed = type == Type::f16x2 || type == Type::bf16x2;
  auto data = std::make_unique<CompareData>();
  data->relation = relation_of(s, op, type);
  if (packed) data->relation_high = relation_of(s, op, type, true);
  data->combine = combine;
  data->result = result;
  in.flags = ftz ? 1 : 0;
  in.slot[2] = d.source(s.operands[1], type);
  in.slot[3] = d.source(s.operands[2], type);
  in.slot[1] = kNoSlot;
  if (combine >= 0) {
    Operand c = s.operands[3];
    data->negate_c = c.negated;
    c.negated = false;
    in.slot[4] = d.source(c, Type::pred);
  }
  const Operand& to = s.operands[0];
  if (to_predicate) {
    in.slot[0] = d.destination(to, Type::pred, true);
    if (!to.second.empty()) in.slot[1] = d.destination(to.second[0], Type::pred, true);
    if (packed) in.exec = run_setp_packed;
    else if (combine >= 0 || in.slot[0] == kNoSlot) {
      if (combine < 0) unsupported(s, "the first predicate of setp cannot be '_'");
      in.exec = run_setp_combined;
    } else {
      in.imm = reinterpret_cast<uint64_t>(data->relation);
      in.exec = in.slot[1] == kNoSlot ? run_setp<false> : run_setp<true>;
    }
  } else {
    if (true_of(result) == 0) unsupported(s, "");
    // Packed sources give packed results; 32-bit ones other than that are for the ordinary types.
    bool halves = result == Type::f16x2 || result == Type::bf16x2;
    if (packed ? type_bits(result) != 32 || result == Type::f32 : halves) unsupported(s, "");
    in.slot[0] = d.destination(to, result);
    in.exec = run_set;
  }
  d.keep(in, std::move(data));
}

const Family registered[] = {{"mov", decode_mov}, {"selp", decode_selp}, {"slct", decode_slct}, {"setp", decode_compare}, {"set", decode_compare}};

}  // namespace
}  // namespace emu
