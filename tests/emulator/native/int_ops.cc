// Integer arithmetic, logic and bit fields (PTX ISA 9.7.1, 9.7.2, 9.7.8).
#include <algorithm>

#include "vector_ops.h"

namespace emu {
namespace {

// ---------------------------------------------------------------- generic shapes

template <class T, class F>
Step run1(Warp& w, const Instruction& in, uint32_t mask) {
  const auto* a = registers<T>(w, in.slot[1]);
  for_lanes(registers<T>(w, in.slot[0]), mask, [&](int i) { return to_container<T>(F()(from_container<T>(a[i]))); });
  return Step::next;
}

template <class T, class F>
Step run2(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]);
  for_lanes(registers<T>(w, in.slot[0]), mask, [&](int i) { return to_container<T>(F()(from_container<T>(a[i]), from_container<T>(b[i]))); });
  return Step::next;
}

template <class T, class F>
Step run3(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]), *c = registers<T>(w, in.slot[3]);
  for_lanes(registers<T>(w, in.slot[0]), mask,
            [&](int i) { return to_container<T>(F()(from_container<T>(a[i]), from_container<T>(b[i]), from_container<T>(c[i]))); });
  return Step::next;
}

/// T x T -> wide, optionally plus wide.
template <class T, class W, bool Add>
Step run_wide(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]);
  const auto* c = Add ? registers<W>(w, in.slot[3]) : nullptr;
  using U = std::make_unsigned_t<W>;
  for_lanes(registers<W>(w, in.slot[0]), mask, [&](int i) {
    U product = static_cast<U>(static_cast<W>(from_container<T>(a[i]))) * static_cast<U>(static_cast<W>(from_container<T>(b[i])));
    return to_container<W>(static_cast<W>(product + (Add ? static_cast<U>(c[i]) : U(0))));
  });
  return Step::next;
}

template <class T> using U = std::make_unsigned_t<T>;

// Arithmetic modulo 2^bits in the unsigned type; 16-bit operands promote to int without overflow.
struct Add { template <class T> T operator()(T a, T b) const { return static_cast<T>(static_cast<U<T>>(static_cast<U<T>>(a) + static_cast<U<T>>(b))); } };
struct Sub { template <class T> T operator()(T a, T b) const { return static_cast<T>(static_cast<U<T>>(static_cast<U<T>>(a) - static_cast<U<T>>(b))); } };
template <class T> T low_product(T a, T b) { return static_cast<T>(static_cast<uint64_t>(static_cast<U<T>>(a)) * static_cast<uint64_t>(static_cast<U<T>>(b))); }
template <> inline uint32_t low_product(uint32_t a, uint32_t b) { return a * b; }
template <> inline int32_t low_product(int32_t a, int32_t b) { return static_cast<int32_t>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }
struct MulLo { template <class T> T operator()(T a, T b) const { return low_product(a, b); } };
struct MadLo { template <class T> T operator()(T a, T b, T c) const { return Add()(low_product(a, b), c); } };
template <class T> T high_product(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using W = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> 64);
  } else {
    using W = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> (8 * sizeof(T)));
  }
}
struct MulHi { template <class T> T operator()(T a, T b) const { return high_product(a, b); } };
struct MadHi { template <class T> T operator()(T a, T b, T c) const { return Add()(high_product(a, b), c); } };
struct AddSat { template <class T> T operator()(T a, T b) const {
  int64_t s = static_cast<int64_t>(a) + static_cast<int64_t>(b);
  return static_cast<T>(std::min<int64_t>(std::max<int64_t>(s, INT32_MIN), INT32_MAX)); } };
struct SubSat { template <class T> T operator()(T a, T b) const {
  int64_t s = static_cast<int64_t>(a) - static_cast<int64_t>(b);
  return static_cast<T>(std::min<int64_t>(std::max<int64_t>(s, INT32_MIN), INT32_MAX)); } };
struct MadHiSat { template <class T> T operator()(T a, T b, T c) const { return AddSat()(high_product(a, b), c); } };
// Division by zero, which the ISA leaves unspecified, gives all ones; the remainder is then the dividend.
struct Div { template <class T> T operator()(T a, T b) const {
  if (b == 0) return static_cast<T>(~static_cast<T>(0));
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub()(static_cast<T>(0), a);
  return static_cast<T>(a / b); } };
struct Rem { template <class T> T operator()(T a, T b) const {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b); } };
struct Min { template <class T> T operator()(T a, T b) const { return a < b ? a : b; } };
struct Max { template <class T> T operator()(T a, T b) const { return a > b ? a : b; } };
struct MinRelu { template <class T> T operator()(T a, T b) const { return Max()(Min()(a, b), static_cast<T>(0)); } };
struct MaxRelu { template <class T> T operator()(T a, T b) const { return Max()(Max()(a, b), static_cast<T>(0)); } };
struct Neg { template <class T> T operator()(T a) const { return Sub()(static_cast<T>(0), a); } };
struct Abs { template <class T> T operator()(T a) const { return a < 0 ? Sub()(static_cast<T>(0), a) : a; } };
struct Sad { template <class T> T operator()(T a, T b, T c) const { return Add()(c, a < b ? Sub()(b, a) : Sub()(a, b)); } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };
struct Not { template <class T> T operator()(T a) const { return static_cast<T>(~a); } };
struct Cnot { template <class T> T operator()(T a) const { return a == 0; } };
struct Brev { template <class T> T operator()(T a) const {
  T out = 0;
  for (unsigned i = 0; i < 8 * sizeof(T); ++i) out |= ((a >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return out; } };

/// Two 16-bit halves at once.
template <class T, class F>
struct Halves {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    uint32_t low = static_cast<uint16_t>(F()(static_cast<T>(a), static_cast<T>(b)));
    uint32_t high = static_cast<uint16_t>(F()(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
    return high << 16 | low;
  }
};

// ---------------------------------------------------------------- decoding helpers

void slots(Decoder& d, const Statement& s, Instruction& in, Type type, int sources) {
  d.operand_count(s, sources + 1, sources + 1);
  for (int i = 1; i <= sources; ++i) in.slot[i] = d.source(s.operands[i], type);
  in.slot[0] = d.destination(s.operands[0], type);
}

template <class F> Exec pick1(const Statement& s, Type type) {
  switch (type) {
    case Type::s16: return run1<int16_t, F>;
    case Type::s32: return run1<int32_t, F>;
    case Type::s64: return run1<int64_t, F>;
    default: unsupported(s, "");
  }
}

#define PICK(run, F)                                          \
  switch (type) {                                             \
    case Type::u16: in.exec = run<uint16_t, F>; return;       \
    case Type::s16: in.exec = run<int16_t, F>; return;        \
    case Type::u32: in.exec = run<uint32_t, F>; return;       \
    case Type::s32: in.exec = run<int32_t, F>; return;        \
    case Type::u64: in.exec = run<uint64_t, F>; return;       \
    case Type::s64: in.exec = run<int64_t, F>; return;        \
    default: unsupported(s, "");                              \
  }

#define PICK_BITS(run, F)                                     \
  switch (type_bits(type)) {                                  \
    case 16: in.exec = run<uint16_t, F>; return;              \
    case 32: in.exec = run<uint32_t, F>; return;              \
    case 64: in.exec = run<uint64_t, F>; return;              \
    default: unsupported(s, "");                              \
  }

bool is_integer(Type type) {
  return (type >= Type::u8 && type <= Type::s64) || type == Type::u16x2 || type == Type::s16x2;
}
bool is_bits(Type type) { return type >= Type::b8 && type <= Type::b128; }

// ---------------------------------------------------------------- carry chains

/// add.cc addc sub.cc subc mad.cc madc: imm bit 0: carry in, bit 1: carry out; offset: 0 add, 1 sub.
template <class T>
Step run_carry(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]);
  auto* d = registers<T>(w, in.slot[0]);
  bool subtract = in.offset == 1;
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    unsigned carry = (in.imm & 1) ? (w.carry >> i & 1) : 0;
    unsigned __int128 x = static_cast<T>(a[i]), y = static_cast<T>(b[i]);
    unsigned __int128 sum = subtract ? x - y - carry : x + y + carry;
    d[i] = static_cast<T>(sum);
    unsigned out = static_cast<unsigned>(sum >> (8 * sizeof(T))) & 1;   // subtraction: the borrow
    if (in.imm & 2) w.carry = (w.carry & ~(1u << i)) | out << i;
  }
  return Step::next;
}

/// mad{c}.{lo,hi}{.cc}: as run_carry, offset 2: high half of the product.
template <class T>
Step run_mad_carry(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]), *c = registers<T>(w, in.slot[3]);
  auto* d = registers<T>(w, in.slot[0]);
  for (int i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    unsigned carry = (in.imm & 1) ? (w.carry >> i & 1) : 0;
    T product = in.offset == 2 ? high_product(static_cast<T>(a[i]), static_cast<T>(b[i])) : low_product(static_cast<T>(a[i]), static_cast<T>(b[i]));
    unsigned __int128 sum = static_cast<unsigned __int128>(static_cast<U<T>>(product)) + static_cast<U<T>>(c[i]) + carry;
    d[i] = static_cast<U<T>>(sum);
    unsigned out = static_cast<unsigned>(sum >> (8 * sizeof(T))) & 1;
    if (in.imm & 2) w.carry = (w.carry & ~(1u << i)) | out << i;
  }
  return Step::next;
}

void decode_add_sub(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool subtract = s.opcode[0][0] == 's';
  bool with_carry = s.opcode[0].back() == 'c';   // addc, subc
  bool carry_out = m.take("cc");
  bool saturate = m.take("sat");
  Type type = m.need_type();
  if (with_carry || carry_out) {
    if (saturate || (type_bits(type) != 32 && type_bits(type) != 64) || !is_integer(type)) unsupported(s, "");
    slots(d, s, in, type, 2);
    in.imm = (with_carry ? 1 : 0) | (carry_out ? 2 : 0);
    in.offset = subtract;
    in.exec = type_bits(type) == 32 ? run_carry<uint32_t> : run_carry<uint64_t>;
    return;
  }
  slots(d, s, in, type, 2);
  if (saturate) {
    if (type != Type::s32) unsupported(s, "");
    in.exec = subtract ? run2<int32_t, SubSat> : run2<int32_t, AddSat>;
    return;
  }
  if (type == Type::u16x2 || type == Type::s16x2) {
    in.exec = subtract ? run2<uint32_t, Halves<uint16_t, Sub>> : run2<uint32_t, Halves<uint16_t, Add>>;
    return;
  }
  if (subtract) { PICK(run2, Sub) } else { PICK(run2, Add) }
}

void decode_mul_mad(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool mad = s.opcode[0][1] == 'a';
  bool with_carry = s.opcode[0] == "madc";
  int part = m.take_one({"lo", "hi", "wide"}, -2);
  bool carry_out = m.take("cc");
  bool saturate = m.take("sat");
  Type type = m.need_type();
  if (!is_integer(type)) unsupported(s, "");
  if (part == 2) {
    if (with_carry || carry_out || saturate) unsupported(s, "");
    Type wide;
    switch (type) {
      case Type::u16: wide = Type::u32; in.exec = mad ? run_wide<uint16_t, uint32_t, true> : run_wide<uint16_t, uint32_t, false>; break;
      case Type::s16: wide = Type::s32; in.exec = mad ? run_wide<int16_t, int32_t, true> : run_wide<int16_t, int32_t, false>; break;
      case Type::u32: wide = Type::u64; in.exec = mad ? run_wide<uint32_t, uint64_t, true> : run_wide<uint32_t, uint64_t, false>; break;
      case Type::s32: wide = Type::s64; in.exec = mad ? run_wide<int32_t, int64_t, true> : run_wide<int32_t, int64_t, false>; break;
      default: unsupported(s, "");
    }
    d.operand_count(s, mad ? 4 : 3, mad ? 4 : 3);
    in.slot[1] = d.source(s.operands[1], type);
    in.slot[2] = d.source(s.operands[2], type);
    if (mad) in.slot[3] = d.source(s.operands[3], wide);
    in.slot[0] = d.destination(s.operands[0], wide);
    return;
  }
  slots(d, s, in, type, mad ? 3 : 2);
  if (with_carry || carry_out) {
    in.imm = (with_carry ? 1 : 0) | (carry_out ? 2 : 0);
    in.offset = part == 1 ? 2 : 0;
    switch (type) {
      case Type::u32: in.exec = run_mad_carry<uint32_t>; return;
      case Type::s32: in.exec = run_mad_carry<int32_t>; return;
      case Type::u64: in.exec = run_mad_carry<uint64_t>; return;
      case Type::s64: in.exec = run_mad_carry<int64_t>; return;
      default: unsupported(s, "");
    }
  }
  if (saturate) {
    if (!mad || part != 1 || type != Type::s32) unsupported(s, "");
    in.exec = run3<int32_t, MadHiSat>;
    return;
  }
  if (mad) {
    if (part == 0) { PICK(run3, MadLo) } else { PICK(run3, MadHi) }
  } else {
    if (part == 0) { PICK(run2, MulLo) } else { PICK(run2, MulHi) }
  }
}

// 24-bit products: operands are the low 24 bits, sign-extended for s32.
template <class T, bool Hi, bool Mad>
Step run_24(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = Mad ? w.r32(in.slot[3]) : nullptr;
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) {
    int64_t x, y;
    if constexpr (std::is_signed_v<T>) {
      x = static_cast<int32_t>(a[i] << 8) >> 8;
      y = static_cast<int32_t>(b[i] << 8) >> 8;
    } else {
      x = a[i] & 0xffffff;
      y = b[i] & 0xffffff;
    }
    uint32_t p = static_cast<uint32_t>((x * y) >> (Hi ? 16 : 0));
    return p + (Mad ? c[i] : 0u);
  });
  return Step::next;
}

void decode_24(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool mad = s.opcode[0] == "mad24";
  bool hi = m.take_one({"lo", "hi"}, -2) == 1;
  Type type = m.need_type();
  if (type != Type::u32 && type != Type::s32) unsupported(s, "");
  slots(d, s, in, type, mad ? 3 : 2);
  bool is_s = type == Type::s32;
  if (mad) in.exec = is_s ? (hi ? run_24<int32_t, true, true> : run_24<int32_t, false, true>) : (hi ? run_24<uint32_t, true, true> : run_24<uint32_t, false, true>);
  else in.exec = is_s ? (hi ? run_24<int32_t, true, false> : run_24<int32_t, false, false>) : (hi ? run_24<uint32_t, true, false> : run_24<uint32_t, false, false>);
}

template <class F>
void decode_binary(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  slots(d, s, in, type, 2);
  PICK(run2, F)
}

void decode_min_max(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool max = s.opcode[0] == "max";
  bool relu = m.take("relu");
  Type type = m.need_type();
  slots(d, s, in, type, 2);
  if (type == Type::s16x2) {
    in.exec = max ? (relu ? run2<uint32_t, Halves<int16_t, MaxRelu>> : run2<uint32_t, Halves<int16_t, Max>>)
                  : (relu ? run2<uint32_t, Halves<int16_t, MinRelu>> : run2<uint32_t, Halves<int16_t, Min>>);
    return;
  }
  if (type == Type::u16x2 && !relu) {
    in.exec = max ? run2<uint32_t, Halves<uint16_t, Max>> : run2<uint32_t, Halves<uint16_t, Min>>;
    return;
  }
  if (relu) {
    if (type != Type::s32) unsupported(s, "");
    in.exec = max ? run2<int32_t, MaxRelu> : run2<int32_t, MinRelu>;
    return;
  }
  if (max) { PICK(run2, Max) } else { PICK(run2, Min) }
}

template <class F>
void decode_signed_unary(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  slots(d, s, in, type, 1);
  in.exec = pick1<F>(s, type);
}

void decode_sad(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  slots(d, s, in, type, 3);
  PICK(run3, Sad)
}

// ---------------------------------------------------------------- logic

template <class F>
Step run_pred2(Warp& w, const Instruction& in, uint32_t mask) {
  set_predicate(w, in.slot[0], F()(w.pred(in.slot[1]), w.pred(in.slot[2])), mask);
  return Step::next;
}

Step run_pred_not(Warp& w, const Instruction& in, uint32_t mask) {
  set_predicate(w, in.slot[0], ~w.pred(in.slot[1]), mask);
  return Step::next;
}

template <class F>
void decode_logic(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  if (!is_bits(type) && type != Type::pred) unsupported(s, "");
  slots(d, s, in, type, 2);
  if (type == Type::pred) {
    in.exec = run_pred2<F>;
    return;
  }
  PICK_BITS(run2, F)
}

void decode_not(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  if (!is_bits(type) && type != Type::pred) unsupported(s, "");
  slots(d, s, in, type, 1);
  if (type == Type::pred) {
    in.exec = run_pred_not;
    return;
  }
  PICK_BITS(run1, Not)
}

void decode_cnot(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  if (!is_bits(type)) unsupported(s, "");
  slots(d, s, in, type, 1);
  PICK_BITS(run1, Cnot)
}

// lop3: imm is the table. One value: each bit chooses by (a, b, c).
Step run_lop3(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  uint32_t term[8];
  for (int k = 0; k < 8; ++k) term[k] = (in.imm >> k & 1) ? 0xffffffffu : 0u;
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) {
    uint32_t x = a[i], y = b[i], z = c[i];
    return (term[0] & ~x & ~y & ~z) | (term[1] & ~x & ~y & z) | (term[2] & ~x & y & ~z) | (term[3] & ~x & y & z) |
           (term[4] & x & ~y & ~z) | (term[5] & x & ~y & z) | (term[6] & x & y & ~z) | (term[7] & x & y & z);
  });
  return Step::next;
}

// With a predicate: p = (d != 0) op q. slot[4] p, slot[5] q; offset: 0 or, 1 and.
Step run_lop3_pred(Warp& w, const Instruction& in, uint32_t mask) {
  Slot d = in.slot[0];
  alignas(64) uint32_t result[kLanes];
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  for (int i = 0; i < kLanes; ++i) {
    result[i] = 0;
    for (int k = 0; k < 8; ++k)
      if (in.imm >> k & 1) result[i] |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
  }
  uint32_t nonzero = mask_of([&](int i) { return result[i] != 0; });
  uint32_t q = w.pred(in.slot[5]);
  set_predicate(w, in.slot[4], in.offset ? nonzero & q : nonzero | q, mask);
  if (d != kNoSlot) for_lanes(w.r32(d), mask, [&](int i) { return result[i]; });
  return Step::next;
}

void decode_lop3(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  int op = m.take_one({"or", "and"});
  if (m.need_type() != Type::b32) unsupported(s, "");
  d.operand_count(s, op < 0 ? 5 : 6, op < 0 ? 5 : 6);
  for (int i = 1; i <= 3; ++i) in.slot[i] = d.source(s.operands[i], Type::b32);
  int64_t table = d.immediate(s.operands[4]);
  if (table < 0 || table > 255) unsupported(s, "lop3 table must be 0 to 255");
  in.imm = static_cast<uint64_t>(table);
  in.slot[0] = d.destination(s.operands[0], Type::b32, op >= 0);
  if (op < 0) {
    in.exec = run_lop3;
    return;
  }
  if (s.operands[0].second.empty()) unsupported(s, "lop3 with .or or .and needs d|p");
  in.offset = op;
  in.slot[5] = d.source(s.operands[5], Type::pred);
  in.slot[4] = d.destination(s.operands[0].second[0], Type::pred);
  in.exec = run_lop3_pred;
}

// ---------------------------------------------------------------- shifts

template <class T>
struct ShiftLeft { T operator()(T a, uint32_t n) const { return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(static_cast<U<T>>(a) << n); } };
template <class T>
struct ShiftRight { T operator()(T a, uint32_t n) const {
  constexpr uint32_t bits = 8 * sizeof(T);
  if (n >= bits) n = std::is_signed_v<T> ? bits - 1 : bits;
  return n >= bits ? T(0) : static_cast<T>(a >> n); } };

template <class T, template <class> class F>
Step run_shift(Warp& w, const Instruction& in, uint32_t mask) {
  const auto* a = registers<T>(w, in.slot[1]);
  const uint32_t* n = w.r32(in.slot[2]);
  for_lanes(registers<T>(w, in.slot[0]), mask, [&](int i) { return to_container<T>(F<T>()(from_container<T>(a[i]), n[i])); });
  return Step::next;
}

void decode_shift(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool left = s.opcode[0] == "shl";
  Type type = m.need_type();
  d.operand_count(s, 3, 3);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], Type::u32);
  in.slot[0] = d.destination(s.operands[0], type);
  if (left) {
    if (!is_bits(type)) unsupported(s, "");
    switch (type) {
      case Type::b16: in.exec = run_shift<uint16_t, ShiftLeft>; return;
      case Type::b32: in.exec = run_shift<uint32_t, ShiftLeft>; return;
      case Type::b64: in.exec = run_shift<uint64_t, ShiftLeft>; return;
      default: unsupported(s, "");
    }
  }
  switch (type) {
    case Type::b16: case Type::u16: in.exec = run_shift<uint16_t, ShiftRight>; return;
    case Type::b32: case Type::u32: in.exec = run_shift<uint32_t, ShiftRight>; return;
    case Type::b64: case Type::u64: in.exec = run_shift<uint64_t, ShiftRight>; return;
    case Type::s16: in.exec = run_shift<int16_t, ShiftRight>; return;
    case Type::s32: in.exec = run_shift<int32_t, ShiftRight>; return;
    case Type::s64: in.exec = run_shift<int64_t, ShiftRight>; return;
    default: unsupported(s, "");
  }
}

// shf: imm bit 0 right, bit 1 wrap (else clamp).
Step run_shf(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  bool right = in.imm & 1, wrap = in.imm & 2;
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) {
    uint32_t n = wrap ? c[i] & 31 : std::min(c[i], 32u);
    uint64_t pair = static_cast<uint64_t>(b[i]) << 32 | a[i];
    return static_cast<uint32_t>(right ? pair >> n : (pair << n) >> 32);
  });
  return Step::next;
}

void decode_shf(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool right = m.take_one({"l", "r"}, -2) == 1;
  bool wrap = m.take_one({"clamp", "wrap"}, -2) == 1;
  if (m.need_type() != Type::b32) unsupported(s, "");
  slots(d, s, in, Type::b32, 3);
  in.imm = (right ? 1 : 0) | (wrap ? 2 : 0);
  in.exec = run_shf;
}

// ---------------------------------------------------------------- bit counting and fields

enum class Count { popc, clz, bfind, bfind_shift };

template <class T, Count Kind>
Step run_count(Warp& w, const Instruction& in, uint32_t mask) {
  const auto* a = registers<T>(w, in.slot[1]);
  constexpr int bits = 8 * sizeof(T);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    U<T> x = static_cast<U<T>>(a[i]);
    if constexpr (Kind == Count::popc) return static_cast<uint32_t>(__builtin_popcountll(x));
    if constexpr (Kind == Count::clz) return x ? static_cast<uint32_t>(__builtin_clzll(x) - (64 - bits)) : bits;
    if (std::is_signed_v<T> && static_cast<T>(x) < 0) x = static_cast<U<T>>(~x);
    if (x == 0) return 0xffffffffu;
    uint32_t position = 63u - static_cast<uint32_t>(__builtin_clzll(x));
    return Kind == Count::bfind_shift ? bits - 1 - position : position;
  });
  return Step::next;
}

void decode_count(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  const std::string& name = s.opcode[0];
  bool shift = m.take("shiftamt");
  Type type = m.need_type();
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[0] = d.destination(s.operands[0], Type::u32);
  bool wide = type_bits(type) == 64;
  if (name == "popc" || name == "clz") {
    if (type != Type::b32 && type != Type::b64) unsupported(s, "");
    if (name == "popc") in.exec = wide ? run_count<uint64_t, Count::popc> : run_count<uint32_t, Count::popc>;
    else in.exec = wide ? run_count<uint64_t, Count::clz> : run_count<uint32_t, Count::clz>;
    return;
  }
  switch (type) {
    case Type::u32: in.exec = shift ? run_count<uint32_t, Count::bfind_shift> : run_count<uint32_t, Count::bfind>; return;
    case Type::s32: in.exec = shift ? run_count<int32_t, Count::bfind_shift> : run_count<int32_t, Count::bfind>; return;
    case Type::u64: in.exec = shift ? run_count<uint64_t, Count::bfind_shift> : run_count<uint64_t, Count::bfind>; return;
    case Type::s64: in.exec = shift ? run_count<int64_t, Count::bfind_shift> : run_count<int64_t, Count::bfind>; return;
    default: unsupported(s, "");
  }
}

void decode_brev(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  if (type != Type::b32 && type != Type::b64) unsupported(s, "");
  slots(d, s, in, type, 1);
  in.exec = type == Type::b32 ? run1<uint32_t, Brev> : run1<uint64_t, Brev>;
}

template <class T>
Step run_bfe(Warp& w, const Instruction& in, uint32_t mask) {
  const auto* a = registers<T>(w, in.slot[1]);
  const auto *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  for_lanes(registers<T>(w, in.slot[0]), mask, [&](int i) {
    constexpr uint32_t bits = 8 * sizeof(T), msb = bits - 1;
    uint32_t position = b[i] & 0xff, length = c[i] & 0xff;
    U<T> x = static_cast<U<T>>(a[i]);
    if (length == 0) return to_container<T>(T(0));
    U<T> sign = 0;
    if (std::is_signed_v<T>) sign = static_cast<U<T>>(x >> std::min(position + length - 1, msb) & 1);
    U<T> field = position > msb ? 0 : static_cast<U<T>>(x >> position);
    uint32_t got = position > msb ? 0 : std::min(length, bits - position);
    if (got < bits) field &= static_cast<U<T>>((static_cast<U<T>>(1) << got) - 1);
    if (sign && got < bits) field |= static_cast<U<T>>(~static_cast<U<T>>(0)) << got;
    return to_container<T>(static_cast<T>(field));
  });
  return Step::next;
}

void decode_bfe(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  d.operand_count(s, 4, 4);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], Type::u32);
  in.slot[3] = d.source(s.operands[3], Type::u32);
  in.slot[0] = d.destination(s.operands[0], type);
  switch (type) {
    case Type::u32: in.exec = run_bfe<uint32_t>; return;
    case Type::s32: in.exec = run_bfe<int32_t>; return;
    case Type::u64: in.exec = run_bfe<uint64_t>; return;
    case Type::s64: in.exec = run_bfe<int64_t>; return;
    default: unsupported(s, "");
  }
}

template <class T>
Step run_bfi(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = registers<T>(w, in.slot[1]), *b = registers<T>(w, in.slot[2]);
  const auto *c = w.r32(in.slot[3]), *n = w.r32(in.slot[4]);
  for_lanes(registers<T>(w, in.slot[0]), mask, [&](int i) {
    constexpr uint32_t bits = 8 * sizeof(T);
    uint32_t position = c[i] & 0xff, length = n[i] & 0xff;
    if (length == 0 || position >= bits) return static_cast<T>(b[i]);
    T field = length >= bits ? static_cast<T>(~T(0)) : static_cast<T>((T(1) << length) - 1);
    return static_cast<T>((b[i] & ~(field << position)) | ((a[i] & field) << position));
  });
  return Step::next;
}

void decode_bfi(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  Type type = m.need_type();
  if (type != Type::b32 && type != Type::b64) unsupported(s, "");
  d.operand_count(s, 5, 5);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], type);
  in.slot[3] = d.source(s.operands[3], Type::u32);
  in.slot[4] = d.source(s.operands[4], Type::u32);
  in.slot[0] = d.destination(s.operands[0], type);
  in.exec = type == Type::b32 ? run_bfi<uint32_t> : run_bfi<uint64_t>;
}

// bmsk: imm 0 clamp, 1 wrap.
Step run_bmsk(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    uint32_t start = in.imm ? a[i] & 31 : std::min(a[i], 32u), length = in.imm ? b[i] & 31 : std::min(b[i], 32u);
    uint64_t field = (1ull << length) - 1;
    return static_cast<uint32_t>(field << start);
  });
  return Step::next;
}

void decode_bmsk(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.imm = m.take_one({"clamp", "wrap"}, -2);
  if (m.need_type() != Type::b32) unsupported(s, "");
  slots(d, s, in, Type::b32, 2);
  in.exec = run_bmsk;
}

// szext: sign- or zero-extends from bit b. imm 0 clamp, 1 wrap.
template <bool Signed>
Step run_szext(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    uint32_t n = in.imm ? b[i] & 31 : std::min(b[i], 32u);
    if (n >= 32) return a[i];
    uint32_t low = a[i] & ((1u << n) - 1);
    if (Signed && n > 0 && (a[i] >> (n - 1) & 1)) low |= 0xffffffffu << n;
    return low;
  });
  return Step::next;
}

void decode_szext(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.imm = m.take_one({"clamp", "wrap"}, -2);
  Type type = m.need_type();
  if (type != Type::u32 && type != Type::s32) unsupported(s, "");
  slots(d, s, in, type, 2);
  in.exec = type == Type::s32 ? run_szext<true> : run_szext<false>;
}

// fns: the offset-th set bit from a base. A rare instruction; plain loop.
Step run_fns(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    int32_t offset = static_cast<int32_t>(c[i]);
    uint32_t base = b[i];
    if (offset == 0) return base < 32 && (a[i] >> base & 1) ? base : 0xffffffffu;
    int32_t step = offset > 0 ? 1 : -1, left = offset > 0 ? offset - 1 : -offset - 1;
    for (int64_t at = base; at >= 0 && at < 32; at += step) {
      if (!(a[i] >> at & 1)) continue;
      if (left-- == 0) return static_cast<uint32_t>(at);
    }
    return 0xffffffffu;
  });
  return Step::next;
}

void decode_fns(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  if (m.need_type() != Type::b32) unsupported(s, "");
  slots(d, s, in, Type::b32, 3);
  in.exec = run_fns;
}

// dp4a / dp2a: imm bit 0 a signed, bit 1 b signed; offset: 0 dp4a, 1 dp2a.lo, 2 dp2a.hi.
Step run_dot(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  auto byte = [](uint32_t word, int k, bool is_s) { uint32_t v = word >> (8 * k) & 0xff; return is_s ? static_cast<int32_t>(static_cast<int8_t>(v)) : static_cast<int32_t>(v); };
  auto half = [](uint32_t word, int k, bool is_s) { uint32_t v = word >> (16 * k) & 0xffff; return is_s ? static_cast<int32_t>(static_cast<int16_t>(v)) : static_cast<int32_t>(v); };
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    int64_t sum = 0;
    if (in.offset == 0) {
      for (int k = 0; k < 4; ++k) sum += static_cast<int64_t>(byte(a[i], k, in.imm & 1)) * byte(b[i], k, in.imm & 2);
    } else {
      for (int k = 0; k < 2; ++k) sum += static_cast<int64_t>(half(a[i], k, in.imm & 1)) * byte(b[i], k + (in.offset == 2 ? 2 : 0), in.imm & 2);
    }
    return static_cast<uint32_t>(sum) + c[i];
  });
  return Step::next;
}

void decode_dot(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.offset = s.opcode[0] == "dp4a" ? 0 : 1 + m.take_one({"lo", "hi"}, -2);
  Type a = m.need_type(), b = m.need_type();
  if (type_bits(a) != 32 || type_bits(b) != 32 || !is_integer(a) || !is_integer(b)) unsupported(s, "");
  in.imm = (is_signed(a) ? 1 : 0) | (is_signed(b) ? 2 : 0);
  slots(d, s, in, Type::b32, 3);
  in.exec = run_dot;
}

// prmt: imm is the mode: 0 default, 1 f4e, 2 b4e, 3 rc8, 4 ecl, 5 ecr, 6 rc16.
Step run_prmt(Warp& w, const Instruction& in, uint32_t mask) {
  const auto *a = w.r32(in.slot[1]), *b = w.r32(in.slot[2]), *c = w.r32(in.slot[3]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) -> uint32_t {
    uint64_t pair = static_cast<uint64_t>(b[i]) << 32 | a[i];
    uint32_t selector = c[i], n = selector & 3;
    if (in.imm) {
      auto rep = [](uint32_t x, uint32_t y, uint32_t z, uint32_t t) { return x | y << 4 | z << 8 | t << 12; };
      switch (in.imm) {
        case 1: selector = rep(n, n + 1, n + 2, n + 3); break;
        case 2: selector = rep(n, (n + 7) & 7, (n + 6) & 7, (n + 5) & 7); break;
        case 3: selector = rep(n, n, n, n); break;
        case 4: selector = rep(n, std::max(n, 1u), std::max(n, 2u), 3); break;
        case 5: selector = rep(0, std::min(n, 1u), std::min(n, 2u), n); break;
        default: selector = (n & 1) ? rep(2, 3, 2, 3) : rep(0, 1, 0, 1); break;
      }
    }
    uint32_t out = 0;
    for (int k = 0; k < 4; ++k) {
      uint32_t pick = selector >> (4 * k) & 15;
      uint32_t byte = static_cast<uint32_t>(pair >> (8 * (pick & 7))) & 0xff;
      if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
      out |= byte << (8 * k);
    }
    return out;
  });
  return Step::next;
}

void decode_prmt(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  if (m.need_type() != Type::b32) unsupported(s, "");
  in.imm = static_cast<uint64_t>(m.take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) + 1);
  slots(d, s, in, Type::b32, 3);
  in.exec = run_prmt;
}

const Family registered[] = {
    {"add", decode_add_sub}, {"sub", decode_add_sub}, {"addc", decode_add_sub}, {"subc", decode_add_sub},
    {"mul", decode_mul_mad}, {"mad", decode_mul_mad}, {"madc", decode_mul_mad}, {"mul24", decode_24}, {"mad24", decode_24},
    {"div", decode_binary<Div>}, {"rem", decode_binary<Rem>}, {"min", decode_min_max}, {"max", decode_min_max},
    {"neg", decode_signed_unary<Neg>}, {"abs", decode_signed_unary<Abs>}, {"sad", decode_sad},
    {"and", decode_logic<And>}, {"or", decode_logic<Or>}, {"xor", decode_logic<Xor>}, {"not", decode_not}, {"cnot", decode_cnot},
    {"lop3", decode_lop3}, {"shl", decode_shift}, {"shr", decode_shift}, {"shf", decode_shf}, {"popc", decode_count},
    {"clz", decode_count}, {"bfind", decode_count}, {"brev", decode_brev}, {"bfe", decode_bfe}, {"bfi", decode_bfi},
    {"bmsk", decode_bmsk}, {"szext", decode_szext}, {"fns", decode_fns}, {"dp4a", decode_dot}, {"dp2a", decode_dot}, {"prmt", decode_prmt},
};

}  // namespace
}  // namespace emu
