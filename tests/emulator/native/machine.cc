#include "machine.h"

#include <algorithm>

namespace emu {

Warp::~Warp() {
  delete bulk;
  delete copies;
  delete copy_list;
}

Step Warp::block(Wait::Kind kind, const char* what, uint32_t object, uint32_t parity, bool may_time_out) {
  Wait& wait = fragment().wait;
  wait.kind = kind;
  wait.what = what;
  wait.object = object;
  wait.parity = parity;
  wait.may_time_out = may_time_out;
  return Step::blocked;
}

ThreadGroups& Warp::bulk_groups(int lane) {
  if (!bulk) bulk = new std::array<ThreadGroups, kLanes>;
  return (*bulk)[lane];
}

ThreadGroups& Warp::copy_groups(int lane) {
  if (!copies) copies = new std::array<ThreadGroups, kLanes>;
  return (*copies)[lane];
}

std::vector<uint64_t>& Warp::copy_id_list(int lane) {
  if (!copy_list) copy_list = new std::array<std::vector<uint64_t>, kLanes>;
  std::vector<uint64_t>& list = (*copy_list)[lane];
  const AsyncQueue& queue = cta->cluster->async;
  list.erase(std::remove_if(list.begin(), list.end(), [&](uint64_t id) { return queue.complete(id); }), list.end());
  return list;
}

std::vector<uint64_t> Warp::copy_ids(int lane) { return copy_list ? copy_id_list(lane) : std::vector<uint64_t>(); }

Agent Warp::agent(int lane) const {
  Agent out;
  out.cta_rank = static_cast<uint16_t>(cta->rank);
  out.warp = static_cast<uint16_t>(index);
  out.lane = static_cast<uint8_t>(lane);
  return out;
}

void Warp::exit(uint32_t mask) {
  Cluster& cluster = *cta->cluster;
  uint32_t count = static_cast<uint32_t>(__builtin_popcount(mask));
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    bool arrived = (cluster_step.arrived >> lane & 1) && cluster_step.generation[lane] == cluster.barrier.generation;
    if (!arrived) ++cluster.barrier.exited;
  }
  live &= ~mask;
  fragment().mask &= ~mask;
  cta->exited += count;
  cluster.exited += count;
  cluster.settle_barrier();
  cluster.wake();
}

Step Warp::branch(uint32_t mask, uint32_t target) {
  Fragment& f = fragment();
  if (mask == f.mask) {
    f.pc = target;
    return Step::jump;
  }
  Fragment taken;
  taken.pc = target;
  taken.mask = mask;
  taken.calls = f.calls;
  f.mask &= ~mask;
  ++f.pc;
  fragments.push_back(std::move(taken));
  return Step::jump;
}

uint8_t* Cta::shared_at(uint64_t offset, uint64_t bytes, const char* what) {
  if (offset < kSharedBase || offset > shared_end || bytes > shared_end - offset)
    fail(Fault::out_of_bounds, "%s of %llu bytes at shared offset 0x%llx of CTA rank %u; its shared memory is [0x%x, 0x%x)", what,
         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset), rank, kSharedBase, shared_end);
  return shared + offset;
}

void Cta::check_barriers(uint32_t offset, uint64_t bytes, const char* what) const {
  for (uint64_t word = offset / 8; word <= (offset + bytes - 1) / 8; ++word) {
    if (live_words[word / 64] >> (word % 64) & 1)
      fail(Fault::barrier_state, "%s touches shared offset 0x%x of CTA rank %u, where a live mbarrier is", what,
           static_cast<uint32_t>(word * 8), rank);
  }
}

Cta& Cluster::cta(uint32_t rank) {
  if (rank >= ctas.size()) fail(Fault::out_of_bounds, "CTA rank %u of a cluster of %zu", rank, ctas.size());
  return *ctas[rank];
}

Cta& Cluster::shared_cta(uint64_t address, uint32_t* offset) {
  uint64_t rank = address >> 24;
  if (rank >= ctas.size())
    fail(Fault::out_of_bounds, "shared address 0x%llx names CTA rank %llu of a cluster of %zu", static_cast<unsigned long long>(address),
         static_cast<unsigned long long>(rank), ctas.size());
  *offset = static_cast<uint32_t>(address & 0xffffff);
  Cta& cta = *ctas[rank];
  if (cta.ended())
    fail(Fault::in_flight, "access to shared memory of CTA rank %u, which has ended", cta.rank);
  return cta;
}

void Cluster::settle_barrier() {
  if (barrier.arrived + barrier.exited < threads || barrier.arrived == 0) return;
  ++barrier.generation;
  barrier.arrived = 0;
  barrier.exited = exited;
  wake();
}

std::array<uint32_t, 3> Grid::first_cta(uint64_t cluster) const {
  std::array<uint32_t, 3> out{};
  for (int d = 0; d < 3; ++d) {
    uint64_t extent = config.grid[d] / config.cluster[d];
    out[d] = static_cast<uint32_t>(cluster % extent) * config.cluster[d];
    cluster /= extent;
  }
  return out;
}

const Range* Grid::range_of(uint64_t address) const {
  auto it = std::upper_bound(ranges.begin(), ranges.end(), address, [](uint64_t a, const Range& r) { return a < r.begin; });
  if (it == ranges.begin()) return nullptr;
  --it;
  return address < it->end ? &*it : nullptr;
}

uint8_t* Grid::global_at(uint64_t address, uint64_t bytes, Access access, const char* what) const {
  const Range* range = range_of(address);
  if (!range || bytes > range->end - address) {
    std::string near = "no buffer";
    auto it = std::upper_bound(ranges.begin(), ranges.end(), address, [](uint64_t a, const Range& r) { return a < r.begin; });
    if (it != ranges.begin()) {
      --it;
      near = format("%s of %llu bytes, at its byte %lld", it->name.c_str(), static_cast<unsigned long long>(it->end - it->begin),
                    static_cast<long long>(address - it->begin));
    } else if (it != ranges.end()) {
      near = format("%s, %llu bytes before it", it->name.c_str(), static_cast<unsigned long long>(it->begin - address));
    }
    fail(Fault::out_of_bounds, "%s of %llu bytes at global address 0x%llx, outside every buffer (nearest: %s)", what,
         static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address), near.c_str());
  }
  if (access != Access::read && !range->writable)
    fail(Fault::read_only, "%s of %llu bytes to %s, which is read-only, at its byte %llu", what, static_cast<unsigned long long>(bytes),
         range->name.c_str(), static_cast<unsigned long long>(address - range->begin));
  return reinterpret_cast<uint8_t*>(address);
}

static const char* access_name(Access access) {
  return access == Access::read ? "load" : access == Access::write ? "store" : "atomic operation";
}

uint8_t* resolve(Warp& warp, int lane, Space space, uint64_t address, uint32_t bytes, Access access) {
  const char* what = access_name(access);
  if (address & (bytes - 1))
    fail_lane(lane, Fault::misaligned, "%s of %u bytes at address 0x%llx", what, bytes, static_cast<unsigned long long>(address));
  try {
    Cta& cta = *warp.cta;
    if (space == Space::generic) {
      if (address >= kSharedWindow && address < kSharedWindow + (1ull << 32)) {
        address -= kSharedWindow;
        space = Space::shared_cluster;
      } else if (address >= kLocalWindow && address < kLocalWindow + (1ull << 32)) {
        address -= kLocalWindow;
        space = Space::local;
      } else {
        space = Space::global;
      }
    }
    if (space == Space::param) {
      if (address >= kLocalWindow && address < kLocalWindow + (1ull << 32)) {
        address -= kLocalWindow;
        space = Space::local;
      } else {
        space = Space::global;
      }
    }
    switch (space) {
      case Space::shared_cta:
        if (address >> 24 != cta.rank)
          fail(Fault::out_of_bounds, "%s at shared::cta address 0x%llx, which is not of the thread's own CTA (rank %u)", what,
               static_cast<unsigned long long>(address), cta.rank);
        [[fallthrough]];
      case Space::shared_cluster: {
        uint32_t offset;
        Cta& owner = cta.cluster->shared_cta(address, &offset);
        uint8_t* out = owner.shared_at(offset, bytes, what);
        owner.check_barriers(offset, bytes, what);
        return out;
      }
      case Space::local: {
        size_t size = warp.local.size() / kLanes;
        if (address > size || bytes > size - address)
          fail(Fault::out_of_bounds, "%s of %u bytes at local address 0x%llx; a thread has %zu bytes", what, bytes,
               static_cast<unsigned long long>(address), size);
        return warp.local.data() + lane * size + address;
      }
      default: {
        if (const Range* r = warp.range; r && address >= r->begin && address < r->end && bytes <= r->end - address &&
                                         (access == Access::read || r->writable))
          return reinterpret_cast<uint8_t*>(address);
        uint8_t* out = cta.cluster->grid->global_at(address, bytes, access, what);
        warp.range = cta.cluster->grid->range_of(address);
        return out;
      }
    }
  } catch (Verdict& verdict) {
    if (verdict.where.empty()) verdict.where = format("lane %d", lane);
    throw;
  }
}

}  // namespace emu
