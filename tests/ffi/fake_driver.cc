#include "fake_driver.h"

#include <elf.h>

#include <cstring>
#include <memory>
#include <sstream>

#include "driver.h"

namespace cu = jfa::cu;

namespace {

struct Kernel {
  std::string symbol;
  int device = -1;
  int static_shared = 0, max_threads = 0;
  std::vector<size_t> param_sizes;
  int max_dynamic_shared = 0;
  bool any_cluster = false;
};

struct Module {
  int device = -1;
  std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

thread_local std::vector<cu::Context> contexts;

fake::State& state() {
  static fake::State* const state = new fake::State();
  return *state;
}

cu::Context ContextOf(int device) { return reinterpret_cast<cu::Context>(static_cast<uintptr_t>(0x10 + device)); }
int DeviceOf(cu::Context context) { return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 0x10; }
int DeviceOf(cu::Stream stream) { return static_cast<int>((reinterpret_cast<uintptr_t>(stream) - 0x1000) / 0x100); }
int CurrentDevice() { return contexts.empty() ? -1 : DeviceOf(contexts.back()); }

// Counts the call; the failure that the test asked for, or kSuccess. The caller holds the mutex.
fake::Result Enter(const char* function) {
  ++state().calls[function];
  auto found = state().fail.find(function);
  return found == state().fail.end() ? fake::kSuccess : found->second;
}

const char* NameOf(int result) {
  switch (result) {
    case fake::kInvalidValue: return "CUDA_ERROR_INVALID_VALUE";
    case fake::kOutOfMemory: return "CUDA_ERROR_OUT_OF_MEMORY";
    case fake::kInvalidImage: return "CUDA_ERROR_INVALID_IMAGE";
    case fake::kInvalidContext: return "CUDA_ERROR_INVALID_CONTEXT";
    case fake::kNoBinaryForGpu: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case fake::kInvalidHandle: return "CUDA_ERROR_INVALID_HANDLE";
    case fake::kNotFound: return "CUDA_ERROR_NOT_FOUND";
    case fake::kLaunchOutOfResources: return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    case fake::kInvalidClusterSize: return "CUDA_ERROR_INVALID_CLUSTER_SIZE";
    default: return nullptr;
  }
}

fake::Result Load(const char* image, int device, Module& module) {
  if (std::memcmp(image, ELFMAG, SELFMAG) != 0) return fake::kInvalidImage;
  std::istringstream lines(image + sizeof(Elf64_Ehdr));
  std::string line, word, arch;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    words >> word;
    if (word == "arch") {
      words >> arch;
    } else if (word == "kernel") {
      auto kernel = std::make_unique<Kernel>();
      words >> kernel->symbol >> kernel->static_shared >> kernel->max_threads;
      for (size_t size; words >> size;) kernel->param_sizes.push_back(size);
      kernel->device = device;
      kernel->max_dynamic_shared = fake::kSharedDefault - kernel->static_shared;
      module.kernels[kernel->symbol] = std::move(kernel);
    } else {
      return fake::kInvalidImage;
    }
  }
  if (arch.empty()) return fake::kInvalidImage;
  return arch == "sm_90a" && device < 2 ? fake::kSuccess : fake::kNoBinaryForGpu;
}

}  // namespace

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))
#define FAKE_ENTER(function)                                   \
  std::lock_guard<std::mutex> fake_lock(state().mutex);        \
  if (fake::Result forced = Enter(function); forced != fake::kSuccess) return forced

FAKE_EXPORT fake::State* fake_driver_state() { return &state(); }

FAKE_EXPORT int cuGetErrorName(int result, const char** out) {
  *out = NameOf(result);
  return *out != nullptr ? fake::kSuccess : fake::kInvalidValue;
}

FAKE_EXPORT int cuGetErrorString(int result, const char** out) {
  *out = NameOf(result) != nullptr ? "text of the fake driver" : nullptr;
  return *out != nullptr ? fake::kSuccess : fake::kInvalidValue;
}

FAKE_EXPORT int cuStreamGetCtx(cu::Stream stream, cu::Context* out) {
  FAKE_ENTER("cuStreamGetCtx");
  *out = ContextOf(DeviceOf(stream));
  return fake::kSuccess;
}

FAKE_EXPORT int cuCtxGetCurrent(cu::Context* out) {
  FAKE_ENTER("cuCtxGetCurrent");
  *out = contexts.empty() ? nullptr : contexts.back();
  return fake::kSuccess;
}

FAKE_EXPORT int cuCtxPushCurrent_v2(cu::Context context) {
  FAKE_ENTER("cuCtxPushCurrent");
  contexts.push_back(context);
  return fake::kSuccess;
}

FAKE_EXPORT int cuCtxPopCurrent_v2(cu::Context* out) {
  FAKE_ENTER("cuCtxPopCurrent");
  if (contexts.empty()) return fake::kInvalidContext;
  *out = contexts.back();
  contexts.pop_back();
  return fake::kSuccess;
}

FAKE_EXPORT int cuCtxGetDevice(cu::Device* out) {
  FAKE_ENTER("cuCtxGetDevice");
  *out = CurrentDevice();
  return *out >= 0 ? fake::kSuccess : fake::kInvalidContext;
}

FAKE_EXPORT int cuDeviceGetAttribute(int* out, int attribute, cu::Device device) {
  FAKE_ENTER("cuDeviceGetAttribute");
  switch (attribute) {
    case cu::kComputeCapabilityMajor: *out = device < 2 ? 9 : 8; return fake::kSuccess;
    case cu::kComputeCapabilityMinor: *out = device < 2 ? 0 : 6; return fake::kSuccess;
    case cu::kMaxSharedMemoryPerBlockOptin: *out = fake::kSharedLimit; return fake::kSuccess;
    default: return fake::kInvalidValue;
  }
}

FAKE_EXPORT int cuDeviceGetName(char* out, int size, cu::Device device) {
  FAKE_ENTER("cuDeviceGetName");
  std::snprintf(out, static_cast<size_t>(size), "Fake GPU %d", device);
  return fake::kSuccess;
}

FAKE_EXPORT int cuModuleLoadData(cu::Module* out, const void* image) {
  FAKE_ENTER("cuModuleLoadData");
  if (CurrentDevice() < 0) return fake::kInvalidContext;
  auto module = std::make_unique<Module>();
  module->device = CurrentDevice();
  fake::Result result = Load(static_cast<const char*>(image), module->device, *module);
  if (result == fake::kSuccess) {
    // As in the real driver, modules live as long as their context: to the end of the process.
    static auto* const loaded = new std::vector<std::unique_ptr<Module>>();
    loaded->push_back(std::move(module));
    *out = reinterpret_cast<cu::Module>(loaded->back().get());
  }
  return result;
}

FAKE_EXPORT int cuModuleGetFunction(cu::Function* out, cu::Module handle, const char* symbol) {
  FAKE_ENTER("cuModuleGetFunction");
  auto& module = *reinterpret_cast<Module*>(handle);
  auto found = module.kernels.find(symbol);
  if (found == module.kernels.end()) return fake::kNotFound;
  *out = reinterpret_cast<cu::Function>(found->second.get());
  return fake::kSuccess;
}

FAKE_EXPORT int cuFuncGetAttribute(int* out, int attribute, cu::Function function) {
  FAKE_ENTER("cuFuncGetAttribute");
  const auto& kernel = *reinterpret_cast<Kernel*>(function);
  switch (attribute) {
    case cu::kSharedSizeBytes: *out = kernel.static_shared; return fake::kSuccess;
    case cu::kMaxDynamicSharedSizeBytes: *out = kernel.max_dynamic_shared; return fake::kSuccess;
    default: return fake::kInvalidValue;
  }
}

FAKE_EXPORT int cuFuncSetAttribute(cu::Function function, int attribute, int value) {
  FAKE_ENTER("cuFuncSetAttribute");
  auto& kernel = *reinterpret_cast<Kernel*>(function);
  switch (attribute) {
    case cu::kMaxDynamicSharedSizeBytes:
      if (value + kernel.static_shared > fake::kSharedLimit) return fake::kInvalidValue;
      kernel.max_dynamic_shared = value;
      state().max_dynamic_shared[{kernel.symbol, kernel.device}] = value;
      return fake::kSuccess;
    case cu::kNonPortableClusterSizeAllowed: kernel.any_cluster = value != 0; return fake::kSuccess;
    default: return fake::kInvalidValue;
  }
}

#ifndef FAKE_WITHOUT_PARAM_INFO
FAKE_EXPORT int cuFuncGetParamInfo(cu::Function function, size_t index, size_t* offset, size_t* size) {
  FAKE_ENTER("cuFuncGetParamInfo");
  const auto& sizes = reinterpret_cast<Kernel*>(function)->param_sizes;
  if (index >= sizes.size()) return fake::kInvalidValue;
  *offset = 0;
  for (size_t i = 0; i < index; ++i) *offset += sizes[i];
  *size = sizes[index];
  return fake::kSuccess;
}
#endif

#ifndef FAKE_WITHOUT_TENSOR_MAPS
FAKE_EXPORT int cuTensorMapEncodeTiled(cu::TensorMap* out, int type, uint32_t rank, void* address, const uint64_t* dims,
                                       const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                       int interleave, int swizzle, int l2_promotion, int fill) {
  FAKE_ENTER("cuTensorMapEncodeTiled");
  if (reinterpret_cast<uintptr_t>(out) % 64 != 0) return fake::kInvalidValue;
  fake::TensorMapRecord record;
  record.type = type, record.interleave = interleave, record.swizzle = swizzle;
  record.l2_promotion = l2_promotion, record.fill = fill;
  record.address = reinterpret_cast<uintptr_t>(address);
  record.dims.assign(dims, dims + rank);
  record.strides.assign(strides, strides + rank - 1);
  record.box.assign(box, box + rank);
  record.element_strides.assign(element_strides, element_strides + rank);
  // The map's bytes hold its number, by which a test finds it again among a launch's parameters.
  std::memset(out, 0, sizeof(*out));
  out->opaque[0] = state().tensor_maps.size();
  out->opaque[15] = 0x7465736e6f72;
  state().tensor_maps.push_back(std::move(record));
  return fake::kSuccess;
}
#endif

FAKE_EXPORT int cuMemsetD32Async(cu::DevicePtr address, unsigned word, size_t words, cu::Stream stream) {
  FAKE_ENTER("cuMemsetD32Async");
  if (CurrentDevice() != DeviceOf(stream)) return fake::kInvalidHandle;
  state().memsets.push_back({CurrentDevice(), stream, address, words, word});
  return fake::kSuccess;
}

FAKE_EXPORT int cuLaunchKernelEx(const cu::LaunchConfig* config, cu::Function function, void** params, void** extra) {
  FAKE_ENTER("cuLaunchKernelEx");
  const auto& kernel = *reinterpret_cast<Kernel*>(function);
  if (extra != nullptr) return fake::kInvalidValue;
  if (CurrentDevice() != DeviceOf(config->stream) || kernel.device != CurrentDevice()) return fake::kInvalidHandle;
  fake::LaunchRecord record;
  record.symbol = kernel.symbol, record.device = kernel.device, record.stream = config->stream;
  record.grid = {config->grid_x, config->grid_y, config->grid_z};
  record.block = {config->block_x, config->block_y, config->block_z};
  record.shared_bytes = config->shared_bytes;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const cu::LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == cu::kLaunchAttributeClusterDimension) {
      record.cluster = {attribute.value.cluster_dim.x, attribute.value.cluster_dim.y, attribute.value.cluster_dim.z};
    } else if (attribute.id == cu::kLaunchAttributeProgrammaticStreamSerialization) {
      record.programmatic = attribute.value.programmatic_stream_serialization_allowed != 0;
    } else {
      return fake::kInvalidValue;
    }
  }
  if (record.block[0] * record.block[1] * record.block[2] > static_cast<unsigned>(kernel.max_threads)) {
    return fake::kLaunchOutOfResources;
  }
  if (static_cast<int>(record.shared_bytes) > kernel.max_dynamic_shared) return fake::kInvalidValue;
  if (record.cluster[0] * record.cluster[1] * record.cluster[2] > 8 && !kernel.any_cluster) {
    return fake::kInvalidClusterSize;
  }
  for (size_t i = 0; i < kernel.param_sizes.size(); ++i) {
    record.params.emplace_back(static_cast<const char*>(params[i]), kernel.param_sizes[i]);
  }
  state().launches.push_back(std::move(record));
  return fake::kSuccess;
}
