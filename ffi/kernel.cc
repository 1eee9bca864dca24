#include "kernel.h"

#include <mutex>

#include "error.h"

namespace jfa {
namespace {

constexpr uint32_t kPortableClusterBlocks = 8;

// The plan's parameters must be the kernel's, in number and size.
void CheckParameters(const cu::Driver& driver, cu::Function function, const Launch& launch, const std::string& where) {
  if (driver.FuncGetParamInfo == nullptr) return;  // the exporter has checked them too
  size_t count = 0;
  for (;; ++count) {
    size_t offset = 0, size = 0;
    cu::Result result = driver.FuncGetParamInfo(function, count, &offset, &size);
    if (result == cu::kInvalidValue) break;  // no such parameter
    driver.Check(result, "cuFuncGetParamInfo", [&] { return where; });
    if (count < launch.params.size() && size != ParamSize(launch.params[count])) {
      throw Error(ErrorCode::kInvalidArgument,
                  Concat(where, ": the plan gives parameter ", count, " ", ParamSize(launch.params[count]),
                         " bytes; entry point '", launch.symbol, "' takes ", size));
    }
  }
  if (count != launch.params.size()) {
    throw Error(ErrorCode::kInvalidArgument, Concat(where, ": the plan gives ", launch.params.size(),
                                                    " parameters; entry point '", launch.symbol, "' takes ", count));
  }
}

int Attribute(const cu::Driver& driver, cu::Function function, cu::FunctionAttribute attribute,
              const std::string& where) {
  int value = 0;
  driver.Check(driver.FuncGetAttribute(&value, attribute, function), "cuFuncGetAttribute", [&] { return where; });
  return value;
}

// Only ever raises the limit: other plans may launch the same function with more shared memory.
void AllowSharedMemory(const cu::Driver& driver, cu::Function function, const Launch& launch,
                       const std::string& where) {
  const int wanted = static_cast<int>(launch.shared_bytes);
  if (wanted <= Attribute(driver, function, cu::kMaxDynamicSharedSizeBytes, where)) return;
  cu::Result result = driver.FuncSetAttribute(function, cu::kMaxDynamicSharedSizeBytes, wanted);
  if (result == cu::kSuccess) return;
  const int fixed = Attribute(driver, function, cu::kSharedSizeBytes, where);
  cu::Device device = 0;
  int limit = 0;
  driver.Check(driver.CtxGetDevice(&device), "cuCtxGetDevice", [&] { return where; });
  driver.Check(driver.DeviceGetAttribute(&limit, cu::kMaxSharedMemoryPerBlockOptin, device), "cuDeviceGetAttribute",
               [&] { return where; });
  throw Error(ErrorCode::kResourceExhausted,
              Concat(where, ": a block needs ", wanted, " bytes of dynamic and ", fixed,
                     " of static shared memory; the device allows ", limit, ": cuFuncSetAttribute failed: ",
                     driver.Describe(result)));
}

}  // namespace

cu::Function PrepareKernel(const cu::Driver& driver, CubinStore& store, cu::Context context, const Launch& launch,
                           const std::string& where) {
  cu::Module module = store.Load(driver, context, launch.sha256, where);
  cu::Function function = nullptr;
  driver.Check(
      driver.ModuleGetFunction(&function, module, launch.symbol.c_str()), "cuModuleGetFunction",
      [&] { return Concat(where, ": entry point '", launch.symbol, "' of cubin ", Hex(launch.sha256)); },
      ErrorCode::kNotFound);
  CheckParameters(driver, function, launch, where);

  // Two plans may raise the limits of one function at the same time.
  static std::mutex* const mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  AllowSharedMemory(driver, function, launch, where);
  if (launch.ClusterBlocks() > kPortableClusterBlocks) {
    driver.Check(driver.FuncSetAttribute(function, cu::kNonPortableClusterSizeAllowed, 1), "cuFuncSetAttribute",
                 [&] { return Concat(where, ": clusters of ", launch.ClusterBlocks(), " blocks"); },
                 ErrorCode::kResourceExhausted);
  }
  return function;
}

}  // namespace jfa
