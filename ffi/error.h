// The one exception type of the executor. Handlers turn it into an XLA FFI error; it never leaves this library.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace jfa {

enum class ErrorCode {
  kInvalidArgument,     // a plan or a call that contradicts itself
  kNotFound,            // no such cubin, entry point or program
  kFailedPrecondition,  // right plan, wrong device or driver
  kResourceExhausted,   // more than the device has
  kDataLoss,            // a cubin whose bytes are not what its name promises
  kUnavailable,         // no driver
  kInternal,            // the driver refused a call
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// Writes its arguments one after the other into a string.
template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace jfa
