// Small asynchronous instructions and control of execution resources: cp.async, st.async, red.async, fences, griddepcontrol,
// setmaxnreg, clusterlaunchcontrol (PTX ISA 9.7.9.12 f., 9.7.9.25.3, 9.7.13.4, .13, .17 f., 9.7.19.5).
#include <algorithm>

#include "memory_access.h"
#include "vector_ops.h"

namespace emu {
namespace {

// ---------------------------------------------------------------- cp.async (not bulk)

/// One thread's copy of 4, 8 or 16 bytes from global to shared memory, zero-filled beyond the source size.
struct ThreadCopy : AsyncOp {
  const uint8_t* from = nullptr;
  Cta* cta = nullptr;
  uint32_t offset = 0;
  uint32_t size = 0, valid = 0;
  std::shared_ptr<AsyncGroup> group;
  bool advance(Cluster&) override {
    uint8_t bytes[16] = {};
    if (valid) std::memcpy(bytes, from, valid);
    cta->check_barriers(offset, size, "cp.async");
    std::memcpy(cta->shared_at(offset, size, "cp.async"), bytes, size);
    --group->unread;
    --group->unfinished;
    return true;
  }
  std::string describe() const override { return format("cp.async of %u bytes to shared 0x%x", size, cta->address(offset)); }
};

struct CopyData : Payload {
  Address to, from;
  Space to_space = Space::shared_cta;
  uint32_t size = 4;
  Slot source_size = kNoSlot;   // or
  Slot ignore = kNoSlot;        // predicate: ignore the source, write zeros
};

Step run_copy(Warp& w, const Instruction& in, uint32_t mask) {
  const CopyData& data = in.as<CopyData>();
  uint32_t ignore = data.ignore == kNoSlot ? 0 : w.pred(data.ignore);
  if (in.flags) ignore = ~ignore;
  if (data.ignore == kNoSlot) ignore = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto op = std::make_unique<ThreadCopy>();
    op->size = data.size;
    op->valid = data.size;
    if (data.source_size != kNoSlot) {
      op->valid = w.r32(data.source_size)[lane];
      if (op->valid > data.size) fail_lane(lane, Fault::illegal_operand, "cp.async source size %u above its copy size %u", op->valid, data.size);
    }
    if (ignore >> lane & 1) op->valid = 0;
    uint64_t from = w.address(data.from, lane);
    if (from % data.size) fail_lane(lane, Fault::misaligned, "cp.async of %u bytes from address 0x%llx", data.size, static_cast<unsigned long long>(from));
    if (op->valid) {
      uint8_t* source = w.cta->cluster->grid->global_at(from, op->valid, Access::read, "cp.async");
      op->from = source;
    }
    resolve(w, lane, data.to_space, w.address(data.to, lane), data.size, Access::write);
    uint64_t to = w.address(data.to, lane) - (data.to_space == Space::generic ? kSharedWindow : 0);
    op->cta = &w.cta->cluster->shared_cta(to, &op->offset);
    if (op->cta != w.cta) fail_lane(lane, Fault::illegal_operand, "cp.async into another CTA's shared memory");
    op->group = w.copy_groups(lane).join();
    ++op->group->unread;
    ++op->group->unfinished;
    op->agent = w.agent(lane);
    op->proxy = Proxy::generic;
    op->line = w.line;
    std::vector<uint64_t>& ids = w.copy_id_list(lane);
    ids.push_back(w.cta->cluster->async.submit(*w.cta->cluster, std::move(op)));
  }
  return Step::next;
}

void decode_copy(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<CopyData>();
  bool cg = s.opcode[2] == "cg";
  if (m.take_one({"shared", "shared::cta"}) < 0) unsupported(s, "");
  if (!m.take("global")) unsupported(s, "");
  bool policy = m.take("L2::cache_hint");
  m.take_one({"L2::64B", "L2::128B", "L2::256B"});
  policy = m.take("L2::cache_hint") || policy;
  d.operand_count(s, 3, policy ? 5 : 4);
  data->to = d.address(s.operands[0]);
  data->from = d.address(s.operands[1]);
  int64_t size = d.immediate(s.operands[2]);
  if (cg ? size != 16 : size != 4 && size != 8 && size != 16) unsupported(s, "copy size must be 4, 8 or 16 bytes (16 with .cg)");
  data->size = static_cast<uint32_t>(size);
  size_t extra = s.operands.size() - (policy ? 1 : 0);
  if (extra > 3) {
    Operand operand = s.operands[3];
    if (operand.kind == Operand::Kind::reg && operand.bits == 1) {
      in.flags = operand.negated;
      operand.negated = false;
      data->ignore = d.source(operand, Type::pred);
    } else {
      data->source_size = d.source(operand, Type::u32);
    }
  }
  if (policy) d.source(s.operands.back(), Type::b64);
  in.exec = run_copy;
  d.keep(in, std::move(data));
}

Step run_copy_commit(Warp& w, const Instruction&, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) w.copy_groups(__builtin_ctz(rest)).commit();
  return Step::next;
}

void decode_copy_commit(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  d.operand_count(s, 0, 0);
  in.exec = run_copy_commit;
}

// imm: groups that may be pending; flags: wait_all.
Step run_copy_wait(Warp& w, const Instruction& in, uint32_t mask) {
  if (!w.copies) return Step::next;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    ThreadGroups& groups = w.copy_groups(__builtin_ctz(rest));
    if (in.flags && groups.open) groups.commit();
    if (!groups.reached(in.imm, false)) return w.block(Wait::Kind::group, "cp.async groups of this thread");
  }
  return Step::next;
}

void decode_copy_wait(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = s.opcode[2] == "wait_all";
  d.operand_count(s, in.flags ? 0 : 1, in.flags ? 0 : 1);
  if (!in.flags) {
    int64_t n = d.immediate(s.operands[0]);
    if (n < 0) unsupported(s, "");
    in.imm = static_cast<uint64_t>(n);
  }
  in.exec = run_copy_wait;
}

// ---------------------------------------------------------------- st.async, red.async

struct RemoteStore : AsyncOp {
  Cta *cta = nullptr, *barrier_cta = nullptr;
  uint32_t offset = 0, barrier = 0, size = 0;
  std::array<uint8_t, 16> bytes{};
  int reduce = -1;      // -1 store, else index of the operation
  Type type = Type::b32;
  bool advance(Cluster&) override {
    cta->check_barriers(offset, size, "st.async");
    uint8_t* to = cta->shared_at(offset, size, "st.async");
    if (reduce < 0) std::memcpy(to, bytes.data(), size);
    else reduce_into(to);
    barrier_cta->barriers.complete_tx(*barrier_cta, barrier, size);
    return true;
  }
  bool needs_cta(uint32_t rank) const override { return cta->rank == rank; }
  std::string describe() const override { return format("%s of %u bytes to shared 0x%x", reduce < 0 ? "st.async" : "red.async", size, cta->address(offset)); }

 private:
  void reduce_into(uint8_t* to) {
    uint64_t old = 0, b = 0;
    std::memcpy(&old, to, size);
    std::memcpy(&b, bytes.data(), size);
    bool is_s = is_signed(type);
    int64_t so = size == 4 ? static_cast<int32_t>(old) : static_cast<int64_t>(old), sb = size == 4 ? static_cast<int32_t>(b) : static_cast<int64_t>(b);
    uint64_t value = old;
    switch (reduce) {
      case 0: value = old >= b ? 0 : old + 1; break;
      case 1: value = old == 0 || old > b ? b : old - 1; break;
      case 2: value = is_s ? (so < sb ? old : b) : std::min(old, b); break;
      case 3: value = is_s ? (so > sb ? old : b) : std::max(old, b); break;
      case 4: value = old + b; break;
      case 5: value = old & b; break;
      case 6: value = old | b; break;
      default: value = old ^ b; break;
    }
    std::memcpy(to, &value, size);
  }
};

struct RemoteData : Payload {
  Address to, barrier;
  std::vector<Slot> values;
  Type type = Type::b32;
  int reduce = -1;
};

Step run_remote(Warp& w, const Instruction& in, uint32_t mask) {
  const RemoteData& data = in.as<RemoteData>();
  Cluster& cluster = *w.cta->cluster;
  const uint32_t element = type_bits(data.type) / 8, size = element * static_cast<uint32_t>(data.values.size());
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto op = std::make_unique<RemoteStore>();
    uint64_t to = w.address(data.to, lane), barrier = w.address(data.barrier, lane);
    if (to % size) fail_lane(lane, Fault::misaligned, "st.async of %u bytes to shared address 0x%llx", size, static_cast<unsigned long long>(to));
    if (barrier & 7) fail_lane(lane, Fault::misaligned, "mbarrier at shared address 0x%llx", static_cast<unsigned long long>(barrier));
    op->cta = &cluster.shared_cta(to, &op->offset);
    op->barrier_cta = &cluster.shared_cta(barrier, &op->barrier);
    if (op->cta != op->barrier_cta)
      fail_lane(lane, Fault::illegal_operand, "st.async to CTA rank %u signals an mbarrier of CTA rank %u", op->cta->rank, op->barrier_cta->rank);
    op->cta->shared_at(op->offset, size, "st.async");
    op->barrier_cta->barriers.at(*op->barrier_cta, op->barrier);
    for (size_t k = 0; k < data.values.size(); ++k) {
      if (element == 8) std::memcpy(op->bytes.data() + 8 * k, &w.r64(data.values[k])[lane], 8);
      else std::memcpy(op->bytes.data() + 4 * k, &w.r32(data.values[k])[lane], 4);
    }
    op->size = size;
    op->reduce = data.reduce;
    op->type = data.type;
    op->agent = w.agent(lane);
    op->proxy = Proxy::generic;
    op->line = w.line;
    cluster.async.submit(cluster, std::move(op));
  }
  return Step::next;
}

void decode_remote(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<RemoteData>();
  bool red = s.opcode[0] == "red";
  m.take_one({"weak", "relaxed"});
  m.take("cluster");
  if (!m.take("shared::cluster")) unsupported(s, "only st.async and red.async to shared::cluster are known");
  if (!m.take("mbarrier::complete_tx::bytes")) unsupported(s, "");
  if (red) data->reduce = m.take_one({"inc", "dec", "min", "max", "add", "and", "or", "xor"}, -2);
  int vector = red ? -1 : m.take_one({"v2", "v4"});
  data->type = m.need_type();
  int bits = type_bits(data->type);
  if ((bits != 32 && bits != 64) || (red && is_float(data->type)) || (vector == 1 && bits == 64)) unsupported(s, "");
  d.operand_count(s, 3, 3);
  data->to = d.address(s.operands[0]);
  data->barrier = d.address(s.operands[2]);
  if (vector < 0) data->values.push_back(d.source(s.operands[1], data->type));
  else {
    if (s.operands[1].kind != Operand::Kind::vector || s.operands[1].items.size() != (2u << vector)) unsupported(s, "");
    for (const Operand& item : s.operands[1].items) data->values.push_back(d.source(item, data->type));
  }
  in.exec = run_remote;
  d.keep(in, std::move(data));
}

// ---------------------------------------------------------------- fences, griddepcontrol

// Execution here is sequentially consistent inside a proxy; fences only matter to observers. imm: the SyncKind.
Step run_fence(Warp& w, const Instruction& in, uint32_t mask) {
  Cluster& cluster = *w.cta->cluster;
  if (cluster.grid->observer) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      SyncEvent event;
      event.kind = static_cast<SyncKind>(in.imm);
      event.agent = w.agent(__builtin_ctz(rest));
      event.order = cluster.order++;
      event.line = w.line;
      cluster.grid->observer->sync(event);
    }
  }
  return Step::next;
}

void decode_fence(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.exec = run_fence;
  in.imm = static_cast<uint64_t>(SyncKind::fence);
  d.operand_count(s, 0, 0);
  if (s.opcode[0] == "membar") {
    if (m.take("proxy")) {
      m.take_one({"alias", "async", "async.global"}, -2);
      in.imm = static_cast<uint64_t>(SyncKind::fence_proxy_async);
      return;
    }
    m.take_one({"cta", "gl", "sys"}, -2);
    return;
  }
  if (m.take("proxy")) {
    in.imm = static_cast<uint64_t>(SyncKind::fence_proxy_async);
    if (m.take("alias")) return;
    if (m.take("async")) {
      m.take_one({"global", "shared::cta", "shared::cluster"});
      return;
    }
    if (m.take("async::generic")) {
      bool acquire = m.take_one({"acquire", "release"}, -2) == 0;
      m.take_one({acquire ? "sync_restrict::shared::cluster" : "sync_restrict::shared::cta"}, -2);
      m.take_one({"cluster"}, -2);
      return;
    }
    unsupported(s, "");
  }
  if (m.take("mbarrier_init")) {
    m.take_one({"release"}, -2);
    m.take_one({"cluster"}, -2);
    return;
  }
  int sem = m.take_one({"sc", "acq_rel", "acquire", "release"});
  if (sem >= 2 && m.take_one({"sync_restrict::shared::cluster", "sync_restrict::shared::cta"}) >= 0) {
    m.take_one({"cluster"}, -2);
    return;
  }
  m.take_one({"cta", "cluster", "gpu", "sys"}, -2);
}

// Launches run one after the other here, so that the grids that this one depends on have completed.
Step run_griddepcontrol(Warp&, const Instruction&, uint32_t) { return Step::next; }

void decode_griddepcontrol(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take_one({"launch_dependents", "wait"}, -2);
  d.operand_count(s, 0, 0);
  in.exec = run_griddepcontrol;
}

// ---------------------------------------------------------------- setmaxnreg

// imm: registers a thread; flags: inc.
Step run_setmaxnreg(Warp& w, const Instruction& in, uint32_t) {
  const uint32_t want = static_cast<uint32_t>(in.imm);
  Cta& cta = *w.cta;
  if (w.register_count == 0) return Step::next;   // the compiler ignores it in such a kernel (see prepare())
  if (in.flags ? want < w.register_count : want > w.register_count)
    fail(Fault::register_pool, "setmaxnreg.%s to %u, but the warp's threads have %u registers", in.flags ? "inc" : "dec", want, w.register_count);
  int64_t delta = (static_cast<int64_t>(want) - static_cast<int64_t>(w.register_count)) * kLanes;
  if (delta > cta.register_pool) {
    return w.block(Wait::Kind::registers, in.flags ? "setmaxnreg.inc" : "setmaxnreg.dec");
  }
  cta.register_pool -= delta;
  w.register_count = want;
  w.maxnreg_history.push_back(want);
  cta.cluster->wake();
  return Step::next;
}

void decode_setmaxnreg(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  in.flags = m.take_one({"inc", "dec"}, -2) == 0;
  m.take_one({"sync"}, -2);
  m.take_one({"aligned"}, -2);
  if (m.need_type() != Type::u32) unsupported(s, "");
  d.operand_count(s, 1, 1);
  int64_t n = d.immediate(s.operands[0]);
  if (n < 24 || n > 256 || n % 8) unsupported(s, format("setmaxnreg takes a multiple of 8 from 24 to 256; got %lld", static_cast<long long>(n)));
  in.imm = static_cast<uint64_t>(n);
  in.aligned = true;
  in.exec = run_setmaxnreg;
}

// ---------------------------------------------------------------- clusterlaunchcontrol

// The response, 16 bytes: first word 1 if a cluster was cancelled, then the %ctaid of its first CTA.
struct TryCancel : AsyncOp {
  struct Target { Cta *cta, *barrier_cta; uint32_t offset, barrier; };
  std::vector<Target> targets;
  bool grid_ordered() const override { return true; }
  bool advance(Cluster& cluster) override {
    uint32_t response[4] = {};
    int64_t next = cluster.grid->cancel_next();
    if (next >= 0) {
      auto first = cluster.grid->first_cta(static_cast<uint64_t>(next));
      response[0] = 1;
      for (int i = 0; i < 3; ++i) response[i + 1] = first[i];
    } else {
      cluster.cancel_failed = true;
    }
    for (const Target& t : targets) {
      t.cta->check_barriers(t.offset, 16, "clusterlaunchcontrol.try_cancel");
      std::memcpy(t.cta->shared_at(t.offset, 16, "clusterlaunchcontrol.try_cancel"), response, 16);
      t.barrier_cta->barriers.complete_tx(*t.barrier_cta, t.barrier, 16);
    }
    return true;
  }
  bool needs_cta(uint32_t rank) const override {
    for (const Target& t : targets)
      if (t.cta->rank == rank) return true;
    return false;
  }
  std::string describe() const override { return "clusterlaunchcontrol.try_cancel"; }
};

struct CancelData : Payload {
  Address to, barrier;
  bool multicast = false, generic = false;
};

Step run_try_cancel(Warp& w, const Instruction& in, uint32_t mask) {
  const CancelData& data = in.as<CancelData>();
  Cluster& cluster = *w.cta->cluster;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    // The ISA leaves a request after an observed failure undefined.
    if (cluster.cancel_failed) fail_lane(lane, Fault::illegal_operand, "clusterlaunchcontrol.try_cancel after one that failed");
    auto op = std::make_unique<TryCancel>();
    uint64_t to = w.address(data.to, lane), barrier = w.address(data.barrier, lane);
    if (data.generic) {
      if (to < kSharedWindow || barrier < kSharedWindow) fail_lane(lane, Fault::illegal_operand, "clusterlaunchcontrol.try_cancel outside shared memory");
      to -= kSharedWindow;
      barrier -= kSharedWindow;
    }
    if (to & 15) fail_lane(lane, Fault::misaligned, "clusterlaunchcontrol response at shared address 0x%llx", static_cast<unsigned long long>(to));
    if (barrier & 7) fail_lane(lane, Fault::misaligned, "mbarrier at shared address 0x%llx", static_cast<unsigned long long>(barrier));
    uint32_t offset, barrier_offset;
    Cta& cta = cluster.shared_cta(to, &offset);
    Cta& barrier_cta = cluster.shared_cta(barrier, &barrier_offset);
    if (&cta != w.cta || &barrier_cta != w.cta) fail_lane(lane, Fault::illegal_operand, "clusterlaunchcontrol.try_cancel needs addresses of the own CTA");
    if (data.multicast)
      for (auto& other : cluster.ctas) op->targets.push_back({other.get(), other.get(), offset, barrier_offset});
    else
      op->targets.push_back({&cta, &cta, offset, barrier_offset});
    for (auto& t : op->targets) {
      t.cta->shared_at(t.offset, 16, "clusterlaunchcontrol.try_cancel");
      t.barrier_cta->barriers.at(*t.barrier_cta, t.barrier);
    }
    op->agent = w.agent(lane);
    op->agent.engine = Engine::cluster_launch;
    op->line = w.line;
    cluster.async.submit(cluster, std::move(op));
  }
  return Step::next;
}

void decode_try_cancel(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<CancelData>();
  m.take_one({"async"}, -2);
  data->generic = !m.take("shared::cta");
  m.take_one({"mbarrier::complete_tx::bytes"}, -2);
  data->multicast = m.take("multicast::cluster::all");
  if (m.need_type() != Type::b128) unsupported(s, "");
  d.operand_count(s, 2, 2);
  data->to = d.address(s.operands[0]);
  data->barrier = d.address(s.operands[1]);
  in.exec = run_try_cancel;
  d.keep(in, std::move(data));
}

// slot: 0-2 destinations, 3 response. flags: 0 is_canceled, 1 one dimension (imm), 2 vector.
Step run_query(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t *low = w.r64(in.slot[3]), *high = low + kLanes;
  auto word = [&](int i, int k) { return static_cast<uint32_t>((k < 2 ? low : high)[i] >> (32 * (k & 1))); };
  if (in.flags == 0) {
    set_predicate(w, in.slot[0], mask_of([&](int i) { return word(i, 0) == 1; }), mask);
    return Step::next;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int i = __builtin_ctz(rest);
    bool success = word(i, 0) == 1;
    for (int k = 0; k < 3; ++k) {
      if (in.flags == 1 && k != static_cast<int>(in.imm)) continue;
      Slot slot = in.flags == 1 ? in.slot[0] : in.slot[k];
      if (slot != kNoSlot) w.r32(slot)[i] = success ? word(i, k + 1) : kPoison;   // undefined after a failure
    }
  }
  return Step::next;
}

void decode_query(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  int what = m.take_one({"is_canceled", "get_first_ctaid", "get_first_ctaid::x", "get_first_ctaid::y", "get_first_ctaid::z"}, -2);
  d.operand_count(s, 2, 2);
  if (what == 1) m.take_one({"v4"}, -2);
  Type type = m.need_type();
  if (type != (what == 0 ? Type::pred : Type::b32) || m.need_type() != Type::b128) unsupported(s, "");
  in.slot[3] = d.source(s.operands[1], Type::b128);
  if (what == 1) {
    const Operand& to = s.operands[0];
    if (to.kind != Operand::Kind::vector || to.items.size() != 4) unsupported(s, "");
    in.flags = 2;
    for (int k = 0; k < 3; ++k) in.slot[k] = d.destination(to.items[k], Type::b32, true);
    if (to.items[3].kind != Operand::Kind::sink) unsupported(s, "the fourth element of get_first_ctaid.v4 must be '_'");
  } else {
    in.flags = what == 0 ? 0 : 1;
    in.imm = static_cast<uint64_t>(std::max(what - 2, 0));
    in.slot[0] = d.destination(s.operands[0], type);
  }
  in.exec = run_query;
}

const Family registered[] = {
    {"cp.async.ca", decode_copy}, {"cp.async.cg", decode_copy},
    {"cp.async.commit_group", decode_copy_commit}, {"cp.async.wait_group", decode_copy_wait}, {"cp.async.wait_all", decode_copy_wait},
    {"st.async", decode_remote}, {"red.async", decode_remote}, {"fence", decode_fence}, {"membar", decode_fence},
    {"griddepcontrol", decode_griddepcontrol}, {"setmaxnreg", decode_setmaxnreg},
    {"clusterlaunchcontrol.try_cancel", decode_try_cancel}, {"clusterlaunchcontrol.query_cancel", decode_query},
};

}  // namespace
}  // namespace emu
