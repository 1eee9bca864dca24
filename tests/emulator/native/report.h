// What a run tells: places of verdicts, the table of waiting threads, counts, traces.
#pragma once

#include <string>

#include "machine.h"

namespace emu {

/// Adds line, text, CTA and warp to a verdict that an instruction raised.
void place(Verdict& verdict, const Warp& warp, uint32_t pc);
/// The same for a verdict that an operation raised when it landed.
void place(Verdict& verdict, const Cluster& cluster, const AsyncOp& op);
/// The verdict for clusters that cannot go on: a line and a JSON row for each waiting thread group.
Verdict deadlock(const std::vector<Cluster*>& clusters);
/// Rules for the end of a CTA: nothing in flight, barriers balanced, TMEM and registers returned.
void check_cta_end(Cluster& cluster, Cta& cta);
/// Adds a row to the trace (see Interval).
void record(Cluster& cluster, int cta, int warp, uint8_t kind, uint64_t begin, uint64_t end, int line);

std::string json_string(const std::string& text);

/// Sums over the clusters of a launch.
struct Totals {
  std::vector<uint64_t> executed;                // by instruction
  std::vector<uint64_t> warp_instructions;       // by %warpid
  std::map<std::string, uint64_t> mma, events;
  uint64_t instructions = 0, tma_bytes_in = 0, tma_bytes_out = 0;
  uint64_t barrier_waits = 0, barrier_stalls = 0;
  uint32_t peak_tensor_columns = 0;
  std::vector<std::pair<uint64_t, Interval>> trace;   // cluster, row
  void add(const Cluster& cluster);
  std::string json(const Grid& grid) const;
};

}  // namespace emu
