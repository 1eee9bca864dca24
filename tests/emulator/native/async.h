// Asynchronous operations: what they are, in what order they may land, and when the adversary lets them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "events.h"
#include "random.h"

namespace emu {

struct Cluster;

enum class AsyncMode : uint8_t { eager, lazy, random };

/// One asynchronous operation in flight. Derive, hand it to AsyncQueue::submit.
struct AsyncOp {
  virtual ~AsyncOp() = default;
  /// Performs the next stage (for instance: read the source; then write and complete_tx). True when it was the last.
  /// It runs on the cluster's thread, after the issuing instruction; it must not touch registers of threads that may
  /// have gone on, unless the ISA says that they wait.
  virtual bool advance(Cluster& cluster) = 0;
  /// For reports: "TMA load 128x64 bf16 to shared 0x400".
  virtual std::string describe() const = 0;
  /// True if this stage reads and writes global memory in an order that other clusters can see (reductions,
  /// cluster launch control): it then lands between two rounds of the grid, in the order of clusters.
  virtual bool grid_ordered() const { return false; }

  /// True while the operation reads or writes memory of this CTA, or signals a barrier in it: the CTA must not end yet.
  virtual bool needs_cta(uint32_t rank) const { return agent.cta_rank == rank; }

  Agent agent;                     // engine and issuing thread
  Proxy proxy = Proxy::async;
  int pipe = -1;                   // operations of one pipe land in order of issue; -1: unordered
  std::vector<uint64_t> after;     // ids of operations that must be complete before this one starts
  int line = 0;                    // of the instruction, set by the caller of submit
  uint64_t id = 0;                 // set by submit; ids rise in order of issue
};

class AsyncQueue {
 public:
  /// Takes an operation over. In eager mode it lands before submit returns, if nothing it depends on is in flight.
  uint64_t submit(Cluster& cluster, std::unique_ptr<AsyncOp> op);
  bool empty() const { return live_.empty(); }
  size_t size() const { return live_.size(); }
  /// True once the operation has completed.
  bool complete(uint64_t id) const { return live_.find(id) == live_.end(); }
  /// Advances one operation that may start now (by the rng); false if there is none.
  bool advance_one(Cluster& cluster, Random& random);
  /// Lands what has been waiting for the grid's order, in order of issue.
  bool advance_queued(Cluster& cluster);
  bool any_queued() const;
  /// Number of the pipe that `name` (any key the family chooses, e.g. CTA pair, warp and lane) denotes.
  int pipe(uint64_t name);
  /// Operations in flight, in order of issue.
  std::vector<const AsyncOp*> in_flight() const;

  AsyncMode mode = AsyncMode::random;

 private:
  struct Live {
    std::unique_ptr<AsyncOp> op;
    uint64_t issued = 0;   // Cluster::clock, for traces
    bool queued = false;   // waits for the grid's order
  };
  bool ready(const AsyncOp& op) const;
  bool advance(Cluster& cluster, uint64_t id);
  std::unordered_map<uint64_t, Live> live_;
  std::vector<uint64_t> order_;                  // ids in flight, ascending
  std::vector<std::deque<uint64_t>> pipes_;
  std::unordered_map<uint64_t, int> pipe_names_;
  uint64_t next_ = 1;
};

/// A thread's groups of bulk (or non-bulk cp.async) operations.
struct AsyncGroup {
  int unread = 0;       // operations that have not finished reading their source
  int unfinished = 0;   // operations whose writes have not been made
};

struct ThreadGroups {
  std::shared_ptr<AsyncGroup> open;                     // not committed yet; nullptr if empty
  std::deque<std::shared_ptr<AsyncGroup>> committed;
  /// The open group, made on demand. An operation keeps the pointer and counts itself in and out.
  std::shared_ptr<AsyncGroup> join();
  void commit();
  /// Committed groups that are not complete (read_only: have not finished reading). Drops complete ones.
  size_t pending(bool read_only);
  /// True if at most `allowed` of the most recent groups are pending, as wait_group defines it.
  bool reached(size_t allowed, bool read_only);
};

}  // namespace emu
