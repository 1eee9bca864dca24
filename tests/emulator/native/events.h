// Memory and synchronisation events, for checkers that watch a run (races between proxies come later).
#pragma once

#include <cstdint>

#include "program.h"

namespace emu {

/// Who acts. Asynchronous engines are agents of their own, not the threads that ask them.
enum class Engine : uint8_t { thread, tma, tensor, cluster_launch };

struct Agent {
  Engine engine = Engine::thread;
  uint16_t cta_rank = 0;   // in the cluster
  uint16_t warp = 0;       // issuing warp
  uint8_t lane = 0;        // issuing lane (for a warp-wide access: the lane itself)
};

enum class Proxy : uint8_t { generic, async, tensor_map };
enum class Access : uint8_t { read, write, reduce };

/// Spaces of events: shared memory of a CTA of the cluster (address = rank << 24 | offset), TMEM (address =
/// rank << 32 | lane << 16 | column, bytes = columns * 4), global (host address).
enum class Region : uint8_t { global, shared, tensor };

struct MemoryEvent {
  Agent agent;
  Proxy proxy = Proxy::generic;
  Access access = Access::read;
  Region region = Region::global;
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint64_t operation = 0;  // id of the asynchronous operation, 0 for a thread's own access
  uint64_t order = 0;      // position in the cluster's run
  int line = 0;
};

enum class SyncKind : uint8_t {
  mbarrier_init, mbarrier_arrive, mbarrier_expect_tx, mbarrier_complete_tx, mbarrier_wait, named_barrier_arrive,
  named_barrier_leave, cluster_arrive, cluster_leave, fence_proxy_async, fence, fence_before_thread_sync,
  fence_after_thread_sync, issue, complete, wait_ld, wait_st, group_wait
};

struct SyncEvent {
  SyncKind kind;
  Agent agent;
  uint64_t object = 0;     // barrier (rank << 24 | offset), named barrier number, or operation id
  uint64_t phase = 0;
  int64_t value = 0;       // count or bytes
  uint64_t operation = 0;
  uint64_t order = 0;
  int line = 0;
};

/// A checker. All calls for one cluster come from one thread at a time.
struct Observer {
  virtual ~Observer() = default;
  virtual void memory(const MemoryEvent& event) = 0;
  virtual void sync(const SyncEvent& event) = 0;
};

}  // namespace emu
