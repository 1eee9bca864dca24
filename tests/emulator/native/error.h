// Verdicts: every way in which a program under emulation can be wrong, with its place and value.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace emu {

/// What went wrong. Names (see verdict_name) are the stable interface to Python.
enum class Fault : uint8_t {
  parse,                // the PTX text is malformed
  unsupported,          // an instruction, modifier or operand form that the emulator does not know
  launch,               // launch parameters do not fit the kernel
  deadlock,             // no thread and no asynchronous operation can make progress
  out_of_bounds,        // an access outside every allocation of its space
  misaligned,           // an access that is not naturally aligned
  read_only,            // a write to a buffer that the launch passed as read-only
  barrier_state,        // mbarrier uninitialised, initialised twice, overwritten while live, or its counts overflow
  byte_count,           // transaction bytes that can never match
  phase_alias,          // a wait that missed its phase (or would take a later one for it)
  in_flight,            // exit with asynchronous operations in flight
  register_pool,        // setmaxnreg arithmetic
  named_barrier,        // bar/barrier misuse
  divergence,           // an .aligned or .uni instruction not executed by the whole warp
  warpgroup,            // wgmma: registers in use, missing fences, warps out of step
  tensor_memory,        // TMEM allocation, ownership or range rules
  descriptor,           // illegal matrix or instruction descriptor
  tensor_map,           // illegal or foreign tensor map, or a TMA request that it does not allow
  proxy,                // a proxy fence rule
  illegal_operand,      // a value that the instruction does not allow
  trap,                 // the program executed trap
  internal              // a bug of the emulator
};

const char* fault_name(Fault fault);

/// Thrown by decoding and execution. Execution code throws it through fail(); the interpreter adds the place.
struct Verdict : std::exception {
  Fault fault = Fault::internal;
  std::string message;      // what, with the offending values
  int line = 0;             // line in the PTX text, 0 if none
  std::string text;         // that line
  std::string where;        // "CTA (0,0,0) rank 0 warp 3 lane 5", empty at load time
  std::string detail;       // further facts as JSON, e.g. the table of waiting warps

  bool placed = false;      // where and text are complete

  Verdict(Fault f, std::string m) : fault(f), message(std::move(m)) {}
  const char* what() const noexcept override { return message.c_str(); }
};

/// printf-style; throws Verdict.
[[noreturn]] void fail(Fault fault, const char* format, ...) __attribute__((format(printf, 2, 3)));

/// As fail(), naming the lane at fault.
[[noreturn]] void fail_lane(int lane, Fault fault, const char* format, ...) __attribute__((format(printf, 3, 4)));

std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emu
