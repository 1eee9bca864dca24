#pragma once

#include "machine.h"
#include "report.h"

namespace emu {

/// Checks the launch against the kernel and fills the grid's derived fields. Throws Verdict(launch).
void prepare(Grid& grid);
std::unique_ptr<Cluster> make_cluster(Grid& grid, uint64_t index);
/// Runs the whole grid. Throws the first cluster's Verdict.
Totals run_grid(Grid& grid);

}  // namespace emu
