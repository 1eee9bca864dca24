// bar, barrier, barrier.cluster and mbarrier (PTX ISA 9.7.13.1, .3, .15).
#include <algorithm>

#include "vector_ops.h"

namespace emu {
namespace {

void emit(Warp& w, int lane, SyncKind kind, uint64_t object, uint64_t phase) {
  Cluster& cluster = *w.cta->cluster;
  if (!cluster.grid->observer) return;
  SyncEvent event;
  event.kind = kind;
  event.agent = w.agent(lane);
  event.object = object;
  event.phase = phase;
  event.order = cluster.order++;
  event.line = w.line;
  cluster.grid->observer->sync(event);
}

// ---------------------------------------------------------------- named barriers

enum class Bar : uint8_t { sync, arrive, red_popc, red_and, red_or };

// slot: 0 destination, 1 barrier, 2 threads (kNoSlot: all), 3 predicate; flags: Bar; imm bit 0: per thread (not aligned),
// bit 1: negated predicate.
uint32_t uniform(Warp& w, Slot slot, uint32_t mask, const char* what) {
  const uint32_t* values = w.r32(slot);
  int first = __builtin_ctz(mask);
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    if (values[__builtin_ctz(rest)] != values[first]) fail(Fault::named_barrier, "%s differs between the threads of a warp", what);
  return values[first];
}

Step run_bar(Warp& w, const Instruction& in, uint32_t mask) {
  const Bar kind = static_cast<Bar>(in.flags);
  const bool per_thread = in.imm & 1;
  Cta& cta = *w.cta;
  const uint32_t all = (cta.threads + kLanes - 1) / kLanes * kLanes;
  const uint32_t number = uniform(w, in.slot[1], mask, "barrier number");
  if (number > 15) fail(Fault::named_barrier, "barrier number %u; there are 16", number);
  const uint32_t expected = in.slot[2] == kNoSlot ? all : uniform(w, in.slot[2], mask, "thread count");
  if (expected == 0 || expected % kLanes || expected > all)
    fail(Fault::named_barrier, "barrier %u: thread count %u must be a multiple of 32 from 32 to %u", number, expected, all);
  NamedBarrier& barrier = cta.named[number];
  BarrierStep& step = w.named_steps[number];
  uint32_t fresh = mask & ~step.arrived;
  if (fresh) {
    if (barrier.arrived && barrier.expected != expected)
      fail(Fault::named_barrier, "barrier %u: thread count %u, but threads that have arrived gave %u", number, expected, barrier.expected);
    barrier.expected = expected;
    // An aligned barrier counts whole warps; a per-thread one counts lanes, the missing ones of a partial warp with the last.
    uint32_t count = kLanes;
    if (per_thread) {
      count = static_cast<uint32_t>(__builtin_popcount(fresh));
      if ((w.live & ~(step.arrived | mask)) == 0) count += kLanes - static_cast<uint32_t>(__builtin_popcount(w.live));
    }
    if (barrier.arrived + count > expected)
      fail(Fault::named_barrier, "barrier %u: %u threads arrive where %u of %u have already", number, count, barrier.arrived, expected);
    if (kind >= Bar::red_popc) {
      uint32_t p = w.pred(in.slot[3]);
      if (in.imm & 2) p = ~p;
      uint32_t set = p & fresh;
      barrier.red_popc += static_cast<uint32_t>(__builtin_popcount(set));
      barrier.red_and &= set == fresh;
      barrier.red_or |= set != 0;
    }
    emit(w, __builtin_ctz(fresh), SyncKind::named_barrier_arrive, number, barrier.generation);
    for (uint32_t rest = fresh; rest; rest &= rest - 1) step.generation[__builtin_ctz(rest)] = barrier.generation;
    if (kind != Bar::arrive) step.arrived |= fresh;
    barrier.arrived += count;
    cta.cluster->touch();
    if (barrier.arrived == barrier.expected) {
      ++barrier.generation;
      barrier.arrived = 0;
      barrier.last_and = barrier.red_and;
      barrier.last_or = barrier.red_or;
      barrier.last_popc = barrier.red_popc;
      barrier.red_and = 1;
      barrier.red_or = barrier.red_popc = 0;
      cta.cluster->wake();
    }
    if (kind == Bar::arrive) return Step::next;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    if (step.generation[__builtin_ctz(rest)] == barrier.generation) return w.block(Wait::Kind::named_barrier, "", number);
  step.arrived &= ~mask;
  emit(w, __builtin_ctz(mask), SyncKind::named_barrier_leave, number, barrier.generation);
  switch (kind) {
    case Bar::red_popc: for_lanes(w.r32(in.slot[0]), mask, [&](int) { return barrier.last_popc; }); break;
    case Bar::red_and: set_predicate(w, in.slot[0], barrier.last_and ? kFull : 0, mask); break;
    case Bar::red_or: set_predicate(w, in.slot[0], barrier.last_or ? kFull : 0, mask); break;
    default: break;
  }
  return Step::next;
}

void decode_bar(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  m.take("cta");
  Bar kind;
  switch (m.take_one({"sync", "arrive", "red"}, -2)) {
    case 0: kind = Bar::sync; break;
    case 1: kind = Bar::arrive; break;
    default: kind = static_cast<Bar>(static_cast<int>(Bar::red_popc) + m.take_one({"popc", "and", "or"}, -2));
  }
  bool aligned = m.take("aligned") || s.opcode[0] == "bar";
  in.flags = static_cast<uint8_t>(kind);
  in.aligned = aligned;
  in.imm = aligned ? 0 : 1;
  in.slot[2] = kNoSlot;
  size_t at = 0;
  bool red = kind >= Bar::red_popc;
  if (red) {
    Type type = m.need_type();
    if (type != (kind == Bar::red_popc ? Type::u32 : Type::pred)) unsupported(s, "");
    d.operand_count(s, 3, 4);
    Operand predicate = s.operands.back();
    if (predicate.negated) in.imm |= 2;
    predicate.negated = false;
    in.slot[3] = d.source(predicate, Type::pred);
    in.slot[0] = d.destination(s.operands[at++], type);
  } else {
    d.operand_count(s, kind == Bar::arrive ? 2 : 1, 2);
  }
  in.slot[1] = d.source(s.operands[at++], Type::u32);
  if (at < s.operands.size() - (red ? 1 : 0)) in.slot[2] = d.source(s.operands[at], Type::u32);
  in.exec = run_bar;
}

// ---------------------------------------------------------------- barrier.cluster

Step run_cluster_arrive(Warp& w, const Instruction&, uint32_t mask) {
  Cluster& cluster = *w.cta->cluster;
  BarrierStep& step = w.cluster_step;
  if (step.arrived & mask)
    fail_lane(__builtin_ctz(step.arrived & mask), Fault::named_barrier, "barrier.cluster.arrive a second time without barrier.cluster.wait");
  for (uint32_t rest = mask; rest; rest &= rest - 1) step.generation[__builtin_ctz(rest)] = cluster.barrier.generation;
  step.arrived |= mask;
  cluster.barrier.arrived += static_cast<uint32_t>(__builtin_popcount(mask));
  emit(w, __builtin_ctz(mask), SyncKind::cluster_arrive, 0, cluster.barrier.generation);
  cluster.touch();
  cluster.settle_barrier();
  return Step::next;
}

Step run_cluster_wait(Warp& w, const Instruction&, uint32_t mask) {
  Cluster& cluster = *w.cta->cluster;
  BarrierStep& step = w.cluster_step;
  if (mask & ~step.arrived)
    fail_lane(__builtin_ctz(mask & ~step.arrived), Fault::named_barrier, "barrier.cluster.wait without barrier.cluster.arrive");
  for (uint32_t rest = mask; rest; rest &= rest - 1)
    if (step.generation[__builtin_ctz(rest)] == cluster.barrier.generation) return w.block(Wait::Kind::cluster_barrier, "barrier.cluster");
  step.arrived &= ~mask;
  emit(w, __builtin_ctz(mask), SyncKind::cluster_leave, 0, cluster.barrier.generation);
  return Step::next;
}

void decode_cluster_barrier(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  bool arrive = m.take_one({"arrive", "wait"}, -2) == 0;
  m.take_one({"release", "relaxed", "acquire"});
  in.aligned = m.take("aligned");
  d.operand_count(s, 0, 0);
  in.exec = arrive ? run_cluster_arrive : run_cluster_wait;
}

// ---------------------------------------------------------------- mbarrier

enum class Where : uint8_t { shared_cta, shared_cluster, generic };

struct MbarrierData : Payload {
  Address address;
  Where where = Where::generic;
  Slot value = kNoSlot;       // count, bytes, state or parity
  Slot bytes = kNoSlot;
  bool expect = false, drop = false, no_complete = false, parity = false, blocking = false;
};

/// The CTA and offset of the barrier that a lane names. remote: other CTAs of the cluster are allowed.
Cta& barrier_of(Warp& w, const MbarrierData& data, int lane, bool remote, uint32_t* offset) {
  uint64_t address = w.address(data.address, lane);
  uint64_t shown = address;
  if (data.where == Where::generic) {
    if (address < kSharedWindow || address >= kSharedWindow + (1ull << 32))
      fail_lane(lane, Fault::illegal_operand, "mbarrier at generic address 0x%llx, which is not shared memory", static_cast<unsigned long long>(shown));
    address -= kSharedWindow;
  }
  if (address & 7) fail_lane(lane, Fault::misaligned, "mbarrier at shared address 0x%llx", static_cast<unsigned long long>(address));
  Cta& cta = w.cta->cluster->shared_cta(address, offset);
  if (&cta != w.cta && (!remote || data.where == Where::shared_cta))
    fail_lane(lane, Fault::illegal_operand, "this mbarrier operation needs an object of the own CTA (rank %u); 0x%llx is in rank %u", w.cta->rank,
              static_cast<unsigned long long>(address), cta.rank);
  cta.shared_at(*offset, 8, "mbarrier");
  return cta;
}

Where take_where(Modifiers& m, bool* cluster) {
  int space = m.take_one({"shared", "shared::cta", "shared::cluster"});
  *cluster = space == 2;
  return space < 0 ? Where::generic : space == 2 ? Where::shared_cluster : Where::shared_cta;
}

void take_semantics(Modifiers& m) {
  m.take_one({"release", "relaxed", "acquire"});
  m.take_one({"cta", "cluster"});
}

void finish(const Statement& s, Modifiers& m) {
  if (m.need_type() != Type::b64) unsupported(s, "");
}

Step run_init(Warp& w, const Instruction& in, uint32_t mask) {
  const MbarrierData& data = in.as<MbarrierData>();
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    w.cta->cluster->actor = w.agent(lane);
    uint32_t offset;
    Cta& cta = barrier_of(w, data, lane, false, &offset);
    cta.barriers.init(cta, offset, w.r32(data.value)[lane], w.line);
  }
  return Step::next;
}

void decode_init(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  bool cluster;
  data->where = take_where(m, &cluster);
  if (cluster) unsupported(s, "");
  finish(s, m);
  d.operand_count(s, 2, 2);
  data->address = d.address(s.operands[0]);
  data->value = d.source(s.operands[1], Type::u32);
  in.exec = run_init;
  d.keep(in, std::move(data));
}

Step run_inval(Warp& w, const Instruction& in, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint32_t offset;
    Cta& cta = barrier_of(w, in.as<MbarrierData>(), __builtin_ctz(rest), false, &offset);
    cta.barriers.invalidate(cta, offset);
  }
  return Step::next;
}

void decode_inval(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  bool cluster;
  data->where = take_where(m, &cluster);
  if (cluster) unsupported(s, "");
  finish(s, m);
  d.operand_count(s, 1, 1);
  data->address = d.address(s.operands[0]);
  in.exec = run_inval;
  d.keep(in, std::move(data));
}

// The opaque state: completed phases and, for pending_count, the pending arrivals before the operation.
uint64_t state_of(const Mbarrier& barrier) { return barrier.phase << 20 | barrier.pending; }

Step run_arrive(Warp& w, const Instruction& in, uint32_t mask) {
  const MbarrierData& data = in.as<MbarrierData>();
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    w.cta->cluster->actor = w.agent(lane);
    w.cta->cluster->acting_line = w.line;
    uint32_t offset;
    Cta& cta = barrier_of(w, data, lane, true, &offset);
    if (&cta != w.cta && in.slot[0] != kNoSlot)
      fail_lane(lane, Fault::illegal_operand, "an arrive on an mbarrier of another CTA (rank %u) returns no state", cta.rank);
    Mbarrier& barrier = cta.barriers.at(cta, offset);
    uint64_t state = state_of(barrier);
    uint32_t count = data.value == kNoSlot ? 1 : w.r32(data.value)[lane];
    if (data.no_complete && count >= barrier.pending && barrier.tx == 0)
      fail_lane(lane, Fault::barrier_state, "mbarrier.arrive.noComplete of %u arrivals completes the phase (%u pending)", count, barrier.pending);
    if (data.expect) cta.barriers.expect_tx(cta, offset, w.r32(data.bytes)[lane]);
    if (data.drop) cta.barriers.arrive_drop(cta, offset, count);
    else cta.barriers.arrive(cta, offset, count);
    if (in.slot[0] != kNoSlot) w.r64(in.slot[0])[lane] = state;
  }
  return Step::next;
}

void decode_arrive(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  data->drop = s.opcode[1] == "arrive_drop";
  data->expect = m.take("expect_tx");
  data->no_complete = m.take("noComplete");
  take_semantics(m);
  bool cluster;
  data->where = take_where(m, &cluster);
  take_semantics(m);   // older texts put the space first
  finish(s, m);
  in.slot[0] = kNoSlot;
  size_t at = 0;
  if (!s.operands.empty() && s.operands[0].kind != Operand::Kind::address) {
    if (cluster && s.operands[0].kind != Operand::Kind::sink) unsupported(s, "an arrive in shared::cluster returns no state");
    in.slot[0] = d.destination(s.operands[0], Type::b64, true);
    at = 1;
  }
  bool value = data->expect || data->no_complete;
  d.operand_count(s, at + (value ? 2 : 1), at + 2);
  data->address = d.address(s.operands[at]);
  if (s.operands.size() > at + 1) (data->expect ? data->bytes : data->value) = d.source(s.operands[at + 1], Type::u32);
  in.exec = run_arrive;
  d.keep(in, std::move(data));
}

// flags: 1 complete_tx.
Step run_tx(Warp& w, const Instruction& in, uint32_t mask) {
  const MbarrierData& data = in.as<MbarrierData>();
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    w.cta->cluster->actor = w.agent(lane);
    w.cta->cluster->acting_line = w.line;
    uint32_t offset;
    Cta& cta = barrier_of(w, data, lane, true, &offset);
    if (in.flags) cta.barriers.complete_tx(cta, offset, w.r32(data.bytes)[lane]);
    else cta.barriers.expect_tx(cta, offset, w.r32(data.bytes)[lane]);
  }
  return Step::next;
}

void decode_tx(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  in.flags = s.opcode[1] == "complete_tx";
  take_semantics(m);
  bool cluster;
  data->where = take_where(m, &cluster);
  finish(s, m);
  d.operand_count(s, 2, 2);
  data->address = d.address(s.operands[0]);
  data->bytes = d.source(s.operands[1], Type::u32);
  in.exec = run_tx;
  d.keep(in, std::move(data));
}

void forget_waiter(Mbarrier& barrier, const Warp& w, uint32_t lanes) {
  auto& list = barrier.waiters;
  for (size_t i = 0; i < list.size();) {
    if (list[i].warp == &w && (list[i].mask &= ~lanes) == 0) list.erase(list.begin() + static_cast<ptrdiff_t>(i));
    else ++i;
  }
}

Step run_wait(Warp& w, const Instruction& in, uint32_t mask) {
  const MbarrierData& data = in.as<MbarrierData>();
  Cluster& cluster = *w.cta->cluster;
  Fragment& fragment = w.fragment();
  uint32_t done = 0;
  Cta* first_cta = nullptr;
  uint32_t first_offset = 0, first_parity = 0;
  bool all = true;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint32_t offset;
    Cta& cta = barrier_of(w, data, lane, false, &offset);
    Mbarrier& barrier = cta.barriers.at(cta, offset);
    bool passed;
    uint32_t parity;
    if (data.parity) {
      parity = w.r32(data.value)[lane];
      if (parity > 1) fail_lane(lane, Fault::illegal_operand, "phase parity must be 0 or 1; got %u", parity);
      passed = MbarrierTable::passed(barrier, parity);
    } else {
      uint64_t phase = w.r64(data.value)[lane] >> 20;
      if (phase > barrier.phase || phase + 1 < barrier.phase)
        fail_lane(lane, Fault::phase_alias, "wait for the state of phase %llu of the mbarrier at shared offset 0x%x, which is in phase %llu",
                  static_cast<unsigned long long>(phase), offset, static_cast<unsigned long long>(barrier.phase));
      parity = phase & 1;
      passed = phase < barrier.phase;
    }
    if (passed) done |= 1u << lane;
    else if (all) {
      all = false;
      first_cta = &cta;
      first_offset = offset;
      first_parity = parity;
    }
  }
  const bool blocks = !all && data.blocking && !fragment.timed_out;
  bool surprise = all && cluster.grid->config.spurious_wait > 0 && data.blocking && cluster.random.unit() < cluster.grid->config.spurious_wait;
  // Every lane that is told "not yet" is remembered by its barrier: if the phase after the awaited one completes before it
  // looks again for the same parity, that parity could no longer tell (Fault::phase_alias).
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint32_t offset;
    Cta& cta = barrier_of(w, data, lane, false, &offset);
    Mbarrier& barrier = cta.barriers.at(cta, offset);
    const uint32_t parity = data.parity ? w.r32(data.value)[lane] : static_cast<uint32_t>(w.r64(data.value)[lane] >> 20 & 1);
    for (const Mbarrier::Waiter& waiter : barrier.waiters)
      if (waiter.warp == &w && (waiter.mask >> lane & 1) && waiter.parity == parity && waiter.line == w.line && waiter.phase + 2 <= barrier.phase)
        MbarrierTable::missed(cta, offset, barrier, waiter);
    forget_waiter(barrier, w, 1u << lane);
    if (done >> lane & 1) {
      if (!surprise) {
        barrier.waited = true;
        ++barrier.waits;
        emit(w, lane, SyncKind::mbarrier_wait, cta.address(offset), barrier.phase - 1);
      }
      continue;
    }
    Mbarrier::Waiter* entry = nullptr;
    for (auto& waiter : barrier.waiters)
      if (waiter.warp == &w && waiter.phase == barrier.phase && waiter.line == w.line && waiter.parity == parity && waiter.blocked == blocks)
        entry = &waiter;
    if (entry) entry->mask |= 1u << lane;
    else barrier.waiters.push_back({&w, 1u << lane, barrier.phase, parity, w.line, blocks});
    if (!fragment.timed_out) ++barrier.stalls;
  }
  if (blocks) {
    return w.block(Wait::Kind::mbarrier, "", first_cta->address(first_offset), first_parity, true);
  }
  fragment.timed_out = false;
  set_predicate(w, in.slot[0], surprise ? 0 : done, mask);
  // A test that fails is mostly one turn of a loop: let others run.
  return all && !surprise ? Step::next : Step::yield;
}

void decode_wait(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  data->blocking = s.opcode[1] == "try_wait";
  data->parity = m.take("parity");
  take_semantics(m);
  bool cluster;
  data->where = take_where(m, &cluster);
  if (cluster) unsupported(s, "a wait needs an mbarrier of the own CTA");
  finish(s, m);
  d.operand_count(s, 3, data->blocking ? 4 : 3);
  data->address = d.address(s.operands[1]);
  data->value = d.source(s.operands[2], data->parity ? Type::u32 : Type::b64);
  if (s.operands.size() > 3) d.source(s.operands[3], Type::u32);   // the time limit is the scheduler's
  in.slot[0] = d.destination(s.operands[0], Type::pred);
  in.exec = run_wait;
  d.keep(in, std::move(data));
}

Step run_pending_count(Warp& w, const Instruction& in, uint32_t mask) {
  const uint64_t* state = w.r64(in.slot[1]);
  for_lanes(w.r32(in.slot[0]), mask, [&](int i) { return static_cast<uint32_t>(state[i] & kMbarrierMax); });
  return Step::next;
}

void decode_pending_count(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  finish(s, m);
  d.operand_count(s, 2, 2);
  in.slot[1] = d.source(s.operands[1], Type::b64);
  in.slot[0] = d.destination(s.operands[0], Type::u32);
  in.exec = run_pending_count;
}

// cp.async.mbarrier.arrive: an arrive once the thread's earlier cp.async have completed. flags: 1 noinc.
struct CopyArrive : AsyncOp {
  Cta* cta = nullptr;
  uint32_t offset = 0;
  bool advance(Cluster&) override {
    cta->barriers.arrive(*cta, offset, 1);
    return true;
  }
  std::string describe() const override { return format("cp.async.mbarrier.arrive on shared 0x%x", cta->address(offset)); }
};

Step run_copy_arrive(Warp& w, const Instruction& in, uint32_t mask) {
  const MbarrierData& data = in.as<MbarrierData>();
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    w.cta->cluster->actor = w.agent(lane);
    w.cta->cluster->acting_line = w.line;
    auto op = std::make_unique<CopyArrive>();
    op->cta = &barrier_of(w, data, lane, false, &op->offset);
    op->cta->barriers.at(*op->cta, op->offset);
    if (!in.flags) op->cta->barriers.increment_pending(*op->cta, op->offset);
    op->agent = w.agent(lane);
    op->proxy = Proxy::generic;
    op->line = w.line;
    op->after = w.copy_ids(lane);
    w.cta->cluster->async.submit(*w.cta->cluster, std::move(op));
  }
  return Step::next;
}

void decode_copy_arrive(Decoder& d, const Statement& s, Modifiers& m, Instruction& in) {
  auto data = std::make_unique<MbarrierData>();
  in.flags = m.take("noinc");
  bool cluster;
  data->where = take_where(m, &cluster);
  if (cluster) unsupported(s, "");
  finish(s, m);
  d.operand_count(s, 1, 1);
  data->address = d.address(s.operands[0]);
  in.exec = run_copy_arrive;
  d.keep(in, std::move(data));
}

const Family registered[] = {
    {"bar", decode_bar}, {"barrier", decode_bar}, {"barrier.cluster", decode_cluster_barrier},
    {"mbarrier.init", decode_init}, {"mbarrier.inval", decode_inval}, {"mbarrier.arrive", decode_arrive}, {"mbarrier.arrive_drop", decode_arrive},
    {"mbarrier.expect_tx", decode_tx}, {"mbarrier.complete_tx", decode_tx}, {"mbarrier.test_wait", decode_wait}, {"mbarrier.try_wait", decode_wait},
    {"mbarrier.pending_count", decode_pending_count}, {"cp.async.mbarrier.arrive", decode_copy_arrive},
};

}  // namespace
}  // namespace emu
