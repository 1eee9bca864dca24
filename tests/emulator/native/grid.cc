// Launching a kernel: making clusters, running them on host threads in rounds, keeping the order of global memory.
//
// Clusters run side by side, each on one host thread at a time, for a quantum of instructions. Between two such rounds
// the grid phase executes, cluster by cluster, what has an order across clusters: atomics, volatile, acquire and release
// accesses to global memory, TMA reductions, cluster launch control. So the result does not depend on the host threads.
#include "grid.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace emu {
namespace {

constexpr uint64_t kQuantum = 16'384;       // warp instructions of a cluster in a round
constexpr size_t kResidentCtas = 8;         // at the beginning; more are launched when the resident ones are stuck
constexpr size_t kResidentMax = 148;        // as on the whole GPU
constexpr int kIdleRoundsToGrow = 64;       // rounds without activity before more clusters become resident
constexpr int kIdleRounds = 20'000;         // of all clusters together, without activity, before those that poll count as stuck

uint32_t product(const std::array<uint32_t, 3>& v) { return v[0] * v[1] * v[2]; }

uint64_t special_value(Special special, const Grid& grid, const Cluster& cluster, const Cta& cta, const Warp& warp, int lane) {
  const LaunchConfig& config = grid.config;
  uint32_t linear = static_cast<uint32_t>(warp.index * kLanes + lane);
  auto axis = [](Special first, Special s) { return static_cast<uint32_t>(s) - static_cast<uint32_t>(first); };
  uint32_t cluster_threads = product(config.cluster);
  switch (special) {
    case Special::tid_x: return linear % config.block[0];
    case Special::tid_y: return linear / config.block[0] % config.block[1];
    case Special::tid_z: return linear / config.block[0] / config.block[1];
    case Special::ntid_x: case Special::ntid_y: case Special::ntid_z: return config.block[axis(Special::ntid_x, special)];
    case Special::ctaid_x: case Special::ctaid_y: case Special::ctaid_z: return cta.id[axis(Special::ctaid_x, special)];
    case Special::nctaid_x: case Special::nctaid_y: case Special::nctaid_z: return config.grid[axis(Special::nctaid_x, special)];
    case Special::laneid: return lane;
    case Special::warpid: return warp.index;
    case Special::nwarpid: return (product(config.block) + kLanes - 1) / kLanes;
    case Special::smid: return (cluster.index * cluster_threads + cta.rank) % kResidentMax;
    case Special::nsmid: return kResidentMax;
    case Special::gridid: return 1;
    case Special::lanemask_eq: return 1u << lane;
    case Special::lanemask_le: return (2ull << lane) - 1;
    case Special::lanemask_lt: return (1u << lane) - 1;
    case Special::lanemask_ge: return ~((1u << lane) - 1);
    case Special::lanemask_gt: return static_cast<uint32_t>(~((2ull << lane) - 1));
    case Special::clusterid_x: case Special::clusterid_y: case Special::clusterid_z: return cluster.id[axis(Special::clusterid_x, special)];
    case Special::nclusterid_x: case Special::nclusterid_y: case Special::nclusterid_z: {
      uint32_t d = axis(Special::nclusterid_x, special);
      return config.grid[d] / config.cluster[d];
    }
    case Special::cluster_ctaid_x: case Special::cluster_ctaid_y: case Special::cluster_ctaid_z: {
      uint32_t d = axis(Special::cluster_ctaid_x, special);
      return cta.id[d] - cluster.id[d] * config.cluster[d];
    }
    case Special::cluster_nctaid_x: case Special::cluster_nctaid_y: case Special::cluster_nctaid_z:
      return config.cluster[axis(Special::cluster_nctaid_x, special)];
    case Special::cluster_ctarank: return cta.rank;
    case Special::cluster_nctarank: return cluster_threads;
    case Special::is_explicit_cluster: return cluster_threads > 1 || grid.entry->explicit_cluster;
    case Special::dynamic_smem_size: return config.shared_bytes;
    case Special::total_smem_size: return grid.shared_end - kSharedBase;
    case Special::aggr_smem_size: return grid.shared_end;
    default: fail(Fault::internal, "special register without a value");
  }
}

void fill_constants(const Function& function, const Grid& grid, const Cluster& cluster, const Cta& cta, Warp& warp) {
  for (const Constant& c : function.constants) {
    uint64_t value = c.value;
    switch (c.kind) {
      case Constant::Kind::shared_symbol: value = cta.address(static_cast<uint32_t>(value)); break;
      case Constant::Kind::dynamic_shared_symbol: value = cta.address(grid.dynamic_shared + static_cast<uint32_t>(value)); break;
      case Constant::Kind::param_symbol: value += reinterpret_cast<uint64_t>(grid.params); break;
      case Constant::Kind::global_symbol: value += reinterpret_cast<uint64_t>(grid.globals); break;
      default: break;
    }
    if (c.bits == 1) {
      warp.pred(c.slot) = value ? kFull : 0;
      continue;
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      uint64_t v = c.kind == Constant::Kind::special
                       ? special_value(static_cast<Special>(c.value), grid, cluster, cta, warp, lane) : value;
      if (c.bits <= 32) warp.r32(c.slot)[lane] = static_cast<uint32_t>(c.bits < 32 ? v & ((1u << c.bits) - 1) : v);
      else warp.r64(c.slot)[lane] = v;
      if (c.bits == 128) warp.r64(c.slot)[kLanes + lane] = 0;
    }
  }
}

}  // namespace

std::unique_ptr<Cluster> make_cluster(Grid& grid, uint64_t index) {
  const Function& entry = *grid.entry;
  const LaunchConfig& config = grid.config;
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = &grid;
  cluster->index = index;
  cluster->random = Random(config.seed * 0x2545f4914f6cdd1dull + index);
  cluster->async.mode = config.async;
  std::array<uint32_t, 3> first = grid.first_cta(index);
  for (int d = 0; d < 3; ++d) cluster->id[d] = first[d] / config.cluster[d];
  uint32_t threads = product(config.block);
  uint32_t warps = (threads + kLanes - 1) / kLanes;
  uint32_t file = (entry.register_bytes + 63) / 64 * 64;
  for (uint32_t rank = 0; rank < product(config.cluster); ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    cta->id = {first[0] + rank % config.cluster[0], first[1] + rank / config.cluster[0] % config.cluster[1],
               first[2] + rank / config.cluster[0] / config.cluster[1]};
    cta->shared_end = grid.shared_end;
    cta->shared_memory.resize(grid.shared_end + 1024);
    // Offset 0 at a multiple of 1024, so that host alignment follows shared alignment.
    cta->shared = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(cta->shared_memory.data()) + 1023) / 1024 * 1024);
    for (uint32_t at = 0; at + 4 <= grid.shared_end; at += 4) std::memcpy(cta->shared + at, &kPoison, 4);
    cta->live_words.assign(grid.shared_end / 512 + 1, 0);
    cta->threads = threads;
    cta->register_file.resize(static_cast<size_t>(file) * warps + 64);
    uint8_t* registers = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(cta->register_file.data()) + 63) / 64 * 64);
    for (uint32_t w = 0; w < warps; ++w) {
      auto warp = std::make_unique<Warp>();
      warp->cta = cta.get();
      warp->index = static_cast<int>(w);
      uint32_t lanes = std::min<uint32_t>(kLanes, threads - w * kLanes);
      warp->live = warp->full = lanes == kLanes ? kFull : (1u << lanes) - 1;
      warp->registers = registers + static_cast<size_t>(file) * w;
      for (uint32_t at = 0; at + 4 <= file; at += 4) std::memcpy(warp->registers + at, &kPoison, 4);
      for (const Function& function : grid.program->functions)
        if (!function.is_entry) fill_constants(function, grid, *cluster, *cta, *warp);
      fill_constants(entry, grid, *cluster, *cta, *warp);
      warp->local.assign(static_cast<size_t>(entry.local_bytes) * kLanes, 0);
      for (size_t at = 0; at + 4 <= warp->local.size(); at += 4) std::memcpy(warp->local.data() + at, &kPoison, 4);
      warp->executed.assign(grid.program->code.size(), 0);
      warp->register_count = grid.register_count;
      Fragment fragment;
      fragment.pc = entry.first;
      fragment.mask = warp->live;
      warp->fragments.push_back(std::move(fragment));
      cta->warps.push_back(std::move(warp));
    }
    cluster->threads += threads;
    cluster->ctas.push_back(std::move(cta));
  }
  return cluster;
}

namespace {

/// Host threads that run one round at a time.
class Crew {
 public:
  explicit Crew(int size) {
    for (int i = 0; i < size; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Crew() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    start_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void run(std::vector<std::unique_ptr<Cluster>>& clusters) {
    if (threads_.empty() || clusters.size() < 2) {
      for (auto& cluster : clusters) step(*cluster);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      clusters_ = &clusters;
      next_ = 0;
      busy_ = threads_.size();
      ++round_;
    }
    start_.notify_all();
    take();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  static void step(Cluster& cluster) {
    if (cluster.finished || cluster.error) return;
    try {
      cluster.run(kQuantum);
    } catch (const Verdict& verdict) {
      cluster.error = std::make_unique<Verdict>(verdict);
    }
  }
  void take() {
    for (size_t i; (i = next_.fetch_add(1)) < clusters_->size();) step(*(*clusters_)[i]);
  }
  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return stop_ || round_ != seen; });
        if (stop_) return;
        seen = round_;
      }
      take();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::vector<std::unique_ptr<Cluster>>* clusters_ = nullptr;
  std::atomic<size_t> next_{0};
  size_t busy_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
};

void raise_first(const std::vector<std::unique_ptr<Cluster>>& active) {
  const Cluster* first = nullptr;
  for (const auto& cluster : active)
    if (cluster->error && (!first || cluster->index < first->index)) first = cluster.get();
  if (first) throw *first->error;
}

}  // namespace

void prepare(Grid& grid) {
  const Function& entry = *grid.entry;
  LaunchConfig& config = grid.config;
  for (int d = 0; d < 3; ++d) {
    if (config.grid[d] == 0 || config.block[d] == 0 || config.cluster[d] == 0)
      fail(Fault::launch, "grid, block and cluster extents must be positive");
    if (config.grid[d] % config.cluster[d])
      fail(Fault::launch, "cluster extent %u does not divide grid extent %u", config.cluster[d], config.grid[d]);
    if (entry.reqntid[0] && entry.reqntid[d] != config.block[d])
      fail(Fault::launch, "kernel requires blocks of (%u, %u, %u) threads (.reqntid); launched with (%u, %u, %u)", entry.reqntid[0],
           entry.reqntid[1], entry.reqntid[2], config.block[0], config.block[1], config.block[2]);
    if (entry.reqnctapercluster[0] && entry.reqnctapercluster[d] != config.cluster[d])
      fail(Fault::launch, "kernel requires clusters of (%u, %u, %u) CTAs (.reqnctapercluster); launched with (%u, %u, %u)",
           entry.reqnctapercluster[0], entry.reqnctapercluster[1], entry.reqnctapercluster[2], config.cluster[0], config.cluster[1],
           config.cluster[2]);
  }
  uint64_t threads = static_cast<uint64_t>(config.block[0]) * config.block[1] * config.block[2];
  if (threads > 1024) fail(Fault::launch, "a block has at most 1024 threads; got %llu", static_cast<unsigned long long>(threads));
  if (entry.maxntid[0] && threads > static_cast<uint64_t>(product(entry.maxntid)))
    fail(Fault::launch, "kernel allows blocks of %u threads (.maxntid); launched with %llu", product(entry.maxntid), static_cast<unsigned long long>(threads));
  if (static_cast<uint64_t>(config.cluster[0]) * config.cluster[1] * config.cluster[2] > 16) fail(Fault::launch, "a cluster has at most 16 CTAs");
  uint64_t after_static = kSharedBase + entry.static_shared;
  grid.dynamic_shared = static_cast<uint32_t>((after_static + entry.dynamic_alignment - 1) / entry.dynamic_alignment * entry.dynamic_alignment);
  uint64_t end = config.shared_bytes ? static_cast<uint64_t>(grid.dynamic_shared) + config.shared_bytes : after_static;
  if (end > kSharedBase + kSharedMax)
    fail(Fault::launch, "%u bytes of static and %u of dynamic shared memory exceed %u", entry.static_shared, config.shared_bytes, kSharedMax);
  grid.shared_end = static_cast<uint32_t>(end);
  // What the compiler gives a thread of a kernel that uses setmaxnreg: the declared number, or as many as let the declared
  // number of CTAs share the SM, counting whole warpgroups, in steps of 8 (ptxas 13.0 does so). Without .minnctapersm or
  // .maxnreg it ignores setmaxnreg.
  uint32_t warpgroups = static_cast<uint32_t>((threads + 4 * kLanes - 1) / (4 * kLanes));
  if (entry.maxnreg) grid.register_count = (entry.maxnreg + 7) / 8 * 8;
  else if (entry.minnctapersm && (entry.reqntid[0] || entry.maxntid[0]))
    grid.register_count = std::min(256u, 65536u / (warpgroups * 4 * kLanes * entry.minnctapersm) / 8 * 8);
  grid.clusters = 1;
  for (int d = 0; d < 3; ++d) grid.clusters *= config.grid[d] / config.cluster[d];
  grid.single = grid.clusters == 1;
  std::sort(grid.ranges.begin(), grid.ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
}

Totals run_grid(Grid& grid) {
  prepare(grid);
  Totals totals;
  std::vector<std::unique_ptr<Cluster>> active;
  const uint32_t per_cluster = product(grid.config.cluster);
  size_t resident = std::max<size_t>(1, kResidentCtas / per_cluster);
  const size_t most = std::max<size_t>(1, kResidentMax / per_cluster);
  int host = grid.config.threads > 0 ? grid.config.threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (grid.observer) host = 1;
  Crew crew(static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(host), grid.clusters)) - 1);
  Random random(grid.config.seed ^ 0x6a09e667f3bcc909ull);
  uint64_t last_activity = 0;
  int idle_rounds = 0;
  for (;;) {
    while (active.size() < resident && grid.next_cluster < grid.clusters) active.push_back(make_cluster(grid, grid.next_cluster++));
    if (active.empty()) break;
    crew.run(active);
    raise_first(active);
    bool all_stuck = true;
    uint64_t activity = 0;
    // The grid phase: clusters in an order that the seed decides.
    std::vector<Cluster*> turns;
    for (auto& cluster : active) {
      if (cluster->finished) continue;
      if (cluster->waits_for_grid()) {
        turns.push_back(cluster.get());
        std::swap(turns.back(), turns[random.below(static_cast<uint32_t>(turns.size()))]);
        cluster->stuck = false;
      }
      all_stuck = all_stuck && cluster->stuck;
    }
    for (Cluster* cluster : turns) cluster->run_grid_phase();
    bool ended = false;
    for (auto& cluster : active) {
      activity += cluster->activity;
      if (!cluster->finished) continue;
      totals.add(*cluster);
      cluster.reset();
      ended = true;
    }
    if (ended) {
      active.erase(std::remove(active.begin(), active.end(), nullptr), active.end());
      idle_rounds = 0;
      last_activity = 0;
      continue;
    }
    idle_rounds = activity == last_activity ? idle_rounds + 1 : 0;
    // A cluster that merely polls makes rounds without activity; one that is stuck has nothing to poll for.
    bool more = grid.next_cluster < grid.clusters && resident < most;
    bool standstill = (all_stuck && idle_rounds > 0) || idle_rounds > (more ? kIdleRoundsToGrow : std::max(256, kIdleRounds / static_cast<int>(active.size())));
    last_activity = activity;
    if (!standstill) continue;
    if (more) {
      resident = std::min(2 * resident, most);   // perhaps they wait for clusters that are not resident yet
      idle_rounds = 0;
      continue;
    }
    std::vector<Cluster*> waiting;
    for (auto& cluster : active) waiting.push_back(cluster.get());
    throw deadlock(waiting);
  }
  return totals;
}

}  // namespace emu
