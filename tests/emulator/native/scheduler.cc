// Running a cluster: which warp goes next, when operations land, when threads of a warp meet again, and what a standstill is.
#include <algorithm>

#include "machine.h"
#include "report.h"
#include "wgmma.h"

namespace emu {
namespace {

constexpr uint64_t kLandWhileSpinning = 2'000;   // instructions without activity after which an operation lands anyway
constexpr int kIdleRounds = 3;                   // rounds of time-outs without activity before a cluster counts as stuck

/// Lanes of one program counter and call depth meet again.
bool merge(Warp& warp, size_t into) {
  Fragment& f = warp.fragments[into];
  for (size_t j = 0; j < warp.fragments.size(); ++j) {
    if (j == into || warp.fragments[j].pc != f.pc || warp.fragments[j].calls != f.calls) continue;
    f.mask |= warp.fragments[j].mask;
    f.blocked = false;
    f.timed_out = false;
    warp.fragments.erase(warp.fragments.begin() + static_cast<ptrdiff_t>(j));
    if (warp.current > j) --warp.current;
    return true;
  }
  return false;
}

}  // namespace

void Cluster::run_fragment(Warp& warp, size_t index, uint32_t budget) {
  warp.current = index;
  const Instruction* code = grid->program->code.data();
  uint64_t* executed = warp.executed.data();
  Fragment* f = &warp.fragment();
  f->blocked = false;
  uint32_t pc = f->pc;
  uint64_t begin = clock;
  const uint64_t waiting_since = f->waiting_since;
  const int wait_line = code[pc].line;
  actor = warp.agent(0);
  const bool trace_on = grid->config.trace;
  try {
    while (budget-- > 0) {
      const Instruction& in = code[pc];
      uint32_t mask = f->mask;
      if (in.predicate != kNoSlot) {
        uint32_t p = warp.pred(in.predicate);
        mask &= in.predicate_negated ? ~p : p;
      }
      ++clock;
      if (mask == 0) {
        ++executed[pc];
        ++pc;
        if (warp.fragments.size() > 1) {
          f->pc = pc;
          while (merge(warp, warp.current)) {}
          f = &warp.fragment();
        }
        continue;
      }
      f->pc = pc;
      warp.line = in.line;
      if (in.aligned && mask != warp.live) {
        if (mask != f->mask) {
          fail(Fault::divergence, "an .aligned instruction is predicated off for some lanes: executed by 0x%08x of the warp's live lanes 0x%08x",
               mask, warp.live);
        }
        warp.block(Wait::Kind::converge, "the other threads of its warp at this .aligned instruction");
        f->blocked = true;
        f->tried = progress;
        break;
      }
      if (in.touches_loads && warp.loads_pending) land_tensor_loads(warp);
      if (in.wgmma_use && warp.wgmma) touch_wgmma_registers(warp, in);
      Step step = in.exec(warp, in, mask);
      if (step == Step::next) {
        ++executed[pc];
        ++pc;
        if (warp.fragments.size() > 1) {
          f = &warp.fragment();
          f->pc = pc;
          while (merge(warp, warp.current)) {}
          f = &warp.fragment();
        }
        continue;
      }
      f = &warp.fragment();
      if (step == Step::blocked) {
        f->blocked = true;
        f->tried = progress;
        --clock;
        break;
      }
      ++executed[pc];
      if (step == Step::jump) {
        // branch() and its kin have set the counters
      } else if (step == Step::yield) {
        f->pc = pc + 1;
      } else {   // exit
        if (f->mask == 0) {
          warp.fragments.erase(warp.fragments.begin() + static_cast<ptrdiff_t>(warp.current));
          f = nullptr;
          break;
        }
        f->pc = pc + 1;
      }
      if (warp.fragments.size() > 1)
        while (merge(warp, warp.current)) {}
      f = &warp.fragment();
      pc = f->pc;
      if (step == Step::yield) break;
    }
    if (f && !f->blocked) f->pc = pc;
  } catch (Verdict& verdict) {
    place(verdict, warp, pc);
    throw;
  }
  warp.instructions += clock - begin;
  if (!trace_on) return;
  const int cta = static_cast<int>(warp.cta->rank);
  const bool moved = clock > begin;
  if (moved && waiting_since != ~0ull && begin > waiting_since) record(*this, cta, warp.index, 1, waiting_since, begin, wait_line);
  if (moved) record(*this, cta, warp.index, 0, begin, clock, code[pc].line);
  if (f) f->waiting_since = !f->blocked ? ~0ull : moved || waiting_since == ~0ull ? clock : waiting_since;
}

bool Cluster::time_out() {
  bool any = false;
  for (auto& cta : ctas)
    for (auto& warp : cta->warps)
      for (Fragment& f : warp->fragments)
        if (f.blocked && f.wait.may_time_out) {
          f.timed_out = true;
          any = true;
        }
  return any;
}

bool Cluster::waits_for_grid() const {
  if (async.any_queued()) return true;
  for (const auto& cta : ctas)
    for (const auto& warp : cta->warps)
      for (const Fragment& f : warp->fragments)
        if (f.blocked && f.wait.kind == Wait::Kind::grid_order) return true;
  return false;
}

void Cluster::run(uint64_t budget) {
  stuck = false;
  const uint64_t end = clock + budget;
  while (!finished && clock < end) {
    if (async.mode == AsyncMode::random && !async.empty()) {
      if (random.below(64) == 0) landing_ = random.below(3) == 0 ? 0.02 : random.unit();
      if (random.unit() < landing_) async.advance_one(*this, random);
    }
    // A wait that may time out does so now and then, as the ISA allows.
    const bool surprise = random.below(256) == 0;
    candidates_.clear();
    for (auto& cta : ctas) {
      if (cta->ended()) continue;
      for (auto& warp : cta->warps) {
        size_t n = warp->fragments.size();
        // Of a split warp, the lanes that are furthest behind go first, most of the time, so that they catch up.
        size_t best = n;
        bool random_lane = n > 1 && random.below(4) == 0;
        uint32_t seen = 0;
        for (size_t i = 0; i < n; ++i) {
          Fragment& f = warp->fragments[i];
          if (f.blocked) {
            if (f.wait.kind == Wait::Kind::grid_order) continue;
            if (surprise && f.wait.may_time_out && random.below(4) == 0) f.timed_out = true;
            if (f.tried == progress && !f.timed_out) continue;
          }
          ++seen;
          if (best == n || (random_lane ? random.below(seen) == 0 : f.pc < warp->fragments[best].pc)) best = i;
        }
        if (best < n) candidates_.emplace_back(warp.get(), best);
      }
    }
    if (candidates_.empty()) {
      if (async.advance_one(*this, random)) continue;
      if (waits_for_grid()) return;
      if (activity != idle_activity_) {
        idle_activity_ = activity;
        idle_rounds_ = 0;
      }
      if (idle_rounds_++ < kIdleRounds && time_out()) continue;
      idle_rounds_ = 0;
      stuck = true;
      return;
    }
    auto [warp, fragment] = candidates_[random.below(static_cast<uint32_t>(candidates_.size()))];
    // Slices of very different lengths: sometimes single instructions, mostly long runs.
    uint32_t slice = random.below(8) == 0 ? 1 + random.below(8) : 64 + random.below(512);
    run_fragment(*warp, fragment, slice);
    if (warp->live == 0) check_exit();
    if (activity != spin_activity_) {
      spin_activity_ = activity;
      spin_clock_ = clock;
    } else {
      if (clock - spin_clock_ > kLandWhileSpinning && async.advance_one(*this, random)) continue;
      if (clock - spin_clock_ > grid->config.spin_limit) {
        stuck = true;
        return;
      }
    }
  }
}

void Cluster::run_grid_phase() {
  grid_phase = true;
  async.advance_queued(*this);
  std::vector<Warp*> turns;
  for (auto& cta : ctas)
    for (auto& warp : cta->warps) {
      turns.push_back(warp.get());
      std::swap(turns.back(), turns[random.below(static_cast<uint32_t>(turns.size()))]);
    }
  for (Warp* warp : turns) {
    // Fragments may split, merge or vanish: take one at a time.
    for (size_t i = 0; i < warp->fragments.size(); ++i) {
      Fragment& f = warp->fragments[i];
      if (!f.blocked || f.wait.kind != Wait::Kind::grid_order) continue;
      size_t before = warp->fragments.size();
      run_fragment(*warp, i, 1);
      if (warp->fragments.size() < before) i -= std::min(i + 1, before - warp->fragments.size());
    }
    if (warp->live == 0) check_exit();
  }
  grid_phase = false;
}

/// Called when a warp has ended: rules for the end of a CTA and of the cluster.
void Cluster::check_exit() {
  for (auto& cta : ctas) {
    if (!cta->ended() || cta->checked) continue;
    cta->checked = true;
    if (grid->config.check_leaks) check_cta_end(*this, *cta);
  }
  if (exited < threads) return;
  while (!async.empty()) {
    if (async.advance_one(*this, random)) continue;
    if (async.any_queued()) return;   // lands in the grid phase; run() comes back here
    fail(Fault::internal, "operations in flight that cannot land");
  }
  finished = true;
}

}  // namespace emu
