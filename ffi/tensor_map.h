// Encodes a plan's tensor map for an address.
#pragma once

#include "driver.h"
#include "plan.h"

namespace jfa {

// Runs on the host alone. `out` must be 64-aligned, as its type says.
cu::Result EncodeTensorMap(const cu::Driver& driver, const TensorMap& map, void* address, cu::TensorMap* out);

}  // namespace jfa
