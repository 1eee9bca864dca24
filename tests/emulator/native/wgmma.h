// wgmma in use (PTX ISA 9.7.15): which registers of a warp it holds, its groups, and the warps of a warpgroup in step.
//
// A warp's share of a wgmma.mma_async is 16 rows of D: an operation of the cluster's asynchronous queue, which reads A,
// B and the accumulator when it lands, at any time from its issue to the wgmma.wait_group that retires it. The rules
// for registers do not depend on when it lands: registers are in use until the wait.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "machine.h"

namespace emu {

/// A register that some wgmma.mma_async of the program uses, as one warp sees it.
struct WgmmaRegister {
  enum class Last : uint8_t {
    unfenced,   // no wgmma.fence since the warp started
    fenced,     // none of the following since the last wgmma.fence
    read,       // by an instruction of the thread
    written,    // by an instruction of the thread
    wgmma,      // as accumulator
  };
  uint64_t user = 0;             // number of the last wgmma that uses it; in flight if above WgmmaWarp::retired
  uint64_t shape = 0;            // of the last wgmma that had it as accumulator, ...
  uint16_t position = 0;         // ... and its place in that accumulator
  bool as_a = false;             // the last wgmma that uses it reads it as a part of A
  Last last = Last::unfenced;
  int line = 0;                  // of the last access
  int user_line = 0;
};

/// wgmma instructions that not all warps of the warpgroup have executed yet.
struct Warpgroup {
  struct Step {
    const Instruction* instruction = nullptr;
    int warp = 0, line = 0;                  // of the first warp there
    std::shared_ptr<struct WgmmaWork> work;  // of a wgmma.mma_async
  };
  std::deque<Step> steps;
  uint64_t first = 0;                        // number of steps.front(): all warps have executed those before
  std::array<uint64_t, 4> passed{};          // instructions that each warp has executed
};

struct WgmmaWarp {
  struct Group {
    uint64_t last = 0;           // number of its last wgmma; 0 if it is empty
    uint64_t step = 0;           // that one's number among the warpgroup's steps
    int line = 0;                // of that one
    std::shared_ptr<struct WgmmaWork> work;   // of that one
  };
  std::vector<WgmmaRegister> registers;
  std::shared_ptr<Warpgroup> group;
  uint64_t issued = 0, grouped = 0, retired = 0;   // wgmma are numbered from 1; the last one of each kind
  Group open;                         // not committed
  std::deque<Group> committed;
};

/// An instruction reads or writes registers of wgmma (Instruction::wgmma_use). Verdict if one is in flight.
inline void touch_wgmma_registers(Warp& warp, const Instruction& in);

/// Verdict on a warp that has ended with wgmma that it did not wait for, or that its warpgroup did not all execute.
void check_wgmma_end(const Cta& cta);

[[noreturn]] void fail_wgmma_register(const Warp& warp, const WgmmaRegister& reg, bool write);

inline void touch_wgmma_registers(Warp& warp, const Instruction& in) {
  WgmmaWarp& state = *warp.wgmma;
  const WgmmaUse& use = warp.cta->cluster->grid->program->wgmma_uses[in.wgmma_use];
  for (size_t i = 0; i < use.registers.size(); ++i) {
    WgmmaRegister& reg = state.registers[use.registers[i]];
    const bool write = i >= use.reads;
    if (reg.user > state.retired) fail_wgmma_register(warp, reg, write);
    reg.last = write ? WgmmaRegister::Last::written : WgmmaRegister::Last::read;
    reg.line = in.line;
  }
}

}  // namespace emu
