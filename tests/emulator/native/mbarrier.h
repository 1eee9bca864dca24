// mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "error.h"

namespace emu {

struct Cta;
struct Warp;

constexpr uint32_t kMbarrierMax = (1u << 20) - 1;

/// State of one object. A phase completes when pending == 0 and tx == 0.
struct Mbarrier {
  uint32_t expected = 0;      // arrivals that the next phase starts with
  uint32_t pending = 0;
  int64_t tx = 0;
  uint64_t phase = 0;         // completed phases
  int init_line = 0;
  bool waited = false;        // a wait has seen the last completed phase
  /// Lanes that were told "not yet" while `phase` was the current one.
  struct Waiter {
    Warp* warp;
    uint32_t mask;
    uint64_t phase;
    uint32_t parity;
    int line;
    bool blocked;             // inside try_wait; else it returned false and the thread has gone on
  };
  std::vector<Waiter> waiters;
  uint64_t waits = 0, stalls = 0;   // statistics
  uint64_t tx_total = 0;            // bytes completed so far
};

/// The barriers in one CTA's shared memory, by byte offset. Every function takes the offset of the object inside that
/// CTA (without its rank) and throws Verdict(barrier_state) on an object that is not initialised.
class MbarrierTable {
 public:
  void init(Cta& cta, uint32_t offset, uint32_t count, int line);
  void invalidate(Cta& cta, uint32_t offset);
  Mbarrier& at(const Cta& cta, uint32_t offset);
  bool live(uint32_t offset) const { return table_.find(offset) != table_.end(); }
  /// Arrives `count` times. Completes the phase if that is due and wakes the cluster.
  void arrive(Cta& cta, uint32_t offset, uint32_t count);
  void arrive_drop(Cta& cta, uint32_t offset, uint32_t count);
  void expect_tx(Cta& cta, uint32_t offset, int64_t bytes);
  void complete_tx(Cta& cta, uint32_t offset, int64_t bytes);
  /// cp.async.mbarrier.arrive without .noinc: one more arrival pending in this phase.
  void increment_pending(Cta& cta, uint32_t offset);
  /// True if the phase of that parity is complete, i.e. the current phase has the other parity.
  static bool passed(const Mbarrier& barrier, uint32_t parity) { return (barrier.phase & 1) != (parity & 1); }
  const std::unordered_map<uint32_t, Mbarrier>& all() const { return table_; }

  /// Raises phase_alias for a wait that came too late.
  [[noreturn]] static void missed(const Cta& cta, uint32_t offset, const Mbarrier& barrier, const Mbarrier::Waiter& waiter);

 private:
  void settle(Cta& cta, uint32_t offset, Mbarrier& barrier);
  std::unordered_map<uint32_t, Mbarrier> table_;
};

}  // namespace emu
