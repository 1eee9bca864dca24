// A small seeded generator (xoshiro-like splitmix), the same on every machine.
#pragma once

#include <cstdint>

namespace emu {

class Random {
 public:
  explicit Random(uint64_t seed = 0) : state_(seed + 0x9e3779b97f4a7c15ull) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// Uniform in [0, bound).
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>((static_cast<unsigned __int128>(next()) * bound) >> 64); }
  /// Uniform in [0, 1).
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace emu
