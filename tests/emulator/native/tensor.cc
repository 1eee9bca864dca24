#include "tensor.h"

#include <algorithm>

#include "bulk.h"

namespace emu {
namespace {

void notify_rects(Cluster& cluster, const Agent& agent, const TensorRects& rects, Access access, uint64_t operation, int line) {
  Observer* observer = cluster.grid->observer;
  if (!observer) return;
  for (const TensorRect& r : rects) {
    for (uint32_t i = 0; i < r.lanes; ++i) {
      const uint64_t address = static_cast<uint64_t>(r.rank) << 32 | (r.lane + i) << 16 | r.column;
      Agent who = agent;
      if (who.engine == Engine::thread) who.lane = static_cast<uint8_t>((r.lane + i) % kLanes);
      observer->memory({who, Proxy::async, access, Region::tensor, address, r.columns * 4ull, operation, cluster.order++, line});
    }
  }
}

/// Faults of `what`, which acts now, with the warps' loads and stores in flight.
void check_traffic(Cluster& cluster, const TensorRects& reads, const TensorRects& writes, const Warp* except_loads,
                   const std::string& what) {
  for (auto& cta : cluster.ctas) {
    for (auto& warp : cta->warps) {
      if (!warp->tensor) continue;
      for (const PendingStore& store : warp->tensor->stores) {
        const TensorRect* hit = overlap(store.rects, writes);
        if (!hit) hit = overlap(store.rects, reads);
        if (hit) {
          fail(Fault::tensor_memory,
               "%s touches Tensor Memory (%s) while the tcgen05.st of warp %d in line %d is in flight: nothing orders them "
               "(tcgen05.wait::st before the signal)",
               what.c_str(), hit->describe().c_str(), warp->index, store.line);
        }
      }
      if (warp.get() == except_loads) continue;
      for (const PendingLoad& load : warp->tensor->loads) {
        if (const TensorRect* hit = overlap(load.rects, writes)) {
          fail(Fault::tensor_memory,
               "%s overwrites Tensor Memory (%s) while the tcgen05.ld of warp %d in line %d is in flight: nothing orders them "
               "(tcgen05.wait::ld before the signal)",
               what.c_str(), hit->describe().c_str(), warp->index, load.line);
        }
      }
    }
  }
}

/// Faults of a load or store of `cta`, which acts now, with the tensor pipe.
void check_pipe(Cta& cta, const TensorRects& reads, const TensorRects& writes, const char* what) {
  for (const TensorOp* op : tensor_pipe(cta).operations) {
    const TensorRect* hit = overlap(op->writes, reads);
    if (!hit) hit = overlap(op->writes, writes);
    if (!hit) hit = overlap(op->reads, writes);
    if (hit) {
      fail(Fault::tensor_memory, "%s touches Tensor Memory (%s) that %s, issued in line %d, %s: wait for its tcgen05.commit first", what,
           hit->describe().c_str(), op->describe().c_str(), op->line, overlap(op->writes, {*hit}) ? "has yet to write" : "has yet to read");
    }
  }
}

bool land_now(Warp& warp) {
  Cluster& cluster = *warp.cta->cluster;
  switch (cluster.async.mode) {
    case AsyncMode::eager: return true;
    case AsyncMode::lazy: return false;
    default: return cluster.random.below(2) == 0;
  }
}

void land(Warp& warp, const PendingLoad& load) {
  Cta& cta = *warp.cta;
  check_pipe(cta, load.rects, {}, "tcgen05.ld");
  check_traffic(*cta.cluster, load.rects, {}, &warp, "tcgen05.ld");
  TensorMemory& memory = cta.tensor;
  const uint32_t count = load.access.registers();
  for (uint32_t r = 0; r < count; ++r) {
    if (load.destinations[r] == kNoSlot) continue;
    uint32_t* out = warp.r32(load.destinations[r]);
    if (load.access.shape == TensorAccess::Shape::l32x32b && !load.access.packed) {
      std::memcpy(out, memory.column(load.column + r) + load.lane, kLanes * 4);
      continue;
    }
    for (uint32_t t = 0; t < kLanes; ++t) {
      const auto [row, column] = load.access.cell(t, r);
      const uint32_t lane = load.lane + row;
      if (load.access.packed) {
        const uint32_t low = memory.word(lane, load.column + column), high = memory.word(lane, load.column + column + 1);
        out[t] = (low & 0xffff) | high << 16;
      } else {
        out[t] = memory.word(lane, load.column + column);
      }
    }
  }
  if (load.then) load.then(warp);
  notify_rects(*cta.cluster, warp.agent(0), load.rects, Access::read, 0, load.line);
}

void land(Warp& warp, const PendingStore& store) {
  Cta& cta = *warp.cta;
  check_pipe(cta, {}, store.rects, "tcgen05.st");
  check_traffic(*cta.cluster, {}, store.rects, nullptr, "tcgen05.st");
  TensorMemory& memory = cta.tensor;
  const uint32_t count = store.access.registers();
  for (uint32_t r = 0; r < count; ++r) {
    const uint32_t* in = store.values.data() + static_cast<size_t>(r) * kLanes;
    if (store.access.shape == TensorAccess::Shape::l32x32b && !store.access.packed) {
      std::memcpy(memory.column(store.column + r) + store.lane, in, kLanes * 4);
      continue;
    }
    for (uint32_t t = 0; t < kLanes; ++t) {
      const auto [row, column] = store.access.cell(t, r);
      const uint32_t lane = store.lane + row;
      if (store.access.packed) {
        // One 16-bit element a column, in its low half; what the high half becomes is not stated, so it is poison.
        memory.word(lane, store.column + column) = static_cast<uint32_t>(kPoisonHalf) << 16 | (in[t] & 0xffff);
        memory.word(lane, store.column + column + 1) = static_cast<uint32_t>(kPoisonHalf) << 16 | in[t] >> 16;
      } else {
        memory.word(lane, store.column + column) = in[t];
      }
    }
  }
  notify_rects(*cta.cluster, warp.agent(0), store.rects, Access::write, 0, store.line);
}

bool conflict(const TensorOp& x, const TensorOp& y, const TensorRect** hit) {
  *hit = overlap(x.writes, y.writes);
  if (!*hit) *hit = overlap(x.writes, y.reads);
  if (!*hit) *hit = overlap(x.reads, y.writes);
  return *hit != nullptr;
}

}  // namespace

std::string TensorRect::describe() const {
  return format("CTA rank %u lanes %u-%u columns %u-%u", rank, lane, lane + lanes - 1, column, column + columns - 1);
}

const TensorRect* overlap(const TensorRects& x, const TensorRects& y) {
  for (const TensorRect& a : x)
    for (const TensorRect& b : y)
      if (a.overlaps(b)) return &a;
  return nullptr;
}

void check_allocated(Cluster& cluster, const TensorRect& rect, const char* what) {
  TensorMemory& memory = cluster.cta(rect.rank).tensor;
  if (rect.lane + rect.lanes > TensorMemory::kRows) {
    fail(Fault::tensor_memory, "%s touches lanes %u to %u; Tensor Memory has %u", what, rect.lane, rect.lane + rect.lanes - 1,
         TensorMemory::kRows);
  }
  for (uint32_t c = rect.column; c < rect.column + rect.columns; ++c) {
    if (c >= TensorMemory::kColumns) {
      fail(Fault::tensor_memory, "%s touches columns %u to %u; Tensor Memory has %u", what, rect.column,
           rect.column + rect.columns - 1, TensorMemory::kColumns);
    }
    if (memory.owner[c] == 0) {
      fail(Fault::tensor_memory, "%s touches columns %u to %u of CTA rank %u, of which column %u is not allocated", what, rect.column,
           rect.column + rect.columns - 1, rect.rank, c);
    }
  }
}

// ---------------------------------------------------------------- the pipe

Cta& peer_of(Cta& cta) { return cta.cluster->cta(cta.rank ^ 1); }

void use_group(Cta& cta, int group) {
  int& used = cta.tensor.group;
  if (used != 0 && used != group) {
    fail(Fault::tensor_memory, "tcgen05 instruction with cta_group::%d in a kernel that uses cta_group::%d", group, used);
  }
  if (group == 2 && (cta.rank ^ 1) >= cta.cluster->ctas.size()) {
    fail(Fault::tensor_memory, "cta_group::2 in CTA rank %u of a cluster of %zu: there is no peer CTA", cta.rank, cta.cluster->ctas.size());
  }
  used = group;
}

TensorPipe& tensor_pipe(Cta& cta) {
  // Both CTAs of a pair share the even one's.
  Cta& owner = cta.tensor.group == 2 ? cta.cluster->cta(cta.rank & ~1u) : cta;
  if (!owner.tensor.pipe) owner.tensor.pipe = std::make_shared<TensorPipe>();
  return *owner.tensor.pipe;
}

std::vector<Cta*> TensorOp::members() const {
  if (group == 1) return {cta};
  return {&cta->cluster->cta(cta->rank & ~1u), &cta->cluster->cta(cta->rank | 1u)};
}

bool TensorOp::needs_cta(uint32_t rank) const { return group == 1 ? rank == cta->rank : rank / 2 == cta->rank / 2; }

bool TensorOp::advance(Cluster& cluster) {
  auto& operations = tensor_pipe(*cta).operations;
  for (const TensorOp* other : operations) {
    const TensorRect* hit = nullptr;
    if (other == this || other->thread == thread || !conflict(*this, *other, &hit)) continue;
    const bool ordered = std::find(other->after.begin(), other->after.end(), id) != other->after.end();
    if (!ordered) {
      fail(Fault::tensor_memory, "it touches Tensor Memory (%s) that %s, issued in line %d by another thread, uses too, and nothing orders them",
           hit->describe().c_str(), other->describe().c_str(), other->line);
    }
  }
  check_traffic(cluster, reads, writes, nullptr, describe());
  for (Cta* member : members()) member->tensor.make();
  execute(cluster);
  notify_rects(cluster, agent, reads, Access::read, id, line);
  notify_rects(cluster, agent, writes, Access::write, id, line);
  operations.erase(std::find(operations.begin(), operations.end(), this));
  return true;
}

namespace {

/// Orders `fresh` after `earlier` where the ISA pipelines the two; faults where they conflict and nothing orders them.
void order_after(TensorOp& fresh, const TensorOp& earlier) {
  const bool copies = fresh.order == TensorOrder::copy || fresh.order == TensorOrder::copy_4x256b;
  const bool earlier_copies = earlier.order == TensorOrder::copy || earlier.order == TensorOrder::copy_4x256b;
  const bool both_mma = fresh.order == TensorOrder::mma && earlier.order == TensorOrder::mma;
  // cp -> mma, and shift -> cp.4x256b.
  bool ordered = (earlier_copies && fresh.order == TensorOrder::mma) ||
                 (earlier.order == TensorOrder::shift && fresh.order == TensorOrder::copy_4x256b);
  // mma -> shift, shift -> mma, mma -> mma on one accumulator: they hold whoever issued them, given the fences.
  if (!copies && !earlier_copies) ordered = ordered || !both_mma || overlap(earlier.writes, fresh.writes);
  if (ordered) fresh.after.push_back(earlier.id);
  if (both_mma) {
    // An accumulator becomes an operand A only by way of a commit.
    if (const TensorRect* hit = earlier.thread == fresh.thread ? overlap(earlier.writes, fresh.reads) : nullptr) {
      fail(Fault::tensor_memory,
           "the MMA reads Tensor Memory (%s) that %s, issued in line %d, has yet to write: only a wait for its tcgen05.commit orders them",
           hit->describe().c_str(), earlier.describe().c_str(), earlier.line);
    }
    return;   // a thread's MMAs run in order of issue; those of different threads are checked when they land
  }
  const TensorRect* hit = nullptr;
  if (!ordered && conflict(earlier, fresh, &hit)) {
    fail(Fault::tensor_memory, "%s touches Tensor Memory (%s) that %s, issued in line %d, uses: nothing orders them", fresh.describe().c_str(),
         hit->describe().c_str(), earlier.describe().c_str(), earlier.line);
  }
}

}  // namespace

void submit(Warp& warp, int lane, std::unique_ptr<TensorOp> op) {
  Cta& cta = *warp.cta;
  Cluster& cluster = *cta.cluster;
  TensorPipe& pipe = tensor_pipe(cta);
  op->cta = &cta;
  op->thread = cta.rank << 16 | static_cast<uint32_t>(warp.index * kLanes + lane);
  op->agent = warp.agent(lane);
  op->agent.engine = Engine::tensor;
  op->line = warp.line;
  for (const TensorOp* earlier : pipe.operations) order_after(*op, *earlier);
  // A thread's MMAs run in order of issue; a copy may overtake them.
  if (op->order == TensorOrder::mma || op->order == TensorOrder::shift) op->pipe = cluster.async.pipe(uint64_t{1} << 48 | op->thread);
  pipe.operations.push_back(op.get());
  cluster.async.submit(cluster, std::move(op));
}

// ---------------------------------------------------------------- ld and st

uint32_t TensorAccess::registers() const {
  switch (shape) {
    case Shape::l16x128b: return 2 * repeat;
    case Shape::l16x256b: return 4 * repeat;
    default: return repeat;
  }
}

uint32_t TensorAccess::columns() const {
  const uint32_t per_repeat = shape == Shape::l16x64b ? 2 : shape == Shape::l16x128b ? 4 : shape == Shape::l16x256b ? 8 : 1;
  return per_repeat * repeat * (packed ? 2 : 1);
}

TensorAccess::Cell TensorAccess::cell(uint32_t t, uint32_t r) const {
  const uint32_t scale = packed ? 2 : 1;
  switch (shape) {
    case Shape::l32x32b: break;
    case Shape::l16x64b: return {t / 4 + 8 * (t % 2), scale * (t / 2 % 2 + 2 * r)};
    case Shape::l16x128b: return {t / 4 + 8 * (r % 2), scale * (t % 4 + 4 * (r / 2))};
    case Shape::l16x256b: return {t / 4 + 8 * (r / 2 % 2), scale * (2 * (t % 4) + r % 2 + 8 * (r / 4))};
    case Shape::l16x32bx2: return {t % 16, scale * r + t / 16 * split};
  }
  return {t, scale * r};
}

TensorRects TensorAccess::rects(uint32_t rank, uint32_t lane, uint32_t column) const {
  TensorRects out{{rank, lane, lanes(), column, columns()}};
  if (shape == Shape::l16x32bx2) out.push_back({rank, lane, lanes(), column + split, columns()});
  return out;
}

TensorTraffic& tensor_traffic(Warp& warp) {
  if (!warp.tensor) warp.tensor = std::make_shared<TensorTraffic>();
  return *warp.tensor;
}

void issue_load(Warp& warp, PendingLoad load) {
  warp.cta->tensor.make();
  TensorTraffic& traffic = tensor_traffic(warp);
  // Two loads into one register keep their order.
  const uint32_t count = load.access.registers();
  for (const PendingLoad& earlier : traffic.loads) {
    const uint32_t n = earlier.access.registers();
    bool shared = false;
    for (uint32_t r = 0; r < count && !shared; ++r) {
      shared = load.destinations[r] != kNoSlot &&
               std::find(earlier.destinations, earlier.destinations + n, load.destinations[r]) != earlier.destinations + n;
    }
    if (shared || earlier.then || load.then) {
      land_tensor_loads(warp);
      break;
    }
  }
  if (land_now(warp)) {
    land(warp, load);
    return;
  }
  traffic.loads.push_back(std::move(load));
  warp.loads_pending = true;
}

void issue_store(Warp& warp, PendingStore store) {
  warp.cta->tensor.make();
  if (land_now(warp)) {
    land(warp, store);
    return;
  }
  // Stores of one thread to one place are not ordered; that is a fault which the landing of the second reports.
  tensor_traffic(warp).stores.push_back(std::move(store));
}

void land_tensor_loads(Warp& warp) {
  warp.loads_pending = false;
  if (!warp.tensor) return;
  std::vector<PendingLoad> loads;
  loads.swap(warp.tensor->loads);
  for (const PendingLoad& load : loads) {
    try {
      land(warp, load);
    } catch (Verdict& verdict) {
      if (!verdict.line) verdict.line = load.line;
      throw;
    }
  }
}

void land_tensor_stores(Warp& warp) {
  if (!warp.tensor) return;
  std::vector<PendingStore>& stores = warp.tensor->stores;
  while (!stores.empty()) {
    // Their order is free.
    const size_t pick = warp.cta->cluster->random.below(static_cast<uint32_t>(stores.size()));
    const PendingStore store = std::move(stores[pick]);
    stores.erase(stores.begin() + static_cast<ptrdiff_t>(pick));
    try {
      land(warp, store);
    } catch (Verdict& verdict) {
      if (!verdict.line) verdict.line = store.line;
      throw;
    }
  }
}

void check_no_traffic(Cta& cta, uint32_t column, uint32_t columns, const char* what) {
  const TensorRects rects{{cta.rank, 0, TensorMemory::kRows, column, columns}};
  check_pipe(cta, rects, rects, what);
  check_traffic(*cta.cluster, rects, rects, nullptr, what);
}

}  // namespace emu
