// Lane loops that the compiler can vectorise, for the opcode families.
#pragma once

#include <cstdint>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "machine.h"

namespace emu {

/// Lanes of `mask` as 32-bit or 64-bit words of all ones.
template <class C>
inline C lane_bits(uint32_t mask, int lane) {
  return static_cast<C>(0) - static_cast<C>((mask >> lane) & 1);
}

/// d[lane] = f(lane) for the lanes in mask. C is the container: uint32_t or uint64_t. d may be any of f's inputs.
template <class C, class F>
inline void for_lanes(C* d, uint32_t mask, F&& f) {
  if (mask == kFull) {
#pragma GCC ivdep
    for (int i = 0; i < kLanes; ++i) d[i] = f(i);
  } else {
#pragma GCC ivdep
    for (int i = 0; i < kLanes; ++i) {
      C keep = lane_bits<C>(mask, i);
      d[i] = (f(i) & keep) | (d[i] & ~keep);
    }
  }
}

/// Packs 32 words that are 0 or all ones into a mask.
inline uint32_t pack_mask(const uint32_t* words) {
#ifdef __AVX2__
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(words + 8 * i)))) << (8 * i);
  return out;
#else
  uint32_t out = 0;
  for (int i = 0; i < kLanes; ++i) out |= (words[i] & 1u) << i;
  return out;
#endif
}

/// A mask of the lanes where f(lane) holds.
template <class F>
inline uint32_t mask_of(F&& f) {
  alignas(32) uint32_t words[kLanes];
#pragma GCC ivdep
  for (int i = 0; i < kLanes; ++i) words[i] = f(i) ? 0xffffffffu : 0u;
  return pack_mask(words);
}

/// mask_of for 64-bit inputs, where mixed widths would keep the compiler from vectorising.
template <class F>
inline uint32_t mask_of64(F&& f) {
  uint32_t out = 0;
  for (int i = 0; i < kLanes; ++i) out |= static_cast<uint32_t>(f(i) ? 1 : 0) << i;
  return out;
}

inline void set_predicate(Warp& warp, Slot slot, uint32_t value, uint32_t mask) {
  uint32_t& p = warp.pred(slot);
  p = (value & mask) | (p & ~mask);
}

/// The container of a register of T.
template <class T>
using Container = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline Container<T>* registers(Warp& warp, Slot slot) {
  return reinterpret_cast<Container<T>*>(warp.registers + slot);
}

/// T from its container and back (narrow registers are zero-extended).
template <class T>
inline T from_container(Container<T> c) {
  return static_cast<T>(c);
}
template <class T>
inline Container<T> to_container(T value) {
  return static_cast<Container<T>>(static_cast<std::make_unsigned_t<T>>(value));
}

}  // namespace emu
