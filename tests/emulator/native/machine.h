// The machine: Grid > Cluster > Cta > Warp > Fragment. One cluster is run by one host thread at a time, so that nothing
// inside it needs a lock; global memory is shared by all.
//
// Addresses. Global: host pointers, inside registered ranges. Shared, in both windows: rank << 24 | offset, where
// the offset of user data starts at kSharedBase; generic = kSharedWindow + that, so that the low 32 bits of a generic
// address are the shared address. Local: kLocalWindow + offset, of the executing thread. Parameters: host pointers
// into the grid's parameter block (registered, read-only).
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "async.h"
#include "error.h"
#include "events.h"
#include "mbarrier.h"
#include "program.h"
#include "random.h"

namespace emu {

struct Grid;
struct Cluster;
struct Cta;
struct Warp;

constexpr int kLanes = 32;
constexpr uint32_t kFull = 0xffffffffu;
constexpr uint64_t kSharedWindow = 0x0100000000000000ull;
constexpr uint64_t kLocalWindow = 0x0200000000000000ull;
constexpr uint32_t kSharedBase = 1024;              // reserved by the system, as on sm_90 and later
constexpr uint32_t kSharedMax = 227 * 1024;         // user bytes of one CTA
constexpr uint32_t kPoison = 0x7fff7fffu;           // a NaN in f32, bf16x2 and f16x2

// ---------------------------------------------------------------- tensor memory

/// 512 columns of 128 lanes of 32 bits, stored column by column: word(lane, column). A lane's neighbours are contiguous.
struct TensorMemory {
  static constexpr uint32_t kColumns = 512, kRows = 128;
  std::vector<uint32_t> words;               // made on first use, poisoned
  std::array<uint16_t, kColumns> owner{};    // id of the allocation a column belongs to, 0 if free
  struct Allocation { uint16_t id; uint32_t column, count; int line; };
  std::vector<Allocation> allocations;       // live ones
  uint16_t next_id = 1;
  uint32_t last_request = kColumns;          // nCols must not grow
  bool relinquished = false;
  int group = 0;                             // the one cta_group the kernel uses; 0 until known
  std::shared_ptr<struct TensorPipe> pipe;   // operations in flight (tensor.h)
  uint32_t peak = 0;                         // most columns live at once

  uint32_t* column(uint32_t c) { return words.data() + static_cast<size_t>(c) * kRows; }
  uint32_t& word(uint32_t lane, uint32_t c) { return column(c)[lane]; }
  void make() { if (words.empty()) words.assign(static_cast<size_t>(kColumns) * kRows, kPoison); }
};

// ---------------------------------------------------------------- threads

/// What a blocked fragment waits for; for the scheduler's report.
struct Wait {
  enum class Kind : uint8_t {
    none, mbarrier, named_barrier, cluster_barrier, converge, group, tensor_alloc, tensor_wait, registers, grid_order,
    prerequisite, other
  };
  Kind kind = Kind::none;
  uint32_t object = 0;      // barrier: rank << 24 | offset, or number
  uint32_t parity = 0;
  bool may_time_out = false;   // try_wait: returns false when nothing else can run
  const char* what = "";       // static text for the other kinds
};

/// Threads of a warp that share a program counter.
struct Fragment {
  uint32_t pc = 0;
  uint32_t mask = 0;
  bool blocked = false;
  bool timed_out = false;          // set by the scheduler for a fragment whose wait may time out
  uint64_t tried = 0;              // Cluster::progress when it last blocked
  uint64_t waiting_since = ~0ull;  // Cluster::clock when it first blocked at this instruction (traces only)
  Wait wait;
  std::vector<uint32_t> calls;     // return addresses
};

/// What a warp's lanes have pending at the barriers that they pass in two steps.
struct BarrierStep {
  uint32_t arrived = 0;                          // lanes that have arrived and not yet left
  std::array<uint64_t, kLanes> generation{};     // in which they arrived
};

struct alignas(64) Warp {
  Cta* cta = nullptr;
  int index = 0;                   // %warpid
  uint32_t live = 0;               // lanes that exist and have not exited
  uint32_t full = 0;               // lanes that exist
  uint8_t* registers = nullptr;
  std::vector<Fragment> fragments; // the one that runs is fragments[current]
  size_t current = 0;
  std::vector<uint8_t> local;      // 32 x local_bytes
  std::vector<uint64_t> executed;  // by instruction
  uint64_t instructions = 0;
  uint32_t register_count = 0;     // a thread's, as setmaxnreg sees it; 0 if unknown
  int line = 0;                    // of the instruction in execution
  const struct Range* range = nullptr;   // last range of global memory that was hit
  uint32_t carry = 0;              // condition code CC.CF, a bit a lane
  std::array<BarrierStep, 16> named_steps;
  BarrierStep cluster_step;
  std::vector<uint32_t> maxnreg_history;   // immediates of setmaxnreg, in order
  std::array<ThreadGroups, kLanes>* bulk = nullptr;      // cp.async.bulk groups, made on demand
  std::array<ThreadGroups, kLanes>* copies = nullptr;    // cp.async groups
  std::array<std::vector<uint64_t>, kLanes>* copy_list = nullptr;   // ids of cp.async operations, perhaps complete
  std::shared_ptr<struct TensorTraffic> tensor;          // tcgen05.ld and .st in flight (tensor.h)
  bool loads_pending = false;                            // a tcgen05.ld has not yet filled its registers
  std::shared_ptr<struct WgmmaWarp> wgmma;               // made by its first wgmma instruction (wgmma.h)
  ~Warp();

  uint32_t* r32(Slot s) { return reinterpret_cast<uint32_t*>(registers + s); }
  uint64_t* r64(Slot s) { return reinterpret_cast<uint64_t*>(registers + s); }
  float* f32(Slot s) { return reinterpret_cast<float*>(registers + s); }
  double* f64(Slot s) { return reinterpret_cast<double*>(registers + s); }
  uint32_t& pred(Slot s) { return *reinterpret_cast<uint32_t*>(registers + s); }

  Fragment& fragment() { return fragments[current]; }
  /// Describes the wait and returns Step::blocked.
  Step block(Wait::Kind kind, const char* what, uint32_t object = 0, uint32_t parity = 0, bool may_time_out = false);
  ThreadGroups& bulk_groups(int lane);
  ThreadGroups& copy_groups(int lane);
  std::vector<uint64_t>& copy_id_list(int lane);
  /// The lane's cp.async operations that are in flight.
  std::vector<uint64_t> copy_ids(int lane);
  Agent agent(int lane) const;

  /// Ends the lanes of `mask` (Step::exit follows).
  void exit(uint32_t mask);
  /// Splits the lanes of `mask` off the running fragment and sends them to `target`; all of them: the fragment jumps.
  Step branch(uint32_t mask, uint32_t target);
  /// True if every live lane of `members` is in the running fragment; otherwise the instruction must block (converge).
  bool converged(uint32_t members) { return (members & live & ~fragment().mask) == 0; }

  /// Lane's address: base slot (32 or 64 bit) plus offset.
  uint64_t address(const Address& a, int lane) {
    return (a.bits == 32 ? r32(a.base)[lane] : r64(a.base)[lane]) + static_cast<uint64_t>(a.offset);
  }
};

// ---------------------------------------------------------------- CTA

struct NamedBarrier {
  uint32_t expected = 0;        // threads; 0 while idle
  uint32_t arrived = 0;
  uint64_t generation = 0;
  struct Member { Warp* warp; uint32_t mask; bool waits; };
  std::vector<Member> members;  // of the current generation
  uint32_t red_and = 1, red_or = 0, red_popc = 0;       // of the current generation
  uint32_t last_and = 1, last_or = 0, last_popc = 0;    // of the last completed one
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;                        // %cluster_ctarank
  std::array<uint32_t, 3> id{};             // %ctaid
  uint8_t* shared = nullptr;                // [kSharedBase + static + dynamic]; offsets below kSharedBase are illegal
  uint32_t shared_end = 0;
  std::vector<uint64_t> live_words;         // bit per 8-byte word of shared memory: holds a live mbarrier
  uint32_t barriers_low = 0xffffffffu, barriers_high = 0;   // offsets between which all live mbarriers lie
  MbarrierTable barriers;
  std::array<NamedBarrier, 16> named;
  TensorMemory tensor;
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t threads = 0, exited = 0;
  int64_t register_pool = 0;                // free registers for setmaxnreg
  std::vector<uint8_t> shared_memory, register_file;
  bool checked = false;                     // rules of its end have been applied

  bool ended() const { return exited == threads; }

  uint32_t address(uint32_t offset) const { return rank << 24 | offset; }
  /// Host pointer to [offset, offset + bytes) of this CTA's shared memory; Verdict if outside. No alignment rule.
  uint8_t* shared_at(uint64_t offset, uint64_t bytes, const char* what);
  /// Throws if the range touches a live mbarrier.
  void check_barriers(uint32_t offset, uint64_t bytes, const char* what) const;
};

// ---------------------------------------------------------------- cluster

struct ClusterBarrier {
  uint64_t generation = 0;
  uint32_t arrived = 0;                     // threads
  uint32_t exited = 0;                      // threads that ended without having arrived in this generation
};

/// A row of the trace. kind: 0 a warp runs, 1 it waits, 2 a bulk copy, 3 a tensor operation, 4 a cluster launch request,
/// 5 another operation is in flight (issue to completion; warp is the issuer).
struct Interval { int cta, warp; uint64_t begin, end; int line; uint8_t kind; };

struct Cluster {
  Grid* grid = nullptr;
  uint64_t index = 0;                       // in the grid
  std::array<uint32_t, 3> id{};             // %clusterid
  std::vector<std::unique_ptr<Cta>> ctas;
  AsyncQueue async;
  Random random;
  ClusterBarrier barrier;
  uint64_t progress = 1;                    // rises whenever a blocked fragment might go on
  uint64_t activity = 0;                    // rises with everything that is not waiting; see touch()
  uint64_t clock = 0;                       // warp instructions executed, the time axis of a trace
  uint64_t order = 0;                       // of events
  Agent actor;                              // who acts at the moment, for events; operations set their own
  uint64_t acting_operation = 0;
  int acting_line = 0;
  uint64_t tma_bytes_in = 0, tma_bytes_out = 0;   // families count here
  std::vector<Interval> trace;
  uint32_t threads = 0, exited = 0;
  bool finished = false;
  bool stuck = false;                       // nothing can run and nothing is in flight
  bool cancel_failed = false;               // a clusterlaunchcontrol.try_cancel of this cluster has failed
  bool grid_phase = false;                  // global memory may be touched in order (see Grid)
  std::unique_ptr<Verdict> error;
  std::map<std::string, uint64_t> mma_counts;

  /// Something happened that a blocked fragment may wait for.
  void wake() { ++progress; ++activity; }
  /// Something happened that shows that the cluster is not idling (a store, for instance).
  void touch() { ++activity; }
  Cta& cta(uint32_t rank);
  /// CTA and offset of a shared::cluster address; Verdict if it names no CTA of the cluster.
  Cta& shared_cta(uint64_t address, uint32_t* offset);
  /// Counts an MMA for the report, e.g. "f16 128x128x16 cta_group::1 SS".
  void count_mma(const std::string& shape) { ++mma_counts[shape]; }
  /// Threads of a cluster barrier: completes the generation if all have come.
  void settle_barrier();

  /// Executes up to `budget` warp instructions. Returns early when finished, stuck, or waiting for the grid.
  void run(uint64_t budget);
  /// Executes what waits for the grid's order: operations and fragments blocked on Wait::Kind::grid_order.
  void run_grid_phase();
  bool waits_for_grid() const;

 private:
  friend class AsyncQueue;
  std::vector<std::pair<Warp*, size_t>> candidates_;
  uint64_t idle_activity_ = 0;
  int idle_rounds_ = 0;
  uint64_t spin_activity_ = 0, spin_clock_ = 0;
  double landing_ = 0.5;                    // chance that an operation lands before a slice (random mode)
  void run_fragment(Warp& warp, size_t fragment, uint32_t budget);
  bool time_out();
  void check_exit();
};

// ---------------------------------------------------------------- grid

struct Range {
  uint64_t begin, end;
  bool writable;
  std::string name;
};

struct LaunchConfig {
  std::array<uint32_t, 3> grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  uint32_t shared_bytes = 0;    // dynamic
  uint64_t seed = 0;
  AsyncMode async = AsyncMode::random;
  double spurious_wait = 0;     // probability that try_wait / test_wait returns false though the phase is complete
  int threads = 0;              // host threads; 0: one a core
  bool trace = false;
  uint64_t spin_limit = 4'000'000;   // warp instructions without any activity after which a cluster counts as stuck
  bool check_leaks = true;      // in-flight operations and TMEM at exit
};

struct Grid {
  const Program* program = nullptr;
  const Function* entry = nullptr;
  LaunchConfig config;
  std::vector<Range> ranges;                // ascending
  uint8_t* params = nullptr;                // parameter block, 64-byte aligned
  uint8_t* globals = nullptr;               // module-scope .global and .const variables
  Observer* observer = nullptr;
  uint64_t clusters = 0;                    // in the grid
  uint64_t next_cluster = 0;                // the first one not launched; cluster launch control takes from here
  bool single = false;                      // one cluster in all: no order to keep
  uint32_t dynamic_shared = 0;              // offset of dynamic shared memory
  uint32_t shared_end = 0;
  uint32_t register_count = 0;              // registers of a thread at launch; 0 if the compiler ignores setmaxnreg

  /// Index of a cluster that will then never be launched, or -1. Only in the grid phase.
  int64_t cancel_next() { return next_cluster < clusters ? static_cast<int64_t>(next_cluster++) : -1; }
  /// %ctaid of the first CTA of a cluster.
  std::array<uint32_t, 3> first_cta(uint64_t cluster) const;

  /// Host pointer to [address, address + bytes) in global memory; Verdict if outside or not writable.
  uint8_t* global_at(uint64_t address, uint64_t bytes, Access access, const char* what) const;
  /// The range that holds the address, or nullptr.
  const Range* range_of(uint64_t address) const;
};

/// True if an access to global memory that other clusters may order against must block now (Warp::block_for_grid).
inline bool must_wait_for_grid(const Warp& warp) {
  const Cluster& cluster = *warp.cta->cluster;
  return !cluster.grid_phase && !cluster.grid->single;
}

/// A decoded access of one thread: host pointer for any space, with bounds, alignment, write permission and live-barrier
/// checks. `space` generic is resolved by window.
uint8_t* resolve(Warp& warp, int lane, Space space, uint64_t address, uint32_t bytes, Access access);

/// Fills the registers of the warp's pending tcgen05.ld: before an instruction that shares registers with one, because a
/// true dependency is always respected, and in tcgen05.wait::ld.
void land_tensor_loads(Warp& warp);

}  // namespace emu
