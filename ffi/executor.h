// Runs a launch plan: the state of one call site, shared by every device and thread that reaches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cubin_store.h"
#include "driver.h"
#include "plan.h"

namespace jfa {

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;
};

class Executor {
 public:
  explicit Executor(LaunchPlan plan, CubinStore& store = CubinStore::Global());

  const LaunchPlan& plan() const { return plan_; }

  // Loads what the plan needs on the stream's device; does nothing where that was done before. Throws Error.
  void Initialize(cu::Stream stream);

  // Enqueues the plan's steps. `operands` are the arguments, then the results. Allocates no device memory, waits for
  // nothing and reads no device data, so that it may run while the stream is captured. Throws Error; the steps before
  // the one that failed stay enqueued.
  void Execute(cu::Stream stream, const Buffer* operands, size_t argument_count, size_t result_count);

  // How often any executor of the process has run Execute. A captured CUDA graph replays without it, so that the number
  // tells a replay from a call.
  static uint64_t ExecutionCount();

 private:
  // The plan's program in one device context.
  struct Prepared {
    cu::Context context = nullptr;
    const Program* program = nullptr;
    std::vector<cu::Function> functions;  // one for each step; null for a fill
  };

  const Prepared& PrepareFor(const cu::Driver& driver, cu::Context context);
  const Program& ProgramFor(const cu::Driver& driver) const;
  void CheckBuffers(const Buffer* operands, size_t argument_count, size_t result_count) const;

  const LaunchPlan plan_;
  CubinStore& store_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<const Prepared>> prepared_;
};

}  // namespace jfa
