#include "mbarrier.h"

#include <algorithm>

#include "machine.h"

namespace emu {
namespace {

void emit(Cta& cta, SyncKind kind, uint32_t offset, uint64_t phase, int64_t value) {
  Cluster& cluster = *cta.cluster;
  if (!cluster.grid->observer) return;
  SyncEvent event;
  event.kind = kind;
  event.agent = cluster.actor;
  event.operation = cluster.acting_operation;
  event.object = cta.address(offset);
  event.phase = phase;
  event.value = value;
  event.order = cluster.order++;
  event.line = cluster.acting_line;
  cluster.grid->observer->sync(event);
}

void mark(Cta& cta, uint32_t offset, bool live) {
  uint64_t& word = cta.live_words.at(offset / 512);
  uint64_t bit = 1ull << (offset / 8 % 64);
  word = live ? word | bit : word & ~bit;
  if (live) {
    cta.barriers_low = std::min(cta.barriers_low, offset);
    cta.barriers_high = std::max(cta.barriers_high, offset + 8);
  }
}

}  // namespace

void MbarrierTable::init(Cta& cta, uint32_t offset, uint32_t count, int line) {
  if (count == 0 || count > kMbarrierMax)
    fail(Fault::illegal_operand, "mbarrier.init count must be 1 to %u; got %u", kMbarrierMax, count);
  uint8_t* word = cta.shared_at(offset, 8, "mbarrier.init");
  auto [it, fresh] = table_.try_emplace(offset);
  if (!fresh)
    fail(Fault::barrier_state, "mbarrier at shared offset 0x%x initialised again (first in line %d) without mbarrier.inval",
         offset, it->second.init_line);
  it->second.expected = it->second.pending = count;
  it->second.init_line = line;
  std::memset(word, 0xb5, 8);   // opaque
  mark(cta, offset, true);
  emit(cta, SyncKind::mbarrier_init, offset, 0, count);
  cta.cluster->wake();
}

void MbarrierTable::invalidate(Cta& cta, uint32_t offset) {
  at(cta, offset);
  table_.erase(offset);
  mark(cta, offset, false);
  uint32_t poison[2] = {kPoison, kPoison};
  std::memcpy(cta.shared_at(offset, 8, "mbarrier.inval"), poison, 8);
  cta.cluster->wake();
}

Mbarrier& MbarrierTable::at(const Cta& cta, uint32_t offset) {
  auto it = table_.find(offset);
  if (it == table_.end())
    fail(Fault::barrier_state, "no mbarrier has been initialised at shared offset 0x%x of CTA rank %u", offset, cta.rank);
  return it->second;
}

void MbarrierTable::missed(const Cta& cta, uint32_t offset, const Mbarrier& barrier, const Mbarrier::Waiter& waiter) {
  fail(Fault::phase_alias,
       "mbarrier at shared offset 0x%x of CTA rank %u is beyond phase %llu while warp %d of CTA rank %u (line %d) still waits for "
       "phase %llu: its parity can no longer be told apart",
       offset, cta.rank, static_cast<unsigned long long>(barrier.phase), waiter.warp->index, waiter.warp->cta->rank, waiter.line,
       static_cast<unsigned long long>(waiter.phase));
}

void MbarrierTable::settle(Cta& cta, uint32_t offset, Mbarrier& barrier) {
  cta.cluster->touch();
  if (barrier.pending != 0 || barrier.tx != 0) return;
  // Lanes that still block on an earlier phase would now see the parity of a later one: the wait missed its phase.
  auto& waiters = barrier.waiters;
  for (const Mbarrier::Waiter& waiter : waiters)
    if (waiter.blocked && waiter.phase + 1 <= barrier.phase) missed(cta, offset, barrier, waiter);
  // Those that went on are judged when they look again (see run_wait); entries that nobody will ask for are dropped.
  waiters.erase(std::remove_if(waiters.begin(), waiters.end(), [&](const Mbarrier::Waiter& w) { return w.phase + 64 < barrier.phase; }), waiters.end());
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.waited = false;
  cta.cluster->wake();
}

void MbarrierTable::arrive(Cta& cta, uint32_t offset, uint32_t count) {
  Mbarrier& barrier = at(cta, offset);
  if (count == 0 || count > kMbarrierMax) fail(Fault::illegal_operand, "mbarrier arrive count must be 1 to %u; got %u", kMbarrierMax, count);
  if (count > barrier.pending)
    fail(Fault::barrier_state,
         "mbarrier at shared offset 0x%x of CTA rank %u: %u arrivals, but only %u of %u are pending in phase %llu (tx bytes %lld)", offset,
         cta.rank, count, barrier.pending, barrier.expected, static_cast<unsigned long long>(barrier.phase),
         static_cast<long long>(barrier.tx));
  barrier.pending -= count;
  emit(cta, SyncKind::mbarrier_arrive, offset, barrier.phase, count);
  settle(cta, offset, barrier);
}

void MbarrierTable::arrive_drop(Cta& cta, uint32_t offset, uint32_t count) {
  Mbarrier& barrier = at(cta, offset);
  if (count > barrier.expected)
    fail(Fault::barrier_state, "mbarrier at shared offset 0x%x: arrive_drop of %u from %u expected arrivals", offset, count, barrier.expected);
  barrier.expected -= count;
  arrive(cta, offset, count);
}

void MbarrierTable::expect_tx(Cta& cta, uint32_t offset, int64_t bytes) {
  Mbarrier& barrier = at(cta, offset);
  if (bytes < 0 || bytes > kMbarrierMax) fail(Fault::illegal_operand, "mbarrier expect_tx must be 0 to %u bytes; got %lld", kMbarrierMax, static_cast<long long>(bytes));
  barrier.tx += bytes;
  emit(cta, SyncKind::mbarrier_expect_tx, offset, barrier.phase, bytes);
  if (barrier.tx > kMbarrierMax)
    fail(Fault::barrier_state, "mbarrier at shared offset 0x%x: tx-count %lld above %u", offset, static_cast<long long>(barrier.tx), kMbarrierMax);
  settle(cta, offset, barrier);
}

void MbarrierTable::complete_tx(Cta& cta, uint32_t offset, int64_t bytes) {
  Mbarrier& barrier = at(cta, offset);
  barrier.tx -= bytes;
  barrier.tx_total += static_cast<uint64_t>(bytes);
  emit(cta, SyncKind::mbarrier_complete_tx, offset, barrier.phase, bytes);
  if (barrier.tx < -static_cast<int64_t>(kMbarrierMax))
    fail(Fault::barrier_state, "mbarrier at shared offset 0x%x: tx-count %lld below -%u", offset, static_cast<long long>(barrier.tx), kMbarrierMax);
  settle(cta, offset, barrier);
}

void MbarrierTable::increment_pending(Cta& cta, uint32_t offset) {
  Mbarrier& barrier = at(cta, offset);
  if (barrier.pending == kMbarrierMax) fail(Fault::barrier_state, "mbarrier at shared offset 0x%x: pending count overflows", offset);
  ++barrier.pending;
}

}  // namespace emu
