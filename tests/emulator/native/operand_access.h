// Operands of the tensor core in a CTA's shared memory: checks, and events for an observer.
#pragma once

#include "machine.h"
#include "mma_operands.h"

namespace emu {

/// Verdict unless all 16-byte units of an operand lie in the CTA's shared memory.
void check_units(Cta& cta, const std::vector<uint32_t>& units, const char* what);
/// Reports that an operation reads them.
void notify_units(Cluster& cluster, const AsyncOp& op, const Cta& cta, const std::vector<uint32_t>& units);

}  // namespace emu
