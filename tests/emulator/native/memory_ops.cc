// Loads, stores, atomics, address conversions, prefetch (PTX ISA 9.7.9.8 ff., 9.7.13.6 f.).
#include <algorithm>

#include "floats.h"
#include "memory_access.h"
#include "vector_ops.h"

namespace emu {
namespace {

struct AccessData : Payload {
  Space space = Space::generic;
  Address address;
  std::vector<Slot> slots;      // vector elements; kNoSlot for sinks
  int element = 4;              // bytes
  int register_bits = 32;       // of the registers
  bool sign = false;            // a load into a wider register extends the sign
  bool strong = false;          // volatile, relaxed, acquire, release: ordered by the grid where memory is global
  uint32_t bytes = 4;           // of the whole access
};

/// Whether the lanes' addresses are in global memory (for the order of strong accesses).
bool touches_global(Warp& w, const AccessData& a, uint32_t mask) {
  if (a.space == Space::global) return true;
  if (a.space != Space::generic) return false;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint64_t address = w.address(a.address, __builtin_ctz(rest));
    if (address < kSharedWindow) return true;
  }
  return false;
}

Step wait_for_grid(Warp& w) { return w.block(Wait::Kind::grid_order, "its turn in the order of global memory"); }

template <int Element>
void load_element(uint8_t* const* at, int k, Warp& w, Slot slot, const AccessData& a, uint32_t mask) {
  if (slot == kNoSlot) return;
  if (Element == 4 && a.register_bits <= 32) {
    uint32_t* d = w.r32(slot);
    if (mask == kFull) {
      for (int i = 0; i < kLanes; ++i) std::memcpy(&d[i], at[i] + k * 4, 4);
    } else {
      for (uint32_t rest = mask; rest; rest &= rest - 1) {
        int i = __builtin_ctz(rest);
        std::memcpy(&d[i], at[i] + k * 4, 4);
      }
    }
    return;
  }
  if (Element == 8) {
    uint64_t* d = w.r64(slot);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      int i = __builtin_ctz(rest);
      std::memcpy(&d[i], at[i] + k * 8, 8);
    }
    return;
  }
  if (Element == 16) {
    uint64_t* d = w.r64(slot);
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      int i = __builtin_ctz(rest);
      std::memcpy(&d[i], at[i] + k * 16, 8);
      std::memcpy(&d[kLanes + i], at[i] + k * 16 + 8, 8);
    }
    return;
  }
  // Narrow, or into a wider register: zero- or sign-extended.
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int i = __builtin_ctz(rest);
    uint64_t v = 0;
    std::memcpy(&v, at[i] + k * Element, Element);
    if constexpr (Element < 8) {
      if (a.sign && (v >> (8 * Element - 1) & 1)) v |= ~0ull << (8 * Element);
    }
    if (a.register_bits == 64) w.r64(slot)[i] = v;
    else w.r32(slot)[i] = static_cast<uint32_t>(a.register_bits == 16 ? v & 0xffff : v);
  }
}

template <int Element>
Step run_load(Warp& w, const Instruction& in, uint32_t mask) {
  const AccessData& a = in.as<AccessData>();
  if (a.strong && must_wait_for_grid(w) && touches_global(w, a, mask)) return wait_for_grid(w);
  uint8_t* at[kLanes];
  locate(w, a.space, a.address, a.bytes, mask, Access::read, at);
  int k = 0;
  for (Slot slot : a.slots) load_element<Element>(at, k++, w, slot, a, mask);
  return Step::next;
}

template <int Element>
Step run_store(Warp& w, const Instruction& in, uint32_t mask) {
  const AccessData& a = in.as<AccessData>();
  if (a.strong && must_wait_for_grid(w) && touches_global(w, a, mask)) return wait_for_grid(w);
  uint8_t* at[kLanes];
  locate(w, a.space, a.address, a.bytes, mask, Access::write, at);
  int k = 0;
  for (Slot slot : a.slots) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      int i = __builtin_ctz(rest);
      if (Element == 16) {
        std::memcpy(at[i] + k * 16, &w.r64(slot)[i], 8);
        std::memcpy(at[i] + k * 16 + 8, &w.r64(slot)[kLanes + i], 8);
      } else if (a.register_bits == 64) {
        std::memcpy(at[i] + k * Element, &w.r64(slot)[i], std::min(Element, 8));
      } else {
        std::memcpy(at[i] + k * Element, &w.r32(slot)[i], std::min(Element, 4));
      }
    }
    ++k;
  }
  w.cta->cluster->touch();
  return Step::next;
}

/// ld and st share their grammar: semantics, scope, space, cache hints, vector, type.
void decode_load_store(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  const bool load = s.opcode[0] == "ld" || s.opcode[0] == "ldu";
  auto data = std::make_unique<AccessData>();
  int semantics = m.take_one({"weak", "volatile", "relaxed", "acquire", "release"});
  data->strong = semantics >= 1;
  if (m.take("mmio")) unsupported(s, ".mmio is not known");
  m.take_one({"cta", "cluster", "gpu", "sys"});
  const int space = m.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "param::func", "const"});
  switch (space) {
    case 0: data->space = Space::global; break;
    case 1: case 2: data->space = Space::shared_cta; break;
    case 3: data->space = Space::shared_cluster; break;
    case 4: data->space = Space::local; break;
    case 5: case 6: case 7: data->space = Space::param; break;
    case 8: data->space = Space::constant; break;
    default: data->space = Space::generic;
  }
  // Cache hints change nothing here.
  for (bool more = true; more;) {
    more = m.take_one({"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified", "L1::evict_normal", "L1::evict_unchanged",
                       "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B",
                       "L2::128B", "L2::256B"}) >= 0;
  }
  bool policy = m.take("L2::cache_hint");
  for (bool more = true; more;) more = m.take_one({"L2::64B", "L2::128B", "L2::256B"}) >= 0;
  int vector = m.take_one({"v2", "v4", "v8"});
  Type type = m.need_type();
  size_t count = vector < 0 ? 1 : 2u << vector;
  int bits = type_bits(type);
  if (bits < 8) unsupported(s, "");
  data->element = bits / 8;
  data->bytes = static_cast<uint32_t>(data->element * count);
  data->sign = is_signed(type);
  if (data->bytes > 32 || (data->bytes == 32 && data->space != Space::global && data->space != Space::generic)) unsupported(s, "access of more bytes than the ISA has");
  d.operand_count(s, policy ? 3 : 2, policy ? 3 : 2);
  const Operand& value = s.operands[load ? 0 : 1];
  data->address = d.address(s.operands[load ? 1 : 0]);
  if (policy) d.source(s.operands[2], Type::b64);
  if ((vector >= 0) != (value.kind == Operand::Kind::vector)) unsupported(s, "vector operand and .v do not match");
  const std::vector<Operand> single{value};
  const std::vector<Operand>& items = vector >= 0 ? value.items : single;
  if (items.size() != count) unsupported(s, format("a vector of %zu for .v%zu", items.size(), count));
  int width = 0;
  for (const Operand& item : items) {
    int item_bits = item.kind == Operand::Kind::reg ? item.bits : std::max(bits, 16);
    if (item.kind == Operand::Kind::reg) {
      if (item_bits < bits) unsupported(s, "register '" + item.name + "' is narrower than the access");
      if (width && width != item_bits) unsupported(s, "registers of different widths in one vector");
      width = item_bits;
    }
  }
  if (!width) width = bits <= 16 ? 16 : bits;
  data->register_bits = width;
  for (const Operand& item : items) {
    if (load) data->slots.push_back(d.destination(item, type, true, true));
    else data->slots.push_back(d.source(item, bits == 8 ? (width == 16 ? Type::b16 : Type::b32) : type, true));
  }
  switch (data->element) {
    case 1: in.exec = load ? run_load<1> : run_store<1>; break;
    case 2: in.exec = load ? run_load<2> : run_store<2>; break;
    case 4: in.exec = load ? run_load<4> : run_store<4>; break;
    case 8: in.exec = load ? run_load<8> : run_store<8>; break;
    case 16: in.exec = load ? run_load<16> : run_store<16>; break;
    default: unsupported(s, "");
  }
  d.keep(in, std::move(data));
}

// ---------------------------------------------------------------- atom, red

enum class Atomic : uint8_t { and_, or_, xor_, exch, cas, add, inc, dec, min, max };

struct AtomicData : Payload {
  AccessData access;
  Atomic op = Atomic::add;
  Type type = Type::u32;
  std::vector<Slot> b, c;       // second operand (per vector element), third (cas)
  std::vector<Slot> d;          // destinations, empty for red
};

uint64_t read_lane(Warp& w, Slot slot, int bits, int lane) { return bits == 64 ? w.r64(slot)[lane] : w.r32(slot)[lane]; }

uint64_t apply_atomic(Atomic op, Type type, uint64_t old, uint64_t b, uint64_t c) {
  const int bits = type_bits(type);
  switch (op) {
    case Atomic::and_: return old & b;
    case Atomic::or_: return old | b;
    case Atomic::xor_: return old ^ b;
    case Atomic::exch: return b;
    case Atomic::cas: return old == b ? c : old;
    case Atomic::inc: return old >= b ? 0 : old + 1;
    case Atomic::dec: return old == 0 || old > b ? b : old - 1;
    case Atomic::add:
      switch (type) {
        case Type::f32: return fp::reduce_add_f32(static_cast<uint32_t>(old), static_cast<uint32_t>(b), true);
        case Type::f64: return fp::as_bits64(fp::as_double(old) + fp::as_double(b));
        case Type::f16: return fp::reduce_add_half(static_cast<uint32_t>(old), static_cast<uint32_t>(b), false) & 0xffff;
        case Type::bf16: return fp::reduce_add_half(static_cast<uint32_t>(old), static_cast<uint32_t>(b), true) & 0xffff;
        case Type::f16x2: case Type::bf16x2: {
          bool bf16 = type == Type::bf16x2;
          uint32_t low = fp::reduce_add_half(old & 0xffff, b & 0xffff, bf16) & 0xffff;
          uint32_t high = fp::reduce_add_half(old >> 16 & 0xffff, b >> 16 & 0xffff, bf16) & 0xffff;
          return high << 16 | low;
        }
        default: return bits == 64 ? old + b : (old + b) & 0xffffffffu;
      }
    case Atomic::min: case Atomic::max: {
      bool max = op == Atomic::max;
      switch (type) {
        case Type::s32: return (static_cast<int32_t>(old) < static_cast<int32_t>(b)) != max ? old : b;
        case Type::s64: return (static_cast<int64_t>(old) < static_cast<int64_t>(b)) != max ? old : b;
        case Type::f16: case Type::bf16: case Type::f16x2: case Type::bf16x2: {
          fp::HalfMode mode;
          mode.bf16 = type == Type::bf16 || type == Type::bf16x2;
          mode.packed = bits == 32;
          fp::MinMax choice;
          choice.is_max = max;
          uint32_t x = static_cast<uint32_t>(old), y = static_cast<uint32_t>(b), out;
          fp::min_max_half(&x, &y, nullptr, &out, 1, mode, choice);
          return out;
        }
        default: return (old < b) != max ? old : b;
      }
    }
  }
  return old;
}

Step run_atomic(Warp& w, const Instruction& in, uint32_t mask) {
  const AtomicData& a = in.as<AtomicData>();
  if (must_wait_for_grid(w) && touches_global(w, a.access, mask)) return wait_for_grid(w);
  uint8_t* at[kLanes];
  locate(w, a.access.space, a.access.address, a.access.bytes, mask, Access::reduce, at);
  const int element = a.access.element, bits = a.access.register_bits;
  // Lanes in ascending order: one of the orders that the hardware may take.
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    for (size_t k = 0; k < a.b.size(); ++k) {
      uint8_t* p = at[lane] + k * element;
      if (element == 16) {   // exch and cas only
        uint64_t old[2], b[2] = {w.r64(a.b[k])[lane], w.r64(a.b[k])[kLanes + lane]};
        std::memcpy(old, p, 16);
        if (a.op == Atomic::exch) std::memcpy(p, b, 16);
        else if (old[0] == b[0] && old[1] == b[1]) {
          uint64_t c[2] = {w.r64(a.c[k])[lane], w.r64(a.c[k])[kLanes + lane]};
          std::memcpy(p, c, 16);
        }
        if (!a.d.empty() && a.d[k] != kNoSlot) {
          w.r64(a.d[k])[lane] = old[0];
          w.r64(a.d[k])[kLanes + lane] = old[1];
        }
        continue;
      }
      uint64_t old = 0;
      std::memcpy(&old, p, element);
      uint64_t narrow = element == 8 ? ~0ull : (1ull << (8 * element)) - 1;
      uint64_t b = read_lane(w, a.b[k], bits, lane) & narrow;
      uint64_t c = a.c.empty() ? 0 : read_lane(w, a.c[k], bits, lane) & narrow;
      uint64_t value = apply_atomic(a.op, a.type, old, b, c);
      std::memcpy(p, &value, element);
      if (!a.d.empty() && a.d[k] != kNoSlot) {
        if (bits == 64) w.r64(a.d[k])[lane] = old;
        else w.r32(a.d[k])[lane] = static_cast<uint32_t>(old);
      }
    }
  }
  w.cta->cluster->wake();
  return Step::next;
}

void decode_atomic(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  const bool red = s.opcode[0] == "red";
  auto data = std::make_unique<AtomicData>();
  m.take_one({"relaxed", "acquire", "release", "acq_rel"});
  m.take_one({"cta", "cluster", "gpu", "sys"});
  switch (m.take_one({"global", "shared", "shared::cta", "shared::cluster"})) {
    case 0: data->access.space = Space::global; break;
    case 1: case 2: data->access.space = Space::shared_cta; break;
    case 3: data->access.space = Space::shared_cluster; break;
    default: data->access.space = Space::generic;
  }
  // ptxas takes the space first, too.
  m.take_one({"relaxed", "acquire", "release", "acq_rel"});
  m.take_one({"cta", "cluster", "gpu", "sys"});
  // The ISA's own examples put vector and type before or behind the operation.
  int op = -1, vector = -1, found = 0;
  for (const char* name : {"and", "or", "xor", "exch", "cas", "add", "inc", "dec", "min", "max"}) {
    if (m.take_anywhere(name)) op = found;
    ++found;
  }
  if (op < 0) unsupported(s, "");
  data->op = static_cast<Atomic>(op);
  bool noftz = m.take_anywhere("noftz");
  bool policy = m.take_anywhere("L2::cache_hint");
  for (int v = 0; v < 3; ++v)
    if (m.take_anywhere(v == 0 ? "v2" : v == 1 ? "v4" : "v8")) vector = v;
  Type type = m.need_type();
  data->type = type;
  const int bits = type_bits(type);
  const bool half = bits == 16 || type == Type::f16x2 || type == Type::bf16x2;
  const bool flt = is_float(type);
  bool legal = false;
  switch (data->op) {
    case Atomic::and_: case Atomic::or_: case Atomic::xor_: legal = type == Type::b32 || type == Type::b64; break;
    case Atomic::exch: legal = !red && (type == Type::b32 || type == Type::b64 || type == Type::b128); break;
    case Atomic::cas: legal = !red && (type == Type::b16 || type == Type::b32 || type == Type::b64 || type == Type::b128); break;
    case Atomic::add: legal = type == Type::u32 || type == Type::s32 || type == Type::u64 || type == Type::s64 || type == Type::f32 || type == Type::f64 || (flt && half && noftz); break;
    case Atomic::inc: case Atomic::dec: legal = type == Type::u32; break;
    case Atomic::min: case Atomic::max:
      legal = type == Type::u32 || type == Type::s32 || type == Type::u64 || type == Type::s64 || (vector >= 0 && flt && half && noftz);
      break;
  }
  if (!legal || (noftz && !half)) unsupported(s, "");
  if (vector >= 0 && !(data->access.space == Space::global && flt && type != Type::f64)) unsupported(s, "");
  size_t count = vector < 0 ? 1 : 2u << vector;
  data->access.element = bits / 8;
  data->access.bytes = static_cast<uint32_t>(data->access.element * count);
  if (data->access.bytes > 32) unsupported(s, "access of more bytes than the ISA has");
  data->access.register_bits = bits;
  size_t operands = 2 + (red ? 0 : 1) + (data->op == Atomic::cas ? 1 : 0);
  d.operand_count(s, operands + policy, operands + policy);
  size_t at = 0;
  auto each = [&](const Operand& operand, auto&& visit) {
    if (vector < 0) return visit(operand);
    if (operand.kind != Operand::Kind::vector || operand.items.size() != count) unsupported(s, "vector operand and .v do not match");
    for (const Operand& item : operand.items) visit(item);
  };
  const Operand* result = red ? nullptr : &s.operands[at++];
  data->access.address = d.address(s.operands[at++]);
  each(s.operands[at++], [&](const Operand& o) { data->b.push_back(d.source(o, type)); });
  if (data->op == Atomic::cas) each(s.operands[at++], [&](const Operand& o) { data->c.push_back(d.source(o, type)); });
  if (policy) d.source(s.operands[at++], Type::b64);
  if (result) each(*result, [&](const Operand& o) { data->d.push_back(d.destination(o, type, true)); });
  in.exec = run_atomic;
  d.keep(in, std::move(data));
}

// ---------------------------------------------------------------- addresses

// cvta: imm is added (window of the space); cvta.to: checked and taken away.
template <class C>
Step run_cvta(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t window = in.imm;
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[1]);
  C* d = reinterpret_cast<C*>(w.registers + in.slot[0]);
  if (in.flags == 0) {
    for_lanes(d, mask, [&](int i) { return static_cast<C>(a[i] + window); });
    return Step::next;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int i = __builtin_ctz(rest);
    if (window && (a[i] < window || a[i] >= window + (1ull << 32)))
      fail_lane(i, Fault::illegal_operand, "cvta.to: generic address 0x%llx is not in that space", static_cast<unsigned long long>(a[i]));
    if (!window && a[i] >= kSharedWindow)
      fail_lane(i, Fault::illegal_operand, "cvta.to: generic address 0x%llx is not in that space", static_cast<unsigned long long>(a[i]));
  }
  for_lanes(d, mask, [&](int i) { return static_cast<C>(a[i] - window); });
  return Step::next;
}

void decode_cvta(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = m.take("to");
  int space = m.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const"}, -2);
  in.imm = space >= 1 && space <= 3 ? kSharedWindow : space == 4 ? kLocalWindow : 0;
  if (m.need_type() != Type::u64) unsupported(s, "only 64-bit addresses are known");
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], Type::u64);
  in.slot[0] = d.destination(s.operands[0], Type::u64);
  in.exec = run_cvta<uint64_t>;
}

// isspacep: imm: 0 global, 1 shared::cta, 2 shared::cluster, 3 local, 4 const, 5 param.
Step run_isspacep(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* a = w.r64(in.slot[1]);
  const Grid& grid = *w.cta->cluster->grid;
  uint64_t params = reinterpret_cast<uint64_t>(grid.params);
  uint32_t out = mask_of64([&](int i) {
    bool shared = a[i] >= kSharedWindow && a[i] < kSharedWindow + (1ull << 32);
    switch (in.imm) {
      case 0: return a[i] < kSharedWindow;
      case 1: return shared && (static_cast<uint32_t>(a[i]) >> 24) == w.cta->rank;
      case 2: return shared;
      case 3: return a[i] >= kLocalWindow && a[i] < kLocalWindow + (1ull << 32);
      case 5: return a[i] >= params && a[i] < params + grid.entry->param_bytes;
      default: return false;
    }
  });
  set_predicate(w, in.slot[0], out, mask);
  return Step::next;
}

void decode_isspacep(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  static const int kinds[] = {0, 1, 1, 2, 3, 4, 5, 5};
  in.imm = kinds[m.take_one({"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry"}, -2)];
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], Type::u64);
  in.slot[0] = d.destination(s.operands[0], Type::pred);
  in.exec = run_isspacep;
}

// mapa: the same offset in CTA rank b. flags: generic addresses.
template <class C>
Step run_mapa(Warp& w, const Instruction& in, uint32_t mask) {
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[1]);
  const uint32_t* b = w.r32(in.slot[2]);
  C* d = reinterpret_cast<C*>(w.registers + in.slot[0]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int i = __builtin_ctz(rest);
    // A rank beyond the cluster is no fault yet: compiled code maps for every lane and uses the lanes that exist. An access is.
    uint64_t address = a[i], rank = std::min(b[i], 0xffu);
    if (in.flags) {
      if (address < kSharedWindow || address >= kSharedWindow + (1ull << 32))
        fail_lane(i, Fault::illegal_operand, "mapa of generic address 0x%llx, which is not shared memory", static_cast<unsigned long long>(address));
      address -= kSharedWindow;
    }
    if (address >> 24 >= w.cta->cluster->ctas.size())
      fail_lane(i, Fault::illegal_operand, "mapa of 0x%llx, which is not a shared address", static_cast<unsigned long long>(address));
    address = (address & 0xffffff) | rank << 24;
    d[i] = static_cast<C>(in.flags ? address + kSharedWindow : address);
  }
  return Step::next;
}

void decode_mapa(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = !m.take("shared::cluster");
  Type type = m.need_type();
  if (type != Type::u32 && type != Type::u64) unsupported(s, "");
  if (in.flags && type == Type::u32) unsupported(s, "only 64-bit addresses are known");
  d.operand_count(s, 3, 3);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], Type::u32);
  in.slot[0] = d.destination(s.operands[0], type);
  in.exec = type == Type::u32 ? run_mapa<uint32_t> : run_mapa<uint64_t>;
}

// getctarank: of a shared::cluster address. flags: generic.
template <class C>
Step run_getctarank(Warp& w, const Instruction& in, uint32_t mask) {
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[1]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return static_cast<uint32_t>(a[i]) >> 24; });
  return Step::next;
}

void decode_getctarank(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("shared::cluster");
  Type type = m.need_type();
  if (type != Type::u32 && type != Type::u64) unsupported(s, "");
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[0] = d.destination(s.operands[0], Type::u32);
  in.exec = type == Type::u32 ? run_getctarank<uint32_t> : run_getctarank<uint64_t>;
}

// ---------------------------------------------------------------- st.bulk

// st.bulk: zeros a range of shared memory. slot 0: size (64 bits); flags: shared::cta (else generic).
Step run_st_bulk(Warp& w, const Instruction& in, uint32_t mask) {
  const AccessData& a = in.as<AccessData>();
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = w.address(a.address, lane), size = w.r64(in.slot[0])[lane];
    if (a.space == Space::generic) {
      if (address < kSharedWindow || address >= kSharedWindow + (1ull << 32))
        fail_lane(lane, Fault::illegal_operand, "st.bulk to generic address 0x%llx, which is not shared memory", static_cast<unsigned long long>(address));
      address -= kSharedWindow;
    }
    if ((address | size) & 7)
      fail_lane(lane, Fault::misaligned, "st.bulk of %llu bytes at shared address 0x%llx; both must be multiples of 8",
                static_cast<unsigned long long>(size), static_cast<unsigned long long>(address));
    if (size == 0) continue;
    uint32_t offset;
    Cta& cta = w.cta->cluster->shared_cta(address, &offset);
    if (&cta != w.cta) fail_lane(lane, Fault::out_of_bounds, "st.bulk to shared memory of CTA rank %u, not the own", cta.rank);
    uint8_t* to = cta.shared_at(offset, size, "st.bulk");
    cta.check_barriers(offset, size, "st.bulk");
    std::memset(to, 0, size);
  }
  w.cta->cluster->touch();
  return Step::next;
}

void decode_st_bulk(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<AccessData>();
  m.take("weak");
  data->space = m.take("shared::cta") ? Space::shared_cta : Space::generic;
  d.operand_count(s, 3, 3);
  data->address = d.address(s.operands[0]);
  in.slot[0] = d.source(s.operands[1], Type::u64);
  if (d.immediate(s.operands[2]) != 0) unsupported(s, "st.bulk stores zeros only");
  in.exec = run_st_bulk;
  d.keep(in, std::move(data));
}

// ---------------------------------------------------------------- prefetch and cache control

Step run_nothing(Warp&, const Instruction&, uint32_t) { return Step::next; }

/// A prefetch of an address outside every buffer is harmless on the hardware, and so it is here.
void decode_prefetch(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take_one({"global", "local"});
  m.take_one({"L1", "L2", "L2::evict_last", "L2::evict_normal"}, -2);
  d.operand_count(s, 1, 1);
  d.address(s.operands[0]);
  in.exec = run_nothing;
}

void decode_prefetchu(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take_one({"L1"}, -2);
  d.operand_count(s, 1, 1);
  d.address(s.operands[0]);
  in.exec = run_nothing;
}

void decode_discard(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("global");
  m.take_one({"L2"}, -2);
  d.operand_count(s, 2, 2);
  d.address(s.operands[0]);
  d.immediate(s.operands[1]);
  in.exec = run_nothing;
}

void decode_applypriority(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("global");
  m.take_one({"L2::evict_normal"}, -2);
  d.operand_count(s, 2, 2);
  d.address(s.operands[0]);
  d.immediate(s.operands[1]);
  in.exec = run_nothing;
}

/// Cache policies are opaque; the emulator's is zero.
Step run_createpolicy(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(w.r64(in.slot[0]), mask, [](int) { return uint64_t{0}; });
  return Step::next;
}

void decode_createpolicy(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  int kind = m.take_one({"fractional", "range", "cvt"}, -2);
  if (kind == 1) m.take("global");
  if (kind == 2) {
    m.take_one({"L2"}, -2);
  } else {
    m.take_one({"L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"}, -2);
    m.take_one({"L2::evict_first", "L2::evict_unchanged"});
  }
  if (m.need_type() != Type::b64) unsupported(s, "");
  d.operand_count(s, 1, 4);
  for (size_t i = 1; i < s.operands.size(); ++i) {
    if (s.operands[i].kind == Operand::Kind::address) d.address(s.operands[i]);
    else if (s.operands[i].kind == Operand::Kind::reg) d.source(s.operands[i], s.operands[i].bits == 64 ? Type::b64 : Type::b32);
  }
  in.slot[0] = d.destination(s.operands[0], Type::b64);
  in.exec = run_createpolicy;
}

const Family registered[] = {
    {"st.bulk", decode_st_bulk}, {"ld", decode_load_store}, {"ldu", decode_load_store}, {"st", decode_load_store}, {"atom", decode_atomic}, {"red", decode_atomic},
    {"cvta", decode_cvta}, {"isspacep", decode_isspacep}, {"mapa", decode_mapa}, {"getctarank", decode_getctarank},
    {"prefetch", decode_prefetch}, {"prefetchu", decode_prefetchu}, {"discard", decode_discard}, {"applypriority", decode_applypriority}, {"createpolicy", decode_createpolicy},
};

}  // namespace
}  // namespace emu
