// The C interface that tests/emulator/__init__.py calls through ctypes. Strings go out as malloc'd JSON.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "grid.h"
#include "report.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace emu;

char* copy_out(const std::string& text) {
  char* out = static_cast<char*>(std::malloc(text.size() + 1));
  std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

std::string verdict_json(const Verdict& verdict) {
  return std::string("{\"kind\": ") + json_string(fault_name(verdict.fault)) + ", \"message\": " + json_string(verdict.message) +
         ", \"line\": " + std::to_string(verdict.line) + ", \"text\": " + json_string(verdict.text) + ", \"where\": " + json_string(verdict.where) +
         ", \"waiting\": " + (verdict.detail.empty() ? "[]" : verdict.detail) + "}";
}

/// Counts events by name: the proof that the hooks are there, until a checker uses them.
struct EventCounts : Observer {
  std::map<std::string, uint64_t> counts;
  void memory(const MemoryEvent& event) override {
    static const char* const regions[] = {"global", "shared", "tensor"};
    static const char* const proxies[] = {"generic", "async", "tensor_map"};
    static const char* const accesses[] = {"read", "write", "reduce"};
    ++counts[std::string(regions[static_cast<int>(event.region)]) + " " + accesses[static_cast<int>(event.access)] + " " +
             proxies[static_cast<int>(event.proxy)]];
  }
  void sync(const SyncEvent& event) override {
    static const char* const kinds[] = {
        "mbarrier_init", "mbarrier_arrive", "mbarrier_expect_tx", "mbarrier_complete_tx", "mbarrier_wait", "named_barrier_arrive",
        "named_barrier_leave", "cluster_arrive", "cluster_leave", "fence_proxy_async", "fence", "fence_before_thread_sync",
        "fence_after_thread_sync", "issue", "complete", "wait_ld", "wait_st", "group_wait"};
    ++counts[kinds[static_cast<int>(event.kind)]];
  }
};

/// Runs f; what it throws becomes *error.
template <class F>
bool guarded(char** error, F&& f) {
  *error = nullptr;
  try {
    f();
    return true;
  } catch (const Verdict& verdict) {
    *error = copy_out(verdict_json(verdict));
  } catch (const std::exception& other) {
    *error = copy_out(verdict_json(Verdict(Fault::internal, other.what())));
  }
  return false;
}

}  // namespace

/// One launch, as Python fills it.
struct EmuLaunch {
  const char* entry;             // "" for the only one
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_bytes;
  const uint8_t* params;         // the parameter block
  uint64_t param_bytes;
  uint64_t range_count;
  const uint64_t* range_begin;
  const uint64_t* range_bytes;
  const uint8_t* range_writable;
  const char* const* range_name;
  uint64_t seed;
  uint32_t async_mode;           // 0 eager, 1 lazy, 2 random
  double spurious_wait;
  uint32_t threads;
  uint32_t trace;
  uint32_t check_leaks;
  uint64_t spin_limit;
  uint32_t events;               // count events
};

EXPORT void* emu_load(const char* text, uint64_t size, char** error) {
  std::unique_ptr<Program> program;
  if (!guarded(error, [&] { program = load_program(std::string(text, size)); })) return nullptr;
  return program.release();
}

EXPORT void emu_free(void* program) { delete static_cast<Program*>(program); }

EXPORT void emu_free_string(char* text) { std::free(text); }

/// {"target": ..., "entries": [{"name": ..., "params": [[offset, size, alignment], ...], ...}]}
EXPORT char* emu_describe(void* handle) {
  const Program& program = *static_cast<Program*>(handle);
  std::string out = "{\"target\": " + json_string(program.target) + ", \"instructions\": " + std::to_string(program.code.size()) + ", \"entries\": [";
  bool first = true;
  for (const Function& f : program.functions) {
    if (!f.is_entry || f.count == 0) continue;
    out += first ? "" : ", ";
    first = false;
    out += "{\"name\": " + json_string(f.name) + ", \"params\": [";
    for (size_t i = 0; i < f.params.size(); ++i)
      out += format("%s[%u, %u, %u]", i ? ", " : "", f.params[i].offset, f.params[i].size, f.params[i].alignment);
    out += format("], \"reqntid\": [%u, %u, %u], \"maxntid\": [%u, %u, %u], \"cluster\": [%u, %u, %u], \"static_shared\": %u, "
                  "\"register_bytes\": %u, \"local_bytes\": %u, \"maxnreg\": %u, \"minnctapersm\": %u}",
                  f.reqntid[0], f.reqntid[1], f.reqntid[2], f.maxntid[0], f.maxntid[1], f.maxntid[2], f.reqnctapercluster[0],
                  f.reqnctapercluster[1], f.reqnctapercluster[2], f.static_shared, f.register_bytes, f.local_bytes, f.maxnreg, f.minnctapersm);
  }
  return copy_out(out + "]}");
}

/// The report as JSON, or nullptr and *error.
EXPORT char* emu_launch(void* handle, const EmuLaunch* launch, char** error) {
  const Program& program = *static_cast<Program*>(handle);
  char* report = nullptr;
  guarded(error, [&] {
    Grid grid;
    grid.program = &program;
    grid.entry = program.entry(launch->entry);
    if (!grid.entry) fail(Fault::launch, "no kernel named '%s' (with no name: exactly one kernel)", launch->entry);
    std::memcpy(grid.config.grid.data(), launch->grid, 12);
    std::memcpy(grid.config.block.data(), launch->block, 12);
    std::memcpy(grid.config.cluster.data(), launch->cluster, 12);
    grid.config.shared_bytes = launch->shared_bytes;
    grid.config.seed = launch->seed;
    grid.config.async = static_cast<AsyncMode>(launch->async_mode);
    grid.config.spurious_wait = launch->spurious_wait;
    grid.config.threads = static_cast<int>(launch->threads);
    grid.config.trace = launch->trace;
    grid.config.check_leaks = launch->check_leaks;
    if (launch->spin_limit) grid.config.spin_limit = launch->spin_limit;
    if (launch->param_bytes != grid.entry->param_bytes)
      fail(Fault::launch, "kernel takes %u bytes of parameters; got %llu", grid.entry->param_bytes, static_cast<unsigned long long>(launch->param_bytes));
    for (uint64_t i = 0; i < launch->range_count; ++i)
      grid.ranges.push_back({launch->range_begin[i], launch->range_begin[i] + launch->range_bytes[i], launch->range_writable[i] != 0, launch->range_name[i]});
    // Own copies, aligned as tensor maps need.
    auto aligned = [](std::vector<uint8_t>& storage, size_t size) {
      storage.assign(size + 256, 0);
      return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.data()) + 255) / 256 * 256);
    };
    std::vector<uint8_t> params, globals;
    grid.params = aligned(params, launch->param_bytes);
    if (launch->param_bytes) std::memcpy(grid.params, launch->params, launch->param_bytes);
    grid.globals = aligned(globals, program.global_init.size());
    std::copy(program.global_init.begin(), program.global_init.end(), grid.globals);
    uint64_t p = reinterpret_cast<uint64_t>(grid.params), g = reinterpret_cast<uint64_t>(grid.globals);
    if (launch->param_bytes) grid.ranges.push_back({p, p + launch->param_bytes, false, "the kernel's parameters"});
    for (const Variable& v : program.variables)
      if (v.space == Space::global || v.space == Space::constant)
        grid.ranges.push_back({g + v.offset, g + v.offset + v.size, v.space == Space::global, "variable " + v.name});
    EventCounts events;
    if (launch->events) grid.observer = &events;
    Totals totals = run_grid(grid);
    totals.events = events.counts;
    report = copy_out(totals.json(grid));
  });
  return report;
}
