// The part of the CUDA driver API that the executor uses, declared here so that building needs no CUDA toolkit, and found
// in libcuda.so.1 at first use, so that the library loads on a machine without a driver. Names, values and layouts are
// those of cuda.h, whose ABI the driver keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.h"

namespace jfa::cu {

using Device = int;
using DevicePtr = unsigned long long;
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;

enum Result : int { kSuccess = 0, kInvalidValue = 1 };

enum DeviceAttribute : int {
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int {
  kSharedSizeBytes = 1,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum TensorMapDataType : int {
  kTensorMapUint8 = 0,
  kTensorMapUint16 = 1,
  kTensorMapUint32 = 2,
  kTensorMapInt32 = 3,
  kTensorMapUint64 = 4,
  kTensorMapInt64 = 5,
  kTensorMapFloat16 = 6,
  kTensorMapFloat32 = 7,
  kTensorMapFloat64 = 8,
  kTensorMapBFloat16 = 9,
};
enum TensorMapInterleave : int { kInterleaveNone = 0 };
enum TensorMapSwizzle : int { kSwizzleNone = 0, kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3 };
enum TensorMapL2Promotion : int { kL2None = 0, kL2_64B = 1, kL2_128B = 2, kL2_256B = 3 };
enum TensorMapFloatOobFill : int { kOobFillNone = 0, kOobFillNanRequestZeroFma = 1 };

struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

enum LaunchAttributeId : int {
  kLaunchAttributeClusterDimension = 4,
  kLaunchAttributeProgrammaticStreamSerialization = 6,
};

union LaunchAttributeValue {
  char pad[64];
  uint64_t alignment;
  struct {
    unsigned x, y, z;
  } cluster_dim;
  int programmatic_stream_serialization_allowed;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[8 - sizeof(LaunchAttributeId)];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

static_assert(sizeof(TensorMap) == 128 && sizeof(LaunchAttributeValue) == 64 && sizeof(LaunchAttribute) == 72 &&
              offsetof(LaunchConfig, stream) == 32 && sizeof(LaunchConfig) == 56);

// The entry points. A member is null only where it says so.
class Driver {
 public:
  // Opens libcuda.so.1 at the first call; throws Error (kUnavailable) if that fails, and tries anew at the next call.
  static const Driver& Get();

  // Throws Error naming `call`, `where` and what the driver says of `result`, unless it is kSuccess. `where` is a
  // function, since its text is only wanted on failure.
  template <typename Where>
  void Check(Result result, const char* call, const Where& where, ErrorCode code = ErrorCode::kInternal) const {
    if (result != kSuccess) throw Error(code, Concat(where(), ": ", call, " failed: ", Describe(result)));
  }

  // "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid"
  std::string Describe(Result result) const;

  Result (*GetErrorName)(Result, const char**) = nullptr;
  Result (*GetErrorString)(Result, const char**) = nullptr;
  Result (*StreamGetCtx)(Stream, Context*) = nullptr;
  Result (*CtxGetCurrent)(Context*) = nullptr;
  Result (*CtxPushCurrent)(Context) = nullptr;
  Result (*CtxPopCurrent)(Context*) = nullptr;
  Result (*CtxGetDevice)(Device*) = nullptr;
  Result (*DeviceGetAttribute)(int*, DeviceAttribute, Device) = nullptr;
  Result (*DeviceGetName)(char*, int, Device) = nullptr;
  Result (*ModuleLoadData)(Module*, const void*) = nullptr;
  Result (*ModuleGetFunction)(Function*, Module, const char*) = nullptr;
  Result (*FuncGetAttribute)(int*, FunctionAttribute, Function) = nullptr;
  Result (*FuncSetAttribute)(Function, FunctionAttribute, int) = nullptr;
  // Offset and size of a parameter by its index; null before CUDA 12.4.
  Result (*FuncGetParamInfo)(Function, size_t, size_t*, size_t*) = nullptr;
  Result (*TensorMapEncodeTiled)(TensorMap*, TensorMapDataType, uint32_t rank, void* address, const uint64_t* dims,
                                 const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* element_strides,
                                 TensorMapInterleave, TensorMapSwizzle, TensorMapL2Promotion,
                                 TensorMapFloatOobFill) = nullptr;
  Result (*MemsetD32Async)(DevicePtr, unsigned, size_t, Stream) = nullptr;
  Result (*LaunchKernelEx)(const LaunchConfig*, Function, void** params, void** extra) = nullptr;

 private:
  Driver();
};

// Makes a context current for a scope and leaves the thread as it was.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, Context context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace jfa::cu
