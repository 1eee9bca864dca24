#include "memory_access.h"

namespace emu {
namespace {

struct Bounds {
  uint64_t low = ~0ull, high = 0, bits = 0;
};

Bounds bounds_of(const uint64_t* address, uint32_t mask) {
  Bounds b;
  if (mask == kFull) {
    for (int i = 0; i < kLanes; ++i) {
      b.low = std::min(b.low, address[i]);
      b.high = std::max(b.high, address[i]);
      b.bits |= address[i];
    }
    return b;
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    uint64_t a = address[__builtin_ctz(rest)];
    b.low = std::min(b.low, a);
    b.high = std::max(b.high, a);
    b.bits |= a;
  }
  return b;
}

void observe(Warp& w, Space space, const uint64_t* address, uint32_t bytes, uint32_t mask, Access access) {
  Cluster& cluster = *w.cta->cluster;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t a = address[lane];
    MemoryEvent event;
    event.region = Region::global;
    if (space == Space::shared_cta || space == Space::shared_cluster) event.region = Region::shared;
    if (space == Space::generic && a >= kSharedWindow && a < kSharedWindow + (1ull << 32)) {
      event.region = Region::shared;
      a -= kSharedWindow;
    }
    if (space == Space::local || space == Space::param || a >= kLocalWindow) continue;   // private
    event.agent = w.agent(lane);
    event.access = access;
    event.address = a;
    event.bytes = bytes;
    event.order = cluster.order++;
    event.line = w.line;
    cluster.grid->observer->memory(event);
  }
}

}  // namespace

void locate(Warp& w, Space space, const Address& operand, uint32_t bytes, uint32_t mask, Access access, uint8_t** at) {
  uint64_t address[kLanes];
  const uint64_t offset = static_cast<uint64_t>(operand.offset);
  if (operand.bits == 32) {
    const uint32_t* base = w.r32(operand.base);
    for (int i = 0; i < kLanes; ++i) address[i] = base[i] + offset;
  } else {
    const uint64_t* base = w.r64(operand.base);
    for (int i = 0; i < kLanes; ++i) address[i] = base[i] + offset;
  }
  if (w.cta->cluster->grid->observer) observe(w, space, address, bytes, mask, access);
  const Bounds b = bounds_of(address, mask);
  if ((b.bits & (bytes - 1)) == 0) {
    Cta& cta = *w.cta;
    if (space == Space::shared_cta || (space == Space::generic && b.low >= kSharedWindow && b.high < kSharedWindow + (1ull << 32))) {
      const uint64_t window = space == Space::generic ? kSharedWindow : 0;
      const uint64_t base = window + (static_cast<uint64_t>(cta.rank) << 24);
      // All in the own CTA, and not among its mbarriers.
      if (b.low >= base + kSharedBase && b.high + bytes <= base + cta.shared_end && b.high >= b.low &&
          (b.low - base >= cta.barriers_high || b.high + bytes - base <= cta.barriers_low)) {
        const uint64_t host = reinterpret_cast<uint64_t>(cta.shared) - base;
        for (int i = 0; i < kLanes; ++i) at[i] = reinterpret_cast<uint8_t*>(host + address[i]);
        return;
      }
    } else if (space == Space::global || space == Space::constant || space == Space::param || (space == Space::generic && b.high < kSharedWindow)) {
      const Range* r = w.range;
      if (!r || b.low < r->begin || b.low >= r->end) w.range = r = cta.cluster->grid->range_of(b.low);
      if (r && b.low >= r->begin && b.high < r->end && bytes <= r->end - b.high && (access == Access::read || r->writable)) {
        for (int i = 0; i < kLanes; ++i) at[i] = reinterpret_cast<uint8_t*>(address[i]);
        return;
      }
    }
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    at[lane] = resolve(w, lane, space, address[lane], bytes, access);
  }
}

}  // namespace emu
