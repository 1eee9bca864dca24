// tcgen05.ld, .ld.red, .st, .wait and .fence (PTX ISA 9.7.16.8 and .11).
#include <algorithm>
#include <cmath>

#include "tensor.h"

namespace emu {
namespace {

/// .ld.red: what is done with the registers after they have been filled.
struct Reduction {
  Slot result = kNoSlot;
  Type type = Type::f32;
  bool max = false, absolute = false, nan = false;
};

struct LdStData : Payload {
  TensorAccess access;
  std::vector<Slot> registers;
  Slot taddr = kNoSlot;
  int64_t offset = 0;
  Reduction reduction;
};

const char* shape_name(TensorAccess::Shape shape) {
  constexpr const char* names[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
  return names[static_cast<int>(shape)];
}

/// The common address, split, with every rule about it.
TensorRects locate(Warp& warp, const LdStData& d, uint32_t mask, const char* what, uint32_t* lane, uint32_t* column) {
  if (mask != kFull) fail(Fault::divergence, "%s needs all 32 threads of its warp; 0x%08x execute it", what, mask);
  const uint32_t* taddr = warp.r32(d.taddr);
  for (int i = 1; i < kLanes; ++i) {
    if (taddr[i] != taddr[0]) {
      fail_lane(i, Fault::illegal_operand, "%s: taddr differs between the threads of the warp: 0x%08x in lane 0, 0x%08x in lane %d", what,
                taddr[0], taddr[i], i);
    }
  }
  const uint32_t address = taddr[0] + static_cast<uint32_t>(d.offset);
  *lane = address >> 16;
  *column = address & 0xffff;
  const uint32_t height = d.access.lanes(), first = 32u * (static_cast<uint32_t>(warp.index) % 4);
  const bool mine = *lane >= first && *lane + height <= first + 32;
  if (!mine) {
    fail(Fault::tensor_memory, "%s.%s at 0x%08x touches lanes %u to %u; warp %d may touch lanes %u to %u only", what,
         shape_name(d.access.shape), address, *lane, *lane + height - 1, warp.index, first, first + 31);
  }
  if (*lane % height != 0) {
    fail(Fault::tensor_memory, "%s.%s at 0x%08x: lane %u is not a multiple of %u", what, shape_name(d.access.shape), address, *lane, height);
  }
  const TensorRects rects = d.access.rects(warp.cta->rank, *lane, *column);
  for (const TensorRect& rect : rects) check_allocated(*warp.cta->cluster, rect, what);
  return rects;
}

float reduce_float(float x, float y, const Reduction& r) {
  if (r.absolute) {
    x = std::fabs(x);
    y = std::fabs(y);
  }
  if (std::isnan(x) || std::isnan(y)) {
    if (r.nan || (std::isnan(x) && std::isnan(y))) return std::nanf("");
    return std::isnan(x) ? y : x;
  }
  if (x == y) return std::signbit(x) == r.max ? y : x;  // +0 is above -0
  return (x > y) == r.max ? x : y;
}

uint32_t reduce(uint32_t x, uint32_t y, const Reduction& r) {
  if (r.type == Type::u32) return r.max ? std::max(x, y) : std::min(x, y);
  if (r.type == Type::s32) {
    const auto a = static_cast<int32_t>(x), b = static_cast<int32_t>(y);
    return static_cast<uint32_t>(r.max ? std::max(a, b) : std::min(a, b));
  }
  float a, b;
  std::memcpy(&a, &x, 4);
  std::memcpy(&b, &y, 4);
  const float z = reduce_float(a, b, r);
  if (std::isnan(z)) return 0x7fffffffu;
  uint32_t bits;
  std::memcpy(&bits, &z, 4);
  return bits;
}

void reduce_registers(Warp& warp, const LdStData& d) {
  for (int t = 0; t < kLanes; ++t) {
    uint32_t value = warp.r32(d.registers[0])[t];
    for (size_t i = 1; i < d.registers.size(); ++i) value = reduce(value, warp.r32(d.registers[i])[t], d.reduction);
    warp.r32(d.reduction.result)[t] = value;
  }
}

Step run_load(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<LdStData>();
  PendingLoad load;
  load.access = d.access;
  load.destinations = d.registers.data();
  load.line = warp.line;
  load.rects = locate(warp, d, mask, "tcgen05.ld", &load.lane, &load.column);
  if (d.reduction.result != kNoSlot) load.then = [&d](Warp& w) { reduce_registers(w, d); };
  issue_load(warp, std::move(load));
  return Step::next;
}

Step run_store(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto& d = in.as<LdStData>();
  PendingStore store;
  store.access = d.access;
  store.line = warp.line;
  store.rects = locate(warp, d, mask, "tcgen05.st", &store.lane, &store.column);
  store.values.resize(d.registers.size() * kLanes);
  for (size_t r = 0; r < d.registers.size(); ++r) {
    std::memcpy(store.values.data() + r * kLanes, warp.r32(d.registers[r]), kLanes * 4);
  }
  issue_store(warp, std::move(store));
  return Step::next;
}

void sync_event(Warp& warp, uint32_t mask, SyncKind kind) {
  Cluster& cluster = *warp.cta->cluster;
  Observer* observer = cluster.grid->observer;
  if (!observer) return;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    observer->sync({kind, warp.agent(__builtin_ctz(rest)), 0, 0, 0, 0, cluster.order++, warp.line});
  }
}

Step run_wait_ld(Warp& warp, const Instruction&, uint32_t mask) {
  land_tensor_loads(warp);
  sync_event(warp, mask, SyncKind::wait_ld);
  return Step::next;
}

Step run_wait_st(Warp& warp, const Instruction&, uint32_t mask) {
  land_tensor_stores(warp);
  sync_event(warp, mask, SyncKind::wait_st);
  return Step::next;
}

Step run_fence(Warp& warp, const Instruction& in, uint32_t mask) {
  sync_event(warp, mask, in.imm ? SyncKind::fence_after_thread_sync : SyncKind::fence_before_thread_sync);
  return Step::next;
}

// ---------------------------------------------------------------- decoding

void take_sync_aligned(const Statement& s, Modifiers& mods) {
  if (!mods.take("sync") || !mods.take("aligned")) unsupported(s, "'" + s.mnemonic + "' lacks .sync.aligned");
}

void take_shape(const Statement& s, Modifiers& mods, TensorAccess* access) {
  const int shape = mods.take_one({"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"}, -2);
  access->shape = static_cast<TensorAccess::Shape>(shape);
  access->repeat = 1u << mods.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"}, -2);
  const uint32_t most = shape == 2 ? 64 : shape == 3 ? 32 : 128;
  if (access->repeat > most) unsupported(s, format(".%s takes at most .x%u", shape_name(access->shape), most));
}

const std::vector<Operand>& vector_items(const Operand& operand, std::vector<Operand>* single) {
  if (operand.kind == Operand::Kind::vector) return operand.items;
  single->assign(1, operand);
  return *single;
}

void take_registers(Decoder& decoder, const Statement& s, const Operand& operand, bool load, LdStData* d) {
  std::vector<Operand> single;
  const std::vector<Operand>& items = vector_items(operand, &single);
  if (items.size() != d->access.registers()) {
    unsupported(s, format("'%s' takes a vector of %u registers; got %zu", s.mnemonic.c_str(), d->access.registers(), items.size()));
  }
  for (const Operand& item : items) {
    d->registers.push_back(load ? decoder.destination(item, Type::b32, d->reduction.result == kNoSlot) : decoder.source(item, Type::b32));
  }
}

void take_address(Decoder& decoder, const Statement& s, const Operand& operand, LdStData* d) {
  const Address address = decoder.address(operand);
  if (operand.items[0].kind == Operand::Kind::reg && address.bits != 32) unsupported(s, "a Tensor Memory address has 32 bits");
  d->taddr = address.base;
  d->offset = address.offset;
}

void take_split(Decoder& decoder, const Statement& s, const Operand& operand, TensorAccess* access) {
  const int64_t split = decoder.immediate(operand);
  if (split < 0 || split >= TensorMemory::kColumns) {
    unsupported(s, format("immHalfSplitoff is %lld; it is an offset of columns, 0 to 511", static_cast<long long>(split)));
  }
  access->split = static_cast<uint32_t>(split);
}

/// .ld.red exists from sm_101/sm_103/sm_110 on, not on sm_100.
void check_reduction_target(Decoder& decoder, const Statement& s) {
  const std::string& target = decoder.program().target;
  for (const char* name : {"sm_101", "sm_103", "sm_110"})
    if (target.rfind(name, 0) == 0) return;
  unsupported(s, "'" + s.mnemonic + "' exists on sm_101, sm_103 and sm_110; the module's target is " + target);
}

void decode_load(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<LdStData>();
  const bool reduces = mods.take("red");
  take_sync_aligned(s, mods);
  take_shape(s, mods, &d->access);
  const bool split = d->access.shape == TensorAccess::Shape::l16x32bx2;
  if (reduces) {
    check_reduction_target(decoder, s);
    if (d->access.shape != TensorAccess::Shape::l32x32b || d->access.repeat < 2) {
      unsupported(s, "tcgen05.ld.red is known for .32x32b from .x2 on");
    }
    // The ISA's syntax has the operation before the type, its example after it.
    d->reduction.max = mods.take_anywhere("max");
    if (!d->reduction.max && !mods.take_anywhere("min")) unsupported(s, "tcgen05.ld.red needs .min or .max");
    d->reduction.absolute = mods.take("abs");
    d->reduction.nan = mods.take("NaN");
    d->reduction.type = mods.need_type();
    const Type type = d->reduction.type;
    if (type != Type::f32 && ((type != Type::u32 && type != Type::s32) || d->reduction.absolute || d->reduction.nan)) {
      unsupported(s, "tcgen05.ld.red takes .f32 (with .abs and .NaN), .u32 or .s32");
    }
  } else {
    d->access.packed = mods.take("pack::16b");
    if (!mods.take("b32")) unsupported(s, "'" + s.mnemonic + "' lacks .b32");
  }
  const size_t count = 2 + reduces + split;
  decoder.operand_count(s, count, count);
  size_t next = 1;
  if (reduces) d->reduction.result = decoder.destination(s.operands[next++], Type::b32);
  take_address(decoder, s, s.operands[next++], d.get());
  if (split) take_split(decoder, s, s.operands[next], &d->access);
  take_registers(decoder, s, s.operands[0], true, d.get());
  in.aligned = true;
  in.exec = run_load;
  decoder.keep(in, std::move(d));
}

void decode_store(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  auto d = std::make_unique<LdStData>();
  take_sync_aligned(s, mods);
  take_shape(s, mods, &d->access);
  d->access.packed = mods.take("unpack::16b");
  if (!mods.take("b32")) unsupported(s, "'" + s.mnemonic + "' lacks .b32");
  const bool split = d->access.shape == TensorAccess::Shape::l16x32bx2;
  decoder.operand_count(s, 2 + split, 2 + split);
  take_address(decoder, s, s.operands[0], d.get());
  if (split) take_split(decoder, s, s.operands[1], &d->access);
  take_registers(decoder, s, s.operands[1 + split], false, d.get());
  in.aligned = true;
  in.exec = run_store;
  decoder.keep(in, std::move(d));
}

template <Step (*run)(Warp&, const Instruction&, uint32_t)>
void decode_wait(Decoder& decoder, const Statement& s, Modifiers& mods, Instruction& in) {
  decoder.operand_count(s, 0, 0);
  take_sync_aligned(s, mods);
  in.aligned = true;
  in.exec = run;
}

template <bool after>
void decode_fence(Decoder& decoder, const Statement& s, Modifiers&, Instruction& in) {
  decoder.operand_count(s, 0, 0);
  in.imm = after;
  in.exec = run_fence;
}

const Family load_family("tcgen05.ld", decode_load);
const Family store_family("tcgen05.st", decode_store);
const Family wait_ld_family("tcgen05.wait::ld", decode_wait<run_wait_ld>);
const Family wait_st_family("tcgen05.wait::st", decode_wait<run_wait_st>);
const Family before_family("tcgen05.fence::before_thread_sync", decode_fence<false>);
const Family after_family("tcgen05.fence::after_thread_sync", decode_fence<true>);

}  // namespace
}  // namespace emu
