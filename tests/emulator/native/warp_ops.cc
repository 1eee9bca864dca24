// Exchange inside a warp: shfl, vote, match, redux, elect, activemask, bar.warp.sync (PTX ISA 9.7.9.6, 9.7.13.2, .9-.14),
// and ldmatrix, stmatrix, movmatrix (9.7.15.5).
#include <algorithm>

#include "floats.h"
#include "memory_access.h"
#include "vector_ops.h"

namespace emu {
namespace {

/// Calls run(group, members) for each set of lanes that name the same members. Returns blocked, having called nothing,
/// while a live member of some group is not here yet.
template <class F>
Step by_members(Warp& w, const uint32_t* members, uint32_t mask, F&& run) {
  for (int pass = 0; pass < 2; ++pass) {
    for (uint32_t rest = mask; rest;) {
      int first = __builtin_ctz(rest);
      uint32_t member = members[first], group = 0;
      for (uint32_t lanes = rest; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        if (members[lane] == member) group |= 1u << lane;
      }
      rest &= ~group;
      if (pass == 0) {
        if (group & ~member)
          fail_lane(__builtin_ctz(group & ~member), Fault::illegal_operand, "member mask 0x%08x does not hold the executing lane", member);
        if (member & w.fragment().mask & ~mask)
          fail(Fault::divergence, "lanes 0x%08x of the member mask 0x%08x are predicated off", member & w.fragment().mask & ~mask, member);
        if (!w.converged(member)) return w.block(Wait::Kind::converge, "the other member threads of its warp at this instruction");
      } else {
        run(group, member);
      }
    }
  }
  return Step::next;
}

// ---------------------------------------------------------------- shfl

// slot: 0 d, 1 p, 2 a, 3 b, 4 c, 5 members; flags: 0 up, 1 down, 2 bfly, 3 idx.
Step run_shfl(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t *a = w.r32(in.slot[2]), *b = w.r32(in.slot[3]), *c = w.r32(in.slot[4]);
  alignas(64) uint32_t result[kLanes];
  uint32_t valid = 0;
  Step step = by_members(w, w.r32(in.slot[5]), mask, [&](uint32_t group, uint32_t) {
    for (uint32_t rest = group; rest; rest &= rest - 1) {
      int lane = __builtin_ctz(rest);
      int bval = static_cast<int>(b[lane] & 31), cval = static_cast<int>(c[lane] & 31), segment = static_cast<int>(c[lane] >> 8 & 31);
      int high = (lane & segment) | (cval & ~segment), low = lane & segment;
      int j = 0;
      bool inside = false;
      switch (in.flags) {
        case 0: j = lane - bval; inside = j >= high; break;
        case 1: j = lane + bval; inside = j <= high; break;
        case 2: j = lane ^ bval; inside = j <= high; break;
        default: j = low | (bval & ~segment); inside = j <= high; break;
      }
      if (!inside) j = lane;
      else valid |= 1u << lane;
      // A source that does not take part gives an undefined value.
      result[lane] = group >> j & 1 ? a[j] : kPoison;
    }
  });
  if (step != Step::next) return step;
  if (in.slot[0] != kNoSlot) for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return result[i]; });
  if (in.slot[1] != kNoSlot) set_predicate(w, in.slot[1], valid, mask);
  return Step::next;
}

void decode_shfl(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = static_cast<uint8_t>(m.take_one({"up", "down", "bfly", "idx"}, -2));
  if (m.need_type() != Type::b32) unsupported(s, "");
  d.operand_count(s, 5, 5);
  for (int i = 1; i <= 4; ++i) in.slot[i + 1] = d.source(s.operands[i], Type::b32);
  in.slot[0] = d.destination(s.operands[0], Type::b32, true);
  in.slot[1] = s.operands[0].second.empty() ? kNoSlot : d.destination(s.operands[0].second[0], Type::pred, true);
  in.exec = run_shfl;
}

// ---------------------------------------------------------------- vote, match, activemask, elect

// flags: 0 all, 1 any, 2 uni, 3 ballot; bit 4: negated source.
Step run_vote(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t source = w.pred(in.slot[1]);
  if (in.flags & 16) source = ~source;
  uint32_t yes = 0;
  uint32_t ballot[kLanes];
  Step step = by_members(w, w.r32(in.slot[2]), mask, [&](uint32_t group, uint32_t) {
    uint32_t set = source & group;
    bool result = (in.flags & 3) == 0 ? set == group : (in.flags & 3) == 1 ? set != 0 : set == 0 || set == group;
    if (result) yes |= group;
    for (int i = 0; i < kLanes; ++i)
      if (group >> i & 1) ballot[i] = set;
  });
  if (step != Step::next) return step;
  if ((in.flags & 3) == 3) for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return ballot[i]; });
  else set_predicate(w, in.slot[0], yes, mask);
  return Step::next;
}

void decode_vote(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  int mode = m.take_one({"all", "any", "uni", "ballot"}, -2);
  Type type = m.need_type();
  if (type != (mode == 3 ? Type::b32 : Type::pred)) unsupported(s, "");
  d.operand_count(s, 3, 3);
  Operand source = s.operands[1];
  in.flags = static_cast<uint8_t>(mode | (source.negated ? 16 : 0));
  source.negated = false;
  in.slot[1] = d.source(source, Type::pred);
  in.slot[2] = d.source(s.operands[2], Type::b32);
  in.slot[0] = d.destination(s.operands[0], type);
  in.exec = run_vote;
}

// slot: 0 d, 1 p, 2 a, 3 members; flags: 1 all.
template <class C>
Step run_match(Warp& w, const Instruction& in, uint32_t mask) {
  const C* a = reinterpret_cast<C*>(w.registers + in.slot[2]);
  uint32_t result[kLanes] = {}, all = 0;
  Step step = by_members(w, w.r32(in.slot[3]), mask, [&](uint32_t group, uint32_t) {
    for (uint32_t rest = group; rest; rest &= rest - 1) {
      int lane = __builtin_ctz(rest);
      uint32_t same = 0;
      for (uint32_t others = group; others; others &= others - 1) {
        int j = __builtin_ctz(others);
        if (a[j] == a[lane]) same |= 1u << j;
      }
      if (in.flags) {
        if (same == group) all |= 1u << lane;
        result[lane] = same == group ? group : 0;
      } else {
        result[lane] = same;
      }
    }
  });
  if (step != Step::next) return step;
  if (in.slot[0] != kNoSlot) for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return result[i]; });
  if (in.slot[1] != kNoSlot) set_predicate(w, in.slot[1], all, mask);
  return Step::next;
}

void decode_match(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = static_cast<uint8_t>(m.take_one({"any", "all"}, -2));
  if (!m.take("sync")) unsupported(s, "");
  Type type = m.need_type();
  if (type != Type::b32 && type != Type::b64) unsupported(s, "");
  d.operand_count(s, 3, 3);
  in.slot[2] = d.source(s.operands[1], type);
  in.slot[3] = d.source(s.operands[2], Type::b32);
  in.slot[0] = d.destination(s.operands[0], Type::b32, true);
  in.slot[1] = kNoSlot;
  if (!s.operands[0].second.empty()) {
    if (!in.flags) unsupported(s, "");
    in.slot[1] = d.destination(s.operands[0].second[0], Type::pred, true);
  }
  in.exec = type == Type::b32 ? run_match<uint32_t> : run_match<uint64_t>;
}

Step run_activemask(Warp& w, const Instruction& in, uint32_t mask) {
  for_lanes(w.r32(in.slot[0]), mask, [&](int) { return mask; });
  return Step::next;
}

void decode_activemask(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  if (m.need_type() != Type::b32) unsupported(s, "");
  d.operand_count(s, 1, 1);
  in.slot[0] = d.destination(s.operands[0], Type::b32);
  in.exec = run_activemask;
}

// The lowest member is the leader, as on the hardware.
Step run_elect(Warp& w, const Instruction& in, uint32_t mask) {
  uint32_t leaders = 0;
  uint32_t lane_of[kLanes] = {};
  Step step = by_members(w, w.r32(in.slot[2]), mask, [&](uint32_t group, uint32_t) {
    uint32_t leader = static_cast<uint32_t>(__builtin_ctz(group));
    leaders |= 1u << leader;
    for (int i = 0; i < kLanes; ++i)
      if (group >> i & 1) lane_of[i] = leader;
  });
  if (step != Step::next) return step;
  if (in.slot[0] != kNoSlot) for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return lane_of[i]; });
  set_predicate(w, in.slot[1], leaders, mask);
  return Step::next;
}

void decode_elect(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  d.operand_count(s, 2, 2);
  if (s.operands[0].second.size() != 1) unsupported(s, "elect.sync needs d|p");
  in.slot[2] = d.source(s.operands[1], Type::b32);
  in.slot[0] = d.destination(s.operands[0], Type::b32, true);
  in.slot[1] = d.destination(s.operands[0].second[0], Type::pred);
  in.exec = run_elect;
}

Step run_warp_sync(Warp& w, const Instruction& in, uint32_t mask) {
  return by_members(w, w.r32(in.slot[0]), mask, [](uint32_t, uint32_t) {});
}

void decode_warp_sync(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  d.operand_count(s, 1, 1);
  in.slot[0] = d.source(s.operands[0], Type::b32);
  in.exec = run_warp_sync;
}

// ---------------------------------------------------------------- redux

enum class Redux : uint8_t { add, min, max, and_, or_, xor_, fmin, fmax };
constexpr uint8_t kReduxSigned = 16, kReduxAbs = 32, kReduxNan = 64;

Step run_redux(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t* a = w.r32(in.slot[1]);
  uint32_t result[kLanes] = {};
  Step step = by_members(w, w.r32(in.slot[2]), mask, [&](uint32_t group, uint32_t) {
    Redux op = static_cast<Redux>(in.flags & 15);
    bool first = true;
    uint32_t acc = 0;
    for (uint32_t rest = group; rest; rest &= rest - 1) {
      uint32_t v = a[__builtin_ctz(rest)];
      if (op >= Redux::fmin && (in.flags & kReduxAbs)) v &= 0x7fffffffu;
      if (first) {
        acc = v;
        first = false;
        continue;
      }
      bool is_s = in.flags & kReduxSigned;
      switch (op) {
        case Redux::add: acc += v; break;
        case Redux::min: acc = is_s ? static_cast<uint32_t>(std::min(static_cast<int32_t>(acc), static_cast<int32_t>(v))) : std::min(acc, v); break;
        case Redux::max: acc = is_s ? static_cast<uint32_t>(std::max(static_cast<int32_t>(acc), static_cast<int32_t>(v))) : std::max(acc, v); break;
        case Redux::and_: acc &= v; break;
        case Redux::or_: acc |= v; break;
        case Redux::xor_: acc ^= v; break;
        default: {
          fp::MinMax choice;
          choice.is_max = op == Redux::fmax;
          choice.nan = in.flags & kReduxNan;
          uint32_t out;
          fp::min_max_f32(&acc, &v, nullptr, &out, 1, choice);
          acc = out;
        }
      }
    }
    if (op >= Redux::fmin && (acc & 0x7fffffffu) > 0x7f800000u) acc = 0x7fffffffu;
    for (int i = 0; i < kLanes; ++i)
      if (group >> i & 1) result[i] = acc;
  });
  if (step != Step::next) return step;
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return result[i]; });
  return Step::next;
}

void decode_redux(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  int op = m.take_one({"add", "min", "max", "and", "or", "xor"}, -2);
  bool abs = m.take("abs"), nan = m.take("NaN");
  Type type = m.need_type();
  if (type == Type::f32) {
    if (op != 1 && op != 2) unsupported(s, "");
    op = op == 1 ? static_cast<int>(Redux::fmin) : static_cast<int>(Redux::fmax);
  } else if (abs || nan || (op < 3 ? type != Type::u32 && type != Type::s32 : type != Type::b32)) {
    unsupported(s, "");
  }
  in.flags = static_cast<uint8_t>(op | (is_signed(type) ? kReduxSigned : 0) | (abs ? kReduxAbs : 0) | (nan ? kReduxNan : 0));
  d.operand_count(s, 3, 3);
  in.slot[1] = d.source(s.operands[1], type);
  in.slot[2] = d.source(s.operands[2], Type::b32);
  in.slot[0] = d.destination(s.operands[0], type);
  in.exec = run_redux;
}

// ---------------------------------------------------------------- ldmatrix, stmatrix, movmatrix

struct MatrixData : Payload {
  Space space = Space::shared_cta;
  Address address;
  std::vector<Slot> slots;
  bool transposed = false;
};

/// 8x8 matrices of 16 bits. Lane i of matrix k's eight lanes gives the address of row i; lane l holds in its k-th register
/// row l / 4, elements 2 (l % 4) and the next (transposed: column l / 4).
Step run_matrix(Warp& w, const Instruction& in, uint32_t mask) {
  const MatrixData& data = in.as<MatrixData>();
  const int count = static_cast<int>(data.slots.size());
  const bool load = in.flags;
  const uint32_t row_lanes = count == 4 ? kFull : (1u << (8 * count)) - 1;
  uint8_t* at[kLanes];
  locate(w, data.space, data.address, 16, row_lanes, load ? Access::read : Access::write, at);
  for (int k = 0; k < count; ++k) {
    uint32_t* reg = w.r32(data.slots[k]);
    uint16_t tile[8][8];
    if (load) {
      for (int r = 0; r < 8; ++r) std::memcpy(tile[r], at[8 * k + r], 16);
      for (int l = 0; l < kLanes; ++l) {
        int r = l / 4, c = 2 * (l % 4);
        uint32_t low = data.transposed ? tile[c][r] : tile[r][c], high = data.transposed ? tile[c + 1][r] : tile[r][c + 1];
        reg[l] = high << 16 | low;
      }
    } else {
      for (int l = 0; l < kLanes; ++l) {
        int r = l / 4, c = 2 * (l % 4);
        uint16_t low = static_cast<uint16_t>(reg[l]), high = static_cast<uint16_t>(reg[l] >> 16);
        if (data.transposed) {
          tile[c][r] = low;
          tile[c + 1][r] = high;
        } else {
          tile[r][c] = low;
          tile[r][c + 1] = high;
        }
      }
      for (int r = 0; r < 8; ++r) std::memcpy(at[8 * k + r], tile[r], 16);
    }
  }
  if (!load) w.cta->cluster->touch();
  return Step::next;
}

void decode_matrix(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool load = s.opcode[0] == "ldmatrix";
  in.flags = load;
  if (!m.take("sync") || !m.take("aligned")) unsupported(s, "");
  m.take_one({"m8n8"}, -2);   // the fragment layout of m16n8 (8-bit) is given by a figure only: not known here
  int count = 1 << m.take_one({"x1", "x2", "x4"}, -2);
  auto data = std::make_unique<MatrixData>();
  data->transposed = m.take("trans");
  int space = m.take_one({"shared", "shared::cta"});
  data->space = space < 0 ? Space::generic : Space::shared_cta;
  Type type = m.need_type();
  if (type != Type::b16) unsupported(s, "");
  d.operand_count(s, 2, 2);
  const Operand& regs = s.operands[load ? 0 : 1];
  data->address = d.address(s.operands[load ? 1 : 0]);
  std::vector<Operand> items = regs.kind == Operand::Kind::vector ? regs.items : std::vector<Operand>{regs};
  if (static_cast<int>(items.size()) != count) unsupported(s, "the number of registers does not match");
  for (const Operand& item : items) data->slots.push_back(load ? d.destination(item, Type::b32) : d.source(item, Type::b32));
  in.aligned = true;
  in.exec = run_matrix;
  d.keep(in, std::move(data));
}

Step run_movmatrix(Warp& w, const Instruction& in, uint32_t mask) {
  const uint32_t* a = w.r32(in.slot[1]);
  uint16_t tile[8][8];
  for (int l = 0; l < kLanes; ++l) {
    tile[l / 4][2 * (l % 4)] = static_cast<uint16_t>(a[l]);
    tile[l / 4][2 * (l % 4) + 1] = static_cast<uint16_t>(a[l] >> 16);
  }
  uint32_t* d = w.r32(in.slot[0]);
  for (int l = 0; l < kLanes; ++l) d[l] = static_cast<uint32_t>(tile[2 * (l % 4) + 1][l / 4]) << 16 | tile[2 * (l % 4)][l / 4];
  return Step::next;
}

void decode_movmatrix(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  for (const char* part : {"sync", "aligned", "m8n8", "trans", "b16"})
    if (!m.take(part)) unsupported(s, "");
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], Type::b32);
  in.slot[0] = d.destination(s.operands[0], Type::b32);
  in.aligned = true;
  in.exec = run_movmatrix;
}

const Family registered[] = {
    {"shfl.sync", decode_shfl}, {"vote.sync", decode_vote}, {"match", decode_match}, {"activemask", decode_activemask}, {"elect.sync", decode_elect},
    {"bar.warp.sync", decode_warp_sync}, {"redux.sync", decode_redux}, {"ldmatrix", decode_matrix}, {"stmatrix", decode_matrix}, {"movmatrix", decode_movmatrix},
};

}  // namespace
}  // namespace emu
