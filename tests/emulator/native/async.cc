#include "async.h"

#include <algorithm>

#include "machine.h"
#include "report.h"

namespace emu {

static void emit(Cluster& cluster, const AsyncOp& op, SyncKind kind) {
  if (!cluster.grid->observer) return;
  SyncEvent event;
  event.kind = kind;
  event.agent = op.agent;
  event.operation = op.id;
  event.order = cluster.order++;
  event.line = op.line;
  cluster.grid->observer->sync(event);
}

uint64_t AsyncQueue::submit(Cluster& cluster, std::unique_ptr<AsyncOp> op) {
  uint64_t id = next_++;
  op->id = id;
  if (op->pipe >= 0) pipes_.at(op->pipe).push_back(id);
  order_.push_back(id);
  live_[id].op = std::move(op);
  live_[id].issued = cluster.clock;
  emit(cluster, *live_[id].op, SyncKind::issue);
  cluster.touch();
  if (mode == AsyncMode::eager) {
    while (live_.count(id) && !live_[id].queued && ready(*live_[id].op)) advance(cluster, id);
    // What waited for this one may follow.
    for (bool again = !order_.empty(); again;) {
      again = false;
      for (uint64_t other : std::vector<uint64_t>(order_)) {
        auto it = live_.find(other);
        if (it != live_.end() && !it->second.queued && ready(*it->second.op)) {
          advance(cluster, other);
          again = true;
        }
      }
    }
  }
  return id;
}

bool AsyncQueue::ready(const AsyncOp& op) const {
  if (op.pipe >= 0 && pipes_[op.pipe].front() != op.id) return false;
  for (uint64_t id : op.after)
    if (live_.find(id) != live_.end()) return false;
  return true;
}

bool AsyncQueue::advance(Cluster& cluster, uint64_t id) {
  Live& live = live_.at(id);
  if (live.op->grid_ordered() && !cluster.grid_phase && !cluster.grid->single) {
    live.queued = true;
    return false;
  }
  live.queued = false;
  int line = live.op->line;
  Agent actor = cluster.actor;   // an eager operation lands inside its issuer's instruction
  int acting_line = cluster.acting_line;
  cluster.actor = live.op->agent;
  cluster.acting_operation = id;
  cluster.acting_line = line;
  bool done;
  try {
    done = live.op->advance(cluster);
  } catch (Verdict& verdict) {
    place(verdict, cluster, *live_.at(id).op);
    throw;
  }
  cluster.actor = actor;
  cluster.acting_operation = 0;
  cluster.acting_line = acting_line;
  if (done) {
    emit(cluster, *live_.at(id).op, SyncKind::complete);
    int pipe = live_.at(id).op->pipe;
    if (cluster.grid->config.trace) {
      const Agent& by = live_.at(id).op->agent;
      const uint8_t kind = by.engine == Engine::tma ? 2 : by.engine == Engine::tensor ? 3 : by.engine == Engine::cluster_launch ? 4 : 5;
      record(cluster, by.cta_rank, by.warp, kind, live_.at(id).issued, cluster.clock, line);
    }
    if (pipe >= 0) pipes_[pipe].pop_front();
    live_.erase(id);
    order_.erase(std::lower_bound(order_.begin(), order_.end(), id));
  }
  cluster.wake();
  return true;
}

bool AsyncQueue::advance_one(Cluster& cluster, Random& random) {
  if (order_.empty()) return false;
  // One random start among those that may land; lazily, the search begins there.
  size_t n = order_.size(), first = random.below(static_cast<uint32_t>(n));
  for (size_t i = 0; i < n; ++i) {
    uint64_t id = order_[(first + i) % n];
    const Live& live = live_.at(id);
    if (live.queued || !ready(*live.op)) continue;
    if (advance(cluster, id)) return true;   // else: it now waits for the grid
  }
  return false;
}

bool AsyncQueue::advance_queued(Cluster& cluster) {
  bool any = false;
  for (uint64_t id : std::vector<uint64_t>(order_)) {
    auto it = live_.find(id);
    if (it == live_.end() || !it->second.queued) continue;
    any |= advance(cluster, id);
  }
  return any;
}

bool AsyncQueue::any_queued() const {
  for (const auto& [id, live] : live_)
    if (live.queued) return true;
  return false;
}

int AsyncQueue::pipe(uint64_t name) {
  auto [it, fresh] = pipe_names_.try_emplace(name, static_cast<int>(pipes_.size()));
  if (fresh) pipes_.emplace_back();
  return it->second;
}

std::vector<const AsyncOp*> AsyncQueue::in_flight() const {
  std::vector<const AsyncOp*> out;
  for (uint64_t id : order_) out.push_back(live_.at(id).op.get());
  return out;
}

// ---------------------------------------------------------------- groups

std::shared_ptr<AsyncGroup> ThreadGroups::join() {
  if (!open) open = std::make_shared<AsyncGroup>();
  return open;
}

void ThreadGroups::commit() {
  committed.push_back(open ? open : std::make_shared<AsyncGroup>());
  open.reset();
}

size_t ThreadGroups::pending(bool read_only) {
  while (!committed.empty() && committed.front()->unfinished == 0) committed.pop_front();
  size_t count = 0;
  for (const auto& group : committed) count += (read_only ? group->unread : group->unfinished) != 0;
  return count;
}

bool ThreadGroups::reached(size_t allowed, bool read_only) {
  pending(read_only);
  for (size_t i = 0; i + allowed < committed.size(); ++i)
    if ((read_only ? committed[i]->unread : committed[i]->unfinished) != 0) return false;
  return true;
}

}  // namespace emu
