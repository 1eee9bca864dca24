#include "driver.h"

#include <dlfcn.h>

namespace jfa::cu {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

template <typename Function>
void Find(void* library, const char* symbol, bool required, Function*& out) {
  out = reinterpret_cast<Function*>(dlsym(library, symbol));
  if (out == nullptr && required) {
    throw Error(ErrorCode::kUnavailable,
                Concat("the CUDA driver (", kLibrary, ") has no ", symbol, "; a driver of CUDA 12 or later is needed"));
  }
}

}  // namespace

const Driver& Driver::Get() {
  // Never destroyed: executors may be used until the process ends. A throwing initialisation is tried again.
  static const Driver* const driver = new Driver();
  return *driver;
}

Driver::Driver() {
  // Stays open for the life of the process, as the driver itself demands.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Error(ErrorCode::kUnavailable,
                Concat("no CUDA driver: cannot open ", kLibrary, ": ", reason != nullptr ? reason : "unknown reason"));
  }
  Find(library, "cuGetErrorName", true, GetErrorName);
  Find(library, "cuGetErrorString", true, GetErrorString);
  Find(library, "cuStreamGetCtx", true, StreamGetCtx);
  Find(library, "cuCtxGetCurrent", true, CtxGetCurrent);
  Find(library, "cuCtxPushCurrent_v2", true, CtxPushCurrent);
  Find(library, "cuCtxPopCurrent_v2", true, CtxPopCurrent);
  Find(library, "cuCtxGetDevice", true, CtxGetDevice);
  Find(library, "cuDeviceGetAttribute", true, DeviceGetAttribute);
  Find(library, "cuDeviceGetName", true, DeviceGetName);
  Find(library, "cuModuleLoadData", true, ModuleLoadData);
  Find(library, "cuModuleGetFunction", true, ModuleGetFunction);
  Find(library, "cuFuncGetAttribute", true, FuncGetAttribute);
  Find(library, "cuFuncSetAttribute", true, FuncSetAttribute);
  Find(library, "cuFuncGetParamInfo", false, FuncGetParamInfo);
  Find(library, "cuTensorMapEncodeTiled", true, TensorMapEncodeTiled);
  Find(library, "cuMemsetD32Async", true, MemsetD32Async);
  Find(library, "cuLaunchKernelEx", true, LaunchKernelEx);
}

std::string Driver::Describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (GetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (GetErrorString(result, &text) != kSuccess || text == nullptr) text = "the driver has no text for it";
  return Concat(name, " (", static_cast<int>(result), "): ", text);
}

ScopedContext::ScopedContext(const Driver& driver, Context context) : driver_(driver) {
  auto where = [] { return "selecting the device"; };
  Context current = nullptr;
  driver.Check(driver.CtxGetCurrent(&current), "cuCtxGetCurrent", where);
  if (current == context) return;
  driver.Check(driver.CtxPushCurrent(context), "cuCtxPushCurrent", where);
  pushed_ = true;
}

ScopedContext::~ScopedContext() {
  // It can only fail if the context was destroyed meanwhile; there is nothing left to restore then.
  Context popped = nullptr;
  if (pushed_) driver_.CtxPopCurrent(&popped);
}

}  // namespace jfa::cu
