// Writing the lanes of a destination register under a mask.
#pragma once

#include <cstdint>

#include "machine.h"

namespace emu {

/// Calls write(d) with room for the whole register: N = 32 words of 32 bits, or N = 64, the words of 64-bit lanes. Only
/// lanes in `mask` change. If every live lane is in the mask, d is the register itself.
template <int N, class F>
inline Step write_lanes(Warp& warp, Slot slot, uint32_t mask, F&& write) {
  static_assert(N == 32 || N == 64);
  uint32_t* d = warp.r32(slot);
  if ((warp.live & ~mask) == 0) {
    write(d);
    return Step::next;
  }
  uint32_t result[N];
  write(result);
  constexpr int kWords = N / kLanes;
  for (int i = 0; i < N; ++i) d[i] = (mask >> (i / kWords) & 1) != 0 ? result[i] : d[i];
  return Step::next;
}

/// The same for 64-bit lanes seen as such.
template <class F>
inline Step write_lanes64(Warp& warp, Slot slot, uint32_t mask, F&& write) {
  uint64_t* d = warp.r64(slot);
  if ((warp.live & ~mask) == 0) {
    write(d);
    return Step::next;
  }
  uint64_t result[kLanes];
  write(result);
  for (int i = 0; i < kLanes; ++i) d[i] = (mask >> i & 1) != 0 ? result[i] : d[i];
  return Step::next;
}

}  // namespace emu
