// A kernel made ready for a launch: found in its cubin, checked against the plan, its limits raised.
#pragma once

#include <string>

#include "cubin_store.h"
#include "driver.h"
#include "plan.h"

namespace jfa {

// The function of `launch` in `context`, which must be current. `where` begins every error's message. Thread-safe.
// Throws Error: what CubinStore::Load throws; kNotFound for a missing entry point; kInvalidArgument where the kernel's
// parameters are not the plan's; kResourceExhausted for too much shared memory.
cu::Function PrepareKernel(const cu::Driver& driver, CubinStore& store, cu::Context context, const Launch& launch,
                           const std::string& where);

}  // namespace jfa
