#include "operand_access.h"

#include <algorithm>

#include "bulk.h"

namespace emu {

void check_units(Cta& cta, const std::vector<uint32_t>& units, const char* what) {
  for (const uint32_t unit : units) cta.shared_at(unit, mma::kUnitBytes, what);
}

void notify_units(Cluster& cluster, const AsyncOp& op, const Cta& cta, const std::vector<uint32_t>& units) {
  if (!cluster.grid->observer) return;
  std::vector<uint32_t> sorted(units);
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size();) {
    size_t j = i + 1;
    while (j < sorted.size() && sorted[j] - sorted[j - 1] <= mma::kUnitBytes) ++j;
    notify(cluster, op, Access::read, Region::shared, cta.address(sorted[i]), sorted[j - 1] + mma::kUnitBytes - sorted[i]);
    i = j;
  }
}

}  // namespace emu
