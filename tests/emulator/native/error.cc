#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <vector>

namespace emu {

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::parse: return "parse";
    case Fault::unsupported: return "unsupported";
    case Fault::launch: return "launch";
    case Fault::deadlock: return "deadlock";
    case Fault::out_of_bounds: return "out_of_bounds";
    case Fault::misaligned: return "misaligned";
    case Fault::read_only: return "read_only";
    case Fault::barrier_state: return "barrier_state";
    case Fault::byte_count: return "byte_count";
    case Fault::phase_alias: return "phase_alias";
    case Fault::in_flight: return "in_flight";
    case Fault::register_pool: return "register_pool";
    case Fault::named_barrier: return "named_barrier";
    case Fault::divergence: return "divergence";
    case Fault::warpgroup: return "warpgroup";
    case Fault::tensor_memory: return "tensor_memory";
    case Fault::descriptor: return "descriptor";
    case Fault::tensor_map: return "tensor_map";
    case Fault::proxy: return "proxy";
    case Fault::illegal_operand: return "illegal_operand";
    case Fault::trap: return "trap";
    case Fault::internal: return "internal";
  }
  return "internal";
}

static std::string vformat(const char* text, va_list arguments) {
  va_list copy;
  va_copy(copy, arguments);
  int size = std::vsnprintf(nullptr, 0, text, copy);
  va_end(copy);
  std::string out(size > 0 ? size : 0, '\0');
  if (size > 0) std::vsnprintf(out.data(), out.size() + 1, text, arguments);
  return out;
}

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string out = vformat(text, arguments);
  va_end(arguments);
  return out;
}

void fail(Fault fault, const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string out = vformat(text, arguments);
  va_end(arguments);
  throw Verdict(fault, out);
}

void fail_lane(int lane, Fault fault, const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  std::string out = vformat(text, arguments);
  va_end(arguments);
  Verdict verdict(fault, out);
  verdict.where = format("lane %d", lane);
  throw verdict;
}

}  // namespace emu
